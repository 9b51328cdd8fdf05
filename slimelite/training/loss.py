"""The loss of a micro-batch, assembled from `slimelite.algorithms` according to the arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimelite.algorithms.corrections import (
    mis_weights,
    mismatch_metrics,
    opsm_keep,
    rejection_keep,
    veto_keep,
)
from slimelite.algorithms.losses import CORRECTIONS, MODES
from slimelite.algorithms.packed import Metrics, mean_metric, weighted_sum
from slimelite.algorithms.policy import kl_estimate, policy_loss
from slimelite.algorithms.supervised import dpo_loss, sft_loss
from slimelite.arguments import Args, CorrectionArgs
from slimelite.plugins import load_function
from slimelite.sample import COLUMNS
from slimelite.table import SampleTable
from slimelite.training.batch import MicroBatch, Pairs
from slimelite.training.columns import TokenColumns, TokenValues
from slimelite.training.parallel import World


@dataclass(kw_only=True)
class LossInputs(TokenValues):
    """The R response tokens of a micro-batch, on its device.

    ``segments``: [R] int64 row of each token, among ``num_segments`` rows of ``total_lengths`` prompt and response
    tokens. ``old`` is None in a rollout's first step, where the current log-probs are the old ones too, unless a pass
    has computed them before; after it (``moved``) only with --use-rollout-logprobs. ``pairs``: the pairs for a loss
    that compares two replies, else None.
    """

    batch: MicroBatch
    table: SampleTable
    pairs: Pairs | None
    moved: bool = False

    @classmethod
    def of(cls, batch: MicroBatch, columns: TokenColumns) -> LossInputs:
        """The part of the columns that belongs to ``batch``."""
        values = {f.name: getattr(columns, f.name) for f in fields(TokenValues)}
        taken: dict[str, Any] = {name: value if value is None else batch.take(value) for name, value in values.items()}
        pairs = None if columns.pair_weights is None else Pairs.of(columns.table, columns.pair_weights, batch)
        return cls(batch=batch, table=columns.table, pairs=pairs, moved=columns.moved, **taken)

    @property
    def segments(self) -> Tensor:
        """[R] int64."""
        return self.batch.segments

    @property
    def num_segments(self) -> int:
        """Rows of the micro-batch."""
        return len(self.batch.rows)

    @property
    def total_lengths(self) -> list[int]:
        """Prompt and response tokens of each row."""
        return self.batch.lengths

    @property
    def where(self) -> tuple[Tensor, Tensor, int]:
        """Mask, segments and number of rows, which most functions of `slimelite.algorithms` take in this order."""
        return self.mask, self.segments, self.num_segments

    def column(self, name: str) -> Tensor:
        """A column of numbers of the table, such as one of your own (see `slimelite.sample.COLUMNS`): [R], or
        [num_segments] where a sample has one value.

        Raises:
            ValueError: the table lacks it.
        """
        column, values = COLUMNS[name], getattr(self.table, name)
        if values is None:
            raise ValueError(f"no sample of this rollout has {name}: fill sample.{name} where samples are made")
        if column.per == "token":
            return self.batch.take(torch.from_numpy(values))
        return torch.from_numpy(values[self.batch.rows]).to(self.batch.targets.device)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a micro-batch.

    ``total``: 0-d, its part of the loss of its optimizer step. ``shares``: by name, 0-d, its part of each metric that
    is a sum over the step, such as ``pg_loss``. ``metrics``: by name, the (sum, weight) pair of a mean.
    ``weights``: [R] of the tokens in the policy loss, if the aggregation alone does not say them.
    """

    total: Tensor
    shares: dict[str, Tensor]
    metrics: Metrics = field(default_factory=dict)
    weights: Tensor | None = None


