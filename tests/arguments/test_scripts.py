"""The flags of slime's scripts and of miles: they are known, and mean what they mean there."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.arguments.sources import Vocabulary, known_flags, known_tables, sglang_options
from slimelite.plan.devices import Machine

MODEL = (
    "--swiglu --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14 "
    "--use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization RMSNorm --norm-epsilon 1e-6 "
    "--rotary-base 1000000 --group-query-attention --num-query-groups 2 --vocab-size 151936"
)
CKPT = "--hf-checkpoint Qwen/Qwen2.5-0.5B-Instruct --ref-load /root/Qwen2.5-0.5B-Instruct_torch_dist/"
ROLLOUT = (
    "--prompt-data gsm8k/train.parquet --input-key messages --label-key label --apply-chat-template --rollout-shuffle "
    "--rm-type math --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--rollout-max-response-len 1024 --rollout-temperature 0.8 --over-sampling-batch-size 64 "
    "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std "
    "--global-batch-size 256"
)
EVAL = (
    "--eval-interval 20 --eval-prompt-data gsm8k gsm8k/test.parquet --n-samples-per-eval-prompt 1 "
    "--eval-max-response-len 1024 --eval-top-k 1"
)
PERF = (
    "--tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1 "
    "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216"
)
GRPO = (
    "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 "
    "--eps-clip 0.2 --eps-clip-high 0.28"
)
OPTIMIZER = "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98"
WANDB = "--use-wandb --wandb-project slime-test --wandb-group test-qwen2.5-0.5B-gsm8k"
SGLANG = "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.7"
MISC = (
    "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
    "--attention-backend flash"
)
CLUSTER = "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate"
GSM8K = [MODEL, CKPT, ROLLOUT, EVAL, PERF, GRPO, OPTIMIZER, WANDB, SGLANG, MISC]

FSDP = (
    "--train-backend fsdp --hf-checkpoint Qwen/Qwen3-0.6B --ref-load Qwen/Qwen3-0.6B --prompt-data dapo.jsonl "
    "--input-key prompt --label-key label --apply-chat-template --rm-type deepscaler --num-rollout 3000 "
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 --rollout-max-response-len 8192 "
    "--rollout-temperature 0.8 --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 "
    "--update-weight-buffer-size 536870912 --gradient-checkpointing --attn-implementation flash_attention_3 "
    '--train-env-vars {"PYTORCH_CUDA_ALLOC_CONF":"expandable_segments:True"} --fsdp-cpu-offload '
    "--sglang-attention-backend fa3 --sglang-cuda-graph-max-bs 32 --dump-details /tmp/dump "
    "--use-dynamic-batch-size --max-tokens-per-gpu 9216 --actor-num-gpus-per-node 2 --colocate --balance-data"
)
SFT = (
    "--hf-checkpoint Qwen/Qwen3-4B-Base --rollout-function-path slime.rollout.sft_rollout.generate_rollout "
    "--prompt-data openhermes2_5.parquet --input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 "
    "--global-batch-size 128 --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns "
    "--debug-train-only --optimizer adam --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --use-dynamic-batch-size --max-tokens-per-gpu 9216"
)

GPU4 = Machine(gpus=4)


def parse(*arrays: str, machine: Machine = GPU4) -> Args:
    return make_args(" ".join(arrays).split(), machine=machine)


def test_gsm8k_script() -> None:
    args = parse(CLUSTER, *GSM8K)
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size) == (32, 8, 256)
    assert (args.num_steps_per_rollout, args.num_engines, args.rollout_num_gpus) == (1, 4, 4)
    assert (args.lr, args.adam_beta2, args.eps_clip, args.eps_clip_high) == (1e-6, 0.98, 0.2, 0.28)
    assert args.offload_train
    assert args.offload_rollout
    assert args.sglang_mem_fraction_static == 0.7
    assert not args.use_reference
    assert args.ref_load == "Qwen/Qwen2.5-0.5B-Instruct"
    (dataset,) = args.eval_datasets
    assert (dataset.name, dataset.path, dataset.top_k, dataset.temperature) == ("gsm8k", "gsm8k/test.parquet", 1, 0.8)
    assert (dataset.max_response_len, dataset.rm_type, dataset.label_key) == (1024, "math", "label")
    assert dict(args.no_effect).keys() >= {"--sequence-parallel", "--attention-backend", "--attention-dropout"}


def test_gsm8k_script_on_a_cpu_machine_means_four_ranks() -> None:
    args = parse(CLUSTER, *GSM8K, machine=Machine(gpus=0))
    assert (args.device, args.rollout_backend, args.num_engines) == ("cpu", "embedded", 4)
    assert not args.offload_train
    assert "--sglang-mem-fraction-static" in dict(args.no_effect)


def test_gsm8k_async_twin() -> None:
    args = parse("--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2", *GSM8K)
    assert (args.actor_num_gpus_per_node, args.num_engines, args.offload_train) == (2, 2, False)


def test_fsdp_script() -> None:
    args = parse(FSDP)
    assert args.gradient_checkpointing
    assert args.fsdp_cpu_offload
    assert args.train_env_vars == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert args.sglang_overrides == {"attention_backend": "fa3", "cuda_graph_max_bs": 32}
    assert args.save_debug_rollout_data == "/tmp/dump/rollout_data/{rollout_id}.parquet"


def test_gspo_script() -> None:
    args = parse(CLUSTER, *GSM8K, "--advantage-estimator gspo --eps-clip 3.5e-4")
    assert (args.advantage_estimator, args.eps_clip, args.eps_clip_high) == ("gspo", 3.5e-4, 0.28)


def test_reproducibility_script() -> None:
    args = parse(
        CLUSTER,
        *GSM8K,
        "--calculate-per-token-loss --sglang-enable-deterministic-inference --sglang-attention-backend flashinfer",
        "--deterministic-mode",
    )
    assert args.deterministic_mode
    assert args.loss_aggregation == "token"
    assert args.sglang_overrides == {"enable_deterministic_inference": True, "attention_backend": "flashinfer"}


def test_sft_script() -> None:
    args = parse(SFT, machine=Machine(gpus=8))
    assert args.debug_train_only
    assert (args.num_engines, args.num_epoch, args.actor_num_gpus_per_node) == (0, 3, 8)
    assert (args.n_samples_per_prompt, args.num_steps_per_rollout, args.loss_aggregation) == (1, 1, "token")
    assert args.eval_function_path is None


def test_megatron_recompute_and_offload_are_mapped() -> None:
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer-cpu-offload"
    args = parse(CLUSTER, *GSM8K, words, "--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer")
    assert args.gradient_checkpointing
    assert args.fsdp_cpu_offload
    assert dict(args.no_effect).keys() >= {"--recompute-method", "--overlap-cpu-optimizer-d2h-h2d"}


@pytest.mark.parametrize("project", ["slime", "miles"])
def test_every_flag_is_known(project: str) -> None:
    """Each list holds every flag of the project's parser (miles: v0.1.0), of its FSDP backend, and of the Megatron
    flags in its scripts and launchers."""
    words = (Path(__file__).parent / f"{project}_flags.txt").read_text().split()
    vocabulary = Vocabulary(Args)
    assert len(words) > 400
    assert [w for w in words if not vocabulary.knows(w.removeprefix("--"))] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--use-session-server", "sessions keep the sampled tokens"),
        ("--use-session-server v2 --session-server-port 30000 30002 --tito-model qwen3", "need no separate server"),
        ("--dumper-inference", "only works with --dumper-enable"),
        ("--ft-components rollout", "rollout is already the default behaviour"),
        ("--multi-lora-n-adapters 0 --opd-log-prob-top-k 0", "0 is already the default behaviour"),
        ("--skip-actor-forward-only", "old log-probs need no extra pass"),
    ],
)
def test_flags_of_miles_without_effect(words: str, said: str) -> None:
    reasons = dict(parse(CLUSTER, *GSM8K, words).no_effect)
    for option in (word for word in words.split() if word.startswith("--")):
        assert option in reasons
    assert said in reasons[words.split()[0]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ft-components rollout train", "--max-restarts restarts the whole run"),
        ("--eval-sglang-mem-fraction-static 0.5", "all engines are alike"),
        ("--custom-agent-function-path a.b", "--agent-command runs a program"),
        ("--multi-lora-adapter a path", "start one run for each"),
        ("--update-weight-transfer-mode p2p", "--update-weight-transport chooses how"),
    ],
)
def test_flags_of_miles_that_are_refused(words: str, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse(CLUSTER, *GSM8K, words)
    (problem,) = error.value.problems
    assert problem.startswith(f"{words.split()[0]} is not supported: ")
    assert said in problem


def test_a_suggestion_names_no_flag_that_is_refused() -> None:
    """Whatever is misspelt: a flag of ours, one that is refused, one of SGLang's that is set here."""
    vocabulary = Vocabulary(Args)
    refused = {f"--{name}" for name in known_flags(refused=True)}
    set_here = known_tables()["sglang_set_here"]
    refused |= {f"--sglang-{name}" for name, option in sglang_options().items() if option.field in set_here}
    for option in [*(f"{option}s" for option in sorted(refused)), "--use-session-serve", "--no-session-server"]:
        assert vocabulary.nearest(option) not in refused, option
    for flag in list(vocabulary.flags.values())[::7]:
        assert vocabulary.nearest(f"{flag.option}x") == flag.option


@pytest.mark.parametrize(
    "option", ["--sglang-router-ip 1.2.3.4", "--sglang-router-port 30000", "--router-policy random"]
)
def test_router_flags(option: str) -> None:
    assert option.split()[0] in dict(parse(CLUSTER, *GSM8K, option).no_effect)
