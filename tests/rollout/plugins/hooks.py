"""One plugin of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimelite.rollout.context import RolloutFnTrainOutput
from slimelite.samples.sample import Sample, Status


def echo_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for place, sample in enumerate(group):
            sample.append_response_tokens([40, 41], [-0.5, -0.5], text="echo")
            sample.status = Status.COMPLETED
            sample.reward = float(place)
    return RolloutFnTrainOutput(groups, {"custom/rollout_id": rollout_id})


def tenfold(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    raw = [s.get_reward_value(args) for s in samples]
    return raw, [10 * r for r in raw]


def adds_a_metric(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], seconds: float) -> None:
    metrics["mine"] = float(len(samples))
    metrics |= {"of_run": float(args.num_rollout or 0), "eval_datasets": float(len(args.eval_datasets))}


def replaces_the_log(rollout_id: int, args: Any, samples: list[Sample], metrics: Any, seconds: float) -> bool:
    return True


async def rank_in_group(args: Any, samples: list[Sample]) -> list[float]:
    return [float(place) for place in range(len(samples))]


def note_rollout(args: Any, sample: Sample, *, rollout_id: int) -> Sample:
    sample.metadata["note"] = float(rollout_id)
    return sample


async def note_again(args: Any, sample: Sample, *, evaluation: bool) -> None:
    sample.metadata["note"] += 1.0 if evaluation else 0.5


async def reward_from_notes(args: Any, sample: Sample) -> float:
    return float(sample.metadata["note"])


def remove_truncated(args: Any, groups: list[list[Sample]]) -> None:
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status == Status.TRUNCATED


def drops_even_groups(args: Any, samples: list[Sample]) -> bool:
    return bool((samples[0].group_index or 0) % 2)


def count_everything(args: Any, groups: list[list[Sample]], data_source: Any) -> None:
    (Path(args.dump_details) / "seen.json").write_text(json.dumps({"groups": [g[0].group_index for g in groups]}))


def fixed_scores(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> dict[str, Any]:
    assert evaluation
    return {"quiz": {"rewards": [0.0, 0.5], "truncated": [True, False]}}


def adds_eval_metric(rollout_id: int, args: Any, data: dict[str, Any], metrics: dict[str, Any]) -> None:
    metrics["eval/samples"] = float(sum(len(d["samples"]) for d in data.values()))
