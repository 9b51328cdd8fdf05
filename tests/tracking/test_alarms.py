"""Alarms: on made-up metrics, on those of real runs with planted faults and without, and as a run says them."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import evaluate, make_args, make_metrics, make_table, make_tracker

from slimelite.arguments.args import Args
from slimelite.arguments.flags import all_flags
from slimelite.base.lifecycle import RolloutError
from slimelite.tracking.alarms import KINDS, Alarm, replay
from slimelite.tracking.metrics_file import Record, read_metrics, series
from slimelite.tracking.tracker import Tracker

ROOT = Path(__file__).parents[2]
HEALTHY = {
    "rollout/raw_reward": 0.5,
    "rollout/response_len/mean": 100.0,
    "rollout/truncated_ratio": 0.05,
    "rollout/zero_variance_groups": 0.2,
    "rollout/zero_std/count_0.0": 3.0,
    "rollout/zero_std/count_1.0": 3.0,
    "rollout/weight_staleness/mean": 0.0,
    "rollout/submitted_groups": 40.0,
    "rollout/dropped_groups": 8.0,
    "rollout/failed_groups": 0.0,
    "rollout/stale_groups": 0.0,
    "rollout/engine_deaths": 0.0,
    "rollout/environment/episodes": 64.0,
    "rollout/environment/errors": 1.0,
    "rollout/environment/timeouts": 1.0,
    "rollout/environment/untrained": 1.0,
    "rollout/environment/context_full": 1.0,
    "rollout/environment/turn_limit": 0.2,
    "train/entropy_loss": 1.0,
    "train/grad_norm": 0.5,
    "train/train_rollout_logprob_abs_diff": 0.004,
    "train/skipped_steps": 0.0,
    "perf/step_time": 30.0,
}
Change = Callable[[int], Mapping[str, float]]


def records(change: Change, rollouts: int = 60, seed: int = 0) -> Iterator[Record]:
    """A run whose metrics are those of HEALTHY with noise of 5 %, except where ``change`` says another value."""
    noise = np.random.default_rng(seed)
    yield {"kind": "start", "rollout/step": 0.0}
    for i in range(rollouts):
        row = {name: value * noise.normal(1, 0.05) for name, value in HEALTHY.items()} | change(i)
        yield {"kind": "rollout", "rollout/step": i, **{n: v for n, v in row.items() if n.startswith("rollout/")}}
        yield {"kind": "train", "rollout/step": i, **{n: v for n, v in row.items() if n.startswith("train/")}}
        if scores := {n: v for n, v in row.items() if n.startswith("eval/")}:
            yield {"kind": "eval", "eval/step": i, **scores}
        yield {"kind": "perf", "rollout/step": i, **{n: v for n, v in row.items() if n.startswith("perf/")}}


def groups(wrong: float, right: float) -> dict[str, float]:
    return {
        "rollout/zero_variance_groups": (wrong + right) / 32,
        "rollout/zero_std/count_0.0": wrong,
        "rollout/zero_std/count_1.0": right,
    }


def score(i: int, value: float) -> dict[str, float]:
    return {"eval/sums": value, "eval/sums-stderr": 0.01} if i % 10 == 9 else {}


# kind of alarm -> the metrics of a run with a fault in rollouts 20 to 39, and the first rollout in which it can be seen
FAULTS: dict[str, tuple[Change, int]] = {
    "reward_collapse": (lambda i: {"rollout/raw_reward": 0.0, **groups(32, 0)}, 21),
    "all_right": (lambda i: {"rollout/raw_reward": 0.8, **groups(0, 32), **score(i, 0.6)}, 29),
    "entropy_collapse": (lambda i: {"train/entropy_loss": 0.1}, 22),
    "truncation": (lambda i: {"rollout/truncated_ratio": 0.5}, 22),
    "no_tokens": (lambda i: {"rollout/raw_reward": 0.0, **groups(32, 0), "rollout/response_len/mean": 0.0}, 20),
    "length": (lambda i: {"rollout/response_len/mean": 300.0}, 22),
    "reward_without_eval": (lambda i: {"rollout/raw_reward": 0.9, **score(i, 0.3)}, 29),
    "mismatch": (lambda i: {"train/train_rollout_logprob_abs_diff": 0.05}, 20),
    "stale": (lambda i: {"rollout/weight_staleness/mean": 6.0}, 21),
    "grad_spike": (lambda i: {"train/grad_norm": 50.0}, 20),
    "skipped_steps": (lambda i: {"train/skipped_steps": 0.5}, 20),
    "filtered": (lambda i: {"rollout/dropped_groups": 390.0, "rollout/submitted_groups": 400.0}, 20),
    "failed_groups": (lambda i: {"rollout/failed_groups": 10.0}, 20),
    "agent_errors": (lambda i: {"rollout/environment/errors": 10.0}, 20),
    "agent_timeouts": (lambda i: {"rollout/environment/timeouts": 10.0}, 20),
    "untrained_episodes": (lambda i: {"rollout/environment/untrained": 10.0}, 20),
    "context_overflow": (lambda i: {"rollout/environment/context_full": 10.0}, 20),
    "turn_limit": (lambda i: {"rollout/environment/turn_limit": 0.9}, 22),
    "stall": (lambda i: {"perf/step_time": 600.0}, 20),
}


def during(change: Change) -> Change:
    return lambda i: (score(i, 0.5) if change(9).get("eval/sums") else {}) | (change(i) if 20 <= i < 40 else {})


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_one_alarm_that_begins_and_ends_with_it(kind: str) -> None:
    change, begins = FAULTS[kind]
    found = replay(records(during(change)))
    assert [alarm.kind for alarm in found] == [kind]
    assert found[0].rollout_id == begins
    assert found[0].ended is not None
    assert found[0].ended >= (40 if kind not in ("entropy_collapse", "length") else 39) - (kind == "grad_spike") * 20
    assert replay(records(lambda i: {}, 60)) == []


def test_wrong_from_the_start_is_another_alarm_than_a_collapse() -> None:
    (alarm,) = replay(records(lambda i: {"rollout/raw_reward": 0.0, **groups(31, 0)}))
    assert (alarm.kind, alarm.rollout_id, alarm.ended) == ("all_wrong", 2, None)
    assert "--label-key" in alarm.advice
    silent = {"rollout/raw_reward": 0.0, **groups(32, 0), "rollout/response_len/mean": 0.0}
    assert [alarm.kind for alarm in replay(records(lambda i: silent))] == ["no_tokens"], "the labels are not the reason"
    distilled = {"rollout/opd_reverse_kl": 0.3}
    assert replay(records(lambda i: {"rollout/raw_reward": 0.0, **groups(32, 0), **distilled})) == [], (
        "no reward is used"
    )
    assert {kind.name for kind in KINDS} == {*FAULTS, "all_wrong"}


@pytest.mark.parametrize(
    ("age", "difference", "kinds"), [(0, 0.05, ["mismatch"]), (1, 0.17, []), (1, 0.5, ["mismatch"])]
)
def test_tokens_of_older_weights_may_differ_more(age: float, difference: float, kinds: list[str]) -> None:
    """With ``--async-rollout`` the engine's weights are older on purpose, and nothing need be wrong with it."""
    old = {"rollout/weight_staleness/mean": float(age), "train/train_rollout_logprob_abs_diff": difference}
    assert [alarm.kind for alarm in replay(records(lambda i: old))] == kinds


