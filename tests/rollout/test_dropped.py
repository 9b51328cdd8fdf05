"""Groups that a rollout does not train on are kept in the run folder, with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slimelite.rollout import groups
from slimelite.table import SampleTable

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import ScriptedEngine

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


@pytest.mark.parametrize("keep", [0, 1, 2, 5])
def test_each_reason_has_a_group(make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path, keep: int) -> None:
    """Groups 0, 2, 4 and 6 are filtered out, 5 fails; 7, which is kept for the next rollout, is too old by then."""
    engine = ScriptedEngine()
    args = make_args(
        rollout_batch_size=2,
        over_sampling_batch_size=8,
        custom_generate_function_path=plugin("native.py:fails_in_group_5"),
        dynamic_sampling_filter_path=plugin("hooks.py:drops_even_groups"),
        deterministic_mode=True,
        max_weight_staleness=1,
        run_dir=str(tmp_path),
        keep_dropped=keep,
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
