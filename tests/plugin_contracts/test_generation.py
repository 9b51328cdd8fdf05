"""Contracts of what makes samples: generate functions, rollout functions, data sources."""

from __future__ import annotations

import json

import numpy as np
from rollout.conftest import MakeArgs, MakeManager

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.samples.table import SampleTable

from .conftest import Given


def check_table(table: SampleTable) -> None:
    """What the trainer relies on."""
    assert (np.diff(table.prompt_offsets) > 0).all(), "every sample has a prompt"
    assert table.mask_sums.sum() > 0, "some token is trained on"
    assert np.isfinite(table.rollout_log_probs[table.loss_mask]).all(), "trained tokens have the engine's log-probs"
    assert (table.rollout_log_probs[table.loss_mask] <= 0).all()
    assert not set(table.status) & {"pending", "aborted"}
    of_rollout: dict[int, set[int]] = {}
    for rollout, group in zip(table.rollout_id.tolist(), table.group_id.tolist(), strict=True):
        of_rollout.setdefault(rollout, set()).add(group)
    assert all(len(groups) == 1 for groups in of_rollout.values()), "siblings stay in their group"


def test_custom_generate(
    given: Given, make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine
) -> None:
    """``async fn(args, sample, sampling_params[, evaluation])`` -> Sample, or a list of Samples (a fan-out)."""
    args = make_args(custom_generate_function_path=given("--custom-generate-function-path"), rollout_batch_size=2)
    output = make_manager(args, [http_engine]).generate(0)
    check_table(output.table)
    assert output.metrics["rollout/retries"] == 0
    assert set(output.table.group_id.tolist()) == {0, 1}
    assert len(set(output.table.rollout_id.tolist())) == 8


def test_rollout_function(
    given: Given, make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine
) -> None:
    """``fn(args, rollout_id, data_source, evaluation=False)`` -> groups, or an object with ``samples``, ``metrics``."""
    manager = make_manager(make_args(rollout_function_path=given("--rollout-function-path")), [http_engine])
    for rollout_id in range(2):
        output = manager.generate(rollout_id)
        check_table(output.table)
        assert len(set(output.table.group_id.tolist())) == 3, "as many groups as --rollout-batch-size"
        assert np.isfinite(output.table.reward).all()


def test_data_source(given: Given, make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine) -> None:
    """A class built from (args) or (args, tokenizer): get_samples, add_samples, __len__, (load_)state_dict."""
    args = make_args(data_source_path=given("--data-source-path"))
    source = make_manager(args, [http_engine]).source
    groups = source.get_samples(3)
    assert [len(group) for group in groups] == [4, 4, 4]
    indices = [s.index for group in groups for s in group]
    assert len(set(indices)) == 12, "every sample has an index of its own"
    assert all(len({s.group_index for s in group}) == 1 for group in groups)
    source.add_samples(groups[1:])
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make_manager(args, [http_engine]).source
    resumed.load_state_dict(state)
    for dealt in (source.get_samples(4), resumed.get_samples(4)):
        assert [g[0].group_index for g in dealt][:2] == [g[0].group_index for g in groups[1:]], "returned groups first"
        assert len(dealt) == 4
    assert len(source) == len(resumed)


def test_eval_function(
    given: Given, make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine
) -> None:
    """``fn(args, rollout_id, data_source, evaluation=True)`` -> {dataset: {"rewards": …[, "truncated", "samples"]}}."""
    args = make_args(eval_function_path=given("--eval-function-path"))
    metrics = make_manager(args, [http_engine]).evaluate(0).metrics
    assert [name for name in metrics if name.startswith("eval/")]
    assert all(np.isfinite(value) for value in metrics.values())