def test_a_death_of_an_engine_is_an_alarm_each_time() -> None:
    found = replay(records(lambda i: {"rollout/engine_deaths": float(i >= 10) + (i >= 30)}))
    assert [(alarm.kind, alarm.rollout_id, alarm.ended) for alarm in found] == [
        ("failed_groups", 10, 11),
        ("failed_groups", 30, 31),
    ]


def test_answers_that_are_cut_off_from_the_start_are_an_alarm_unless_they_are_right() -> None:
    """One lucky group in four keeps `all_wrong` silent; the remedy is a larger limit, not another label."""
    cut, some_wrong = {"rollout/truncated_ratio": 0.97}, groups(24, 0)
    (alarm,) = replay(records(lambda i: cut | some_wrong))
    assert (alarm.kind, alarm.rollout_id, alarm.ended) == ("truncation", 2, None)
    assert alarm.says == (
        "97% or more of the responses reached the length limit in 3 rollouts, and 75% or more of the groups had no "
        "right answer"
    )
    assert "--rollout-max-response-len" in alarm.advice
    assert replay(records(lambda i: cut)) == [], "the answers come before the limit"
    assert replay(records(lambda i: some_wrong)) == []
    assert replay(records(lambda i: (cut | some_wrong) if i < 2 else {})) == [], "two rollouts may be chance"
    unknown = {"rollout/zero_variance_groups": math.nan}
    assert replay(records(lambda i: cut | (some_wrong if i == 0 else unknown))) == [], "one rollout may be chance"
    (alarm,) = replay(records(lambda i: {"rollout/truncated_ratio": 0.996} | some_wrong))
    assert alarm.says.startswith("99% or more of the responses")


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("entropy of solved groups", lambda i: {"train/entropy_loss": 0.9**i, **groups(0, 20)}),
        (
            "entropy while the reward rises",
            lambda i: {"train/entropy_loss": 0.93**i, "rollout/raw_reward": 0.2 + i / 75},
        ),
        ("length while the score rises", lambda i: {"rollout/response_len/mean": 50 * 1.05**i, "eval/x": i / 100}),
        (
            "length while the reward rises",
            lambda i: {"rollout/response_len/mean": 50 * 1.05**i, "rollout/raw_reward": i / 60},
        ),
        ("falling truncation", lambda i: {"rollout/truncated_ratio": 0.9 - i / 100}),
        ("an eval near its ceiling", lambda i: {"rollout/raw_reward": 0.4 + i / 120, **score(i, 0.95)}),
        ("solved groups and a solved eval", lambda i: {**groups(0, 32), **score(i, 0.95)}),
        (
            "an eval of few answers",
            lambda i: {"rollout/raw_reward": 0.5 + i / 300, "eval/x": 0.5, "eval/x-stderr": 0.05},
        ),
        ("one odd rollout", lambda i: {"rollout/truncated_ratio": 1.0, "train/entropy_loss": 0.01} if i == 30 else {}),
        ("no gradient between gradients", lambda i: {"train/grad_norm": 0.0} if i % 3 else {}),
        (
            "an evaluation in a turn",
            lambda i: {"perf/step_time": 930.0, "perf/eval_time": 900.0} if i % 10 == 9 else {},
        ),
        ("supervised training", lambda i: {"rollout/raw_reward": float("nan"), "train/entropy_loss": 0.9**i}),
    ],
)
def test_what_healthy_runs_do_is_no_alarm(why: str, change: Change) -> None:
    assert replay(records(change)) == [], why


