# SmolLM2-1.7B and SmolLM2-1.7B-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 32
    --use-rotary-position-embeddings
    --rotary-base 130000
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --vocab-size 49152
)
