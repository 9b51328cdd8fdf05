"""The chunked head equals log_softmax of the full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slimelite.training.lm_head import chunked_log_probs

TOKENS, WIDTH, VOCAB = 23, 8, 37


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = (3 * torch.randn(TOKENS, WIDTH)).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def full(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 7, 23, 100, -1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    mine = chunked_log_probs(hidden, weight, targets, temperature, entropy_grad=True, chunk_size=chunk)
    theirs = full(hidden, weight, targets, temperature)
    probes = torch.randn(2, TOKENS, dtype=torch.float64)
    grads = [
        torch.autograd.grad((log_probs * probes[0]).sum() + (entropy * probes[1]).sum(), (hidden, weight))
        for log_probs, entropy in (mine, theirs)
    ]
    for a, b in zip((*mine, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_without_entropy_gradient_the_log_prob_gradient_is_the_same() -> None:
    hidden, weight, targets = inputs()
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, chunk_size=5)
    assert not entropy.requires_grad
    expected, _ = full(hidden, weight, targets, 1.0)
    mine = torch.autograd.grad(log_probs.square().sum(), (hidden, weight))
    theirs = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_of_bf16_operands_are_not_rounded_to_bf16(temperature: float) -> None:
    """What is left is the rounding of the gradients themselves; logits rounded to bf16 are 20 times further off."""
    hidden, weight, targets = inputs(torch.bfloat16)
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, temperature, entropy_grad=True, chunk_size=6)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = full(exact_hidden, exact_weight, targets, temperature)
    for found, exact in zip((log_probs, entropy), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5)
    (log_probs + 0.1 * entropy).sum().backward()
    (expected[0] + 0.1 * expected[1]).sum().backward()
    for leaf, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert leaf.grad.dtype == torch.bfloat16
        assert (leaf.grad.double() - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_no_tokens() -> None:
    hidden, weight, _ = inputs()
    log_probs, entropy = chunked_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_nothing_of_the_size_of_the_logits_is_kept_or_made() -> None:
    kept: list[int] = []
    made: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend([out.numel()] if isinstance(out, Tensor) else [])
            return out

    hidden, weight, targets = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t), Watch():
        chunked_log_probs(hidden, weight, targets, chunk_size=4)
    assert kept
    assert made
    assert max(kept) < TOKENS * VOCAB
    assert max(made) < TOKENS * VOCAB
