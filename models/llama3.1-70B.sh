# Llama-3.1-70B and -Instruct, Llama-3.3-70B-Instruct
MODEL_ARGS=(
    --swiglu
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
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
