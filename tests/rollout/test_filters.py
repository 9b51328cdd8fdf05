"""Filters: what each one keeps, why it drops, and what is kept of the dropped groups for a person to read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slimelite.rollout import filters, groups
from slimelite.rollout.filters import DynamicFilterOutput, all_of, verdict
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import ScriptedEngine

ARGS = SimpleNamespace(reward_key=None)


def group(rewards: list[float], *, lengths: list[int] | None = None, **fields: Any) -> list[Sample]:
    lengths = lengths or [3] * len(rewards)
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        sample = Sample(index=i, group_index=0, tokens=[1, 2], reward=reward, **fields)
        sample.append_response_tokens([10 + i] * length, [-1.0] * length)
        samples.append(sample)
    return samples


@pytest.mark.parametrize(
    ("name", "samples", "reason"),
    [
        ("check_reward_nonzero_std", group([0, 1, 1]), None),
        ("check_reward_nonzero_std", group([1.0, 1.0, 1.0]), "zero_std_1.0"),
        ("check_reward_nonzero_std", group([0.3, 0.1 + 0.2]), "zero_std_0.3"),  # float noise
        ("check_reward_nonzero_std", group([1.0]), "zero_std_1.0"),  # slime: NaN, which never ends
        ("check_any_success", group([0, 0.5]), None),
        ("check_any_success", group([0, -1]), "no_success"),
        ("check_min_reward", group([0, 0.5]), None),
        ("check_min_reward", group([0, 0.1]), "low_reward"),
        ("check_response_diversity", group([0, 0]), None),
        ("check_reasonable_length", group([0, 0], lengths=[3, 0]), "too_short"),
        ("check_reasonable_length", group([0, 0]), None),
        ("check_reasonable_length", group([0, 0], status=Status.TRUNCATED), "truncated"),
        ("check_all", group([0, 1]), None),
        ("check_all", group([0.0, 0.0]), "zero_std_0.0"),
        ("check_all", group([0, 1], status=Status.TRUNCATED), "truncated"),
    ],
)
def test_filters(name: str, samples: list[Sample], reason: str | None) -> None:
    output = verdict(getattr(filters, name)(ARGS, samples))
    assert (output.keep, output.reason) == (reason is None, reason)


def test_equal_responses_are_not_diverse() -> None:
    samples = group([0, 1, 0, 1])
    for sample in samples[1:]:
        sample.tokens = samples[0].tokens
    assert verdict(filters.check_response_diversity(ARGS, samples)).reason == "low_diversity"
    assert verdict(filters.check_all(ARGS, samples)).reason == "low_diversity"


def test_siblings_of_a_fan_out_count_once() -> None:
    samples = group([0, 1, 1, 1])
    for sample in samples[1:]:
        sample.rollout_id = 1
    assert filters.check_min_reward(ARGS, samples, minimum=0.5).keep
    assert not filters.check_min_reward(ARGS, samples, minimum=0.6).keep


def test_dict_rewards_are_read_by_key() -> None:
    samples = group([0, 1])
    for sample in samples:
        sample.reward = {"score": sample.reward}
    assert filters.check_reward_nonzero_std(SimpleNamespace(reward_key="score"), samples).keep


def test_a_verdict_understands_bools_tensors_and_slimes_objects() -> None:
    assert verdict(True) == DynamicFilterOutput(True)
    assert verdict(False) == DynamicFilterOutput(False, "filter")
    theirs: Any = SimpleNamespace(keep=0, reason="boring")
    assert verdict(theirs) == DynamicFilterOutput(False, "boring")


def test_a_combination_drops_for_the_first_reason() -> None:
    def long_enough(_args: Any, samples: Any) -> bool:
        return len(samples) > 2

    combined = all_of(filters.check_any_success, long_enough)
    assert verdict(combined(ARGS, group([0, 0]))).reason == "no_success"
    assert verdict(combined(ARGS, group([0, 1]))).reason == "filter"
    assert verdict(combined(ARGS, group([0, 1, 0]))).keep


NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


@pytest.fixture(autouse=True)
def no_waiting_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)


def reasons(table: SampleTable) -> dict[int, str]:
    """Group -> why it was dropped."""
    pairs = zip(table.group_id.tolist(), table.metadata, strict=True)
    return {group: json.loads(metadata)["dropped"] for group, metadata in pairs}


def test_what_to_read_when_everything_is_dropped(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = make_args(
        custom_rm_path=plugin("rewards.py:constant"),
        dynamic_sampling_filter_path=NONZERO_STD,
        run_dir=str(tmp_path),
        keep_dropped=2,
    )
    file = tmp_path / "dropped" / "0000007.parquet"
    said = rf"{NONZERO_STD} dropped 128 groups in a row and kept none.* 2 of these groups, .* are in {file}"
    with pytest.raises(ValueError, match=said):
        make_manager(args, [ScriptedEngine()]).generate(7)
    table = SampleTable.from_parquet(file)
    assert list(reasons(table).values()) == ["zero_std_0.5"] * 2
    assert (len(table), set(table.reward.tolist()), set(table.response_lengths.tolist())) == (8, {0.5}, {5})
    # long before the end it was said once, with the file to read
    early = [record for record in caplog.records if "dropped 32 groups in a row" in record.message]
    assert [record.levelname for record in early] == ["WARNING"]
    assert str(file) in early[0].message


@pytest.mark.parametrize("keep", [0, 1, 2, 5, None])
def test_each_reason_has_a_group(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path, keep: int | None
) -> None:
    """Groups 0, 2, 4 and 6 are filtered out, 5 fails; 7, which is kept for the next rollout, is too old by then.

    ``keep`` None: the run saves no rollouts.
    """
    engine = ScriptedEngine()
    args = make_args(
        rollout_batch_size=2,
        over_sampling_batch_size=8,
        custom_generate_function_path=plugin("native.py:fails_in_group_5"),
        dynamic_sampling_filter_path=plugin("hooks.py:drops_even_groups"),
        deterministic_mode=True,
        max_weight_staleness=1,
        run_dir=str(tmp_path),
        keep_dropped=4 if keep is None else keep,
        save_rollouts="none" if keep is None else "all",
    )
    manager = make_manager(args, [engine])
    manager.generate(0)
    engine.version = 5
    assert manager.generate(1).metrics["rollout/stale_groups"] == 1
    if not keep:
        assert not (tmp_path / "dropped").exists()
        return
    first, second = (SampleTable.from_parquet(tmp_path / "dropped" / f"000000{i}.parquet") for i in range(2))
    filtered, failed = dict.fromkeys([0, 2, 4, 6], "filter"), {5: "failed: KeyError('tool broke')"}
    whole = {1: {0: "filter"}, 2: {0: "filter", **failed}, 5: filtered | failed}
    assert reasons(first) == whole[keep]
    # what failed has neither responses nor rewards
    assert np.isnan(first.reward).tolist() == (first.group_id == 5).tolist() == (first.response_lengths == 0).tolist()
    assert reasons(second)[7] == "stale: 5 weight updates old"


def test_a_run_without_drops_writes_nothing(make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path) -> None:
    make_manager(make_args(run_dir=str(tmp_path)), [ScriptedEngine()]).generate(0)
    assert list(tmp_path.iterdir()) == []
