# The flags that the examples share:   source docs/examples/task.sh
# The quickstart's task and SFT model (bash scripts/quickstart.sh makes both), and a run of two small rollouts.
RUN=(
    python train.py --launcher local --hf-checkpoint runs/quickstart/seed-0/sft-model
    --prompt-data data/quickstart/train.parquet --input-key messages --label-key label --apply-chat-template
    --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 32 --num-rollout 2 --lr 1e-3
)
