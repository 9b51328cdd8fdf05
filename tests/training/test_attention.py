"""Packed attention equals transformers' own with masks over padded sequences."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import exact_norms
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trees import tokens_of, tree_table

from slimelite.training.attention import ATTENTION, _gathered_buckets, register_attention, varlen_attention
from slimelite.training.batch import CALL, MicroBatch, PackedSequences, laid_out
from slimelite.training.columns import TokenColumns
from slimelite.training.model import PolicyModel

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
    # transformers keeps the attention in the config
    configs = {attention: deepcopy(config) for attention in (ATTENTION, "sdpa")}
    models = [AutoModelForCausalLM.from_config(c, attn_implementation=a).double() for a, c in configs.items()]
    assert models[0].config._attn_implementation == ATTENTION
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        exact_norms(model)
    return models[0], models[1]


def packed_states(model: PreTrainedModel, ids: list[Tensor]) -> Tensor:
    sequences = PackedSequences.from_lengths([len(i) for i in ids])
    positions = torch.cat([torch.arange(len(i)) for i in ids])
    with laid_out(sequences):
        out = model.get_decoder()(input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False)
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


@pytest.mark.parametrize("window", [None, 6])
def test_gathered_keys_of_a_single_token(window: int | None) -> None:
    """The token of an empty micro-batch, or a short row beside a much longer one."""
    for lengths in ([1], [300, 1]):
        q, k, v = torch.randn(3, sum(lengths), 2, 4, dtype=torch.float64)
        sequences = PackedSequences.from_lengths(lengths)
        found = _gathered_buckets(q, k, v, sequences, 0.5, window)
        torch.testing.assert_close(found[-1], v[-1])


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
    assert sequences.shared == []
    buckets = sequences.own_buckets
    assert torch.equal(torch.cat([b.rows for b in buckets]).sort().values, torch.arange(sum(lengths)))
    assert all(torch.equal(b.queries[b.real], b.rows) for b in buckets)
    work = sum(n * n for n in lengths)
    assert sum(len(b.queries) ** 2 // b.count for b in buckets) <= 1.1 * work + CALL * len(buckets)


def test_many_short_sequences_take_few_calls() -> None:
    lengths = np.random.default_rng(0).integers(20, 60, 256)
    assert len(PackedSequences.from_lengths(lengths).own_buckets) <= 12


def tree_rows() -> list[tuple[list[int], list[int]]]:
    """Groups with a common header, two equal rows, conversations that go on, and a row with nothing in common."""
    rng = np.random.default_rng(0)
    rows: list[tuple[list[int], list[int]]] = []
    header = rng.integers(0, 50, 18).tolist()
    for group in range(3):
        prompt = header * (group < 2) + rng.integers(0, 50, 17 + 3 * group).tolist()
        rows += [(prompt, rng.integers(0, 50, 2 + 5 * i).tolist()) for i in range(4)]
    rows.append(rows[2])
    said = [*rows[3][0], *rows[3][1]]
    rows += [(said + rng.integers(0, 50, 18).tolist(), rng.integers(0, 50, n).tolist()) for n in (1, 9)]
    rows.append((said, [7]))
    rows.append((rng.integers(0, 50, 2).tolist(), rng.integers(0, 50, 21).tolist()))
    return [rows[i] for i in rng.permutation(len(rows))]


WINDOWS = {"few tokens": 6, "beyond a branch": 30, "longer than a row": 200}


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWS])
def test_shared_prefixes_give_the_states_of_each_row_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own attention on padded rows; gradients too, in float64."""
    if family in WINDOWS:
        monkeypatch.setitem(FAMILIES, "mistral", {"sliding_window": WINDOWS[family]})
    torch.manual_seed(1)
    shared, masked = twins("mistral" if family in WINDOWS else family)
    table = tree_table(tree_rows())
    batch = MicroBatch(TokenColumns.from_table(table), np.arange(len(table)), torch.device("cpu"), shares=True)
    assert batch.input_ids.numel() < 0.45 * sum(batch.lengths)
    assert {int(n) for n in batch.sequences.nodes.levels} == {0, 1, 2, 3}
    mine = PolicyModel(shared).hidden(batch)
    ids = [torch.tensor(prompt + response) for prompt, response in tokens_of(table)]
    states = padded_states(masked, ids).split([len(i) for i in ids])
    lengths = table.response_lengths.tolist()
    theirs = torch.cat([s[-n - 1 : -1] for s, n in zip(states, lengths, strict=True)])
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(mine)
    (mine * probe).sum().backward()
    (theirs * probe).sum().backward()
    for p, q in zip(shared.get_decoder().parameters(), masked.get_decoder().parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("width", [8, 4, 12])
def test_both_ways_to_attend_to_a_shared_prefix_agree(width: int) -> None:
    """Merged parts, and gathered keys, which GPUs use in fp32; values may be narrower or wider than keys."""
    table = tree_table(tree_rows())
    sequences = MicroBatch(
        TokenColumns.from_table(table), np.arange(len(table)), torch.device("cpu"), shares=True
    ).sequences
    tokens = int(sequences.cu_seqlens[-1])
    torch.manual_seed(0)
    sizes = ((6, 8), (2, 8), (2, width))
    given = [torch.randn(1, heads, tokens, size, dtype=torch.float64, requires_grad=True) for heads, size in sizes]
    probe = torch.randn(1, tokens, 6, width, dtype=torch.float64)
    found = []
    with laid_out(sequences):
        merged, _ = varlen_attention(torch.nn.Module(), *given, None)
    found.append((merged, *torch.autograd.grad((merged * probe).sum(), given)))
    q, k, v = (x[0].transpose(0, 1) for x in given)
    gathered = _gathered_buckets(q, k, v, sequences, 8**-0.5, None)[None]
    found.append((gathered, *torch.autograd.grad((gathered * probe).sum(), given)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_dropout_is_refused() -> None:
    x = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="is not supported"):
        varlen_attention(torch.nn.Module(), x, x, x, None, dropout=0.1)
