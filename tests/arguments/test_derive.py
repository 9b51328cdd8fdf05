"""Values that nobody gave, each with its reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.arguments.rollout import EPISODE
from slimelite.models.checkpoints import find_checkpoint
from slimelite.plan.devices import Machine, this_machine
from tests.arguments.conftest import COMPLETE, Make, Problems

GPU8 = Machine(gpus=8)


def reason(args: Args, name: str) -> str:
    return {d.name: d.reason for d in args.derivations}[name]


def test_cpu_machine(make: Make) -> None:
    args = make()
    assert (args.device, args.rollout_backend, args.distributed_backend) == ("cpu", "embedded", "gloo")
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.num_engines) == (1, 1, 1)
    assert reason(args, "device") == "no GPU found"


def test_gpu_machine(make: Make) -> None:
    args = make("--colocate", GPU8)
    assert (args.device, args.rollout_backend, args.distributed_backend) == ("cuda", "embedded", "nccl")
    assert (args.actor_num_gpus_per_node, args.rollout_num_gpus, args.num_engines) == (8, 8, 8)
    assert (args.offload_train, args.offload_rollout) == (True, True)


def test_gpus_are_split_between_training_and_engines(make: Make, problems: Problems) -> None:
    args = make("--rollout-num-gpus 2", GPU8)
    assert (args.actor_num_gpus_per_node, args.num_engines, args.offload_train) == (6, 2, False)
    (problem,) = problems("", GPU8)
    assert problem.startswith("--rollout-num-gpus is missing")
    assert "has no GPU" not in problem
    assert problems("--device cuda")[0].endswith("; this machine has no GPU, so use --device cpu")
    assert "--colocate" in problem


def test_which_engine(make: Make, problems: Problems) -> None:
    both = Machine(gpus=8, sglang=True)
    assert make("--colocate", both).rollout_backend == "sglang"
    assert make("", Machine(gpus=0, sglang=True)).rollout_backend == "embedded"
    assert make("--rollout-backend sglang").rollout_backend == "sglang"
    assert make("--colocate --rollout-backend embedded", both).rollout_backend == "embedded"
    assert make("--colocate --deterministic-mode", both).rollout_backend == "embedded"
    repeats = "--deterministic-mode --sglang-enable-deterministic-inference"
    assert make(f"--colocate {repeats}", both).rollout_backend == "sglang"
    (problem,) = problems("--rollout-backend sglang --deterministic-mode")
    assert "--sglang-enable-deterministic-inference" in problem
    (problem,) = problems("--rollout-backend sglang --rollout-num-gpus-per-engine 2")
    assert "on a CPU, a server is one process" in problem


def test_gpus_of_sglang_engines(make: Make, problems: Problems) -> None:
    gpus = Machine(gpus=8, sglang=True)
    for fewer in ("", "--rollout-num-gpus 4", "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4"):
        make(f"--colocate --actor-num-gpus-per-node 8 {fewer}", gpus)
    args = make("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus 8", gpus)
    assert (args.rollout_backend, args.rollout_num_gpus, args.num_engines) == ("sglang", 4, 4)
    (problem,) = problems("--rollout-backend sglang --colocate --update-weight-transport ipc --rollout-num-gpus 2")
    assert "give 1, or leave the flag out" in problem
    (problem,) = problems("--colocate --sglang-dp-size 2", gpus)
    assert "--sglang-enable-dp-attention" in problem
    make("--colocate --sglang-dp-size 2 --sglang-enable-dp-attention", gpus)


def test_the_seed_of_rollouts_follows_the_seed_of_the_run(make: Make) -> None:
    assert (make().seed, make().rollout_seed) == (1234, 42), "slime's"
    assert (make("--rollout-seed 5").rollout_seed, make("--seed 3 --rollout-seed 5").rollout_seed) == (5, 5)
    args = make("--seed 3")
    assert (args.rollout_seed, reason(args, "rollout_seed")) == (3, "as --seed")


def test_infinity_is_no_bound(make: Make) -> None:
    args = make("--clip-grad inf --eps-clip-high inf --use-tis --tis-clip inf")
    assert args.clip_grad == args.eps_clip_high == args.tis_clip == float("inf")


def test_servers_of_someone_else(make: Make, problems: Problems) -> None:
    args = make("--rollout-external-engine-addrs a:1 b:2")
    assert (args.rollout_backend, args.num_engines, args.rollout_num_gpus) == ("sglang", 2, 0)
    assert make("--rollout-external-engine-addrs a:1", GPU8).actor_num_gpus_per_node == 8
    (problem,) = problems("--rollout-external-engine-addrs a:1 --colocate")
    assert "--colocate" in problem
    (problem,) = problems("--rollout-external-engine-addrs a:1 --rollout-backend embedded")
    assert "--rollout-backend embedded" in problem


def test_the_way_of_weights_fits_the_place(make: Make) -> None:
    gpus = Machine(gpus=8, sglang=True)

    def way(words: str, machine: Machine = gpus) -> str | None:
        return make(f"{words} --rollout-backend sglang", machine).update_weight_transport

    assert make("--colocate", GPU8).update_weight_transport is None
    assert way("--colocate", Machine(gpus=0)) == "nccl"
    assert way("--colocate") == "ipc"
    assert way("--colocate --update-weight-transport nccl") == "ipc"
    assert way("--rollout-num-gpus 2") == "nccl"
    assert way("--rollout-external-engine-addrs a:1") == "http"
    assert way("--rollout-external-engine-addrs a:1 --update-weight-disk-dir /shared") == "disk"
    assert way("--update-weight-transport http", Machine(gpus=0)) == "http"


def test_buckets_of_weights_are_small_on_a_cpu(make: Make) -> None:
    def size(words: str, machine: Machine | None = None) -> int:
        return make(words, machine or Machine(gpus=0)).update_weight_buffer_size

    assert size("") == 64 * 1024**2
    assert size("--launcher local") == 16 * 1024**2
    assert size("--update-weight-buffer-size 4096") == 4096
    assert size("--rollout-backend sglang") == size("--colocate", GPU8) == 512 * 1024**2


def test_fault_tolerance_is_for_sglang(make: Make) -> None:
    idle = dict(make("--use-fault-tolerance --rollout-health-check-interval 9").no_effect)
    assert "--rollout-backend sglang" in idle["--use-fault-tolerance"]
    idle = dict(make("--rollout-backend sglang --rollout-health-check-interval 9").no_effect)
    assert "--use-fault-tolerance" in idle["--rollout-health-check-interval"]


def test_weights_are_synced_after_every_rollout_unless_rollouts_run_ahead(make: Make) -> None:
    assert make("--update-weights-interval 3").update_weights_interval == 1
    assert make("--update-weights-interval 3 --async-rollout").update_weights_interval == 3


def test_rollouts_that_run_ahead_cannot_take_turns(problems: Problems) -> None:
    for flag in ("--offload", "--offload-rollout", "--offload-train"):
        (problem,) = problems(f"--async-rollout {flag} --rollout-num-gpus 2", GPU8)
        assert problem.startswith("--async-rollout with --offload: ")


def test_offload_flags(make: Make) -> None:
    args = make("--colocate --no-offload-train", GPU8)
    assert (args.offload_train, args.offload_rollout) == (False, True)
    args = make("--offload --rollout-num-gpus 2", GPU8)
    assert (args.offload_train, args.offload_rollout) == (True, True)
    args = make("--offload")
    assert (args.offload_train, args.offload_rollout) == (False, False)


def test_token_stats_belong_to_saved_rollouts(make: Make) -> None:
    assert make("--token-stats all --save-rollouts 3").token_stats == "all"
    for none in ("none", "0"):
        args = make(f"--token-stats all --save-rollouts {none}")
        assert (args.token_stats, args.rollouts_kept) == ("none", 0)
        assert f"--save-rollouts {none}" in reason(args, "token_stats")


def test_only_train_and_only_rollout(make: Make) -> None:
    train = make("--load-debug-rollout-data d/{rollout_id}.parquet", GPU8)
    assert (train.debug_train_only, train.num_engines, train.rollout_num_gpus) == (True, 0, 0)
    rollout = make("--debug-rollout-only --colocate", GPU8)
    assert (rollout.colocate, rollout.num_engines) == (False, 8)


@pytest.mark.parametrize(
    ("words", "size", "steps"),
    [
        ("", 8, 1),
        ("--global-batch-size 4", 4, 2),
        ("--global-batch-size 3", 3, 3),
        ("--global-batch-size 100", 100, 1),
        ("--num-steps-per-rollout 2", 4, 2),
        ("--num-steps-per-rollout 3", 3, 3),
        ("--num-steps-per-rollout 2 --global-batch-size 5", 5, 2),
    ],
)
def test_batch_arithmetic_for_8_samples(make: Make, words: str, size: int, steps: int) -> None:
    args = make(words)
    assert (args.global_batch_size, args.num_steps_per_rollout) == (size, steps)
    uneven = [n for n in args.notes if "averages its loss over" in n]
    assert len(uneven) == (8 % size != 0)


def test_a_smaller_last_step_is_said(make: Make) -> None:
    (note,) = make("--global-batch-size 3").notes
    assert note == (
        "4 prompts x 2 responses = 8 samples: the last of 3 steps of each rollout has 2 samples instead of 3, and "
        "averages its loss over 2"
    )


def test_batch_sizes_that_contradict(problems: Problems) -> None:
    (problem,) = problems("--num-steps-per-rollout 3 --global-batch-size 4")
    assert problem == "--num-steps-per-rollout 3: 4 prompts x 2 responses = 8 samples in batches of 4 make 2 steps"
    assert "make 4 steps" in problems("--num-steps-per-rollout 5")[0]


def test_reference_model_only_when_something_compares_with_it(make: Make) -> None:
    assert not make().use_reference
    idle = make("--use-kl-loss --kl-loss-coef 0.00 --kl-coef 0.00")
    assert not idle.use_reference
    assert any("--log-ref-kl" in note for note in idle.notes)
    for words in (
        "--use-kl-loss --kl-loss-coef 0.1",
        "--log-ref-kl",
        "--kl-coef 0.1 --advantage-estimator reinforce_plus_plus",
    ):
        custom = make(f"{words} --loss-type custom_loss --custom-loss-function-path my.loss")
        assert make(words).use_reference
        assert custom.use_reference
        assert any("inputs.ref" in note for note in custom.notes) == ("--kl-loss-coef" in words)
        for loss_type in ("sft_loss", "dpo_loss"):
            idle = make(f"{words} --loss-type {loss_type}")
            assert idle.use_reference == (loss_type == "dpo_loss")
            assert dict(idle.no_effect).keys() >= {word for word in words.split() if "kl" in word}


def test_the_kl_of_the_reward_is_k1_unless_a_type_was_given(make: Make) -> None:
    reward = "--kl-coef 0.1 --advantage-estimator reinforce_plus_plus"
    assert (make(reward).kl_reward_type, make(reward).kl_loss_type) == ("k1", "low_var_kl")
    assert make(f"{reward} --kl-loss-type k2").kl_reward_type == "k2"
    assert make(f"{reward} --kl-loss-type low_var_kl").kl_reward_type == "low_var_kl"


def test_ref_load_falls_back(make: Make, tmp_path: Path) -> None:
    megatron = tmp_path / "torch_dist"
    megatron.mkdir()
    (megatron / "latest_checkpointed_iteration.txt").write_text("release")
    hugging_face = tmp_path / "hf"
    hugging_face.mkdir()
    (hugging_face / "config.json").write_text("{}")
    assert make("--log-ref-kl").ref_load == "owner/model"
    assert make(f"--log-ref-kl --ref-load {hugging_face}").ref_load == str(hugging_face)
    for path, why in ((megatron, "is in Megatron format"), (tmp_path / "absent", "is not there")):
        args = make(f"--log-ref-kl --ref-load {path}")
        assert args.ref_load == "owner/model"
        assert f"--ref-load {path} {why}; the reference is --hf-checkpoint owner/model" in args.notes


def test_a_checkpoint_of_ours_is_no_reference(make: Make, problems: Problems, tmp_path: Path) -> None:
    """It was called Megatron's, and the policy was compared with --hf-checkpoint instead."""
    saved = tmp_path / "iter_0000004"
    saved.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    (saved / "trainer.json").write_text("{}")
    for path in (tmp_path, saved):
        (problem,) = problems(f"--log-ref-kl --ref-load {path}")
        assert problem == f"--ref-load {path}: is a checkpoint of --save; name a folder that --save-hf wrote"
        assert any("is a checkpoint of --save" in note for note in make(f"--ref-load {path}").notes)


