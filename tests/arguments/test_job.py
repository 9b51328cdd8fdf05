"""What kind of run the flags ask for."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from slimelite.arguments.conditions import Job
from slimelite.plan.devices import Machine
from tests.arguments.conftest import Make

GRPO = Job(
    trains=True,
    engines="own",
    servers=False,
    syncs=True,
    evaluates=False,
    sampled=True,
    saved=None,
    documents=False,
    loss="policy",
    gpus=False,
    local=False,
    revives=True,
)
ALONE: dict[str, Any] = {"engines": None, "syncs": False, "revives": False}


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        ("", {}),
        ("--launcher local", {"local": True, "revives": False}),
        ("--debug-rollout-only", {"trains": False, "syncs": False}),
        ("--load-debug-rollout-data r{rollout_id}.parquet", {**ALONE, "saved": "r{rollout_id}.parquet"}),
        ("--loss-type custom_loss --custom-loss-function-path my.py:loss", {"loss": "custom"}),
        ("--loss-type sft_loss", {**ALONE, "sampled": False, "loss": "supervised"}),
        (
            "--loss-type pretrain_loss --eval-interval 1 --eval-bpb e.jsonl",
            {**ALONE, "sampled": False, "loss": "supervised", "documents": True, "evaluates": True},
        ),
        ("--loss-type dpo_loss --n-samples-per-prompt 1", {**ALONE, "sampled": False, "loss": "paired"}),
        (
            "--loss-type sft_loss --eval-interval 1 --eval-prompt-data e e.jsonl",
            {"sampled": False, "loss": "supervised", "evaluates": True},
        ),
        ("--eval-interval 1 --eval-prompt-data e e.jsonl", {"evaluates": True}),
        (
            "--eval-interval 1 --eval-prompt-data e e.jsonl --load-debug-rollout-data r.parquet",
            {**ALONE, "saved": "r.parquet"},
        ),
        ("--rollout-backend sglang", {"servers": True}),
        ("--rollout-backend sglang --launcher local", {"servers": True, "local": True, "revives": False}),
        ("--rollout-backend sglang --launcher local --use-fault-tolerance", {"servers": True, "local": True}),
        ("--rollout-external-engine-addrs here:1", {"servers": True, "engines": "external", "revives": False}),
    ],
)
def test_the_kind_of_a_run_follows_from_its_flags(make: Make, words: str, differs: dict[str, Any]) -> None:
    assert make(words).job == replace(GRPO, **differs)


def test_a_run_on_gpus(make: Make) -> None:
    args = make("--actor-num-gpus-per-node 1 --colocate --rollout-backend sglang", Machine(1))
    assert args.job == replace(GRPO, gpus=True, servers=True)


def test_a_copy_with_other_flags_is_another_kind_of_run(make: Make) -> None:
    args = make()
    assert args.job.trains
    assert not replace(args, debug_rollout_only=True).job.trains
    assert pickle.loads(pickle.dumps(args)).job == args.job
