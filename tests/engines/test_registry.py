"""An engine of a user's, in one file of their own, is chosen, checked and built like ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.cluster.workers import EngineFactory
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.engines.registry import ENGINES
from slimelite.plan.devices import Machine
from tests.engines.tiny_models import build_model, greedy

RUN = (
    "--prompt-data p.jsonl --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8"
)
MINE = """
from functools import partial
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.in_process import build_in_process
from slimelite.engines.registry import ENGINES, EngineKind

class Mine(EmbeddedEngine):
    name = "mine"

ENGINES.add(EngineKind("mine", build=partial(build_in_process, Mine), releases_memory=False))
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(ENGINES, "mine", None)  # it is gone after the test
    del ENGINES["mine"]
    build_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(MINE)
    own = ["--import-file", str(tmp_path / "mine.py"), "--hf-checkpoint", str(tmp_path / "model")]
    return [*own, "--rollout-backend", "mine", *RUN.split(), "--rollout-max-response-len", "8"]


def args_of(words: list[str], more: str = "", gpus: int = 0) -> Args:
    return make_args([*words, *more.split()], machine=Machine(gpus=gpus))


def test_it_generates(words: list[str], tmp_path: Path) -> None:
    args = args_of(words)
    assert (args.rollout_backend, args.num_engines, args.update_weight_transport) == ("mine", 1, None)

    async def scenario() -> tuple[str, list[int]]:
        engine = EngineFactory(args).engine(0)
        params = SamplingParams(8, temperature=0.0, ignore_eos=True)
        (result,) = await engine.generate([GenerateRequest("r", (5, 6, 7), params)])
        name = (await engine.info()).name
        await engine.close()
        return name, result.output_ids

    model = build_model(tmp_path / "model")
    assert asyncio.run(scenario()) == ("mine", greedy(model, (5, 6, 7), 8))


@pytest.mark.parametrize(
    ("more", "gpus", "says"),
    [
        ("--colocate", 1, "--rollout-backend mine cannot release its memory"),
        ("--deterministic-mode", 0, "--rollout-backend mine: the samples of this engine are not reproducible"),
        ("--rollout-num-gpus-per-engine 2", 0, "the mine engine runs on only one device"),
        ("--rollout-external-engine-addrs a:1", 0, "which --rollout-backend mine cannot use"),
    ],
)
def test_checks_read_its_record(words: list[str], more: str, gpus: int, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        args_of(words, more, gpus)
    assert [problem for problem in caught.value.problems if says in problem]


def test_what_is_servers_alone_is_said_to_have_no_effect(words: list[str]) -> None:
    noted = dict(args_of(words, "--sglang-mem-fraction-static 0.5 --update-weight-transport http").no_effect)
    assert "--rollout-backend sglang" in noted["--sglang-mem-fraction-static"]
    assert "--update-weight-transport" in noted
