"""Every rule: what breaks it is named in one line, and what mends it passes."""

from __future__ import annotations

import pytest

from slimelite.arguments import make_args
from slimelite.plan.devices import Machine
from tests.arguments.conftest import COMPLETE, Problems

EVAL = "--eval-prompt-data sums a.jsonl"
RULES = [
    # (words that break the rule, what the line says, words added that mend it)
    (
        "--rollout-temperature 0",
        "--rollout-temperature 0.0: must be above 0, because training divides the logits by it",
        "--rollout-temperature 0.5",
    ),
    (
        "--rollout-top-p 0.9 --rollout-backend vllm",
        "--rollout-top-p 0.9: --rollout-backend vllm does not report which tokens it kept",
        "--allow-truncated-sampling",
    ),
    (
        "--rollout-min-p 0.1 --rollout-backend vllm",
        "--rollout-min-p 0.1: --rollout-backend vllm does not report which tokens it kept",
        "--rollout-backend embedded",
    ),
    (
        "--train-constrained --rollout-backend vllm",
        "--train-constrained: --rollout-backend vllm does not report which tokens a grammar allowed",
        "--rollout-backend embedded",
    ),
    (
        "--train-constrained --rollout-top-p 0.9 --allow-truncated-sampling",
        "--train-constrained needs the token ids that --allow-truncated-sampling does not record",
        "--no-train-constrained",
    ),
    (
        "--save s --save-interval 1 --no-save-optim --max-restarts 2",
        "--max-restarts cannot resume the optimizer, because --no-save-optim leaves it out",
        "--no-load-optim",
    ),
    ("--lora-rank 4 --load-in-4bit --compile", "--load-in-4bit with --compile", "--debug-rollout-only"),
    (
        "--loss-type kto_loss --label-key y --ref-load r --n-samples-per-prompt 1 --rollout-batch-size 3 "
        "--global-batch-size 2",
        "--loss-type kto_loss --global-batch-size 2: one step has only one of 3 replies",
        "--rollout-batch-size 4",
    ),
    ("--rollout-top-k 1", "--rollout-top-k 1 samples greedily", "--debug-rollout-only"),
    ("--rollout-min-p 1.5", "--rollout-min-p 1.5: must be", "--rollout-min-p 0.5"),
    (
        "--rollout-backend sglang --rollout-top-k 5000",
        "--rollout-top-k 5000: SGLang reports at most 4096 kept tokens",
        "--sglang-sampling-mask-max-tokens 6000",
    ),
    (
        "--rollout-backend sglang --rollout-top-p 0.9 --sglang-speculative-algorithm EAGLE3",
        "--rollout-top-p 0.9 with --sglang-speculative-algorithm EAGLE3: with speculative decoding, SGLang",
        "--allow-truncated-sampling",
    ),
    (
        "--rollout-backend sglang --rollout-min-p 0.1 --sglang-enable-deterministic-inference",
        "--rollout-min-p with --sglang-enable-deterministic-inference: SGLang cannot combine them",
        "--rollout-min-p 0",
    ),
    (
        "--use-opd --opd-type sglang --rm-url http://t:1/generate --rollout-top-p 0.9",
        "--opd-type sglang with --rollout-top-p, --rollout-top-k or --rollout-min-p: the teacher's server returns",
        "--rollout-top-p 1",
    ),
    ("--rollout-top-k 0", "--rollout-top-k 0: must be -1 or at least 1", "--rollout-top-k -1"),
    (
        "--curriculum-threshold 2 --rm-type math",
        "--curriculum-threshold 2.0: --rm-type math gives a right answer the reward 1, so no task",
        "--curriculum-threshold 0.9",
    ),
    ("--eval-interval 2", "--eval-interval needs --eval-prompt-data", "--eval-prompt-data a a.jsonl"),
    ("--save-interval 2", "--save-interval needs --save: the folder for checkpoints", "--save out"),
    ("--save-rollouts -1", "--save-rollouts -1: must be a number of rollouts, all or none", "--save-rollouts 0"),
    ("--save-rollouts few", "--save-rollouts few: must be a number", "--save-rollouts none"),
    ("--early-stop-patience 2", "--early-stop-patience needs --eval-interval", f"{EVAL} --eval-interval 2"),
    (
        "--early-stop-patience 2 --debug-rollout-only",
        "needs training",
        f"{EVAL} --eval-interval 2 --no-debug-rollout-only",
    ),
    ("--save-best --save-hf out", "--save-best needs --eval-interval", f"{EVAL} --eval-interval 2"),
    (f"--save-best --eval-interval 2 {EVAL}", "--save-best needs --save or --save-hf: the folder", "--save-hf out"),
    (
        f"--early-stop-patience 2 --eval-interval 2 {EVAL} --early-stop-metric eval/sum",
        "--early-stop-metric eval/sum: no evaluation measures this metric; did you mean eval/sums?",
        "--early-stop-metric eval/sums-truncated_ratio",
    ),
    (
        f"--early-stop-patience 2 --eval-interval 2 {EVAL} --early-stop-metric eval/sums-pass@4",
        "--early-stop-metric eval/sums-pass@4: no evaluation measures this metric",
        "--n-samples-per-eval-prompt 5",
    ),
    (
        f"--early-stop-patience 2 --eval-interval 2 {EVAL} --early-stop-metric rollout/raw_reward",
        "the metrics are eval/sums, eval/sums-truncated_ratio",
        "--early-stop-metric eval/sums/reward/format",
    ),
    (
        f"--save-best --save-hf out --eval-interval 3 {EVAL} --async-rollout --update-weights-interval 2",
        "use older weights than the saved model; make --eval-interval a multiple of --update-weights-interval",
        "--eval-interval 4",
    ),
    ("--save out", "--save needs --save-interval: the number of rollouts", "--save-interval 1"),
    (
        "--use-kl-loss --kl-loss-coef 0.1 --kl-coef 0.1 --advantage-estimator reinforce_plus_plus",
        "--kl-coef (in the reward) and --kl-loss-coef",
        "--kl-coef 0",
    ),
    ("--kl-coef 0.1", "use --use-kl-loss --kl-loss-coef 0.1", "--advantage-estimator reinforce_plus_plus"),
    ("--kl-coef 0.1 --advantage-estimator rloo", "no effect with rloo", "--kl-coef 0.00"),
    ("--kl-coef 0.1 --advantage-estimator gspo", "no effect with gspo", "--kl-coef 0.00"),
    ("--kl-coef 0.1 --advantage-estimator cispo", "no effect with cispo", "--kl-coef 0.00"),
    ("--kl-loss-coef 0.1", "--kl-loss-coef needs --use-kl-loss", "--use-kl-loss"),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1", "use low_var_kl", "--use-unbiased-kl"),
    ("--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k1", "use low_var_kl", "--kl-loss-coef 0"),
    (
        "--advantage-estimator ppo --disable-compute-advantages-and-returns",
        "leaves the critic of ppo nothing to learn",
        "--compute-advantages-and-returns",
    ),
    (
        "--disable-compute-advantages-and-returns",
        "leaves the policy loss nothing to learn",
        "--loss-type custom_loss --custom-loss-function-path my.loss",
    ),
    ("--disable-compute-advantages-and-returns", "leaves the policy loss nothing to learn", "--debug-rollout-only"),
    (
        "--advantage-estimator ppo --lr 2 --critic-lr 0.1 --min-lr 1 --lr-decay-style cosine",
        "--min-lr 1.0 is above --critic-lr 0.1",
        "--critic-lr 1",
    ),
    ("--kl-coef inf --advantage-estimator reinforce_plus_plus", "--kl-coef inf: must be finite", "--kl-coef 0"),
    ("--lr inf", "-lr inf: must be finite", "--lr 1e-3"),
    ("--rollout-external", "needs --rollout-external-engine-addrs", "--rollout-external-engine-addrs a:1"),
    ("--critic-lr -1", "--critic-lr -1.0: must be at least 0", "--critic-lr 0"),
    ("--num-critic-only-steps -1", "--num-critic-only-steps -1: must be at least 0", "--num-critic-only-steps 0"),
    ("--value-clip -1", "--value-clip -1.0: must be at least 0", "--value-clip 0.2"),
    ("--use-dynamic-batch-size", "needs --max-tokens-per-gpu", "--max-tokens-per-gpu 64"),
    ("--eps-clip-c 0.5", "--eps-clip-c 0.5: must be above 1", "--eps-clip-c 3"),
    ("--opsm-delta -1 --use-opsm", "--opsm-delta -1.0: must be at least 0", "--opsm-delta 0"),
    ("--reward-timeout -5", "--reward-timeout -5.0: must be above 0", "--reward-timeout 20"),
    ("--code-timeout 0", "--code-timeout 0.0: must be above 0", "--code-timeout 5"),
    ("--eps-clip -0.1", "--eps-clip -0.1: must be at least 0", "--eps-clip 0.1"),
    ("--async-rollout --colocate", "cannot generate while it trains", "--no-colocate"),
    ("--async-rollout --max-weight-staleness 0", "allow 1 or more", "--max-weight-staleness 1"),
    ("--async-rollout --max-weight-staleness 2 --update-weights-interval 3", "allow 3", "--max-weight-staleness 3"),
    ("--gamma 1.5", "--gamma 1.5: must be between 0 and 1", "--gamma 1"),
    (
        "--calculate-per-token-loss --loss-aggregation constant",
        "--calculate-per-token-loss means",
        "--loss-aggregation token",
    ),
    ("--loss-type dpo_loss --dpo-beta 0", "--dpo-beta 0.0: must be above 0", "--dpo-beta 0.01"),
    ("--loss-type dpo_loss --dpo-label-smoothing 0.5", "below 0.5", "--dpo-label-smoothing 0.49"),
    ("--loss-type dpo_loss --dpo-label-smoothing -0.1", "at least 0", "--dpo-label-smoothing 0"),
    ("--loss-type dpo_loss --calculate-per-token-loss", "leave --calculate-per-token-loss out", "--loss-type sft_loss"),
    ("--loss-type dpo_loss --loss-aggregation token", "leave --loss-aggregation out", "--loss-aggregation rollout"),
    ("--loss-type dpo_loss --rejected-key chosen", "are both 'chosen'", "--chosen-key yes"),
    ("--loss-type dpo_loss --debug-rollout-only", "generates no rollouts; choose one", "--no-debug-rollout-only"),
    ("--n-samples-per-prompt 1", "grpo compares the responses", "--disable-rewards-normalization"),
    ("--n-samples-per-prompt 1", "grpo compares the responses", "--advantage-estimator reinforce_plus_plus"),
    ("--n-samples-per-prompt 1", "grpo compares the responses", "--loss-type sft_loss"),
    ("--n-samples-per-prompt 1 --advantage-estimator rloo", "rloo compares", "--n-samples-per-prompt 2"),
    (
        "--n-samples-per-prompt 1 --disable-rewards-normalization "
        "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "drops every group with one response",
        "--n-samples-per-prompt 2",
    ),
    ("--over-sampling-batch-size 3", "must be at least --rollout-batch-size 4", "--over-sampling-batch-size 4"),
    ("--rollout-max-context-len 8 --rollout-max-prompt-len 8", "leaves no room", "--rollout-max-prompt-len 7"),
    ("--rollout-max-response-len 0", "--rollout-max-response-len 0", "--rollout-max-response-len 1"),
    ("--rollout-batch-size 0", "--rollout-batch-size 0: must be at least 1", "--rollout-batch-size 1"),
    ("--debug-train-only", "--debug-train-only has nothing to train on", "--loss-type sft_loss"),
    (
        "--debug-train-only --debug-rollout-only --loss-type policy_loss",
        "leave nothing to run",
        "--no-debug-train-only",
    ),
    ("--loss-type custom_loss", "needs --custom-loss-function-path", "--custom-loss-function-path my.loss"),
    ("--ci-metric-checker-key eval/x", "give both flags", "--ci-metric-checker-threshold 0.5"),
    ("--load-debug-rollout-data-subsample 0.5", "needs --load-debug-rollout-data", "--load-debug-rollout-data x"),
    ("--group-rm", "--group-rm needs --custom-rm-path", "--custom-rm-path my.rm"),
    ("--rm-type reward_model", "--rm-type reward_model needs --reward-model-path", "--reward-model-path model"),
    ("--code-timeout 30", "--code-timeout 30.0: must be below --reward-timeout 30.0", "--reward-timeout 40"),
    ("--code-memory-mb 4096", "--code-memory-mb 4096: must be at least 64 and below 4096", "--code-memory-mb 4095"),
    ("--format-regex (", "--format-regex '(': missing )", "--format-regex ()"),
    (
        "--format-reward-coef 1 --custom-reward-post-process-path my.fn",
        "--custom-reward-post-process-path replaces all changes to the rewards",
        "--format-reward-coef 0",
    ),
    ("--overlong-buffer-len 5000", "--overlong-buffer-len 5000 is above", "--rollout-max-response-len 6000"),
    ("--rm-type remote_rm", "--rm-type remote_rm needs --rm-url", "--rm-url http://127.0.0.1:1"),
    ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters", "--lr-wsd-decay-iters 5"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "choose one", "--lr-warmup-iters 0"),
    ("--lr-decay-style cosine --min-lr 1", "--min-lr 1.0 is above --lr 1e-06", "--lr 2"),
    ("--min-lr 1", "--min-lr 1.0 is above --lr 1e-06", "--min-lr 0"),
    ("--finetune", "--finetune needs --load", "--load out"),
    (f"--load {__file__}", "is a file; --load takes the folder that --save wrote", "--load out"),
    (f"--seed {2**31}", f"--seed {2**31}: must be between 0 and {2**31 - 1}", f"--seed {2**31 - 1}"),
    ("--rollout-seed -1", "--rollout-seed -1: must be between 0 and", "--rollout-seed 0"),
    ("--prompt-data-weights inf", "--prompt-data-weights [inf]: must be finite", "--prompt-data-weights 1e200"),
    (
        f"--hf-checkpoint {'a' * 300}",
        f"--hf-checkpoint {'a' * 80}... cannot be used",
        "--hf-checkpoint o/m",
    ),
    (
        f"--prompt-data p.jsonl {'c' * 300}@[:9]",
        "... cannot be used: File name too long",
        "--prompt-data p.jsonl",
    ),
    (f"--tokenizer {'d/' * 3000}", "... cannot be used: File name too long", "--tokenizer o/m"),
    (
        '--train-env-vars {"A=B":"1"}',
        "'A=B': '1' is not a variable: the name must have no =, and the value must be a text",
        '--train-env-vars {"A":1}',
    ),
    ('--train-env-vars {"A":[1]}', "'A': [1] is not a variable", '--train-env-vars {"A":"1"}'),
    ("--run-dir=", "--run-dir is empty: is it a shell variable that is not set?", "--run-dir out"),
    ("--launcher local --actor-num-gpus-per-node 2", "2 training ranks need --launcher ray", "--launcher ray"),
    ("--launcher local --rollout-num-gpus 2", "2 engines need --launcher ray", "--launcher ray"),
    ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "3 is not a multiple", "--rollout-num-gpus-per-engine 1"),
    ("--rollout-num-gpus-per-engine 2", "engine runs on only one device", "--rollout-num-gpus-per-engine 1"),
    (
        "--rollout-backend vllm --deterministic-mode",
        "samples of this engine are not repro",
        "--rollout-backend embedded",
    ),
    ("--device cuda --colocate --rollout-backend vllm", "vllm cannot release its memory", "--rollout-backend embedded"),
    ("--rollout-num-gpus 0", "leaves no engine", "--rollout-num-gpus 1"),
    (
        "--actor-num-gpus-per-node 3 --dp-replicate-size 2",
        "does not divide the 3 training ranks",
        "--dp-replicate-size 3",
    ),
    ("--prompt-data-weights 1 2", "has 2 weights for 1 paths", "--prompt-data a b"),
    ("--disable-rollout-global-dataset", "needs a --data-source-path", "--data-source-path my.Source"),
    ("--opd-teacher-load m", "--opd-teacher-load needs --use-opd", "--use-opd --opd-type trainer"),
    ("--use-opd", "--use-opd needs --opd-type", "--opd-type megatron --opd-teacher-load m"),
    ("--use-opd --opd-type trainer", "--opd-type trainer needs --opd-teacher-load", "--opd-teacher-load m"),
    ("--use-opd --opd-type sglang", "needs --rm-url", "--rm-url http://127.0.0.1:1"),
    ("--use-opd --opd-type sglang", "needs --rm-url", "--custom-generate-function-path my.fn"),
    ("--use-opd --opd-type sglang --rm-url 127.0.0.1:1", "must start with http", "--rm-url http://127.0.0.1:1"),
    ("--use-opd --opd-type sglang --rm-url http://a --opd-teacher-load m", "choose one", "--opd-type trainer"),
    ("--use-opd --opd-type sglang --rm-url http://a --rm-type remote_rm", "both read --rm-url", "--rm-type math"),
    ("--use-opd --opd-type trainer --opd-teacher-load m --opd-kl-coef -1", "at least 0", "--opd-kl-coef 0"),
    (
        "--use-opd --opd-type trainer --opd-teacher-load m --loss-type sft_loss",
        "--use-opd changes the advantages",
        "--loss-type policy_loss",
    ),
    (
        "--n-samples-per-prompt 1",
        "grpo compares the responses",
        "--use-opd --opd-type trainer --opd-teacher-load m",
    ),
    ("--use-pytorch-profiler", "profiles 10, 11 of the rollouts 0 to 1: name the rollouts", "--profile-rollouts 1"),
    ("--profile-rollouts 1", "--profile-rollouts needs --use-pytorch-profiler", "--use-pytorch-profiler"),
    ("--record-memory-history", "needs GPUs: PyTorch records only the history of", "--no-record-memory-history"),
    (
        "--custom-pg-loss-reducer-function-path my.reducer --loss-aggregation constant",
        "both reduce the loss; choose one",
        "--loss-aggregation token",
    ),
]