def test_algorithm(make: Make) -> None:
    assert make("--eps-clip 0.3").eps_clip_high == 0.3
    assert make("--eps-clip 0.3 --eps-clip-high 0.4").eps_clip_high == 0.4
    for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        args = make(f"--advantage-estimator {estimator}")
        assert args.normalize_advantages
        assert f"--advantage-estimator {estimator} implies --normalize-advantages" in args.notes
    assert make("--calculate-per-token-loss").loss_aggregation == "token"
    assert make("--reward-key score").eval_reward_key == "score"
    assert any("cispo" in note for note in make("--advantage-estimator cispo").notes)


def test_ppo_has_a_critic(make: Make) -> None:
    args = make("--advantage-estimator ppo --lr 3e-4 --num-critic-only-steps 2")
    assert (args.use_critic, args.critic_lr) == (True, 3e-4)
    assert "rollouts 1 to 2 train only the critic: the policy does not change" in args.notes
    assert make("--advantage-estimator ppo --critic-lr 1e-3").critic_lr == 1e-3
    assert not make("--advantage-estimator ppo --loss-type sft_loss").use_critic
    args = make("--critic-lr 1e-3 --critic-lr-warmup-iters 1 --num-critic-only-steps 2 --critic-load x --lambd 0.9")
    assert not args.use_critic
    idle = {flag: why for flag, why in args.no_effect if why == "needs --advantage-estimator ppo or ppo_turns"}
    names = ("--critic-lr", "--critic-lr-warmup-iters", "--num-critic-only-steps", "--critic-load", "--lambd")
    assert set(idle) == set(names)


