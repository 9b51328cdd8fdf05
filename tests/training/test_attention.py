"""Packed attention equals transformers' own with masks over padded sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import exact_norms
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slimelite.training.attention import ATTENTION, PackedSequences, register_attention, varlen_attention

LENGTHS = [5, 17, 1, 16, 9, 30, 16, 2]
FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"sliding_window": 6},
}


def twins(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same random model with packed attention and with transformers' masked SDPA, both in float64 throughout."""
    register_attention()
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        **FAMILIES[family],
    )
    models = [AutoModelForCausalLM.from_config(config, attn_implementation=a).double() for a in (ATTENTION, "sdpa")]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        exact_norms(model)
    return models[0], models[1]


def packed_states(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    sequences = PackedSequences.from_lengths([len(i) for i in ids])
    positions = torch.cat([torch.arange(len(i)) for i in ids])
    out = model.get_decoder()(
        input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False, sequences=sequences
    )
    return out.last_hidden_state[0]


def padded_states(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
    states = model.get_decoder()(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state
    return torch.cat([states[i, : len(row)] for i, row in enumerate(ids)])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(family: str) -> None:
    torch.manual_seed(1)
    packed, masked = twins(family)
    ids = [torch.randint(0, 50, (n,)) for n in LENGTHS]
    mine, theirs = packed_states(packed, ids), padded_states(masked, ids)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(mine)
    (mine * probe).sum().backward()
    (theirs * probe).sum().backward()
    for p, q in zip(packed.get_decoder().parameters(), masked.get_decoder().parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11)


def test_the_sliding_window_matters() -> None:
    torch.manual_seed(1)
    ids = [torch.randint(0, 50, (30,))]
    states = []
    for window in (None, 6):
        FAMILIES["mistral"]["sliding_window"] = window
        torch.manual_seed(2)
        states.append(packed_states(twins("mistral")[0], ids))
    torch.testing.assert_close(states[0][:6], states[1][:6])
    assert (states[0][10:] - states[1][10:]).abs().max() > 1e-3


def test_sequences_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    model, _ = twins("qwen2")
    ids = [torch.randint(0, 50, (n,)) for n in LENGTHS]
    together = packed_states(model, ids)
    alone = torch.cat([packed_states(model, [i]) for i in ids])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None, database=None)
def test_buckets_hold_every_token_once_and_little_padding(lengths: list[int]) -> None:
    sequences = PackedSequences.from_lengths(lengths)
    assert sequences.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert torch.equal(sequences.pad_index[sequences.unpad_index], torch.arange(sum(lengths)))
    padded = sum(count * length for count, length in sequences.buckets)
    assert padded == len(sequences.pad_index)
    assert padded * 0.9 <= sum(lengths) + 1e-6
    assert sum(count for count, _ in sequences.buckets) == len(lengths)


def test_many_short_sequences_take_few_calls() -> None:
    lengths = np.random.default_rng(0).integers(20, 60, 256)
    assert len(PackedSequences.from_lengths(lengths).buckets) <= 12


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"softcap": 50.0}, {"s_aux": torch.zeros(4)}])
def test_what_it_cannot_compute_is_refused(option: dict[str, object]) -> None:
    x = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="does not support"):
        varlen_attention(torch.nn.Module(), x, x, x, None, sequences=PackedSequences.from_lengths([3]), **option)