@pytest.mark.parametrize("seed", range(40))
def test_noise_is_no_alarm(seed: int) -> None:
    noise = np.random.default_rng(seed)
    reward, size, engine = noise.uniform(0.2, 0.9), int(noise.choice([16, 64])), noise.choice([1e-6, 4e-3])

    def change(i: int) -> dict[str, float]:
        chance = reward * (1 - 0.6 * np.exp(-i / 20))
        hits = noise.binomial(8, noise.beta(2 * chance, 2 - 2 * chance, size))
        wrong, right, error = sum(hits == 0), sum(hits == 8), 0.5 / np.sqrt(500)
        return {
            "rollout/raw_reward": hits.mean() / 8,
            "rollout/zero_variance_groups": (wrong + right) / size,
            "rollout/zero_std/count_0.0": wrong,
            "rollout/zero_std/count_1.0": right,
            "rollout/truncated_ratio": noise.binomial(8 * size, 0.2) / 8 / size,
            "rollout/response_len/mean": 100 * (1 + chance) * noise.lognormal(0, 0.1),
            "train/entropy_loss": np.exp(-2 * chance) * noise.lognormal(0, 0.15),
            "train/grad_norm": noise.lognormal(0, 0.5),
            "train/train_rollout_logprob_abs_diff": engine * noise.lognormal(0, 0.3),
            "perf/step_time": 30 * noise.lognormal(0, 0.3),
            **({"eval/x": chance + error * noise.normal(), "eval/x-stderr": error} if i % 10 == 9 else {}),
        }

    assert replay(records(change, 100)) == []


def recorded() -> dict[str, list[Record]]:
    """The runs of scripts/lab/planted_faults_table.py --csv, by name."""
    runs: dict[str, list[Record]] = defaultdict(list)
    with (ROOT / "tests/fixtures/alarms.csv").open() as file:
        for row in csv.DictReader(file):
            values = {name: float(text) for name, text in row.items() if text and name != "run"}
            scores = {name: value for name, value in values.items() if name.startswith("eval/")}
            ids = {"rollout/step": values["rollout/step"]} if "rollout/step" in values else {}
            runs[row["run"]] += [{"kind": "rollout", **values}] if ids else []
            runs[row["run"]] += [{"kind": "eval", **scores}] if scores else []
            runs[row["run"]] += [{"kind": "perf", **ids}] if ids else []
    return runs


def test_planted_faults_are_found_and_ten_healthy_seeds_are_silent() -> None:
    found = {run: {a.kind: a.rollout_id for a in replay(of_run)} for run, of_run in recorded().items()}
    assert found.pop("length") == {"truncation": 16, "length": 19, "reward_without_eval": 19, "all_right": 39}
    assert found.pop("label") == {"all_wrong": 2}
    assert found.pop("lr") == {"reward_collapse": 2, "truncation": 3}
    assert found.pop("filter") == {"filtered": 0}
    assert found.pop("stale") == {"stale": 5}
    assert found == {f"seed-{i}": {} for i in range(10)}


