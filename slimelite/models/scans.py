"""Functions that compute recurrent layers, such as Mamba's: one function for each kind of layer. Each function takes
the state before the first token as an argument.

Each function computes in fp32, or in float64 if the inputs are float64. If all inputs of a step are zero, the output of
the step is zero and the state does not change. So sequences may be padded with zeros at their ends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# number of tokens in a chunk, the same as in fla and transformers. The scores of a chunk are computed at once
CHUNK = 64


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S ← e^g·S; S ← S + k (β·(v - Sᵀk))ᵀ; o = Sᵀq (arXiv:2412.06464, equation 10), in chunks (section 3.3).

    Args:
        query, key: [n, L, heads, K]. This function normalizes both, and divides the query by √K.
        value: [n, L, heads, V]; g: [n, L, heads] log of the decay, at most 0; beta: [n, L, heads].
        state: [n, heads, K, V], the state before the first token; None: zero.

    Returns:
        [n, L, heads, V] in the dtype of ``query``, and the state after the last token, at least fp32.
    """
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    return _linear_attention(query * query.shape[-1] ** -0.5, key, value, g, state, beta)


def state_space_duality(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S ← e^(dt·a)·S + b (dt·x)ᵀ; y = Sᵀc: Mamba-2 (arXiv:2405.21060, section 6).

    Args:
        x: [n, L, heads, P]; dt: [n, L, heads] step sizes; a: [heads] negative.
        b, c: [n, L, groups, N]; a group is shared by ``heads / groups`` heads.
        state: [n, heads, N, P], the state before the first token; None: zero.

    Returns:
        [n, L, heads, P] in the dtype of ``x``, and the state after the last token, at least fp32.
    """
    return _linear_attention(c, b, x * dt[..., None], dt * a, state, None, x.dtype)


def decayed_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S ← e^g·S + k vᵀ; o = Sᵀq: lightning attention (arXiv:2401.04658). The arguments are those of
    `gated_delta_rule`."""
    return _linear_attention(query, key, value, g, state, None)


def _linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    state: Tensor | None,
    beta: Tensor | None,
    result: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with decay: queries read values by their keys, and each value decays after its step.

    With ``beta``, a value replaces the older value of the same key (the delta rule). ``query``, ``key``: [n, L, groups,
    K]. The other arguments are as in the functions above.
    """
    result = query.dtype if result is None else result
    dtype = torch.promote_types(query.dtype, torch.float32)
    (n, length, groups, width), (heads, depth) = query.shape, value.shape[2:]
    size = min(CHUNK, length)

    def chunks(x: Tensor) -> Tensor:
        """``x`` with the shape [n, groups, heads / groups or 1, chunks, size, ...]."""
        x = F.pad(x.to(dtype), (*(0, 0) * (x.ndim - 2), 0, -length % size))
        return x.unflatten(1, (-1, size)).unflatten(3, (groups, -1)).movedim((3, 4), (1, 2))

    q, k, v, decay = chunks(query), chunks(key), chunks(value), chunks(g).cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    scores = (q @ k.mT) * between
    if beta is not None:
        # each token's update depends on the updates of earlier tokens in the chunk: solve a triangular system
        own = chunks(beta)[..., None]
        right = torch.cat([v * own, k * own * decay.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular((k * own) @ k.mT * between, right, upper=False, unitriangular=True)
        v, erased = solved.split([depth, width], -1)
    since, until = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    if state is None:
        state = q.new_zeros(n, heads, width, depth)
    state = state.to(dtype).unflatten(1, (groups, -1))
    results = []
    for i in range(q.shape[3]):
        fresh = v[:, :, :, i] if beta is None else v[:, :, :, i] - erased[:, :, :, i] @ state
        results.append((q[:, :, :, i] @ state) * since[:, :, :, i] + scores[:, :, :, i] @ fresh)
        state = state * since[:, :, :, i, -1:] + k[:, :, :, i].mT @ (fresh * until[:, :, :, i])
    out = torch.cat(results, 3).flatten(1, 2).transpose(1, 2)[:, :length]
    return out.to(result), state.flatten(1, 2)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h ← e^(dt·a)·h + dt·x·b; y = h·c: Mamba-1 (arXiv:2312.00752, algorithm 2).

    Args:
        x, dt: [n, L, D]; a: [D, N] negative; b, c: [n, L, N]. With heads, the shapes are [n, L, heads, D],
            [heads, D, N] and [n, L, heads, N].
        state: [n, D, N] or [n, heads, D, N], the state before the first token; None: zero.

    Returns:
        a tensor with the shape and the dtype of ``x``, and the state after the last token, at least fp32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    steps, values, b_, c_ = (z.to(dtype).transpose(0, 1) for z in (dt, dt * x, b, c))
    if state is None:
        state = steps.new_zeros(*steps.shape[1:], a.shape[-1])
    decays = (steps[..., None] * a.to(dtype)).exp()
    states = _Recurrence.apply(decays, values[..., None] * b_[..., None, :], state.to(dtype))
    out = (states @ c_[..., None])[..., 0]
    return out.transpose(0, 1).to(x.dtype), states[-1]


def forgetting_average(x: Tensor, forgotten: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h ← (1 - f)·h + x; y = h: the recurrence of RG-LRU (arXiv:2402.19427, equation 4).

    Args:
        x: [n, L, D]; forgotten: [n, L, D] between 0 and 1.
        state: [n, D], the state before the first token; None: zero.

    Returns:
        [n, L, D] in the dtype of ``x``, and the state after the last token, at least fp32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    added, decays = x.to(dtype).transpose(0, 1), (1 - forgotten.to(dtype)).transpose(0, 1)
    first = torch.zeros_like(added[0]) if state is None else state.to(dtype)
    states = _Recurrence.apply(decays, added, first)
    return states.transpose(0, 1).to(x.dtype), states[-1]


def matrix_memory(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, weight: Tensor, state: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """C ← e^g·C + w k vᵀ; n ← e^g·n + w k; o = Cᵀq / (max(|nᵀq|, 1) + ε·max w): mLSTM (arXiv:2405.04517, section 2.3).

    ``max w`` is the largest weight so far. This maximum starts at 1, and decays at each step like the state.

    Args:
        query, key: [n, L, heads, K]; value: [n, L, heads, V].
        g: [n, L, heads] log of the decay, at most 0; weight: [n, L, heads], the weight w of each input.
        state: [n, heads, K + 1, V + 1], the state before the first token: C, with n in the last column and log max w in
            the last row.

    Returns:
        [n, L, heads, V] in the dtype of ``query``, and the state after the last token, at least fp32.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g, w = (x.to(dtype) for x in (query, key, value, g, weight))
    memory = None if state is None else state[:, :, :-1]
    inputs = torch.cat([v, torch.ones_like(v[..., :1])], -1) * w[..., None]
    read, memory = _linear_attention(q * q.shape[-1] ** -0.5, k, inputs, g, memory, None)
    with torch.no_grad():  # max w only scales ε, so it needs no gradient
        decay, first = g.cumsum(1), q.new_zeros(len(q), q.shape[2]) if state is None else state[:, :, -1, 0].to(dtype)
        largest = decay + torch.cat([first[:, None], w.log() - decay], 1).cummax(1).values[:, 1:]
    out = read[..., :-1] / (read[..., -1:].abs().clamp(min=1) + eps * largest.exp()[..., None])
    last = largest[:, -1, :, None, None].expand(-1, -1, 1, memory.shape[-1])
    return out.to(query.dtype), torch.cat([memory, last], 2)


class _Context(FunctionCtx):
    """The values that the forward pass saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]


class _Recurrence(torch.autograd.Function):
    """h[t] = a[t]·h[t-1] + u[t]. The inputs are a and u [L, ...], and h[-1] [...]."""

    @staticmethod
    def forward(ctx: _Context, a: Tensor, u: Tensor, first: Tensor) -> Tensor:
        out = torch.empty_like(u)
        before = first
        for decay, added, now in zip(a.unbind(), u.unbind(), out.unbind(), strict=True):
            before = torch.addcmul(added, decay, before, out=now)
        ctx.save_for_backward(a, first, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, first, out = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        parts, decays = grad.unbind(), a.unbind()
        for t in range(len(parts) - 1, 0, -1):
            parts[t - 1].addcmul_(decays[t], parts[t])
        of_decays = torch.empty_like(a)
        torch.mul(grad[1:], out[:-1], out=of_decays[1:])
        torch.mul(grad[0], first, out=of_decays[0])
        return of_decays, grad, decays[0] * parts[0]