@pytest.mark.parametrize(("breaks", "says", "mends"), RULES, ids=[f"{b} | {m}" for b, _, m in RULES])
def test_rule(problems: Problems, breaks: str, says: str, mends: str) -> None:
    problem, *consequences = problems(breaks)
    assert says in problem
    assert problem.startswith("--")
    assert len(consequences) <= 1
    assert problems(f"{breaks} {mends}") == []


@pytest.mark.parametrize(
    "missing",
    ["--rollout-batch-size", "--num-rollout", "--prompt-data", "--rollout-max-response-len", "--hf-checkpoint"],
)
def test_what_a_run_cannot_do_without(missing: str) -> None:

    from slimelite.arguments import ArgumentError

    words = COMPLETE.split()
    at = words.index(missing)
    with pytest.raises(ArgumentError) as caught:
        make_args(words[:at] + words[at + 2 :], machine=Machine(gpus=0))
    (problem,) = caught.value.problems
    assert problem.startswith(missing)
    assert "missing" in problem


def test_epochs_do_instead_of_a_number_of_rollouts() -> None:

    words = COMPLETE.replace("--num-rollout 2", "--num-epoch 2").split()
    args = make_args(words, machine=Machine(gpus=0))
    assert (args.num_rollout, args.num_epoch) == (None, 2)


