"""Whole runs of train.py in one process."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch

import train
from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.cluster.remote import RemoteSink
from slimelite.engines.protocol import WeightBucket
from slimelite.rewards.rules import RULES
from slimelite.samples.table import SampleTable
from tests.base.traces import assert_laid_out, spans

from .conftest import metrics, run_process

pytestmark = pytest.mark.e2e
Run = Callable[..., Path]
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
DETERMINISTIC = ("--deterministic-mode", "--over-sampling-batch-size", "12", "--dynamic-sampling-filter-path", FILTER)


def test_sft_learns(sft: Path) -> None:
    losses = metrics(sft, "train/loss")
    assert len(losses) >= 10
    assert losses[-1] < 0.35 * losses[0]


def test_the_saved_model_opens_in_transformers(sft: Path, task: Path) -> None:
    from transformers import AutoModelForCausalLM

    from slimelite.data.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(sft / "model", dtype=torch.float32)
    tokenizer = load_tokenizer(str(sft / "model"))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2+3+4=?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :])
    assert "####" in text


def test_memory_is_logged_around_every_phase(local_run: Run) -> None:
    run = local_run("memory", "--num-rollout", "1")
    for phase in ("rollout", "train", "update_weights"):
        before, after = (metrics(run, f"perf/memory_{phase}_{when}")[0] for when in ("before", "after"))
        assert 0.05 < min(before, after) <= max(before, after) < psutil.virtual_memory().total / 1e9


def test_a_trace_and_a_profile_say_where_the_time_went(grpo_args: list[str], tmp_path: Path) -> None:
    run = tmp_path / "traced"
    flags = ["--launcher", "local", "--run-dir", str(run), "--num-rollout", "2", "--trace"]
    profiled = ["--use-pytorch-profiler", "--profile-rollouts", "1", "--profile-target", "train_actor"]
    # in a process of its own: after thousands of tests torch's profiler may spin at its start, for good
    done = run_process(sys.executable, "train.py", *grpo_args, *flags, *profiled)
    assert done.returncode == 0, done.stderr
    bars = spans((run / "trace.json").read_text())
    assert_laid_out(bars)
    seen = {(bar["worker"], bar["track"].split()[0], bar["name"]) for bar in bars}
    assert {("driver", "phases", name) for name in ("start", "generate", "train", "update_weights")} <= seen
    assert {("rollout", "calls", "generate"), ("rollout", "rewards", "gsm8k")} <= seen
    assert {("trainer_0", "calls", name) for name in ("train", "push_weights")} <= seen
    assert ("trainer_0", "passes", "actor_train") in seen
    assert ("engine_0", "calls", "load_weights") in seen
    table = SampleTable.from_parquet(run / "rollouts" / "0000000.parquet")
    requests = [bar["args"] for bar in bars if bar["track"].startswith("requests")]
    assert sum(each["requests"] for each in requests) >= 2 * len(table)
    assert sum(each["tokens"] for each in requests) >= len(table.response_tokens)
    (profile,) = (run / "profile").iterdir()
    assert profile.name == "actor_train-0000001-rank0.json.gz"
    operations = {event.get("name") for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= operations


def test_resumed_equals_straight_to_the_bit(local_run: Run, tmp_path: Path) -> None:
    """Dynamic filter, over-sampling (so surplus groups are in the checkpoint), two optimizer steps a rollout."""
    common = (*DETERMINISTIC, "--global-batch-size", "16")
    straight = local_run("straight", *common, "--num-rollout", "6")
    checkpoints = str(tmp_path / "checkpoints")
    local_run("first", *common, "--num-rollout", "3", "--save", checkpoints, "--save-interval", "3")
    second = local_run("second", *common, "--num-rollout", "6", "--load", checkpoints)

    for name in (
        "train/loss",
        "train/grad_norm",
        "train/pg_clipfrac",
        "rollout/raw_reward",
        "rollout/response_len/mean",
    ):
        whole = metrics(straight, name)
        assert metrics(second, name) == whole[len(whole) // 2 :], name
    assert metrics(straight, "train/grad_norm") != metrics(straight, "train/grad_norm")[::-1]
    for rollout in (3, 4, 5):
        a = SampleTable.from_parquet(straight / "rollouts" / f"{rollout:07d}.parquet")
        b = SampleTable.from_parquet(second / "rollouts" / f"{rollout:07d}.parquet")
        for column in ("sample_id", "response_tokens", "rollout_log_probs", "weight_versions", "advantage"):
            np.testing.assert_array_equal(getattr(a, column), getattr(b, column), err_msg=column)


def test_saved_rollouts_train_the_same_without_an_engine(local_run: Run, tmp_path: Path) -> None:
    template = str(tmp_path / "dump" / "{rollout_id}.parquet")
    live = local_run("live", "--num-rollout", "2", "--save-debug-rollout-data", template)
    replayed = local_run("replayed", "--num-rollout", "2", "--load-debug-rollout-data", template)
    for name in ("train/grad_norm", "train/train_rollout_logprob_abs_diff", "rollout/raw_reward"):
        assert metrics(replayed, name) == pytest.approx(metrics(live, name), rel=1e-6), name


def test_first_step_truths_and_engine_agreement(local_run: Run) -> None:
    run = local_run("ci", "--num-rollout", "2", "--ci-test", "--use-kl-loss", "--kl-loss-coef", "0.01")
    assert max(metrics(run, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert metrics(run, "train/kl_loss")[0] < 1e-8
    assert metrics(run, "train/kl_loss")[1] > 1e-8


def test_truncated_samples_train_on_the_distribution_they_come_from(local_run: Run, tmp_path: Path) -> None:
    """--ci-test holds the trainer's log-probs against the engine's, which are over the kept ids; a replay does too."""
    template = str(tmp_path / "dump" / "{rollout_id}.parquet")
    how = ("--rollout-top-p", "0.9", "--rollout-min-p", "0.02", "--rollout-temperature", "0.8", "--ci-test")
    how = (*how, "--num-rollout", "2", "--use-kl-loss", "--kl-loss-coef", "0.01")
    run = local_run("cut", *how, "--partial-rollout", "--save-debug-rollout-data", template)
    assert max(metrics(run, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert metrics(run, "train/kl_loss")[0] < 1e-8
    kept = metrics(run, "rollout/top_p_kept_vocab_per_token")
    table = SampleTable.from_parquet(template.format(rollout_id=1))
    assert table.kept_counts is not None
    assert table.kept_counts[table.loss_mask].min() >= 1
    assert 1 < kept[1] == table.kept_counts[table.loss_mask].mean()
    replayed = local_run("replayed", *how, "--load-debug-rollout-data", template)
    for name in ("train/grad_norm", "train/train_rollout_logprob_abs_diff", "train/kl_loss"):
        assert metrics(replayed, name) == pytest.approx(metrics(run, name), rel=1e-6), name


def test_engines_sample_from_the_quantized_model_with_its_adapter(local_run: Run) -> None:
    """--ci-test holds log-probs of the trainer in 4 bits against those of the engine, before and after a step."""
    qlora = ("--lora-rank", "4", "--load-in-4bit", "--use-kl-loss", "--kl-loss-coef", "0.01")
    run = local_run("qlora", *qlora, "--num-rollout", "2", "--ci-test")
    assert max(metrics(run, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert metrics(run, "train/kl_loss")[0] < 1e-8
    assert metrics(run, "train/kl_loss")[1] > 1e-8


def test_ppo_trains_a_critic_beside_the_policy(local_run: Run, tmp_path: Path) -> None:
    checkpoints = str(tmp_path / "checkpoints")
    common = (
        "--advantage-estimator",
        "ppo",
        "--kl-coef",
        "0.01",
        "--critic-lr",
        "5e-3",
        "--num-critic-only-steps",
        "1",
    )
    saved = ("--save", checkpoints, "--save-interval", "1", "--load", checkpoints, "--ci-test", "--deterministic-mode")
    local_run("first", *common, *saved, "--num-rollout", "1")
    run = local_run("second", *common, *saved, "--num-rollout", "4")
    assert metrics(run, "rollout/values")[0] != 0, "the first rollout has taught the critic something"
    losses = metrics(run, "train/critic-value_loss")
    assert len(losses) == len(metrics(run, "train/pg_loss")) == 3
    assert max(metrics(run, "train/pg_clipfrac")) == 0
    saved = SampleTable.from_parquet(run / "rollouts" / "0000003.parquet")
    assert saved.advantages is not None, "every token has its own"
    assert len(saved.advantages) == len(saved.response_tokens)
    of_rows = np.add.reduceat(saved.advantages * saved.loss_mask, saved.response_offsets[:-1]) / saved.mask_sums
    assert metrics(run, "rollout/advantages")[-1] == pytest.approx(of_rows.mean(), rel=1e-4, abs=1e-6)
    assert max(metrics(run, "train/train_rollout_logprob_abs_diff")) < 1e-4


def test_micro_batches_do_not_matter(local_run: Run) -> None:
    runs = [
        local_run(f"cap{cap}", "--num-rollout", "3", "--deterministic-mode", "--max-tokens-per-gpu", cap)
        for cap in ("64", "4096")
    ]
    few, many = (metrics(run, "train/grad_norm") for run in runs)
    assert few == pytest.approx(many, rel=1e-4)


def test_a_trailing_partial_step_is_trained(local_run: Run) -> None:
    run = local_run("partial", "--num-rollout", "1", "--global-batch-size", "24")
    assert metrics(run, "train/global_batch_size") == [24.0, 8.0]
    assert min(metrics(run, "train/grad_norm")) > 0


def test_rollout_only_and_its_data(local_run: Run) -> None:
    run = local_run("rollout-only", "--num-rollout", "1", "--debug-rollout-only")
    table = SampleTable.from_parquet(run / "rollouts" / "0000000.parquet")
    assert len(table) == 32
    assert metrics(run, "rollout/total_lengths") == [table.total_lengths.mean()]
    assert metrics(run, "rollout/rewards") == pytest.approx([0.0], abs=1e-6)
    assert metrics(run, "train/loss") == []


def test_a_model_defined_by_flags(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = json.loads((task / "model" / "config.json").read_text())["vocab_size"]
    flags = (
        f"--num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --vocab-size {vocabulary} "
        "--qk-layernorm --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
        "--num-query-groups 2 --rotary-base 10000 "
        "--input-key messages --label-key label --apply-chat-template --rm-type random --rollout-batch-size 2 "
        "--n-samples-per-prompt 4 --rollout-max-response-len 8 --num-rollout 1 --colocate --launcher local "
        "--use-dynamic-batch-size --max-tokens-per-gpu 512"
    ).split()
    out = tmp_path / "model"
    paths = ["--tokenizer", str(task / "model"), "--prompt-data", str(task / "train.parquet"), "--save-hf", str(out)]
    assert train.main([*flags, *paths, "--run-dir", str(tmp_path / "run")]) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("qwen3", 1, 32)
    assert "random weights" not in capsys.readouterr().out, "the engine's own are never used: the trainer's come first"


def test_evaluation_before_at_intervals_and_at_the_end(local_run: Run, task: Path) -> None:
    heldout = str(task / "heldout.parquet")
    flags = ("--eval-interval", "2", "--eval-prompt-data", "heldout", heldout, "--n-samples-per-eval-prompt", "2")
    run = local_run("eval", "--num-rollout", "3", *flags)
    assert len(metrics(run, "eval/heldout")) == 3  # before, after 2, after the last
    assert metrics(run, "eval/heldout-pass@2")[0] >= metrics(run, "eval/heldout")[0]
    assert len(list((run / "eval").glob("heldout-*.parquet"))) == 3


def ages(run: Path) -> list[float]:
    """Of the weights that wrote each rollout, in updates, when it was trained on; every token of a rollout is alike."""
    oldest = metrics(run, "rollout/weight_staleness/max")
    assert oldest == metrics(run, "rollout/weight_staleness/mean")
    return oldest


def test_async_rollout_is_one_step_off_and_resumes_bit_for_bit(local_run: Run, tmp_path: Path) -> None:
    flags = ("--no-colocate", "--async-rollout", "--deterministic-mode", "--use-tis", "--token-stats", "all")
    straight = local_run("straight", *flags, "--num-rollout", "4")
    assert ages(straight) == [0, 1, 1, 1]
    table = SampleTable.from_parquet(straight / "rollouts" / "0000002.parquet")
    assert set(table.weight_versions) == {1}
    stats = pq.read_table(straight / "token_stats" / "0000002.parquet").to_pydict()
    assert stats["sample_id"] == table.sample_id.tolist()
    assert [len(values) for values in stats["entropy"]] == table.response_lengths.tolist()
    gap = np.abs(np.concatenate(stats["log_probs"]) - table.rollout_log_probs)
    assert 1e-3 < gap.mean() < 1, "the weights of version 2, not those that wrote it"
    # a checkpoint has the rollout that was generated ahead
    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "2")
    local_run("first", *flags, *save, "--num-rollout", "4")
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("1")
    second = local_run("second", *flags, "--load", str(tmp_path / "checkpoint"), "--num-rollout", "4")
    for name in ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/tis", "rollout/weight_staleness/max"):
        assert metrics(second, name) == metrics(straight, name)[2:], name


def test_async_rollout_with_rare_syncs(local_run: Run) -> None:
    flags = ("--no-colocate", "--async-rollout", "--update-weights-interval", "2", "--num-rollout", "5")
    # synced after 2 and 4 rollouts; each time the next rollout was there already
    assert ages(local_run("rare", *flags)) == [0, 1, 2, 1, 2]


@pytest.mark.newest
def test_engine_and_trainer_agree_after_every_sync(local_run: Run) -> None:
    run = local_run("checked", "--num-rollout", "2", "--check-weight-update-equal")
    gaps = metrics(run, "perf/update_weights_logprob_abs_diff")
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


def test_a_sync_that_changed_the_weights_is_noticed(
    grpo_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send = RemoteSink.send

    def lossy(sink: RemoteSink, bucket: WeightBucket) -> None:
        send(sink, WeightBucket(bucket.names, bucket.shapes, bucket.flat * 1.05))

    monkeypatch.setattr(RemoteSink, "send", lossy)
    flags = ("--launcher", "local", "--num-rollout", "1", "--check-weight-update-equal", "--run-dir", str(tmp_path))
    assert train.main([*grpo_args, *flags]) == 1
    assert "--check-weight-update-equal: after sync 0" in capsys.readouterr().err


ENTRIES = """
import os
from pathlib import Path
from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.rewards.rules import RULES, Rule

with Path(__file__).with_name("processes.txt").open("a") as file:
    print(os.getpid(), file=file)
RULES.add(Rule("half", lambda _: None, lambda _: 0.5))
ESTIMATORS.add(Estimator("flat", "R", group=lambda rewards: rewards.rewards))
"""


def test_an_imported_file_runs_once_in_each_process(local_run: Run, tmp_path: Path) -> None:
    """The driver is the trainer and the rollout manager as well; rules without bound run in grading processes."""
    (tmp_path / "own.py").write_text(ENTRIES)
    named = ("--import-file", str(tmp_path / "own.py"), "--rm-type", "half", "--advantage-estimator", "flat")
    try:
        run = local_run("imported", *named, "--num-rollout", "1")
    finally:
        for registry, name in ((RULES, "half"), (ESTIMATORS, "flat")):
            registry.pop(name, None)
    assert metrics(run, "rollout/raw_reward") == [0.5]
    processes = (tmp_path / "processes.txt").read_text().split()
    assert processes.count(str(os.getpid())) == 1
    assert len(processes) == len(set(processes)) > 1
