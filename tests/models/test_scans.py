"""Each scan is its recurrence, token by token, from any state and with gradients to all of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from slimelite.models.scans import CHUNK, gated_delta_rule, selective_scan, state_space_duality
from slimelite.training.batch import Nodes, PackedSequences, laid_out
from slimelite.training.recurrent import _by_kernel, _duality_by_kernel, causal_convolution, over_tree

HEADS, KEYS, VALUES, CHANNELS, STATE, GROUPS = 4, 5, 3, 6, 4, 2
A_HEADS, A_CHANNELS = -torch.linspace(0.5, 2, HEADS).double(), -torch.linspace(0.1, 2, CHANNELS * STATE).double()
A_CHANNELS = A_CHANNELS.view(CHANNELS, STATE)


def naive_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    out = []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        seen = torch.einsum("nhkv,nhk->nhv", state, key[:, t])
        state = state + torch.einsum("nhk,nhv->nhkv", key[:, t], beta[:, t, :, None] * (value[:, t] - seen))
        out.append(torch.einsum("nhkv,nhk->nhv", state, query[:, t]) / KEYS**0.5)
    return torch.stack(out, 1), state


def naive_duality(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    b, c = (z.repeat_interleave(HEADS // GROUPS, 2) for z in (b, c))
    out = []
    for t in range(x.shape[1]):
        added = torch.einsum("nhs,nhp->nhsp", b[:, t], dt[:, t, :, None] * x[:, t])
        state = state * (dt[:, t] * A_HEADS).exp()[..., None, None] + added
        out.append(torch.einsum("nhsp,nhs->nhp", state, c[:, t]))
    return torch.stack(out, 1), state


def naive_selective(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = []
    for t in range(x.shape[1]):
        state = (dt[:, t, :, None] * A_CHANNELS).exp() * state + (dt * x)[:, t, :, None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(-1))
    return torch.stack(out, 1), state


def delta_inputs(n: int, length: int) -> list[Tensor]:
    q, k = torch.randn(2, n, length, HEADS, KEYS)
    value, (g, beta) = torch.randn(n, length, HEADS, VALUES), torch.randn(2, n, length, HEADS)
    return [q, k, value, -F.softplus(g), beta.sigmoid(), torch.randn(n, HEADS, KEYS, VALUES)]


def duality_inputs(n: int, length: int) -> list[Tensor]:
    b, c = torch.randn(2, n, length, GROUPS, STATE)
    dt = F.softplus(torch.randn(n, length, HEADS))
    return [torch.randn(n, length, HEADS, VALUES), dt, b, c, torch.randn(n, HEADS, STATE, VALUES)]


def selective_inputs(n: int, length: int) -> list[Tensor]:
    x, dt = torch.randn(2, n, length, CHANNELS)
    b, c = torch.randn(2, n, length, STATE)
    return [x, F.softplus(dt), b, c, torch.randn(n, CHANNELS, STATE)]


def duality(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return state_space_duality(x, dt, A_HEADS.to(x.dtype), b, c, state)


def selective(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    return selective_scan(x, dt, A_CHANNELS.to(x.dtype), b, c, state)


Scan = Callable[..., tuple[Tensor, Tensor]]
SCANS: dict[str, tuple[Scan, Scan, Callable[[int, int], list[Tensor]]]] = {
    "gated delta rule": (gated_delta_rule, naive_delta, delta_inputs),
    "state-space duality": (duality, naive_duality, duality_inputs),
    "selective scan": (selective, naive_selective, selective_inputs),
}


def results_and_gradients(scan: Scan, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    results = scan(*inputs)
    torch.manual_seed(1)
    loss = torch.stack([(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in results]).sum()
    return [*(x.detach() for x in results), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("length", [1, 7, CHUNK, 2 * CHUNK + 9])
@pytest.mark.parametrize("kind", SCANS)
def test_a_scan_is_its_recurrence(kind: str, length: int) -> None:
    scan, naive, make = SCANS[kind]
    torch.manual_seed(0)
    inputs = [x.double() for x in make(2, length)]
    for mine, right in zip(*(results_and_gradients(f, inputs) for f in (scan, naive)), strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", SCANS)
def test_padding_leaves_the_state(kind: str) -> None:
    scan, _, make = SCANS[kind]
    torch.manual_seed(0)
    *inputs, state = (x.double() for x in make(2, 21))
    for x in inputs:
        x[1, 13:] = 0
    last = scan(*inputs, state)[1][1:]
    torch.testing.assert_close(last, scan(*(x[1:, :13] for x in inputs), state[1:])[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", SCANS)
def test_half_precision_is_computed_in_fp32(kind: str) -> None:
    """A sum of 300 tokens in bf16 would be off by per cents; the result is rounded once."""
    scan, _, make = SCANS[kind]
    torch.manual_seed(0)
    *inputs, _ = (x.bfloat16() for x in make(1, 300))
    out, state = scan(*inputs, None)
    right, right_state = scan(*(x.float() for x in inputs), None)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, right_state, rtol=2e-2, atol=2e-2 * float(right_state.abs().max()))
    torch.testing.assert_close(out.float(), right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))


def tree() -> tuple[PackedSequences, list[list[int]]]:
    """Rows that share, one of them up to its end; and the positions of each row's tokens."""
    lengths, shared = np.array([90, 110, 100, 130, 7]), np.array([0, 90, 80, 95, 0])
    nodes, leaves = Nodes.of_rows(lengths, shared)
    rows = [nodes.positions(np.full(n, leaf), np.arange(n)).tolist() for leaf, n in zip(leaves, lengths, strict=True)]
    return PackedSequences(nodes), rows