def test_lengths(make: Make) -> None:
    assert make("--rollout-max-context-len 64").rollout_max_prompt_len == 63
    assert make("--rollout-max-context-len 64").eval_datasets == ()


def test_slime_defaults_are_ours(make: Make) -> None:
    args = make(
        "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout "
        "--data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer"
    )
    assert (args.rollout_function_path, args.data_source_path, args.eval_function_path) == (None, None, None)
    assert make("--rollout-function-path my.fn").eval_function_path == "my.fn"


def test_sft_needs_no_engine_unless_it_evaluates(make: Make) -> None:
    sft = make("--loss-type sft_loss")
    assert sft.debug_train_only
    assert sft.rollout_function_path == "slimelite.rollout.generate.offline_rollout"
    both = make(f"--loss-type sft_loss {EVALUATED}")
    assert not both.debug_train_only
    assert both.eval_function_path is None


def test_dpo_counts_pairs_and_has_a_reference(make: Make) -> None:
    args = make("--loss-type dpo_loss --rollout-batch-size 5 --global-batch-size 2 --dpo-loss ipo --kl-loss-type k2")
    assert args.debug_train_only
    assert args.rollout_function_path == "slimelite.rollout.generate.offline_rollout"
    assert (args.use_reference, args.ref_load) == (True, "owner/model")
    assert (args.n_samples_per_prompt, args.num_steps_per_rollout) == (1, 3)
    assert args.notes == (
        "5 pairs: the last of 3 steps of each rollout has 1 pairs instead of 2, and averages its loss over 1",
    )
    assert {"--n-samples-per-prompt", "--kl-loss-type"} == set(dict(args.no_effect))
    assert make("--loss-type dpo_loss --ref-load other/model").ref_load == "other/model"
    both = make("--loss-type dpo_loss --eval-interval 1 --eval-prompt-data e e.jsonl")
    assert (both.debug_train_only, both.eval_function_path) == (False, None)
    idle = "--chosen-key a --rejected-key b --dpo-loss ipo --dpo-beta 1 --dpo-label-smoothing 0.1"
    assert set(dict(make(idle).no_effect)) == set(idle.split()[::2])
    assert "--dpo-label-smoothing" in dict(make(f"--loss-type dpo_loss {idle}").no_effect)


