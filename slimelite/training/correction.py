"""What ``--correction`` and ``--use-opsm`` make of the policy losses of a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimelite.algorithms.corrections import (
    icepop_weights,
    mis_weights,
    opsm_keep,
    rejection_keep,
    tis_weights,
    veto_keep,
)
from slimelite.algorithms.packed import Metrics, mean_metric
from slimelite.arguments import CorrectionArgs
from slimelite.plugins import load_function

if TYPE_CHECKING:
    from slimelite.training.loss import LossInputs


def correct(args: CorrectionArgs, inputs: LossInputs, losses: Tensor, own: Tensor) -> tuple[Tensor, Metrics]:
    """Losses [R], weighted or 0 by the ratio of ``own`` (trainer, before the rollout's first step) to the engine.

    Dropped tokens keep their place in the denominators of the reduction.
    """
    bounds = {"clip": args.tis_clip, "clip_low": args.tis_clip_low}
    match args.correction:
        case "none":
            return losses, {}
        case "tis":
            weights, metrics = tis_weights(own, inputs.rollout_log_probs, inputs.mask, **bounds)
        case "icepop":
            weights, metrics = icepop_weights(own, inputs.rollout_log_probs, inputs.mask, **bounds)
        case "mis":
            return _mis(args, inputs, losses, own)
        case "custom":
            return _custom(args, inputs, losses, own)
    return losses * weights, metrics


def drop_off_policy(
    args: CorrectionArgs, inputs: LossInputs, losses: Tensor, log_probs: Tensor, old: Tensor
) -> tuple[Tensor, Metrics]:
    """Losses [R], 0 in the responses that ``--use-opsm`` drops."""
    if not args.use_opsm:
        return losses, {}
    where = (inputs.mask, inputs.segments, inputs.num_segments)
    keep, metrics = opsm_keep(log_probs, old, inputs.advantages, *where, delta=args.opsm_delta)
    return torch.where(keep, losses, 0.0), metrics


def _mis(args: CorrectionArgs, inputs: LossInputs, losses: Tensor, own: Tensor) -> tuple[Tensor, Metrics]:
    common = (own, inputs.rollout_log_probs, inputs.mask, inputs.segments, inputs.num_segments)
    metrics: Metrics = {}
    upper = args.mis_upper_bound
    if args.mis_mode != "none":
        weights, found = mis_weights(
            *common, level=args.mis_level, mode=args.mis_mode, upper=upper, lower=args.mis_lower_bound
        )
        losses, metrics = losses * weights, metrics | found
    if args.mis_rejection_level is not None:
        upper = upper if args.mis_rejection_upper_bound is None else args.mis_rejection_upper_bound
        keep, found = rejection_keep(
            *common, level=args.mis_rejection_level, upper=upper, lower=args.mis_rejection_lower_bound
        )
        losses, metrics = torch.where(keep, losses, 0.0), metrics | found
    if args.mis_veto_threshold is not None:
        keep, found = veto_keep(*common, threshold=args.mis_veto_threshold)
        losses, metrics = torch.where(keep, losses, 0.0), metrics | found
    return losses, metrics


def _custom(args: CorrectionArgs, inputs: LossInputs, losses: Tensor, own: Tensor) -> tuple[Tensor, Metrics]:
    """``--custom-tis-function-path``, slime's contract; lists have an entry a response, ``pg_loss`` is [R] ::

        fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs)
            -> pg_loss [R], a mask of each response (0: dropped), {metric: [R]}

    A metric is logged as its mean over trained tokens.
    """
    assert args.custom_tis_function_path is not None
    if not inputs.num_segments:
        return losses, {}
    lengths = torch.bincount(inputs.segments, minlength=inputs.num_segments).tolist()
    losses, masks, values = load_function(args.custom_tis_function_path, "--custom-tis-function-path")(
        args,
        pg_loss=losses,
        train_log_probs=list(own.split(lengths)),
        rollout_log_probs=list(inputs.rollout_log_probs.split(lengths)),
        loss_masks=list(inputs.mask.int().split(lengths)),
        total_lengths=inputs.total_lengths,
        response_lengths=lengths,
    )
    kept = torch.cat(list(masks)).bool()
    metrics = {name: mean_metric(value, inputs.mask) for name, value in values.items()}
    return torch.where(kept, losses, 0.0), metrics
