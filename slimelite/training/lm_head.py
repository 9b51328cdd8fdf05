"""Log-probs and entropy of the LM head without ever holding [tokens, vocabulary] logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# logits held at a time: 64 MiB in fp32 on a CPU, 512 MiB on a GPU
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    entropy_grad: bool = False,
    chunk_size: int = -1,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden·weightᵀ / temperature) at the targets, and the entropy of each distribution.

    Logits live for one chunk of rows at a time; the backward pass computes them again. They are in fp32 also when
    ``hidden`` and ``weight`` are in bf16, which would round a logit of 20 by up to 0.06 (float64 stays float64).

    Args:
        hidden: [T, d]; ``weight``: [V, d], same dtype; ``targets``: [T] int64.
        temperature: logits are divided by it.
        entropy_grad: whether the entropy carries a gradient (it costs a little more memory and time).
        chunk_size: rows at a time; -1 chooses by vocabulary size and device.

    Returns:
        log-probs [T] and entropies [T] in nats, at least fp32.
    """
    if chunk_size <= 0:
        chunk_size = max(16, CHUNK_ELEMENTS[hidden.device.type] // len(weight))
    log_probs, entropy = _ChunkedLogProbs.apply(hidden, weight, targets, temperature, entropy_grad, chunk_size)
    return log_probs, entropy


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropy, log_z = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _logits(hidden[rows], weight, temperature)
            top = logits.amax(-1, keepdim=True)
            exps = (logits - top).exp_()
            z = exps.sum(-1)
            log_z[rows] = top[:, 0] + z.log()
            log_probs[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_z[rows]
            entropy[rows] = log_z[rows] - torch.linalg.vecdot(exps, logits) / z
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.temperature, ctx.chunk_size, ctx.entropy_grad = temperature, chunk_size, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # the chunks' contributions add up in fp32
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            log_p = _logits(hidden[rows], weight, ctx.temperature).sub_(log_z[rows, None])
            g = grad_log_probs[rows, None]
            p = log_p.exp()
            # d log p_y / d logit_j = [j = y] - p_j;  dH / d logit_j = -p_j (log p_j + H)
            if ctx.entropy_grad:
                factor = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(g)
            else:
                factor = g
            grad = p.mul_(factor).neg_().scatter_add_(1, targets[rows, None], g)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[rows])
            elif grad_weight is not None:
                # the product is as large as the sum: a part of the vocabulary at a time
                size = max(1, CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])
                for total, part in zip(grad_weight.split(size), grad.split(size, dim=1), strict=True):
                    total += _product(part.T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[rows, V] in at least fp32."""
    logits = _product(hidden, weight.T)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """``left`` @ ``right`` in at least fp32: what the tensor cores add up in fp32 is not rounded back to bf16."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)  # no other device has `out_dtype`
