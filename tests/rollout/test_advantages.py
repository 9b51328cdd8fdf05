"""Every flag that makes advantages of rewards does so in a rollout: against plain loops over groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable

from .conftest import MakeArgs, MakeManager

# rewards of each group's rollouts: several sizes, one of equal rewards; a list is that of fan-out siblings
GROUPS: list[list[Any]] = [[0.0, 1.0, 0.0, 2.5], [1.0, [0.0, 3.0], -1.0], [2.0], [0.5, 0.5, 0.5]]


def scored_table() -> SampleTable:
    samples: list[list[Sample]] = []
    index = rollout = 0
    for group, rewards in enumerate(GROUPS):
        samples.append([])
        for siblings in rewards:
            for reward in siblings if isinstance(siblings, list) else [siblings]:
                sample = Sample(group_index=group, index=index, rollout_id=rollout, tokens=[1, 2], reward=reward)
                sample.append_response_tokens([3, 4], [-0.5, -0.5])
                sample.status = Status.COMPLETED
                samples[-1].append(sample)
                index += 1
            rollout += 1
    return SampleTable.from_samples(samples)


def naive(estimator: str, std: bool, normalize: bool) -> list[float]:
    found: list[float] = []
    for rewards in GROUPS:
        means = [float(np.mean(siblings)) for siblings in rewards]
        for place, siblings in enumerate(rewards):
            others = means[:place] + means[place + 1 :]
            for reward in siblings if isinstance(siblings, list) else [siblings]:
                if estimator in ("reinforce_plus_plus", "ppo") or not normalize:
                    found.append(reward)
                elif not others or np.std(means) == 0:
                    found.append(0.0)
                elif estimator == "rloo":
                    found.append(means[place] - float(np.mean(others)))
                elif estimator == "reinforce_plus_plus_baseline" or not std:
                    found.append(means[place] - float(np.mean(means)))
                else:
                    found.append((means[place] - float(np.mean(means))) / (float(np.std(means, ddof=1)) + 1e-6))
    return found


@pytest.fixture
def saved(tmp_path: Path) -> str:
    template = str(tmp_path / "{rollout_id}.parquet")
    table = scored_table()
    table.advantages = np.full(len(table.response_tokens), 7.0, np.float32)  # of the run that saved it
    table.to_parquet(template.format(rollout_id=0))
    return template


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(
    "estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"]
)
def test_advantages_of_a_rollout(
    make_args: MakeArgs, make_manager: MakeManager, saved: str, estimator: str, std: bool, normalize: bool
) -> None:
    flags = {"grpo_std_normalization": std, "rewards_normalization": normalize, "advantage_estimator": estimator}
    output = make_manager(make_args(load_debug_rollout_data=saved, **flags), []).generate(0)
    np.testing.assert_allclose(output.table.advantage, naive(estimator, std, normalize), rtol=1e-12, atol=1e-12)
    assert output.table.advantages is None
    assert output.metrics["rollout/groups_of_one"] == output.metrics["rollout/zero_variance_groups"] == 0.25
    assert output.metrics["rollout/advantages_abs_max"] == np.abs(output.table.advantage).max() > 0


@pytest.mark.parametrize("given", [{"compute_advantages_and_returns": False}, {"loss_type": "sft_loss"}])
def test_what_needs_no_advantages_gets_none(
    make_args: MakeArgs, make_manager: MakeManager, saved: str, given: dict[str, Any]
) -> None:
    output = make_manager(make_args(load_debug_rollout_data=saved, **given), []).generate(0)
    assert not output.table.advantage.any()
    assert "rollout/groups_of_one" not in output.metrics