def micro_batch_loss(args: Args, inputs: LossInputs, log_probs: Tensor, entropy: Tensor) -> Loss:
    """The loss by ``--loss-type``; ``log_probs`` and ``entropy`` are [R].

    Raises:
        ValueError: the losses of tokens are not [R], or have no gradient.
    """
    found = args.loss(args, inputs, log_probs, entropy)
    if isinstance(found, Loss):
        return found
    losses, metrics = found
    if losses.shape != log_probs.shape or not losses.requires_grad:
        whose = args.custom_loss_function_path or args.loss_type
        raise ValueError(
            f"--{'custom-loss-function-path' if args.custom_loss_function_path else 'loss-type'} {whose} must return a "
            f"loss for each of the {len(log_probs)} tokens of log_probs, computed from them, not {list(losses.shape)} "
            f"{'with' if losses.requires_grad else 'without'} a gradient"
        )
    total = weighted_sum(losses, inputs.weights)
    return Loss(total, {"loss": total}, {"entropy_loss": _weighted_mean(entropy, inputs), **metrics})


def fine_tuning(args: Args, inputs: LossInputs, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:  # noqa: ARG001
    """``--loss-type sft_loss``."""
    return sft_loss(log_probs, inputs.mask), {}


def custom(args: Args, inputs: LossInputs, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Metrics]:
    """``--loss-type custom_loss``: the plugin is called like any other function of ``LOSSES``."""
    plugin = load_function(str(args.custom_loss_function_path), "--custom-loss-function-path")
    found: tuple[Tensor, Metrics] = plugin(args, inputs, log_probs, entropy)
    return found


def preferences(args: Args, inputs: LossInputs, log_probs: Tensor, entropy: Tensor) -> Loss:
    """``--loss-type dpo_loss``."""
    assert inputs.ref is not None
    assert inputs.pairs is not None
    pairs = inputs.pairs
    losses, metrics = dpo_loss(
        log_probs,
        inputs.ref,
        *inputs.where,
        pairs.chosen,
        pairs.rejected,
        beta=args.dpo_beta,
        kind=args.dpo_loss,
        label_smoothing=args.dpo_label_smoothing,
    )
    total = weighted_sum(losses, pairs.weights)
    return Loss(total, {"loss": total, "dpo_loss": total}, {"entropy_loss": _weighted_mean(entropy, inputs), **metrics})


def policy_gradient(args: Args, inputs: LossInputs, log_probs: Tensor, entropy: Tensor) -> Loss:
    """``--loss-type policy_loss``: the estimator's policy loss with correction, entropy and KL terms."""
    own = log_probs.detach() if inputs.old is None and not inputs.moved else inputs.old
    old = inputs.rollout_log_probs if args.use_rollout_logprobs else own
    assert old is not None
    losses, metrics = policy_loss(
        log_probs,
        old,
        inputs.advantages,
        *inputs.where,
        args.advantage_estimator,
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
    )
    correction, uncorrected = CORRECTIONS[args.correction], losses
    if correction.function is not None:
        assert own is not None
        losses, found = correction(args, inputs, losses, own)
        metrics |= found
    if args.use_opsm:
        keep, found = opsm_keep(log_probs, old, inputs.advantages, *inputs.where, delta=args.opsm_delta)
        losses, metrics = torch.where(keep, losses, 0.0), metrics | found
    pg_loss = weighted_sum(losses, inputs.pg_weights)
    weights = None
    if args.use_opsm or args.custom_pg_loss_reducer_function_path or correction.function is not None:
        # corrections multiply the loss of a token: their factor is its derivative, also where that loss is 0
        (factors,) = torch.autograd.grad(losses.sum(), uncorrected, retain_graph=True, materialize_grads=True)
        weights = factors * inputs.pg_weights
    if own is not None:
        metrics |= mismatch_metrics(
            own, inputs.rollout_log_probs, inputs.mask, clip=args.tis_clip, clip_low=args.tis_clip_low
        )
    metrics["entropy_loss"] = _weighted_mean(entropy, inputs)
    total = pg_loss
    if args.entropy_coef:
        total = total - args.entropy_coef * weighted_sum(entropy, inputs.weights)
    if inputs.ref is not None:
        unbiased = old if args.use_unbiased_kl else None
        kl = kl_estimate(log_probs, inputs.ref, inputs.mask, args.kl_loss_type, old=unbiased)
        metrics["kl_loss"] = _weighted_mean(kl, inputs)
        if args.use_kl_loss and args.kl_loss_coef:
            total = total + args.kl_loss_coef * weighted_sum(kl, inputs.weights)
    return Loss(total, {"loss": total, "pg_loss": pg_loss}, metrics, weights)


def _weighted_mean(values: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The mean with the weights of the loss, over the tokens that were computed."""
    return weighted_sum(values.detach(), inputs.weights), inputs.weights.sum()


def _bounded(
    mode: str, args: CorrectionArgs, inputs: LossInputs, losses: Tensor, own: Tensor
) -> tuple[Tensor, Metrics]:
    """``--correction tis`` and ``icepop``: a weight for each token, by a ``mode`` of ``MODES``."""
    common = (own, inputs.rollout_log_probs, *inputs.where)
    weights, metrics = mis_weights(*common, level="token", mode=mode, upper=args.tis_clip, lower=args.tis_clip_low)
    return losses * weights, metrics


truncate, mask_outliers = partial(_bounded, "clip"), partial(_bounded, "mask")


def weigh_and_reject(args: CorrectionArgs, inputs: LossInputs, losses: Tensor, own: Tensor) -> tuple[Tensor, Metrics]:
    """``--correction mis``."""
    common = (own, inputs.rollout_log_probs, *inputs.where)
    metrics: Metrics = {}
    upper = args.mis_upper_bound
    if MODES[args.mis_mode].function is not None:
        weights, metrics = mis_weights(
            *common, level=args.mis_level, mode=args.mis_mode, upper=upper, lower=args.mis_lower_bound
        )
        losses = losses * weights
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


def correct_by_plugin(args: CorrectionArgs, inputs: LossInputs, losses: Tensor, own: Tensor) -> tuple[Tensor, Metrics]:
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


# largest mean |trainer − engine log-prob| on the first step in fp32 [nats]: no weight update explains more yet
EXACT_AGREEMENT = 1e-3


def check_first_step(
    args: Args, world: World, inputs: LossInputs, log_probs: Tensor, loss: Loss, *, initial: bool
) -> None:
    """Check one micro-batch of the first optimizer step (``--ci-test``); ``inputs.old`` came from a separate pass.

    ``initial``: the policy has its initial weights, so that its KL to a reference at the same checkpoint is 0.

    Raises:
        AssertionError: log-probs differ from ``inputs.old``, a token was clipped, log-probs or KL show a difference
            from an equal reference, or engine and trainer disagree by more than `engine_threshold`.
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
    """Check one micro-batch of the critic's first optimizer step; all [R], ``old`` came from a separate pass.

    Raises:
        AssertionError: ``values`` differ from ``old`` by more than rounding.
    """
    drift = _mean(mean_metric((values - old).abs(), mask))
    limit = (1e-5 if world.compute_dtype == torch.float32 else 0.02) * (1 + _mean(mean_metric(old.abs(), mask)))
    assert drift < limit, f"--ci-test: mean |value - old value| is {drift:.2e} on the first step, not below {limit:.0e}"


def engine_threshold(args: Args, *, exact: bool) -> float:
    """The largest allowed mean |trainer − engine log-prob|, in nats: the flag's value. If ``exact`` (fp32, where only
    rounding differs) at most ``EXACT_AGREEMENT``, except for saved rollouts, whose engine may not have used fp32.
    """
    threshold = args.ci_train_rollout_logprob_abs_diff_threshold
    return min(threshold, EXACT_AGREEMENT) if exact and not args.debug_train_only else threshold


def _mean(metric: tuple[Tensor, Tensor]) -> float:
    total, weight = metric
    return float(total / weight) if weight > 0 else 0.0