def test_run_dir_is_named_by_model_and_data(make: Make) -> None:
    assert make().run_dir.startswith("runs/model-p-20")
    assert make("--prompt-data gsm8k/train.parquet@[0:5]").run_dir.startswith("runs/model-gsm8k-20")
    assert make("--run-dir here").run_dir == "here"
    task = "reasoning-gym:chain_sum,gcd?size=4&levels=2"
    assert make(f"--prompt-data environment:{task}").run_dir.startswith(
        "runs/model-reasoning-gym-chain_sum-gcd-size-4-levels-2-20"
    )


def test_flags_without_anything_to_act_on_are_listed(make: Make) -> None:
    words = "--tis-clip 3 --opsm-delta 1 --muon-lr 1 --wandb-group g --lambd 0.9 --sglang-page-size 4"
    assert set(dict(make(f"{words} --lr-wsd-decay-iters 3").no_effect)) == {
        "--tis-clip",
        "--opsm-delta",
        "--muon-lr",
        "--wandb-group",
        "--lambd",
        "--sglang-page-size",
        "--lr-wsd-decay-iters",
    }
    assert dict(make("--recompute-granularity selective --compile --no-load-rng").no_effect).keys() == {
        "--recompute-granularity",
        "--no-load-rng",
    }
    assert make("--tis-clip 3 --use-tis --wandb-group g --use-wandb").no_effect == ()


