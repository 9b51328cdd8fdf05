# Qwen3-4B and Qwen3-4B-Base
# The 2507 models have a rotary base of their own: ROTARY_BASE=5000000.
MODEL_ARGS=(
    --swiglu
    --num-layers 36
    --hidden-size 2560
    --ffn-hidden-size 9728
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --use-rotary-position-embeddings
    --rotary-base "${ROTARY_BASE:-1000000}"
    --disable-bias-linear
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --vocab-size 151936
)
