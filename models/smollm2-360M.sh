# SmolLM2-360M and SmolLM2-360M-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 32
    --hidden-size 960
    --ffn-hidden-size 2560
    --num-attention-heads 15
    --group-query-attention
    --num-query-groups 5
    --use-rotary-position-embeddings
    --rotary-base 100000
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --vocab-size 49152
)