def test_constant_aggregation_and_saved_rollouts(problems: Problems) -> None:
    """Training on saved rollouts needs no response length, but the constant divisor does."""

    from slimelite.arguments import ArgumentError

    words = COMPLETE.replace("--rollout-max-response-len 16", "--load-debug-rollout-data r/{rollout_id}").split()
    assert make_args(words, machine=Machine(gpus=0)).debug_train_only
    with pytest.raises(ArgumentError, match="--rollout-max-response-len"):
        make_args([*words, "--loss-aggregation", "constant"], machine=Machine(gpus=0))
    assert problems("--loss-aggregation constant") == []


def test_saved_rollouts_make_no_epochs() -> None:

    from slimelite.arguments import ArgumentError

    words = COMPLETE.replace("--num-rollout 2", "--num-epoch 2 --load-debug-rollout-data r/{rollout_id}").split()
    with pytest.raises(ArgumentError, match="give --num-rollout"):
        make_args(words, machine=Machine(gpus=0))
    assert make_args([*words, "--num-rollout", "3"], machine=Machine(gpus=0)).num_rollout == 3


@pytest.mark.parametrize("option", ["quantization fp8", "load-format flash_rl"])
def test_servers_that_take_new_weights_cannot_quantize_them(problems: Problems, option: str) -> None:
    gpu, words = Machine(gpus=1, sglang=True), f"--colocate --sglang-{option}"
    (problem,) = problems(words, gpu)
    assert problem.startswith(f"--sglang-{option}: SGLang cannot load the trainer's weights into layers that")
    for mends in ("--debug-rollout-only", "--lora-rank 4"):
        assert problems(f"{words} {mends}", gpu) == [], "the server keeps the weights that it read"
    assert problems(f"{words} --lora-rank 4 --lora-sync merged", gpu) == [problem]
    assert problems("--colocate --sglang-quantization unquant --sglang-load-format safetensors", gpu) == []