EVALUATED = "--eval-interval 1 --eval-prompt-data e e.jsonl"


@pytest.mark.parametrize(
    ("flag", "idle_with", "works_with"),
    [
        ("--eps-clip-c 3", "--advantage-estimator cispo", "--advantage-estimator gspo"),
        ("--gamma 0.9", "", "--advantage-estimator reinforce_plus_plus"),
        ("--gamma 0.9", "--advantage-estimator reinforce_plus_plus_baseline", "--advantage-estimator ppo"),
        ("--gamma 0.9", "--advantage-estimator rloo", "--custom-advantage-function-path my.fn"),
        ("--disable-grpo-std-normalization", "--advantage-estimator rloo", "--advantage-estimator gspo"),
        ("--disable-grpo-std-normalization", "--advantage-estimator ppo", ""),
        ("--disable-grpo-std-normalization", "--disable-rewards-normalization", ""),
        ("--disable-rewards-normalization", "--advantage-estimator ppo", "--advantage-estimator rloo"),
        ("--disable-rewards-normalization", "--advantage-estimator reinforce_plus_plus", "--advantage-estimator cispo"),
        ("--eps-clip 0.1", "--loss-type sft_loss", ""),
        ("--eps-clip-high 0.3", "--loss-type dpo_loss", ""),
        ("--gamma 0.9", "--loss-type sft_loss --advantage-estimator ppo", "--advantage-estimator ppo"),
        ("--normalize-advantages", "--loss-type sft_loss", ""),
        ("--custom-advantage-function-path my.fn", "--loss-type sft_loss", ""),
        ("--use-rollout-logprobs", "--loss-type sft_loss", ""),
        ("--advantage-estimator ppo", "--loss-type sft_loss", ""),
        ("--entropy-coef 0.1", "--loss-type dpo_loss", ""),
        ("--overlong-buffer-len 4", "--loss-type sft_loss", ""),
        ("--format-reward-coef 0.1", "--loss-type dpo_loss", ""),
        ("--format-regex a", "--rm-type math", "--rm-type format"),
        ("--format-regex a", "--rm-type math", "--rm-type math --format-reward-coef 0.1"),
        ("--custom-loss-function-path my.fn", "", "--loss-type custom_loss"),
        ("--lr 1", "--debug-rollout-only", ""),
        ("--ci-test", "--debug-rollout-only", ""),
        ("--lr-warmup-init 0.1", "", "--lr-warmup-iters 2"),
        ("--lr-decay-iters 5", "", "--lr-decay-style linear"),
        ("--max-tokens-per-gpu 64", "", "--use-dynamic-batch-size"),
        ("--input-key q", "--load-debug-rollout-data x", ""),
        (
            "--rollout-stop x",
            "--loss-type sft_loss",
            f"--loss-type sft_loss {EVALUATED}",
        ),
        ("--partial-rollout", f"--loss-type sft_loss {EVALUATED}", ""),
        ("--eval-temperature 0.5", "", EVALUATED),
        (
            "--eval-temperature 0.5",
            "--debug-train-only --loss-type sft_loss",
            "--eval-interval 1 --eval-prompt-data e e.jsonl",
        ),
        ("--sglang-server-concurrency 4", "--load-debug-rollout-data x", ""),
        ("--code-timeout 5", "--rm-type math", "--rm-type code"),
        ("--code-timeout 5", "--rm-type math", ""),
        ("--reward-model-batch-size 2", "", "--reward-model-path m"),
        ("--rm-url http://a", "--rm-type math", "--rm-type remote_rm"),
        ("--rm-url http://a", "--rm-type math", "--custom-rm-path my.fn"),
        ("--generate-timeout 5", "", "--custom-generate-function-path my.fn"),
        ("--fsdp-cpu-offload", "--device cpu", "--device cuda --rollout-num-gpus 1"),
        ("--update-weight-buffer-size 9", "--debug-rollout-only", ""),
        ("--loss-mask-type qwen", "", "--loss-type sft_loss"),
        ("--log-passrate", "--loss-type sft_loss", ""),
        ("--disable-wandb-random-suffix", "--use-wandb", "--use-wandb --wandb-group g"),
        ("--dump-details d", "--save-debug-rollout-data x/{rollout_id}", ""),
        ("--allow-truncated-sampling", "", "--rollout-top-p 0.9"),
        ("--no-load-rng", "", "--load nowhere"),
        ("--rm-type math", "--custom-rm-path my.fn", ""),
        ("--lr-decay-iters 5", "--lr-decay-style inverse-square-root", "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    ],
)
def test_a_flag_of_another_algorithm_is_listed(make: Make, flag: str, idle_with: str, works_with: str) -> None:
    option = flag.split()[0]
    assert option in dict(make(f"{flag} {idle_with}").no_effect)
    assert option not in dict(make(f"{flag} {works_with}").no_effect)


def _checkpoint(root: Path, step: int) -> None:
    directory = root / f"iter_{step:07d}"
    directory.mkdir(parents=True)
    (directory / "rollout_state.json").write_text('{"rollout_seed": 42}')
    (directory / "trainer.json").write_text('{"steps": 1}')
    (directory / "checksums.json").write_text('{"files": {}}')
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_load(make: Make, problems: Problems, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    fresh = make(f"--load {root}")
    assert fresh.resume_directory is None
    begins = f"--load {root}: does not contain a checkpoint yet: a new run begins from --hf-checkpoint"
    assert begins in fresh.notes
    root.mkdir()
    (root / "log.txt").touch()  # of a script whose first start and every later one are the same
    assert begins in make(f"--load {root} --save {root}/../ckpt --save-interval 1").notes
    assert "not a checkpoint" in problems(f"--load {root} --save {tmp_path} --save-interval 1")[0]
    (root / "iter_0000003").mkdir(parents=True)  # the first save was cut short
    assert make(f"--load {root}").resume_directory is None
    for absent in (root, tmp_path / "nowhere"):
        assert "the checkpoint of rollout 5 (--ckpt-step)" in problems(f"--load {absent} --ckpt-step 5")[0]
    _checkpoint(root, 5)
    _checkpoint(root, 9)
    assert make(f"--load {root}").resume_directory == str(root / "iter_0000009")
    assert make(f"--load {root} --ckpt-step 5").resume_directory == str(root / "iter_0000005")
    assert "iter_0000007: does not exist" in problems(f"--load {root} --ckpt-step 7")[0]
    assert problems("--ckpt-step 5") == ["--ckpt-step needs --load"]


def test_load_of_something_else(problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert "without checkpoints of rollouts" in problems(f"--load {tmp_path / 'hf'} --ckpt-step 3")[0]
    (tmp_path / "megatron" / "iter_0000004").mkdir(parents=True)
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("4")
    assert "Megatron" in problems(f"--load {tmp_path / 'megatron'}")[0]
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "a.txt").touch()
    with pytest.raises(ValueError, match="not a checkpoint"):
        find_checkpoint(tmp_path / "junk")


def test_load_of_a_hugging_face_folder_gives_the_weights(make: Make, tmp_path: Path) -> None:
    """As in slime's FSDP scripts; tokenizer and reference stay those of --hf-checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    args = make(f"--load {tmp_path} --kl-loss-coef 0.1 --use-kl-loss")
    assert (args.hf_checkpoint, args.tokenizer, args.ref_load) == (str(tmp_path), "owner/model", "owner/model")
    assert args.resume_directory is None
    _checkpoint(tmp_path, 3)  # its own --save
    args = make(f"--load {tmp_path}")
    assert (args.hf_checkpoint, args.resume_directory) == ("owner/model", str(tmp_path / "iter_0000003"))


def test_megatrons_layout_changes_nothing(make: Make) -> None:
    sizes = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 3 --context-parallel-size 2"
    words = f"{sizes} --sequence-parallel"
    args, plain = make(f"--train-backend megatron {words}"), make()
    assert args.train_backend == "fsdp"
    assert {word for word in words.split() if word.startswith("--")} == set(dict(args.no_effect))
    assert args.actor_num_gpus_per_node == plain.actor_num_gpus_per_node
    assert args.global_batch_size == plain.global_batch_size


def test_one_file_for_all_saved_rollouts(make: Make) -> None:
    assert any("replaces the one before it" in n for n in make("--save-debug-rollout-data all.pt").notes)
    assert not any("replaces" in n for n in make("--save-debug-rollout-data {rollout_id}.pt").notes)


def test_a_new_model_from_flags(tmp_path: Path) -> None:
    shape = "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --vocab-size 64"
    words = COMPLETE.split()[2:] + shape.split()
    args = make_args([*words, "--tokenizer", "tok"], machine=Machine(gpus=0))
    assert args.model_config is not None
    assert (args.model_config["model_type"], args.model_config["num_hidden_layers"]) == ("llama", 2)
    folder = tmp_path / "tokenizer-only"
    folder.mkdir()
    args = make_args([*words, "--hf-checkpoint", str(folder)], machine=Machine(gpus=0))
    assert args.model_config is not None
    assert args.tokenizer == str(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert make_args([*words, "--hf-checkpoint", str(folder)], machine=Machine(gpus=0)).model_config is None
    with pytest.raises(ArgumentError) as caught:
        make_args(words[:-2], machine=Machine(gpus=0))
    assert caught.value.problems[:2] == [
        "--num-layers a new model needs --vocab-size as well (or name an existing model with --hf-checkpoint)",
        "--tokenizer is missing: a new model needs a tokenizer",
    ]


def test_this_machine_counts_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda _, pattern: [Path(f"/dev/nvidia{i}") for i in range(4)])
    for visible, count in ((None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert this_machine().gpus == count


def test_the_engine_context_is_the_longest_asked_for(make: Make) -> None:
    assert make().sglang_context_length is None
    assert make("--rollout-max-context-len 64").sglang_context_length == 64
    evaluated = "--rollout-max-context-len 64 --eval-interval 1 --eval-prompt-data e e.jsonl --eval-max-context-len 128"
    assert make(evaluated).sglang_context_length == 128
    assert make("--rollout-max-context-len 64 --sglang-context-length 99").sglang_context_length == 99


def test_opsm_in_a_single_step_is_noted(make: Make) -> None:
    assert any("drops no response" in note for note in make("--use-opsm").notes)
    for words in ("--use-opsm --num-steps-per-rollout 2", "--use-opsm --use-rollout-logprobs"):
        assert not any("drops no response" in note for note in make(words).notes)


def test_an_environment_makes_the_responses_and_may_bring_its_rows() -> None:
    words = "--hf-checkpoint org/model --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --device cpu"
    words += " --rollout-max-response-len 8"
    args = make_args(f"{words} --environment calculator".split())
    assert args.custom_generate_function_path == EPISODE
    assert args.prompt_data == ["environment:calculator"]
    assert (args.reward_key, args.eval_reward_key) == ("total", "total")
    args = make_args(f"{words} --environment search:x --prompt-data y.jsonl --apply-chat-template".split())
    assert (args.prompt_data, args.apply_chat_template) == (["y.jsonl"], False)
    for more, what in {
        "calculater": "there is no such environment; did you mean calculator?",
        "search:x": "--prompt-data is missing",
        "nim --custom-generate-function-path x.py:f": "both make the responses",
    }.items():
        with pytest.raises(ArgumentError, match=re.escape(what)):
            make_args(f"{words} --environment {more}".split())
    assert make_args(f"{words} --environment x.py:Own --disable-rollout-global-dataset".split()).prompt_data == []
    idle = make_args(f"{words} --prompt-data y.jsonl --environment-max-turns 3".split()).no_effect
    assert idle == (("--environment-max-turns", "needs --environment"),)
    beside = make_args(f"{words} --prompt-data y.jsonl --environment http://a:1 --environment-processes 3".split())
    needs = "needs an environment that is not on a server"
    assert beside.no_effect == (("--environment-processes", needs),)


def test_a_mixture_is_one_file_of_paths_and_weights(make: Make, problems: Problems, tmp_path: Path) -> None:
    file = tmp_path / "mixture.yaml"
    file.write_text("data/smoltalk/train.parquet: 3\ndata/identity/train.parquet@[:100]: 0.5\n")
    args = make(f"--prompt-data {file}")
    assert args.prompt_data == ["data/smoltalk/train.parquet", "data/identity/train.parquet@[:100]"]
    assert args.prompt_data_weights == [3.0, 0.5]
    assert problems(f"--prompt-data {file} --prompt-data-weights 1")[0].endswith("has the weights")
    for text in ("- a.parquet\n", "a.parquet: 0\n", "a.parquet: many\n"):
        file.write_text(text)
        assert "a mixture has lines `path: weight`" in " ".join(problems(f"--prompt-data {file}"))
