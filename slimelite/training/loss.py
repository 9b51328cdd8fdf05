"""The loss of a micro-batch, assembled from `slimelite.algorithms` according to the arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimelite.algorithms.corrections import (
    mis_weights,
    mismatch_metrics,
    opsm_keep,
    rejection_keep,
    veto_keep,
)
from slimelite.algorithms.losses import CORRECTIONS, LOSSES
from slimelite.algorithms.packed import Metrics, mean_metric, segment_sum, weighted_sum
from slimelite.algorithms.policy import kl_estimate, policy_loss
from slimelite.algorithms.supervised import dpo_loss, kto_loss, odds_ratio_loss, reward_model_loss, sft_loss
from slimelite.arguments import AlgorithmArgs, Args, CorrectionArgs, DebugArgs, PreferenceArgs
from slimelite.base.registry import function
from slimelite.slime.plugins import load_function
from slimelite.training.batch import MicroBatch
from slimelite.training.parallel import World


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a micro-batch.

    ``total``: 0-d, the micro-batch's part of the optimizer step's loss. ``shares``: name -> 0-d, the micro-batch's part
    of a metric that is a sum over the step, such as ``pg_loss``. ``metrics``: name -> the (sum, weight) pair of a mean.
    ``weights``: [R], the tokens' weights in the policy loss; None if only ``--loss-aggregation`` determines them.
    """

    total: Tensor
    shares: dict[str, Tensor]
    metrics: Metrics = field(default_factory=dict)
    weights: Tensor | None = None


