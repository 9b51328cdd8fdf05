"""The sampler against plain definitions of what it computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimelite.engines.embedded.sampler import SHAPE, SamplingBatch, sample, stream_of, uniforms

CPU = torch.device("cpu")


def batch(
    n: int,
    vocab: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    min_p: float = 0.0,
    kept: bool = False,
) -> SamplingBatch:
    return SamplingBatch.build(np.array([(temperature, top_p, top_k, min_p, kept, False)] * n, SHAPE), vocab, CPU)


def test_uniforms_are_splitmix64() -> None:
    # the reference implementation's first outputs from state 1234567
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    drawn = uniforms(np.full(5, 1234567, np.uint64), np.arange(5))
    assert [int(u * 2**52) for u in drawn] == [output >> 12 for output in outputs]
    assert stream_of(1234567) == outputs[0]
    assert 0 <= stream_of(-1) < 2**64


def test_neighbouring_seeds_and_positions_are_independent_and_uniform() -> None:
    streams = np.array([stream_of(seed) for seed in range(300)], np.uint64)
    grid = np.stack([uniforms(streams, np.full(300, position)) for position in range(300)])
    assert grid.min() > 0
    assert grid.max() < 1
    assert abs(np.histogram(grid, 10, (0, 1))[0] - 9000).max() < 5 * np.sqrt(9000)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 300, 512, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_token_is_where_the_cumulated_probability_passes_the_uniform(vocab: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(64, vocab, generator=generator) * 3
    logits[:, 1::3] -= 200
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    scaled = logits.double() / temperature
    expected = (scaled.softmax(-1).cumsum(-1) <= uniform[:, None]).sum(-1)
    tokens, log_probs, _ = sample(logits.clone(), batch(64, vocab, temperature), uniform)
    assert torch.equal(tokens, expected)
    expected_log_probs = scaled.log_softmax(-1).gather(-1, expected[:, None])[:, 0]
    assert torch.allclose(log_probs.double(), expected_log_probs, atol=1e-5)
    assert log_probs.dtype == torch.float32


@pytest.mark.parametrize("vocab", [3, 256, 700])
def test_the_ends_of_the_interval_never_draw_an_impossible_token(vocab: int) -> None:
    logits = torch.full((4, vocab), -torch.inf)
    logits[:, vocab // 2] = 0.0
    uniform = torch.tensor([2.0**-53, 0.5, 1 - 2.0**-53, 1 - 2.0**-40], dtype=torch.float64)
    for top_p in (1.0, 0.9):
        tokens, log_probs, _ = sample(logits.clone(), batch(4, vocab, top_p=top_p), uniform)
        assert tokens.tolist() == [vocab // 2] * 4
        assert log_probs.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(0.7, -1, 0), (1.0, 5, 0), (0.3, 40, 0), (0.999, -1, 0), (1.0, 1500, 0), (1.0, -1, 0.2), (0.9, 30, 0.1)],
)
def test_truncation_keeps_the_likeliest_and_the_log_probs(top_p: float, top_k: int, min_p: float) -> None:
    vocab = 3000
    logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    probs = logits.softmax(-1).double()
    ordered, ranked = probs.sort(-1, descending=True)
    keep = (ordered.cumsum(-1) - ordered < top_p) & (torch.arange(vocab) < (top_k if top_k > 0 else vocab))
    keep &= ordered >= min_p * ordered[:, :1]
    mass = torch.where(keep, ordered, 0).cumsum(-1)
    place = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    for kept in (False, True):
        how = batch(32, vocab, top_p=top_p, top_k=top_k, min_p=min_p, kept=kept)
        tokens, log_probs, told = sample(logits.clone(), how, uniform)
        assert torch.equal(tokens, ranked.gather(-1, place)[:, 0])
        over = probs.masked_fill(~torch.zeros(32, vocab, dtype=torch.bool).scatter(1, ranked, keep), 0)
        expected = (over / over.sum(-1, keepdim=True) if kept else probs).log().gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(log_probs.double(), expected, atol=1e-5)
        expected_ids = {row: set(ranked[row, keep[row]].tolist()) for row in range(32 if kept else 0)}
        assert {row: set(ids.tolist()) for row, ids in told.items()} == expected_ids


def test_a_greedy_row_keeps_its_token_and_an_unlimited_one_tells_nothing() -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(2))
    shapes = [(1.0, 1.0, -1, 0.0, True, False), (0.0, 0.9, -1, 0.0, True, False), (1.0, 1.0, 1, 0.0, True, False)]
    mixed = SamplingBatch.build(np.array(shapes, SHAPE), 400, CPU)
    tokens, log_probs, told = sample(logits.clone(), mixed, torch.full((3,), 0.5, dtype=torch.float64))
    assert {row: ids.tolist() for row, ids in told.items()} == {1: [tokens[1]], 2: [tokens[2]]}
    assert log_probs[1:].tolist() == [0.0, 0.0]
    assert log_probs[0] == logits[0].log_softmax(-1)[tokens[0]]


def test_each_row_is_sampled_its_own_way() -> None:
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(2))
    uniform = torch.full((5,), 0.999, dtype=torch.float64)
    shapes = [
        (1.0, 1.0, -1, 0.0, True),
        (0.0, 1.0, -1, 0.0, True),
        (1.0, 1.0, 1, 0.0, False),
        (0.5, 1.0, -1, 0.3, False),
        (1.0, 0.1, 0, 0.0, True),
    ]
    mixed = SamplingBatch.build(np.array([(*shape, False) for shape in shapes], SHAPE), 400, CPU)
    tokens, log_probs, _ = sample(logits.clone(), mixed, uniform)
    for row, shape in enumerate(shapes):
        alone = batch(1, 400, *shape)
        token, log_prob, _ = sample(logits[row : row + 1].clone(), alone, uniform[:1])
        assert (token.item(), log_prob.item()) == (tokens[row].item(), log_probs[row].item())
    assert tokens[1:3].tolist() == logits[1:3].argmax(-1).tolist()
    assert tokens[0] != logits[0].argmax()


def test_banned_tokens_are_not_drawn_even_when_nothing_else_is_likely() -> None:
    logits = torch.full((2, 300), -120.0)
    logits[:, 7] = 0.0
    logits[:, 9] = -110.0
    without = logits[:1].clone()
    without[0, 7] = -torch.inf
    changed = torch.tensor([0]), without
    tokens, log_probs, _ = sample(logits.clone(), batch(2, 300), torch.full((2,), 0.3, dtype=torch.float64), changed)
    assert tokens.tolist() == [9, 7]
    assert torch.isfinite(log_probs).all()


def test_nan_is_passed_on_and_not_turned_into_an_index() -> None:
    logits = torch.randn(3, 700)
    logits[1] = torch.nan
    tokens, log_probs, _ = sample(logits, batch(3, 700), torch.full((3,), 0.5, dtype=torch.float64))
    assert torch.isfinite(log_probs).tolist() == [True, False, True]
    assert tokens.min() >= 0
    assert tokens.max() < 700
