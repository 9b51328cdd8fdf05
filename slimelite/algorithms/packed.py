"""What the algorithms share on packed tensors: safe selection, safe exponentials, sums over rows.

Everywhere in this package ``[T]`` is the response tokens of some rows laid end to end, ``mask: [T] bool`` says
which of them are trained on, and ``segments: [T] int64`` is the row (0 … num_segments − 1) of each token; a row's
tokens are contiguous and in order, and a row may have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

# (sum, weight), both 0-d float64: means over micro-batches and ranks are sum of sums / sum of weights
Metric = tuple[Tensor, Tensor]
Metrics = dict[str, Metric]

MAX_LOG_RATIO = 20.0


def upcast(values: Tensor) -> Tensor:
    """float64 stays float64, everything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def select(values: Tensor, mask: Tensor) -> Tensor:
    """[T] ``values`` in at least fp32, 0 where ``mask`` is False.

    Selecting the *inputs* of a formula keeps an inf or NaN under the mask out of its value and of its gradient,
    where multiplying by the mask would do neither (0·inf = NaN).
    """
    return torch.where(mask, upcast(values), 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to [−20, 20]; the gradient beyond is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[num_segments] sum of ``values`` [T] over the tokens of each row; 0 for a row without tokens."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[num_segments] mean of ``values`` [T] over the unmasked tokens of each row; 0 for a row without any."""
    total = segment_sum(select(values, mask), segments, num_segments)
    count = segment_sum(mask.to(total.dtype), segments, num_segments)
    return total / count.clamp(min=1)


def mean_metric(values: Tensor, mask: Tensor) -> Metric:
    """The mean of ``values`` [T] over unmasked tokens, as a (sum, weight) pair."""
    return select(values.detach(), mask).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)