def micro_batch_loss(args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    """The loss that ``--loss-type`` selects. ``log_probs`` and ``entropy`` are [R].

    Raises:
        ValueError: the token losses are not [R], or a loss has no gradient.
    """
    metrics: Metrics
    match args.loss_type:
        case "policy_loss":
            return policy_gradient(args, batch, log_probs, entropy)
        case "dpo_loss":
            return preferences(args, batch, log_probs, entropy)
        case "kto_loss":
            return judgements(args, batch, log_probs, entropy)
        case "orpo_loss":
            return odds_ratios(args, batch, log_probs, entropy)
        case "reward_model_loss":
            return scored_pairs(batch, log_probs)
        case "sft_loss" | "pretrain_loss":
            losses, metrics = sft_loss(log_probs, batch.mask), {}
        case "custom_loss":
            plugin = load_function(str(args.custom_loss_function_path), "--custom-loss-function-path")
            made = plugin(args, batch, log_probs, entropy)
            if isinstance(made, Loss):
                return _with_gradient(args, made)
            losses, metrics = made
        case name:
            assert args.loss.function is not None  # `problems` has checked it
            made = function(args.loss.function, LOSSES.option, name)(args, batch, log_probs, entropy)
            if isinstance(made, Loss):
                return _with_gradient(args, made)
            losses, metrics = made
    if losses.shape != log_probs.shape or not losses.requires_grad:
        raise ValueError(
            f"{_named(args)} must return a loss for each of the {len(log_probs)} tokens, computed from log_probs; it "
            f"returned shape {list(losses.shape)} {'with' if losses.requires_grad else 'without'} a gradient"
        )
    total = weighted_sum(losses, batch.weights)
    return Loss(total, {"loss": total}, {"entropy_loss": _weighted_mean(entropy, batch), **metrics})


def _named(args: AlgorithmArgs) -> str:
    path = args.custom_loss_function_path
    return f"--custom-loss-function-path {path}" if path else f"--loss-type {args.loss_type}"


def _with_gradient(args: AlgorithmArgs, loss: Loss) -> Loss:
    if not loss.total.requires_grad:
        raise ValueError(f"{_named(args)} must return a Loss whose total is computed from log_probs or entropy")
    return loss


def reads_entropy(args: AlgorithmArgs) -> bool:
    """Whether the entropies need a gradient: ``--entropy-coef`` is set, or a user's own loss may read them."""
    return args.entropy_coef != 0 or args.loss.function is not None or args.loss_type == "custom_loss"


def preferences(args: PreferenceArgs, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    """The loss of ``--loss-type dpo_loss``."""
    assert batch.pairs is not None
    chosen, rejected, weights = batch.pairs
    losses, metrics = dpo_loss(
        log_probs,
        batch.ref,
        *batch.where,
        chosen,
        rejected,
        beta=args.dpo_beta,
        kind=args.dpo_loss,
        label_smoothing=args.dpo_label_smoothing,
    )
    total = weighted_sum(losses, weights)
    return Loss(total, {"loss": total, "dpo_loss": total}, {"entropy_loss": _weighted_mean(entropy, batch), **metrics})


def judgements(args: PreferenceArgs, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    """The loss of ``--loss-type kto_loss``."""
    losses, metrics = kto_loss(
        log_probs,
        batch.ref,
        *batch.where,
        batch.column("reward") > 0,
        kl=batch.columns.mismatch_kl,
        beta=args.dpo_beta,
        desirable_weight=args.kto_desirable_weight,
        undesirable_weight=args.kto_undesirable_weight,
    )
    # the weight of a row is the sum of the weights of its tokens
    total = weighted_sum(losses, segment_sum(batch.weights, batch.segments, len(batch.rows)))
    return Loss(total, {"loss": total, "kto_loss": total}, {"entropy_loss": _weighted_mean(entropy, batch), **metrics})


def odds_ratios(args: PreferenceArgs, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    """The loss of ``--loss-type orpo_loss``. The likelihood term of ORPO is a mean over the tokens of the chosen
    replies."""
    assert batch.pairs is not None
    chosen, rejected, weights = batch.pairs
    losses, metrics = odds_ratio_loss(log_probs, *batch.where, chosen, rejected)
    likelihood, ratio = weighted_sum(sft_loss(log_probs, batch.mask), batch.weights), weighted_sum(losses, weights)
    total = likelihood + args.orpo_lambda * ratio
    shares = {"loss": total, "nll_loss": likelihood, "odds_ratio_loss": ratio}
    return Loss(total, shares, {"entropy_loss": _weighted_mean(entropy, batch), **metrics})


def scored_pairs(batch: MicroBatch, scores: Tensor) -> Loss:
    """The loss of ``--loss-type reward_model_loss``. ``scores``: [R], one score for each row, because a row has one
    response token."""
    assert batch.pairs is not None
    chosen, rejected, weights = batch.pairs
    losses, metrics = reward_model_loss(scores, chosen, rejected)
    total = weighted_sum(losses, weights)
    return Loss(total, {"loss": total, "reward_model_loss": total}, metrics)


def policy_gradient(args: CorrectionArgs, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    """The loss of ``--loss-type policy_loss``: the estimator's policy loss with correction, entropy and KL terms."""
    old = batch.rollout_log_probs if args.use_rollout_logprobs else batch.old
    losses, metrics = policy_loss(
        log_probs,
        old,
        batch.advantages,
        *batch.where,
        args.advantage_estimator,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
    )
    uncorrected = losses
    if args.correction != "none":
        losses, more = corrected(args, batch, losses)
        metrics |= more
    if args.use_opsm:
        keep, more = opsm_keep(log_probs, old, batch.advantages, *batch.where, delta=args.opsm_delta)
        losses, metrics = torch.where(keep, losses, 0.0), metrics | more
    pg_loss = weighted_sum(losses, batch.pg_weights)
    weights = None
    if args.use_opsm or args.custom_pg_loss_reducer_function_path or args.correction != "none":
        # a correction multiplies each token's loss by a factor. The derivative is this factor, even if the loss is 0
        (factors,) = torch.autograd.grad(losses.sum(), uncorrected, retain_graph=True, materialize_grads=True)
        weights = factors * batch.pg_weights
    metrics |= mismatch_metrics(
        *(batch.old, batch.rollout_log_probs, batch.mask), clip=args.tis_clip, clip_low=args.tis_clip_low
    )
    metrics["entropy_loss"] = _weighted_mean(entropy, batch)
    total = pg_loss
    if args.entropy_coef:
        total = total - args.entropy_coef * weighted_sum(entropy, batch.weights)
    if args.use_reference:
        unbiased = old if args.use_unbiased_kl else None
        kl = kl_estimate(log_probs, batch.ref, batch.mask, args.kl_loss_type, old=unbiased)
        metrics["kl_loss"] = _weighted_mean(kl, batch)
        if args.use_kl_loss and args.kl_loss_coef:
            total = total + args.kl_loss_coef * weighted_sum(kl, batch.weights)
    return Loss(total, {"loss": total, "pg_loss": pg_loss}, metrics, weights)


def _weighted_mean(values: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The weighted mean of ``values`` [R] as a (sum, weight) pair. The weights are the token weights of the loss."""
    return weighted_sum(values.detach(), batch.weights), batch.weights.sum()


def corrected(args: CorrectionArgs, batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Metrics]:
    """``losses`` [R] after ``--correction`` has weighted and dropped tokens, and the metrics of the correction."""
    common = (batch.old, batch.rollout_log_probs, *batch.where)
    match args.correction:
        case "tis" | "icepop" as name:
            mode = "clip" if name == "tis" else "mask"
            weights, metrics = mis_weights(
                *common, level="token", mode=mode, upper=args.tis_clip, lower=args.tis_clip_low
            )
            return losses * weights, metrics
        case "mis":
            return weigh_and_reject(args, batch, losses)
        case "custom":
            return correct_by_plugin(args, batch, losses)
        case name:
            own = CORRECTIONS[name].function
            assert own is not None  # `problems` has checked it
            result: tuple[Tensor, Metrics] = function(own, CORRECTIONS.option, name)(args, batch, losses, batch.old)
            return result


def weigh_and_reject(args: CorrectionArgs, batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Metrics]:
    """The correction ``--correction mis``: weight tokens, then drop tokens and responses."""
    common = (batch.old, batch.rollout_log_probs, *batch.where)
    metrics: Metrics = {}
    upper = args.mis_upper_bound
    if args.mis_mode != "none":
        weights, metrics = mis_weights(
            *common, level=args.mis_level, mode=args.mis_mode, upper=upper, lower=args.mis_lower_bound
        )
        losses = losses * weights
    if args.mis_rejection_level is not None:
        upper = upper if args.mis_rejection_upper_bound is None else args.mis_rejection_upper_bound
        keep, more = rejection_keep(
            *common, level=args.mis_rejection_level, upper=upper, lower=args.mis_rejection_lower_bound
        )
        losses, metrics = torch.where(keep, losses, 0.0), metrics | more
    if args.mis_veto_threshold is not None:
        keep, more = veto_keep(*common, threshold=args.mis_veto_threshold)
        losses, metrics = torch.where(keep, losses, 0.0), metrics | more
    return losses, metrics


def correct_by_plugin(args: CorrectionArgs, batch: MicroBatch, losses: Tensor) -> tuple[Tensor, Metrics]:
    """Correct ``losses`` with the function of ``--custom-tis-function-path``, which has slime's signature. Lists have
    one entry for each response, and ``pg_loss`` is [R] ::

        fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs)
            -> pg_loss [R], a mask of each response (0: dropped), {metric: [R]}

    A metric is logged as its mean over trained tokens.
    """
    assert args.custom_tis_function_path is not None
    if not len(batch.rows):
        return losses, {}
    lengths = torch.bincount(batch.segments, minlength=len(batch.rows)).tolist()
    losses, masks, values = load_function(args.custom_tis_function_path, "--custom-tis-function-path")(
        args,
        pg_loss=losses,
        train_log_probs=list(batch.old.split(lengths)),
        rollout_log_probs=list(batch.rollout_log_probs.split(lengths)),
        loss_masks=list(batch.mask.int().split(lengths)),
        total_lengths=batch.lengths,
        response_lengths=lengths,
    )
    kept = torch.cat(list(masks)).bool()
    metrics = {name: mean_metric(value, batch.mask) for name, value in values.items()}
    return torch.where(kept, losses, 0.0), metrics


# largest allowed mean |trainer − engine log-prob| on the first step in fp32 [nats]. Before the first weight update,
# only rounding may cause differences
EXACT_AGREEMENT = 1e-3


def check_first_step(
    args: Args, world: World, batch: MicroBatch, log_probs: Tensor, loss: Loss, *, initial: bool
) -> None:
    """Check one micro-batch of the first optimizer step (``--ci-test``). ``batch.old``: log-probs that an earlier pass
    computed with the same weights.

    ``initial``: the policy has its initial weights, so its KL to a reference from the same checkpoint is 0.

    Raises:
        AssertionError: (1) log-probs differ from ``batch.old``; (2) a token was clipped; (3) a reference from the same
            checkpoint has other log-probs; (4) the KL to this reference is not 0; (5) the log-probs of engine and
            trainer differ by more than `engine_threshold`.
    """
    exact = world.compute_dtype == torch.float32
    same = args.ref_load in (None, args.hf_checkpoint)
    if args.loss.compares and initial and same:
        drift, limit = _mean(mean_metric((log_probs - batch.ref).abs(), batch.mask)), 1e-6 if exact else 0.02
        assert drift < limit, f"--ci-test: mean |log-prob - ref| is {drift:.2e} on the first step, not below {limit}"
    if args.job.loss != "policy" or not batch.mask.any():
        return
    drift = _mean(mean_metric((log_probs - batch.old).abs(), batch.mask))
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
    """Check one micro-batch of the critic's first optimizer step. All tensors are [R]. ``old``: the values that an
    earlier pass computed with the same weights.

    Raises:
        AssertionError: the difference between ``values`` and ``old`` is larger than rounding errors.
    """
    drift = _mean(mean_metric((values - old).abs(), mask))
    limit = (1e-5 if world.compute_dtype == torch.float32 else 0.02) * (1 + _mean(mean_metric(old.abs(), mask)))
    assert drift < limit, f"--ci-test: mean |value - old value| is {drift:.2e} on the first step, not below {limit:.0e}"


def engine_threshold(args: DebugArgs, *, exact: bool) -> float:
    """The largest allowed mean |trainer − engine log-prob|, in nats: the value of
    ``--ci-train-rollout-logprob-abs-diff-threshold``.

    If ``exact`` is True (fp32, where only rounding differs), the result is at most ``EXACT_AGREEMENT``. This second
    limit does not apply to saved rollouts, because their engine may not have used fp32.
    """
    threshold = args.ci_train_rollout_logprob_abs_diff_threshold
    return min(threshold, EXACT_AGREEMENT) if exact and args.job.engines else threshold


def _mean(metric: tuple[Tensor, Tensor]) -> float:
    total, weight = metric
    return float(total / weight) if weight > 0 else 0.0
