"""Where keys, values and weights lie, and that they survive being moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from slimelite.engines.embedded.attention import KVCache
from slimelite.engines.embedded.model import DecoderShape, DecoderWeights
from tests.engines.tiny_models import build_model

CPU = torch.device("cpu")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(folder: Path, family: str) -> tuple[DecoderWeights, dict[str, torch.Tensor]]:
    model = build_model(folder, family)
    weights = DecoderWeights(DecoderShape.from_config(AutoConfig.from_pretrained(folder)), CPU, torch.float32)
    weights.incoming.begin(1)
    return weights, model.state_dict()


def test_rows_keep_their_content_when_they_get_longer_or_move(tmp_path: Path) -> None:
    build_model(tmp_path)
    shape = DecoderShape.from_config(AutoConfig.from_pretrained(tmp_path))
    cache = KVCache(shape, 256, CPU, torch.float32)
    lengths = np.array([16, 3, 9, 14])
    cache.set_row_len(16, lengths[:0])
    written: list[list[torch.Tensor]] = []
    for layer in range(shape.num_layers):
        written.append([torch.randn(n, 2 * shape.num_kv_heads, shape.head_dim) for n in lengths])
        for row, values in enumerate(written[-1]):
            slots = cache.slots(np.full(len(values), row), np.arange(len(values)))
            cache.pool[layer].index_copy_(0, torch.from_numpy(slots), values.flatten(0, 1))
    cache.set_row_len(48, lengths)
    cache.copy(3, 1, 14)
    for layer, values_of_rows in enumerate(written):
        for row, source in ((0, 0), (1, 3), (2, 2), (3, 3)):
            expected = values_of_rows[source].transpose(0, 1)
            keys, values = cache.rows_of(layer, torch.tensor([row]), int(lengths[source]))
            assert torch.equal(torch.cat((keys[0], values[0])), expected)
    assert cache.fits(5, 48)
    assert not cache.fits(6, 48)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_every_name_of_the_checkpoint_has_a_place_of_its_own(tmp_path: Path, family: str) -> None:
    weights, state = load(tmp_path, family)
    assert set(weights.incoming.missing()) == set(state) - ({HEAD} if weights.shape.tied else set())
    for name, tensor in state.items():
        before = len(weights.incoming.missing())
        weights.update([(name, tensor)])
        assert before - len(weights.incoming.missing()) == (0 if weights.shape.tied and name == HEAD else 1)
    assert weights.incoming.missing() == []
    layer, prefix = weights.layers[1], "model.layers.1"
    qkv = [state[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(qkv))
    assert torch.equal(layer.gate_up, torch.cat([state[f"{prefix}.mlp.{x}_proj.weight"] for x in ("gate", "up")]))
    weights.incoming.begin(2)
    assert len(weights.incoming.missing()) == len(state) - weights.shape.tied


def test_a_tied_head_may_come_under_either_name(tmp_path: Path) -> None:
    weights, state = load(tmp_path, "qwen2")
    del state[EMBED]
    head = state[HEAD] + 1
    weights.update(list({**state, HEAD: head}.items()))
    assert weights.incoming.missing() == []
    assert torch.equal(weights.embed, head)
    assert weights.head is weights.embed


def test_a_bad_bucket_changes_nothing(tmp_path: Path) -> None:
    weights, state = load(tmp_path, "llama")
    weights.update(list(state.items()))
    for bad, said in ((("nobody", torch.ones(1)), "nobody"), ((HEAD, torch.ones(2, 2)), r"\(2, 2\)")):
        with pytest.raises(ValueError, match=said):
            weights.update([(EMBED, state[EMBED] + 1), bad])
        assert torch.equal(weights.embed, state[EMBED])
