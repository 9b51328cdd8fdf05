# Qwen2.5-72B and Qwen2.5-72B-Instruct
# The base model has this epsilon, the Instruct model 1e-6: NORM_EPSILON=1e-6.
MODEL_ARGS=(
    --swiglu
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 29568
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --use-rotary-position-embeddings
    --rotary-base 1000000
    --disable-bias-linear
    --add-qkv-bias
    --normalization RMSNorm
    --norm-epsilon "${NORM_EPSILON:-1e-5}"
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
