"""--sglang-config: groups of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimelite.cluster.workers import EngineFactory
from slimelite.engines.sglang.server import server_fields
from slimelite.plan.devices import Machine
from tests.arguments.conftest import Make, Problems

NODE = Machine(gpus=8, sglang=True)
WORDS = "--actor-num-gpus-per-node 8 --colocate --sglang-config {}"


@pytest.fixture
def groups(tmp_path: Path) -> Any:
    """The server groups of the policy, as YAML -> the words that name the file."""

    def write(text: str, model: str = "{name: actor, server_groups: [{groups}]}", more: str = "") -> str:
        path = tmp_path / "groups.yaml"
        path.write_text(f"sglang:\n  - {model.replace('{groups}', text)}\n{more}")
        return WORDS.format(path)

    return write


def test_engines_of_different_sizes(make: Make, groups: Any) -> None:
    words = groups(
        "{worker_type: placeholder, num_gpus: 1}, {num_gpus: 4, num_gpus_per_engine: 2}, "
        "{worker_type: regular, num_gpus: 3, overrides: {mem-fraction-static: 0.5}}"
    )
    args = make(words, NODE)
    assert args.num_engines == 5
    assert [args.engine_place(i)[:2] for i in range(5)] == [(1, 2), (3, 2), (5, 1), (6, 1), (7, 1)]
    fields = [server_fields(EngineFactory(args).setup(i), host="h", port=1) for i in range(5)]
    assert [f["tp_size"] for f in fields] == [2, 2, 1, 1, 1]
    assert [f.get("mem_fraction_static") for f in fields] == [None, None, 0.5, 0.5, 0.5]


def test_engines_are_alike_without_it(make: Make) -> None:
    args = make("--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 4", NODE)
    assert [args.engine_place(i) for i in range(args.num_engines)] == [(0, 4, {}), (4, 4, {})]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{worker_type: prefill, num_gpus: 8}", "server group 0: worker_type prefill is not supported"),
        ("{num_gpus: 4}", "the server groups have 4 GPUs, but --rollout-num-gpus is 8"),
        ("{num_gpus: 8, num_gpus_per_engine: 3}", "8 GPUs cannot be divided into engines of 3"),
        ("{num_gpus: many}", "num_gpus is 'many'"),
        ("{num_gpus: 8, gpus: 3}", "unknown keys gpus"),
        ("{num_gpus: 8, overrides: {tp_size: 3}}", "override tp_size: use --rollout-num-gpus-per-engine"),
        ("{num_gpus: 8, overrides: {tp_sizes: 3}}", "override tp_sizes: SGLang has no such option"),
    ],
)
def test_what_a_group_cannot_be(problems: Problems, groups: Any, text: str, says: str) -> None:
    (problem,) = problems(groups(text), NODE)
    assert problem.startswith("--sglang-config ")
    assert says in problem


def test_frozen_models_are_refused_by_name(problems: Problems, groups: Any) -> None:
    more = "  - {name: judge, model_path: some/other, server_groups: [{num_gpus: 4}]}\n"
    (problem,) = problems(groups("{num_gpus: 4}", more=more), NODE)
    assert "model 'judge' is frozen" in problem


def test_another_engine_does_not_read_it(make: Make, groups: Any) -> None:
    args = make(f"{groups('{num_gpus: 8}')} --rollout-backend embedded", NODE)
    assert args.engine_places == ()
    assert "--sglang-config" in dict(args.no_effect)