def test_a_draft_model_gets_no_weights_by_disk(problems: Problems) -> None:
    gpus, draft = Machine(gpus=2, sglang=True), "--sglang-speculative-algorithm EAGLE3"
    words = f"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --update-weight-disk-dir /shared {draft}"
    (problem,) = problems(words, gpus)
    assert problem.startswith(f"{draft}: with --update-weight-transport disk")
    assert "such as nccl" in problem
    assert problems(words.replace("--update-weight-disk-dir /shared", "--update-weight-transport nccl"), gpus) == []
    assert problems(words.replace(draft, ""), gpus) == []
    assert problems(f"{words} --debug-rollout-only", gpus) == []


def test_a_check_after_a_sync_needs_both_sides_in_memory(problems: Problems) -> None:
    """On shared GPUs the trainer's memory is given back before a sync."""
    gpu, check = Machine(gpus=1, sglang=True), "--colocate --check-weight-update-equal"
    for words in (check, f"{check} --no-offload-rollout", f"{check} --no-offload-train"):
        (problem,) = problems(words, gpu)
        assert problem.startswith("--check-weight-update-equal with --offload")
        assert "--no-offload-train --no-offload-rollout" in problem
    assert problems(f"{check} --no-offload-train --no-offload-rollout", gpu) == []
