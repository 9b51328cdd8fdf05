# Llama-3.1-8B and -Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --use-rotary-position-embeddings
    --rotary-base 500000
    --use-rope-scaling
    --rotary-scaling-factor 8.0
    --disable-bias-linear
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
