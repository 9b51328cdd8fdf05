"""What must hold on the first step of a run (``--ci-test``), before any update could excuse a difference."""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.packed import mean_metric
from slimelite.arguments import Args
from slimelite.training.loss import Loss, LossInputs
from slimelite.training.parallel import World

EXACT_AGREEMENT = 1e-3


def check(args: Args, world: World, inputs: LossInputs, log_probs: Tensor, loss: Loss, *, initial: bool) -> None:
    """Check one micro-batch of the first optimizer step; ``inputs.old`` came from a pass of its own.

    ``initial``: the policy has its initial weights, so that its KL to a reference at the same checkpoint is 0.

    Raises:
        AssertionError: the policy differs from itself of a moment ago, something was clipped, the KL to an equal
            reference is not 0, or engine and trainer disagree by more than `engine_threshold`.
    """
    exact = world.compute_dtype == torch.float32
    same = args.ref_load in (None, args.hf_checkpoint)
    if args.loss.paired and initial and same and inputs.ref is not None:
        drift, limit = _mean(mean_metric((log_probs - inputs.ref).abs(), inputs.mask)), 1e-6 if exact else 0.02
        assert drift < limit, f"--ci-test: mean |log-prob - ref| is {drift:.2e} on the first step, not below {limit}"
    if not args.loss.policy or not inputs.mask.any():
        return
    assert inputs.old is not None
    drift = _mean(mean_metric((log_probs - inputs.old).abs(), inputs.mask))
    limit = 1e-6 if exact else 0.02
    assert drift < limit, f"--ci-test: mean |log-prob - old| is {drift:.2e} on the first step, not below {limit}"
    if exact and not args.use_rollout_logprobs:
        clipped = _mean(loss.metrics["pg_clipfrac"])
        assert clipped == 0, f"--ci-test: {clipped:.2%} of tokens were clipped on the first step"
    if exact and initial and same and "kl_loss" in loss.metrics and not args.ci_disable_kl_checker:
        kl = _mean(loss.metrics["kl_loss"])
        assert abs(kl) < 1e-8, f"--ci-test: the KL to the initial policy is {kl:.2e} on the first step, not below 1e-8"
    total, weight = loss.metrics["train_rollout_logprob_abs_diff"]
    if weight > 0:
        gap, threshold = float(total / weight), engine_threshold(args, exact=exact)
        assert gap <= threshold, f"--ci-test: trainer and engine log-probs differ by {gap:.2e}, more than {threshold}"


def check_values(world: World, values: Tensor, old: Tensor, mask: Tensor) -> None:
    """Check one micro-batch of the critic's first optimizer step; all [R], ``old`` came from a pass of its own.

    Raises:
        AssertionError: the critic differs from itself of a moment ago.
    """
    drift = _mean(mean_metric((values - old).abs(), mask))
    limit = (1e-5 if world.compute_dtype == torch.float32 else 0.02) * (1 + _mean(mean_metric(old.abs(), mask)))
    assert drift < limit, f"--ci-test: mean |value - old value| is {drift:.2e} on the first step, not below {limit:.0e}"


def engine_threshold(args: Args, *, exact: bool) -> float:
    """Largest mean |trainer − engine log-prob| that is allowed, in nats: the flag's; in fp32, where ``exact`` engines
    differ by rounding alone, at most ``EXACT_AGREEMENT``. Saved rollouts may be of an engine that was not exact.
    """
    threshold = args.ci_train_rollout_logprob_abs_diff_threshold
    return min(threshold, EXACT_AGREEMENT) if exact and not args.debug_train_only else threshold


def _mean(metric: tuple[Tensor, Tensor]) -> float:
    total, weight = metric
    return float(total / weight) if weight > 0 else 0.0