def gradients(parts: list[Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    loss = torch.stack([(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in parts]).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("kind", SCANS)
def test_a_tree_is_its_rows(kind: str) -> None:
    """States are handed down level by level, and their gradients up: to inputs of nodes three levels above."""
    scan, _, make = SCANS[kind]
    sequences, rows = tree()
    assert sequences.nodes.levels.max() == 2
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in make(1, int(sequences.sizes.sum()))[:-1]]
    with laid_out(sequences):
        out = over_tree(scan, *inputs)[0]
    parts = [scan(*(x[:, row] for x in inputs), None)[0][0] for row in rows]
    mine = [out[row] for row in rows]
    torch.testing.assert_close(torch.cat(mine), torch.cat(parts), rtol=0, atol=1e-12)
    for a, b in zip(*(gradients(found, tuple(inputs)) for found in (mine, parts)), strict=True):
        assert (a - b).abs().max() <= 1e-11 * b.abs().max()


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_on_a_tree_is_that_on_its_rows(bias: bool) -> None:
    sequences, rows = tree()
    torch.manual_seed(0)
    conv = nn.Conv1d(3, 3, 4, groups=3, padding=3, bias=bias, dtype=torch.float64)
    x = torch.randn(1, 3, int(sequences.sizes.sum()), dtype=torch.float64, requires_grad=True)
    with laid_out(sequences):
        out = causal_convolution(conv, x)
    parts = [conv(x[..., row])[..., : len(row)] for row in rows]
    mine = [out[..., row] for row in rows]
    torch.testing.assert_close(torch.cat(mine, -1), torch.cat(parts, -1))
    for a, b in zip(*(gradients(found, (x, *conv.parameters())) for found in (mine, parts)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_kernel_that_a_layer_holds_is_called_as_transformers_calls_it() -> None:
    """fla's kernel, for GPUs, has the arguments of transformers' own function, which runs everywhere."""
    sequences, _ = tree()
    torch.manual_seed(0)
    inputs = delta_inputs(1, int(sequences.sizes.sum()))[:-1]
    with laid_out(sequences):
        mine = over_tree(gated_delta_rule, *inputs)
        theirs = over_tree(partial(_by_kernel, torch_chunk_gated_delta_rule), *inputs)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_kernel_of_mamba_is_called_with_its_arguments() -> None:
    """That of mamba-ssm, for GPUs, has states [n, heads, P, N]; a loop with its arguments runs everywhere."""

    def kernel(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, chunk_size: int, **states: Any
    ) -> tuple[Tensor, Tensor]:
        assert states.pop("return_final_states")
        first = states.pop("initial_states")
        assert (chunk_size, states) == (128, {})
        start = x.new_zeros(len(x), HEADS, STATE, VALUES) if first is None else first.mT
        result, last = naive_duality(x, dt, b, c, start)
        return result, last.mT

    sequences, _ = tree()
    torch.manual_seed(0)
    x, dt, b, c = (z.double() for z in duality_inputs(1, int(sequences.sizes.sum()))[:-1])
    with laid_out(sequences):
        mine = over_tree(duality, x, dt, b, c)
        theirs = over_tree(lambda x, dt, *rest: _duality_by_kernel(kernel, 128, x, dt, A_HEADS, *rest), x, dt, b, c)
    torch.testing.assert_close(mine, theirs)
