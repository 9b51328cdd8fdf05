# Llama-3.2-1B and -Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 16
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 32
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
