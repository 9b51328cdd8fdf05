"""``--custom-pg-loss-reducer-function-path``: how the policy losses of tokens become that of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slimelite.arguments import AlgorithmArgs
from slimelite.plugins import guarded, load_function
from slimelite.table import SampleTable

FLAG = "--custom-pg-loss-reducer-function-path"


def reducer_weights(args: AlgorithmArgs, table: SampleTable, mask: Tensor, steps: list[np.ndarray]) -> Tensor:
    """[N] float64 weight of every token of the table in the policy loss of its optimizer step.

    The plugin has slime's signature, with lists of one entry a response, and returns the function that reduces::

        fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (losses [tokens] -> 0-d tensor)

    slime calls it for each micro-batch, adds up what the reducers return, and divides by the rollouts of the step (by
    its trained tokens with ``--calculate-per-token-loss``). Here it is called once, with every response of the step,
    and divided alike, so that it may divide by what only the whole step knows; whatever it does is a weight of each
    token, which is found as its derivative.

    Raises:
        ValueError: what the reducer returns is not a finite weighted sum of the losses.
    """
    path = str(args.custom_pg_loss_reducer_function_path)
    per_token = args.loss_aggregation == "token"
    weights = torch.zeros(len(mask), dtype=torch.float64)
    for rows in steps:
        spans = [np.arange(table.response_offsets[row], table.response_offsets[row + 1]) for row in rows]
        tokens = torch.from_numpy(np.concatenate(spans))
        responses = table.response_lengths[rows].tolist()
        masks = list(mask[tokens].int().split(responses))
        make = load_function(path, FLAG)
        reduce = guarded(make(table.total_lengths[rows].tolist(), responses, masks, per_token), path, FLAG)
        divisor = mask[tokens].sum().item() if per_token else len(np.unique(table.rollout_id[rows]))
        weights[tokens] = _derivative(reduce, len(tokens), path) / max(divisor, 1)
    return torch.where(mask, weights, 0.0)


def _derivative(reduce: Callable[[Tensor], Tensor], size: int, path: str) -> Tensor:
    losses = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    total = reduce(losses)
    weights = torch.zeros_like(losses)
    if total.requires_grad:
        (weights,) = torch.autograd.grad(total, losses)
    if not torch.isclose(total.double(), (weights * losses).sum(), rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"{FLAG} {path}: what it returns must reduce losses to a finite weighted "
            f"sum of them; clamp divisors that can be 0 (got {total.item():g} for random losses, and their weighted "
            f"sum is {(weights * losses).sum().item():g})"
        )
    return weights