def test_advice_names_flags_that_exist_and_the_docs_have_it() -> None:
    flags = {"--" + name.replace("_", "-") for name in all_flags(Args)}
    page = (ROOT / "docs/metrics.md").read_text()
    for kind in KINDS:
        assert set(re.findall(r"--[a-z-]+[a-z]", kind.advice)) <= flags
        when = kind.when.replace("|", "\\|")
        row = f"| `{kind.name}` | {when} | {kind.advice} |"
        assert row in page, row


def played(run_dir: Path, rollouts: range, **flags: Any) -> None:
    """A run whose trainer and engine disagree in rollouts 1 to 3, and whose optimizer skips a step in rollout 6."""
    args = make_args(run_dir, num_rollout=9, start_rollout_id=rollouts.start, **flags)
    with make_tracker(args) as tracker:
        tracker.banner(args)
        for i in rollouts:
            with tracker.phase("generate"):
                pass
            tracker.log_rollout(i, make_table(), {"rollout/truncated_ratio": 0.0})
            wrong = {"train/train_rollout_logprob_abs_diff": 0.05 if 1 <= i <= 3 else 1e-5}
            steps = [wrong | {"train/skipped_steps": float(i == 6)}, wrong | {"train/skipped_steps": 0.0}]
            tracker.log_train(i, make_metrics(i) | {"train/skipped_steps": 0.5 * (i == 6)}, steps)
            evaluate(tracker, i, 0.95)
            tracker.finish_rollout(i)


def saved(run_dir: Path) -> list[Alarm]:
    return [Alarm(**json.loads(line)) for line in (run_dir / "alarms.jsonl").read_text().splitlines()]


def test_a_run_says_its_alarms_once_and_a_resumed_one_not_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(tmp_path / "straight", range(9))
    out = capsys.readouterr().out
    assert out.count("alarm mismatch since rollout 1:") == 1
    assert "mean |log-prob difference| 0.050. The policy that computes the gradient differs" in out
    assert out.count("alarm mismatch since rollout 1, ended in rollout 6") == 1
    assert out.count("alarm skipped_steps since rollout 6:") == 1
    assert "50% of the optimizer steps changed nothing" in out
    assert "alarm mismatch since rollout 1:" in (tmp_path / "straight/log.txt").read_text()
    whole = read_metrics(tmp_path / "straight")
    assert series(whole, "alarms/active")[1] == [0, 1, 1, 1, 1, 1, 2, 2, 1]
    assert saved(tmp_path / "straight") == replay(whole)

    played(tmp_path / "resumed", range(5))
    assert [alarm.ended for alarm in saved(tmp_path / "resumed")] == [None]
    capsys.readouterr()
    played(tmp_path / "resumed", range(3, 9))
    out = capsys.readouterr().out
    assert "alarm mismatch since rollout 1:" not in out, "it was said before"
    assert "alarm mismatch since rollout 1, ended in rollout 6" in out
    assert saved(tmp_path / "resumed") == saved(tmp_path / "straight")
    played(tmp_path / "resumed", range(1))
    assert not (tmp_path / "resumed/alarms.jsonl").exists(), "the run began anew, and nothing is wrong in its rollout"


def test_a_rollout_that_cannot_be_finished_is_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"rollout/step": 0, "rollout/submitted_groups": 64.0, "rollout/dropped_groups": 64.0}

    def fail() -> None:
        with Tracker(make_args(tmp_path)) as tracker:
            tracker.banner(make_args(tmp_path))
            raise RolloutError("the filter dropped 64 groups in a row", counts)

    with pytest.raises(RolloutError, match="dropped 64"):
        fail()
    assert "alarm filtered since rollout 0:\n  the filter dropped 64 of 64 groups" in capsys.readouterr().out
    assert [alarm.kind for alarm in saved(tmp_path)] == ["filtered"]
    assert replay(read_metrics(tmp_path)) == saved(tmp_path)


def test_trackers_show_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from test_writers import wandb_records

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    played(tmp_path, range(9), use_tensorboard=True, use_wandb=True, wandb_mode="offline")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors("alarms")]
    assert texts[0][0] == 1
    assert texts[0][1].startswith("**alarm mismatch since rollout 1**: trainer and engine disagree")
    assert [e.value for e in events.Scalars("alarms/active")][:2] == [0, 1]
    alerts = [r.alert for r in wandb_records(tmp_path) if r.HasField("alert")]
    assert alerts[0].title == "alarm mismatch since rollout 1"
    assert alerts[0].level == "WARN"
