# Llama-3.2-3B and -Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 28
    --hidden-size 3072
    --ffn-hidden-size 8192
    --num-attention-heads 24
    --group-query-attention
    --num-query-groups 8
    --use-rotary-position-embeddings
    --rotary-base 500000
    --use-rope-scaling
    --rotary-scaling-factor 32.0
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --vocab-size 128256
)
