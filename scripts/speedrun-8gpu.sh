#!/usr/bin/env bash
# A model of nanochat's size on one machine with eight H100: 561M parameters, 11.2B tokens.   bash scripts/speedrun-8gpu.sh
#
# NOT RUN, because the project had no such machine. Each stage passes --dry-run with small stand-ins for its data, and
# the dry run predicts hours and memory:
#   bash scripts/speedrun-8gpu.sh --dry-run
#
#   1. from the hub: texts of FineWeb-Edu, a tokenizer of 65,536 tokens on 2 billion characters of them
#   2. base: --depth 20, 11.2B tokens; evaluated by bits per byte
#   3. mid: SmolTalk, MMLU's auxiliary set, GSM8K, spelling, counting, identity
#   4. sft: ARC, GSM8K, SmolTalk, spelling, identity
#   5. rl: GRPO on GSM8K
#   6. report.html, with CORE's tasks after each stage
#
# After a crash, give the same command again. Flags go to every stage and override its own. PRICE: one GPU for an hour.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/lib/programs.sh

DRY=false; [[ " $* " == *" --dry-run "* ]] && DRY=true
DATA=${DATA:-data/speedrun-8gpu}
OUT=${OUT:-runs/speedrun-8gpu}
PRICE=${PRICE:-3}
TEXTS=${TEXTS:-HuggingFaceFW/fineweb-edu:sample:10BT}
HELD_OUT=${HELD_OUT:-HuggingFaceFW/fineweb-edu:CC-MAIN-2024-10}
if $DRY; then # what a machine without the hub has, in place of the data; the settings are those of the run
    export HF_HUB_OFFLINE=1
    DATA=$DATA-stand-ins VOCABULARY=2048 # of the tokenizer alone
    TEXTS=$DATA/texts HELD_OUT=$DATA/held_out.txt
fi
mkdir -p "$DATA" "$OUT"

conversations() { # name, arguments: $DATA/NAME/train.parquet, of the hub
    [[ -d "$DATA/$1" ]] || python scripts/prepare_data.py "$@" --out "$DATA/$1"
}
conversations spelling --rows $($DRY && echo 50 || echo 80000)
conversations counting --rows $($DRY && echo 50 || echo 80000)
conversations identity --rows $($DRY && echo 50 || echo 1000) --name Nano
for name in smoltalk mmlu_auxiliary arc_talks gsm8k_talks gsm8k; do
    if ! $DRY; then
        conversations $name
    elif [[ ! -d "$DATA/$name" ]]; then
        for split in train test ARC-Easy/train ARC-Challenge/train; do
            mkdir -p "$(dirname "$DATA/$name/$split")"
            cp "$DATA/counting/train.parquet" "$DATA/$name/$split.parquet"
        done
    fi
done
if $DRY; then
    mkdir -p "$TEXTS"
    for page in docs/*.md; do cp "$page" "$TEXTS/$(basename "$page" .md).txt"; done
    cp README.md "$HELD_OUT"
fi
[[ -d "$DATA/tokenizer" ]] || python scripts/train_tokenizer.py --data texts="$TEXTS" --vocab-size ${VOCABULARY:-65536} \
    --max-chars 2000000000 --out "$DATA/tokenizer"

cat >"$OUT/base.yaml" <<END
loss_type: pretrain_loss
prompt_data: ["$TEXTS"]
tokenizer: $DATA/tokenizer
token_cache: $DATA/tokens
depth: 20
vocab_size: 65536
train_tokens: 11.2e+9
seq_length: 2048
eval_bpb: ["$HELD_OUT"]
eval_interval: 250
save_interval: 500
save_retain_interval: 5000
END

cat >"$DATA/mid-mixture.yaml" <<END
$DATA/smoltalk/train.parquet: 46
$DATA/mmlu_auxiliary/train.parquet: 10
$DATA/gsm8k_talks/train.parquet: 1
$DATA/spelling/train.parquet: 20
$DATA/counting/train.parquet: 8
$DATA/identity/train.parquet: 1
END
cat >"$OUT/mid.yaml" <<END
loss_type: sft_loss
calculate_per_token_loss: true
prompt_data: [$DATA/mid-mixture.yaml]
input_key: messages
tokenizer: $DATA/tokenizer
num_rollout: 200
rollout_batch_size: 4096
global_batch_size: 1024
optimizer: muon
muon_lr: 0.01
lr: 1.0e-3
lr_decay_style: linear
save_interval: 50
END

cat >"$DATA/sft-mixture.yaml" <<END
$DATA/smoltalk/train.parquet: 10
$DATA/arc_talks/ARC-Easy/train.parquet: 2.3
$DATA/arc_talks/ARC-Challenge/train.parquet: 1.1
$DATA/gsm8k_talks/train.parquet: 8
$DATA/spelling/train.parquet: 0.6
$DATA/identity/train.parquet: 1
END
cat >"$OUT/sft.yaml" <<END
loss_type: sft_loss
calculate_per_token_loss: true
prompt_data: [$DATA/sft-mixture.yaml]
input_key: messages
num_rollout: 23
rollout_batch_size: 1024
global_batch_size: 128
optimizer: muon
muon_lr: 2.0e-3
lr: 2.0e-4
lr_decay_style: linear
save_interval: 10
END

cat >"$OUT/rl.yaml" <<END
prompt_data: [$DATA/gsm8k/train.parquet]
input_key: messages
label_key: label
apply_chat_template: true
rm_type: math
num_rollout: 467 # one epoch of 7,473 questions
rollout_batch_size: 16
n_samples_per_prompt: 16
rollout_max_response_len: 256
global_batch_size: 256
lr: 1.0e-6
colocate: true
eval_prompt_data: [gsm8k, $DATA/gsm8k/test.parquet]
eval_top_k: 1
eval_max_response_len: 256
eval_interval: 60
save_interval: 60
END

COMMON=(--actor-num-gpus-per-node 8 --rollout-shuffle --use-dynamic-batch-size --max-tokens-per-gpu 65536 --compile)
if $DRY; then # a stage starts from the model of the one before, whose shape is known
    python - "$DATA" <<'END'
import json, shutil, sys
folder = sys.argv[1] + "/model"
shutil.copytree(sys.argv[1] + "/tokenizer", folder, dirs_exist_ok=True)
config = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_hidden_layers=20, hidden_size=1280)
config |= dict(intermediate_size=3456, num_attention_heads=10, num_key_value_heads=10, head_dim=128, vocab_size=65536)
config |= dict(max_position_embeddings=2048, tie_word_embeddings=False, dtype="float32")
json.dump(config, open(folder + "/config.json", "w"))
END
    for stage in base mid sft rl; do
        echo "== $stage"
        model=(--hf-checkpoint "$DATA/model"); [[ $stage == base ]] && model=()
        python train.py --config "$OUT/$stage.yaml" "${model[@]}" "${COMMON[@]}" --run-dir "$OUT/$stage" --save "$OUT/$stage/checkpoints" \
            --plan-gpu h100:8 "$@"
    done
    exit
fi
python train.py --stages "$OUT"/{base,mid,sft,rl}.yaml --run-dir "$OUT" "${COMMON[@]}" "$@"
slimelite report "$OUT" --price "$PRICE" \
    --tasks arc-easy,arc,hellaswag,piqa,openbookqa,commonsense-qa,boolq,copa,winogrande,lambada,mmlu,gsm8k
