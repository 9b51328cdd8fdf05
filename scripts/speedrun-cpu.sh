#!/usr/bin/env bash
# From nothing to a model that chats, offline, on two cores:   bash scripts/speedrun-cpu.sh
#
#   1. data/speedrun-full: docstrings and reference texts of the installed Python packages, some packages held out
#      (sources.md names them with their licences), questions made from them, and sums
#   2. a tokenizer of 4,096 tokens
#   3. base: a new model of 1.2M parameters is pretrained on the texts
#   4. sft: it learns to chat, to choose one of four lines, and to add: 35 % of the sums show their working, the
#      others are guesses
#   5. rl: GRPO on sums and questions
#   6. runs/speedrun-full/seed-0/results.md: what each stage reached, beside gzip, xz and a Kneser-Ney 5-gram of bytes; report.html
#
# SEED=1 bash scripts/speedrun-cpu.sh       another seed, in a folder of its own
# SIZE=tiny bash scripts/speedrun-cpu.sh    each step in seconds: shows that all of it runs, and learns next to nothing
# BASE_TOKENS=4e6 bash scripts/speedrun-cpu.sh --cpu-threads 2    (flags go to every stage and win)
# The same command goes on after a crash. What it reached: docs/speedrun.md. Then talk to the model:  slimelite serve --web runs/speedrun-full/seed-0/2-rl/model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/lib/programs.sh
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

SEED=${SEED:-0}
SIZE=${SIZE:-full}
if [[ "$SIZE" == tiny ]]; then
    TRAIN_BYTES=300000 HELD_BYTES=30000 ROWS=64 HELD_OUT=8 LAYERS=1 WIDTH=64 VOCABULARY=600 STEPS=2
    SFT_ROWS=128 PROMPTS=8
    BASE_TOKENS=${BASE_TOKENS:-16000} SFT_ROLLOUTS=${SFT_ROLLOUTS:-2} RL_ROLLOUTS=${RL_ROLLOUTS:-2}
else
    TRAIN_BYTES=24000000 HELD_BYTES=1300000 ROWS=30000 HELD_OUT=1000 LAYERS=3 WIDTH=128 VOCABULARY=4096 STEPS=8
    SFT_ROWS=640 PROMPTS=32
    BASE_TOKENS=${BASE_TOKENS:-3200000} SFT_ROLLOUTS=${SFT_ROLLOUTS:-70} RL_ROLLOUTS=${RL_ROLLOUTS:-40}
fi
DATA=${DATA:-data/speedrun-$SIZE}
OUT=${OUT:-runs/speedrun-$SIZE/seed-$SEED}
BASE_STEPS=$(python -c "print(int($BASE_TOKENS / 2048) or 1)")
mkdir -p "$OUT"
began=$SECONDS

[[ -f "$DATA/sources.md" ]] ||
    python scripts/offline_texts.py texts --out "$DATA" --train-bytes $TRAIN_BYTES --held-bytes $HELD_BYTES
[[ -f "$DATA/sft.parquet" ]] || python scripts/offline_texts.py questions --out "$DATA" --rows $ROWS --held-out $HELD_OUT
[[ -d "$DATA/tokenizer" ]] || python scripts/train_tokenizer.py --data texts="$DATA/train.jsonl" --digits 1 \
    --vocab-size $VOCABULARY --max-chars 6000000 --out "$DATA/tokenizer"
echo "$((SECONDS - began)) s: texts, questions and tokenizer"

cat >"$OUT/base.yaml" <<END
loss_type: pretrain_loss
prompt_data: [$DATA/train.jsonl]
tokenizer: $DATA/tokenizer
token_cache: $DATA/tokens
num_layers: $LAYERS
hidden_size: $WIDTH
ffn_hidden_size: $((WIDTH * 3))
num_attention_heads: $((WIDTH / 32))
vocab_size: $VOCABULARY
qk_layernorm: true
seq_length: 512
global_batch_size: 4
num_steps_per_rollout: $STEPS
train_tokens: $BASE_TOKENS
optimizer: muon
muon_lr: 0.02
lr: 5.0e-3
lr_decay_style: WSD
lr_wsd_decay_style: linear
lr_wsd_decay_iters: $((BASE_STEPS * 2 / 5 + 1))
lr_warmup_fraction: 0.02
eval_bpb: [$DATA/held_out.jsonl]
eval_interval: 100000 # before the first step and after the last
skip_eval_before_train: true
save_interval: 20
END

cat >"$OUT/sft.yaml" <<END
loss_type: sft_loss
calculate_per_token_loss: true
prompt_data: [$DATA/sft.parquet]
input_key: messages
tokenizer: $DATA/tokenizer # with the chat template
num_rollout: $SFT_ROLLOUTS
rollout_batch_size: $SFT_ROWS
global_batch_size: 64
optimizer: muon
muon_lr: 0.02
lr: 5.0e-3
lr_decay_style: linear
save_interval: 5
END

cat >"$OUT/rl.yaml" <<END
prompt_data: [$DATA/sums.parquet, $DATA/questions.parquet]
prompt_data_weights: [3, 1]
input_key: messages
label_key: label
metadata_key: metadata # each row names its rule of --rm-type
apply_chat_template: true
num_rollout: $RL_ROLLOUTS
rollout_batch_size: $PROMPTS
n_samples_per_prompt: 8
rollout_max_response_len: 96
global_batch_size: $((PROMPTS * 8))
lr: 5.0e-4
lr_warmup_iters: 5
eps_clip: 0.2
eps_clip_high: 0.28
eval_prompt_data: [sums, $DATA/held_out_sums.parquet, questions, $DATA/held_out_questions.parquet]
eval_top_k: 1
eval_interval: 100000 # before the first step and after the last
save_interval: 10
END

python train.py --stages "$OUT"/{base,sft,rl}.yaml --run-dir "$OUT" --launcher local --rollout-shuffle \
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 --seed "$SEED" --rollout-seed "$SEED" "$@"
echo "$((SECONDS - began)) s: base, sft and rl"
slimelite report "$OUT" --max-tokens 48 --prompts "3+4+5+6=?" "Return the number of" \
    "Which text is of Matrix.transpose?"$'\n'"Open a file. -> A"$'\n'"Return the transpose of the matrix. -> B"$'\n'"Raised on a timeout. -> C"$'\n'"Parse a date. -> D"
echo "seconds of the processor, of this shell and of what it ran:"
times
echo "$((SECONDS - began)) s in all. Talk to it:  slimelite serve --web $OUT/2-rl/model"
python scripts/speedrun_results.py "$OUT" --data "$DATA" $([[ "$SIZE" == tiny ]] && echo --only-print)
