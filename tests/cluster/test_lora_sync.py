"""Adapters on the way to engines: the first update brings everything, later ones what adapters change, and the engine
samples from what the trainer trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from slimelite.cluster.remote import LocalRemote, RemoteSink
from slimelite.engines.checks import WeightUpdate
from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.training.parallel import local
from slimelite.training.trainer import Trainer
from tests.training.tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of

ATTENTION = {"lora_rank": 4, "lora_targets": ("attn",)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", max_position_embeddings=64)


@pytest.fixture
def engine(model: Path) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(str(model), eos_token_ids=())
    yield engine
    asyncio.run(engine.close())


def held(engine: EmbeddedEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine._weights._targets.items()}


def gap(trainer: Trainer, engine: EmbeddedEngine) -> float:
    """The largest difference of log-probs of `random_table`, in nats."""
    table = random_table()
    mine, theirs = trainer.log_probs(table), []
    for row in range(len(table)):
        prompt = table.row_slice("prompt_tokens", row).tolist()
        response = table.row_slice("response_tokens", row).tolist()
        theirs += asyncio.run(engine.score([*prompt, *response], len(prompt))).log_probs
    return float(np.abs(mine - np.array(theirs)).max())


def test_later_updates_bring_what_adapters_change(model: Path, engine: EmbeddedEngine) -> None:
    sink = RemoteSink([LocalRemote(engine, "engine")])
    with one_rank(tiny_args(model, **ATTENTION)) as trainer:
        sent = [trainer.push_weights(sink, 0)["perf/update_weights_bytes"]]
        for version in range(1, 4):
            trainer.train(version, random_table(seed=version))
            sent.append(trainer.push_weights(sink, version)["perf/update_weights_bytes"])
            assert gap(trainer, engine) < 1e-4
        whole = weights_of(trainer)
        changed = sum(w.nbytes for name, w in whole.items() if "_proj.weight" in name and "self_attn" in name)
        assert sent == [sum(w.nbytes for w in whole.values()), changed, changed, changed]
        # a second engine, as one that was restarted, has nothing yet: both get everything
        other = EmbeddedEngine(str(save_tiny_model(model.parent / "other", seed=9)), eos_token_ids=())
        both = RemoteSink([LocalRemote(engine, "engine"), LocalRemote(other, "other")])
        assert trainer.push_weights(both, 4)["perf/update_weights_bytes"] == sent[0]
        assert gap(trainer, other) < 1e-4
        asyncio.run(other.close())
        # 1,000 updates of adapters that change with each: to the bit what one merge of the frozen weights gives
        parts = [local(p.detach()) for p in trainer.model.trained().values()]
        for step in range(1000):
            for part in parts:
                part.mul_(1.01 if step % 2 else 0.991).add_(1e-5)
            trainer.push_weights(sink, 5 + step)
        last = weights_of(trainer)
        assert all(torch.equal(weight, last[name]) for name, weight in held(engine).items())
        assert any(not torch.equal(weight, whole[name]) for name, weight in last.items())
        (result,) = asyncio.run(
            engine.generate([GenerateRequest("a", (1, 2, 3), SamplingParams(2, ignore_eos=True, seed=0))])
        )
        assert result.weight_versions == [1004, 1004]


def test_an_update_without_what_changed_is_refused(model: Path, engine: EmbeddedEngine) -> None:
    with one_rank(tiny_args(model, **ATTENTION)) as trainer:
        trainer.push_weights(RemoteSink([LocalRemote(engine, "engine")]), 0)
    names = ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    assert asyncio.run(engine.begin_weight_update(1, names))
    with pytest.raises(ValueError, match="weight version 1 lacks 2 weights"):
        asyncio.run(engine.end_weight_update())


def test_only_a_whole_update_makes_a_model_complete() -> None:
    update = WeightUpdate({"a": (1,), "b": (1,)}, {"tied": "a"})
    assert not update.begin(0, ["a"]), "nothing has brought b"
    with update.taking([("a", (1,))]):
        pass
    with pytest.raises(ValueError, match=r"lacks 1 weights \(b\)"):
        update.end()
    with update.taking([("b", (1,))]):
        pass
    update.end()
    assert update.begin(1, ["tied"])
    with update.taking([("a", (1,))]):
        pass
    update.end()
    assert not update.begin(2)
    assert update.missing() == ["a", "b"]
