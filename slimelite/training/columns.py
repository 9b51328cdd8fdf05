"""Data that the loss needs for each response token of a rollout: masks, log-probs, advantages, weights.

Every rank has the columns of the whole rollout (a few bytes for each token). So all ranks compute the same whitened
advantages, and agree on the rows that have no gradient. This happens before rows are distributed to ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from slimelite.algorithms import advantages as adv
from slimelite.algorithms.corrections import level_ratio, mis_weights
from slimelite.algorithms.packed import row_weights, segment_sum, select
from slimelite.algorithms.policy import kl_estimate
from slimelite.arguments import AlgorithmArgs, Args, CorrectionArgs, DistillationArgs
from slimelite.base.guard import guarded
from slimelite.engines.params import SamplingParams
from slimelite.samples.sample import COLUMNS
from slimelite.samples.table import SampleTable, TokenStats
from slimelite.slime.plugins import load_function

# in a step without a gradient, about this many rows are computed, to measure the entropy and the mismatch
MEASURED_ROWS = 8
# number of tokens whose means are computed at a time, to limit the memory of temporary arrays
TOKENS_AT_ONCE = 2**18
# passes over rows before the first optimizer step -> the columns that the pass fills
PASSES = {
    "ref_log_probs": ("ref",),
    "teacher_log_probs": ("teacher",),
    "values": ("values",),
    "token_stats": ("other_log_probs", "other_entropy"),
    "log_probs": ("old", "entropy"),
}


@dataclass(kw_only=True)
class TokenColumns:
    """The data of the N response tokens of a table with n rows, on the CPU. Columns are [N].

    ``steps``: the rows of each optimizer step. ``mask``: bool, True for trained tokens. ``segments``: int64, the row of
    each token. ``rollout_log_probs``: the engine's log-probs; NaN for tokens without them. ``weights``: the weight of
    each token in the loss of its optimizer step. ``pg_weights``: the weight of each token in the policy loss.
    ``pair_weights``: [n], the result of `pair_weights`; None if the loss does not compare pairs. ``of_tokens``: whether
    a token's advantage may differ from its row's advantage in the table. ``returns``: the estimator's returns before
    distillation and whitening. A critic learns them. ``loss_weights``: see `sample.COLUMNS`. ``mismatch_kl``: the KL
    for the current optimizer step, see `supervised.kto_loss`.

    Forward passes fill the other columns. The passes use the weights from before the rollout's first optimizer step.
    The other columns are NaN for tokens that were not computed. ``old``, ``entropy``: log-probs and entropies of the
    policy. ``ref``, ``teacher``: log-probs of the reference model and of the teacher. ``values``: the critic's values.
    ``other_log_probs``, ``other_entropy``: log-probs and entropies of the policy, in rows that only `token_stats`
    reads.
    """

    table: SampleTable
    steps: list[np.ndarray]
    mask: Tensor
    segments: Tensor
    rollout_log_probs: Tensor
    weights: Tensor
    pg_weights: Tensor
    advantages: Tensor
    old: Tensor = field(init=False)
    entropy: Tensor = field(init=False)
    ref: Tensor = field(init=False)
    teacher: Tensor = field(init=False)
    values: Tensor = field(init=False)
    other_log_probs: Tensor = field(init=False)
    other_entropy: Tensor = field(init=False)
    of_tokens: bool = False
    returns: Tensor | None = None
    pair_weights: np.ndarray | None = None
    loss_weights: Tensor | None = None
    mismatch_kl: float = 0.0

    @classmethod
    def from_table(cls, table: SampleTable, steps: list[np.ndarray] | None = None) -> TokenColumns:
        """Build the columns that do not need a model. If ``steps`` is None, all rows are one optimizer step."""
        rows = np.repeat(np.arange(len(table)), table.response_lengths)
        mask = table.loss_mask & ~table.removed[rows] if table.removed.any() else table.loss_mask.copy()
        columns = cls(
            table=table,
            steps=[np.arange(len(table))] if steps is None else steps,
            mask=torch.from_numpy(mask),
            segments=torch.from_numpy(rows),
            rollout_log_probs=torch.tensor(table.rollout_log_probs),
            weights=torch.zeros(len(rows), dtype=torch.float64),
            pg_weights=torch.zeros(len(rows), dtype=torch.float64),
            advantages=torch.zeros(len(rows)),
        )
        for name in chain(*PASSES.values()):  # expand: only one number is in memory
            setattr(columns, name, torch.tensor(torch.nan).expand(len(rows)))
        return columns

    def fill(self, name: str, outputs: Iterable[Tensor]) -> None:
        """Store the results of the pass ``name``: [N] for each column of the pass, with NaN for tokens that were not
        computed."""
        for column, values in zip(PASSES[name], outputs, strict=False):  # the entropy of a reference is not used
            setattr(self, column, torch.where(values.isnan(), getattr(self, column), values))

    def set_weights(self, args: Args) -> None:
        """Set the weights of all tokens and pairs. A weight depends on all rows of the optimizer step."""
        table, per_row = self.table, torch.zeros(len(self.table), dtype=torch.float64)
        counts, mode = table.mask_sums, args.loss_aggregation
        if args.loss.chosen:
            counts, mode = counts.copy(), "token"
            counts[pairs_of(table, np.arange(len(table)))[1]] = 0
        for rows in self.steps:
            per_row[rows] = row_weights(
                torch.from_numpy(counts[rows]),
                torch.from_numpy(table.rollout_id[rows]),
                mode,
                max_response_len=args.rollout_max_response_len,
            ) * torch.from_numpy(counts[rows] > 0)
        # numpy and in place, to save memory: in a long rollout, such a column has gigabytes
        weights = np.repeat(per_row.numpy(), table.response_lengths)
        weights *= self.mask.numpy()
        self.weights = self.pg_weights = torch.from_numpy(weights)
        if args.custom_pg_loss_reducer_function_path:
            self.pg_weights = reducer_weights(args, self)
        self.pair_weights = pair_weights(table, self.steps, args.loss_type) if args.job.loss == "paired" else None

    def normalize_correction(self, args: CorrectionArgs) -> None:
        """``--mis-batch-normalize``: divide policy-loss weights by the mean correction weight of their optimizer step.

        The mean is computed as in slime. A token to which the mode ``mask`` gives the weight 0 enters the mean with its
        ratio. A token that a rejection or a veto drops still enters the mean with its weight. At the levels
        ``sequence`` and ``geometric``, the mean is over responses with a trained token, not over tokens. The column
        ``old`` must be filled for every trained row.
        """
        tokens = (self.old, self.rollout_log_probs, self.mask, self.segments, len(self.table))
        level, upper, lower = args.mis_level, args.mis_upper_bound, args.mis_lower_bound
        weights, _ = mis_weights(*tokens, level=level, mode=args.mis_mode, upper=upper, lower=lower)
        weights = torch.where(weights > 0, weights, select(level_ratio(*tokens, level), self.mask))
        counts = self.mask.double()
        if args.mis_level != "token":
            counts = (
                counts / torch.bincount(self.segments[self.mask], minlength=len(self.table)).clamp(min=1)[self.segments]
            )
        factors = torch.ones(len(self.table), dtype=torch.float64)
        for rows in self.steps:
            of_step = counts * torch.isin(self.segments, torch.from_numpy(rows))
            mean = (weights * of_step).sum() / of_step.sum().clamp(min=1e-8)
            # if all weights of a step are 0, the step has no gradient with any factor
            factors[rows] = 1 / mean if mean > 1e-8 else 1.0
        self.pg_weights = self.pg_weights * factors[self.segments]

    def spread_advantages(self, args: DistillationArgs) -> None:
        """Set the advantage of every token.

        `RolloutManager` has compared the rollouts of each group, and has set an advantage for each row. From this
        advantage, the estimator of ``--advantage-estimator`` (docs/algorithms.md) computes an advantage for each token.
        If ``--custom-advantage-function-path`` is set, the plugin's function ``fn(args, table, columns)`` sets
        ``columns.advantages`` instead. With a critic, the plugin's function also sets ``columns.returns``.

        Raises:
            ValueError: an advantage or return of a trained token is not finite.
        """
        if args.custom_advantage_function_path:
            load_function(args.custom_advantage_function_path, "--custom-advantage-function-path")(
                args, self.table, self
            )
        else:
            per_row = torch.tensor(self.table.advantage, dtype=torch.float32)
            if not per_row.isfinite().all():
                # before a recurrence copies such numbers to other tokens
                self._check_finite(args, advantages=per_row[self.segments])
            kl = torch.zeros(len(self.mask))
            if args.kl_coef:
                kl = kl_estimate(self.old, self.ref, self.mask, args.kl_reward_type)
            groups, rollouts = self.table.compared()
            turns = self.table.turn_rewards if args.estimator.group is None else None
            tokens = adv.RolloutTokens(
                *(per_row, kl, self.mask, self.segments, self.values),
                turn_rewards=None if turns is None else torch.tensor(turns),
                groups=torch.from_numpy(groups),
                rollouts=torch.from_numpy(rollouts),
                kl_coef=args.kl_coef,
                gamma=args.gamma,
                lambd=args.lambd,
            )
            self.advantages, self.returns = adv.token_advantages(args.advantage_estimator, tokens)
        if args.use_opd:
            self.advantages = adv.add_distillation(
                self.advantages, self.old, self.teacher, self.mask, opd_kl_coef=args.opd_kl_coef
            )
        returns = None if self.returns is self.advantages else self.returns
        self._check_finite(args, advantages=self.advantages, returns=returns)
        if args.normalize_advantages:
            self.advantages = adv.whiten(self.advantages, self.mask)
        of_tokens = args.estimator.token or args.custom_advantage_function_path
        self.of_tokens = bool(of_tokens or args.normalize_advantages or args.use_opd)

    def _check_finite(self, args: DistillationArgs, **columns: Tensor | None) -> None:
        source = "rewards and log-probs"
        if args.custom_advantage_function_path:
            source = f"the columns that --custom-advantage-function-path {args.custom_advantage_function_path} sets"
        elif args.custom_reward_post_process_path:
            source = f"the result of --custom-reward-post-process-path {args.custom_reward_post_process_path}"
        for name, column in columns.items():
            if column is not None:
                self._refuse(~column.isfinite(), f"{name} that are not finite; check {source}")

    def rows_to_compute(self, args: CorrectionArgs, *, checked: bool) -> np.ndarray:
        """[n] bool: the rows that need a forward pass, because they can have a gradient.

        If a step has no row with a gradient, a few trained rows are computed anyway, to measure the entropy and the
        mismatch with the engine. ``checked``: whether --ci-test checks this rollout. If it is True, every trained row
        is computed.
        """
        trained = self.table.mask_sums > 0
        if checked or normalizes(args):
            return trained
        computed = self.rows_with_gradient(args)
        for rows in self.steps:
            if not computed[rows].any():
                candidates = rows[trained[rows]]
                computed[candidates[:: math.ceil(len(candidates) / MEASURED_ROWS) or 1]] = True
        return computed

    def known_rows(self) -> np.ndarray:
        """[n] bool: the rows whose log-probs in ``old`` are known."""
        return self._rows_with(~self.old.isnan())

    def rows_with_gradient(self, args: AlgorithmArgs) -> np.ndarray:
        """[n] bool: the rows whose loss can have a gradient. Other rows do not need a forward pass.

        A fully masked row has no gradient. If the loss is a policy loss without KL and entropy terms, a row whose
        advantages are all 0 has no gradient either.
        """
        counts = self.mask
        only_advantages = args.job.loss == "policy" and not args.entropy_coef
        if only_advantages and not (args.use_kl_loss and args.kl_loss_coef):
            counts = counts & (self.advantages != 0)
        return self._rows_with(counts)

    def check(self, args: Args, vocab_size: int) -> None:
        """Check that the loss can use the table.

        Raises:
            ValueError: a token is outside the model's vocabulary, or a trained token has no value in a column that the
                loss reads, such as the log-probs of the engine or of a teacher.
        """
        table = self.table
        largest = max(table.prompt_tokens.max(initial=0), table.response_tokens.max(initial=0))
        if largest >= vocab_size:
            raise ValueError(
                f"token {largest} is outside the model's vocabulary of {vocab_size} tokens; --tokenizer belongs to "
                "another model: name the tokenizer of this model"
            )
        if args.use_opd and args.opd_type == "sglang":
            self._refuse(
                self.teacher.isnan(),
                "no teacher log-probs, which --opd-type sglang needs: set --rm-url to the teacher's address, or set "
                "sample.teacher_log_probs in the function that creates the samples",
            )
        self._check_kept(args, vocab_size)
        for name in args.loss.columns:
            values = getattr(table, name)
            absent = np.ones(len(table), bool) if values is None else np.isnan(values)
            if values is None or COLUMNS[name].per == "sample":
                absent = absent[self.segments.numpy()]
            self._refuse(
                torch.from_numpy(absent),
                f"no {name}, which --loss-type {args.loss_type} reads: set sample.{name} in the function that creates "
                "the samples",
            )
        if args.job.loss == "policy" and (args.use_rollout_logprobs or args.correction != "none"):
            self._refuse(
                self.rollout_log_probs.isnan(),
                "no engine log-probs, which --use-rollout-logprobs and --correction need; leave out these flags, or "
                "generate the samples with log-probs",
            )

    def _check_kept(self, args: Args, vocab_size: int) -> None:
        """Check the kept ids, over which log-probs are renormalised. A sampled token must be one of its kept ids."""
        table, truncated = self.table, SamplingParams.of(args, "rollout").truncation()
        if truncated.get("top_k", 0) >= vocab_size:  # then top_k does not exclude tokens
            del truncated["top_k"]
        counts = np.zeros(len(self.mask), np.int32) if table.kept_counts is None else table.kept_counts
        if truncated and args.job.loss == "policy" and not args.allow_truncated_sampling:
            flags = " and ".join(f"--rollout-{name.replace('_', '-')}" for name in truncated)
            self._refuse(
                torch.from_numpy(counts == 0),
                f"tokens whose kept ids are missing; with {flags}, these ids are needed to renormalise log-probs. A "
                "generate function must set return_sampling_mask in the body of /generate, and pass the answer's "
                "meta_info to sample.append_response_tokens; or add --allow-truncated-sampling, to accept log-probs "
                "over the whole vocabulary",
            )
        if table.kept_ids is None or not len(table.kept_ids):
            return
        outside = (table.kept_ids < 0) | (table.kept_ids >= vocab_size)
        among = table.kept_ids == np.repeat(table.response_tokens, counts)
        some, known = counts > 0, counts == 0
        starts = (np.cumsum(counts, dtype=np.int64) - counts)[some]
        known[some] = np.logical_or.reduceat(among, starts) & ~np.logical_or.reduceat(outside, starts)
        what = "sampled tokens that are not among their kept ids (output_token_sampling_mask of the engine)"
        self._refuse(torch.from_numpy(~known), what)

    def means(self, args: DistillationArgs, computed: np.ndarray) -> dict[str, float]:
        """The metrics ``rollout/*``, one for each column. A column is first averaged over the trained tokens of each
        row. The metric is the mean of these row means, without those that are NaN.

        ``computed``: [n] bool, the rows that the optimizer steps compute. If the policy's log-probs are unknown in
        one of them, the metrics of these log-probs are left out.
        """
        columns = {
            "returns": self.returns,
            "values": self.values,
            "ref_log_probs": self.ref,
            "teacher_log_probs": self.teacher,
        }
        if args.job.sampled:
            columns |= {"advantages": self.advantages, "rollout_log_probs": self.rollout_log_probs}
        if self.known_rows()[computed].all() and not args.loss.scores:
            columns |= {"log_probs": self.old, "entropy": self.entropy}
            if args.use_reference:
                columns["kl"] = kl_estimate(self.old, self.ref, self.mask, "k1")
            if args.use_opd:
                columns["opd_reverse_kl"] = self.old - self.teacher
        counts = torch.from_numpy(self.table.mask_sums)
        trained, counts = counts > 0, counts.clamp(min=1)
        means = {}
        for name, column in columns.items():
            mean = math.nan if column is None else float(self._row_means(column, counts)[trained].nanmean())
            if not math.isnan(mean):
                means[f"rollout/{name}"] = mean
        return means

    def trained(self) -> dict[str, np.ndarray]:
        """The columns that training has computed for the table, by name; each [N] float32."""
        columns = {"advantages": self.advantages.float().numpy()} if self.of_tokens else {}
        if self.loss_weights is not None:
            columns["loss_weights"] = self.loss_weights.float().numpy()
        return columns

    def token_stats(self) -> TokenStats:
        """The policy's log-probs and entropies before the rollout's first optimizer step; NaN for rows that were not
        computed."""
        log_probs = torch.where(self.old.isnan(), self.other_log_probs, self.old).float()
        entropy = torch.where(self.entropy.isnan(), self.other_entropy, self.entropy).float()
        return TokenStats(self.table.sample_id, self.table.response_offsets, log_probs.numpy(), entropy.numpy())

    def _refuse(self, tokens: Tensor, what: str) -> None:
        """Raise ValueError if ``tokens`` [N] bool is True for a trained token. ``what``: the part of the message after
        "samples … have"."""
        rows = self.segments[self.mask & tokens].unique().numpy()
        if len(rows):
            raise ValueError(f"samples {self.table.sample_id[rows].tolist()[:8]} have {what}")

    def _row_means(self, column: Tensor, counts: Tensor) -> Tensor:
        """[n] the mean of ``column`` [N] over the trained tokens of each row. ``counts``: [n], their number. The rows
        are processed in parts."""
        ends = self.table.response_offsets
        parts, begin = [], 0
        while begin < len(self.table):
            end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + TOKENS_AT_ONCE, "right")) - 1)
            tokens = slice(int(ends[begin]), int(ends[end]))
            parts.append(
                segment_sum(select(column[tokens], self.mask[tokens]), self.segments[tokens] - begin, end - begin)
            )
            begin = end
        return torch.cat([*parts, column[:0]]) / counts

    def _rows_with(self, tokens: Tensor) -> np.ndarray:
        """[n] bool: the rows for which ``tokens`` [N] bool is True for at least one token."""
        has_one, some = np.zeros(len(self.table), bool), self.table.response_lengths > 0
        if some.any():
            has_one[some] = np.logical_or.reduceat(tokens.numpy(), self.table.response_offsets[:-1][some])
        return has_one


def passes(
    args: Args, columns: TokenColumns, computed: np.ndarray | None = None, *, checked: bool = False
) -> dict[str, np.ndarray]:
    """Name of a pass in ``PASSES`` -> the rows that need this separate forward pass before the first optimizer step.

    Args:
        computed: [n] bool, the rows that the steps will compute. They depend on the advantages. None: the advantages
            are not known yet; the result has the passes that advantages and reference terms need.
        checked: whether --ci-test checks this rollout. The check needs the log-probs of a separate pass.
    """
    table = columns.table
    if computed is None:
        reads_old = args.kl_coef != 0 or args.use_opd or args.custom_advantage_function_path
        needed = {
            "ref_log_probs": args.use_reference,
            "teacher_log_probs": args.use_opd and args.opd_type == "trainer",
            "values": args.use_critic,
            "log_probs": reads_old and args.job.sampled,
        }
        return {name: np.flatnonzero(table.mask_sums) for name, need in needed.items() if need}
    first, later = np.zeros(len(table), bool), np.zeros(len(table), bool)
    first[columns.steps[0]] = True
    begin = pass_begins(args, len(columns.steps), checked)
    if begin is not None:
        later[np.concatenate(columns.steps[begin:])] = True
    unknown = ~columns.known_rows()
    own_pass = {"log_probs": later & computed & (unknown | checked)}
    if args.token_stats == "all":
        unread = ~(computed & (first | later)) & (np.diff(table.prompt_offsets) > 0) & (table.response_lengths > 0)
        own_pass["token_stats"] = unknown & unread
    return {name: np.flatnonzero(rows) for name, rows in own_pass.items() if rows.any()}


def pass_begins(args: CorrectionArgs, num_steps: int, checked: bool) -> int | None:
    """The first step whose rows need a separate pass for the old log-probs; None: no step needs such a pass.

    Old log-probs are computed with the weights from before the rollout's first optimizer step. The first step still has
    these weights. So its training pass also computes the old log-probs, and all ratios are exactly 1. (In a separate
    pass, other micro-batches would cause other rounding errors.) Later steps need a separate pass. The exception
    is --use-rollout-logprobs without a correction: then old log-probs only serve to measure the mismatch in the first
    step.
    """
    if not args.job.sampled:
        return None
    if args.job.loss != "policy" or checked or normalizes(args):
        return 0
    spared = args.use_rollout_logprobs and args.correction == "none"
    return None if num_steps == 1 or spared else 1


def normalizes(args: CorrectionArgs) -> bool:
    """Whether the correction divides by a mean over all trained rows (``--mis-batch-normalize``)."""
    return args.correction == "mis" and args.mis_batch_normalize


FLAG = "--custom-pg-loss-reducer-function-path"


def reducer_weights(args: AlgorithmArgs, columns: TokenColumns) -> Tensor:
    """[N] float64: the weight of every token of the table in the policy loss of its optimizer step.

    The plugin has slime's signature. The lists in its arguments have one entry for each response. The plugin returns
    the *reducer*, a function of the token losses::

        fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (losses [tokens] -> 0-d tensor)

    slime calls the plugin for each micro-batch, and adds the results of the reducers. Then slime divides the sum by the
    number of the step's rollouts (with ``--calculate-per-token-loss``: of its trained tokens). slimelite divides by the
    same number, but calls the plugin once with all responses of the step. So the reducer may divide by totals of the
    whole step. The reducer must compute a weighted sum of the losses: its derivative with respect to a token's loss
    becomes the weight of the token.

    Raises:
        ValueError: the reducer's result is not a finite weighted sum of the losses.
    """
    path = str(args.custom_pg_loss_reducer_function_path)
    per_token = args.loss_aggregation == "token"
    table, mask = columns.table, columns.mask
    weights = torch.zeros(len(mask), dtype=torch.float64)
    for rows in columns.steps:
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
            f"{FLAG} {path}: the function that it returns must compute a finite weighted sum of the losses; clamp "
            f"divisors that can be 0 (for random losses it returned {total.item():g}, but their weighted sum is "
            f"{(weights * losses).sum().item():g})"
        )
    return weights


def pair_weights(table: SampleTable, steps: list[np.ndarray], loss: str) -> np.ndarray:
    """[n] the weight of each row's pair: 1 / number of pairs in its optimizer step. This number includes pairs that are
    not trained on.

    A pair is the two rows of a unit. The row with the higher reward is the chosen row.

    Raises:
        ValueError: a unit does not have exactly two rows; its two rewards are equal; or only one of its rows has
            trained tokens.
    """
    units, sizes = np.unique(table.unit_id, return_counts=True)
    if (sizes != 2).any():
        raise ValueError(
            f"--loss-type {loss} trains on pairs: units {units[sizes != 2].tolist()[:8]} do not have two rows; the "
            "rollout function must set the same unit_id for the two samples of a pair"
        )
    chosen, rejected = pairs_of(table, np.arange(len(table)))
    trained = table.mask_sums > 0
    wrong = ~(table.reward[chosen] > table.reward[rejected]) | (trained[chosen] != trained[rejected])
    if wrong.any():
        raise ValueError(
            f"--loss-type {loss} trains on pairs: in units {units[wrong].tolist()[:8]} the two rewards are "
            "equal, or only one row has trained tokens; set remove_sample for both samples"
        )
    weights = np.zeros(len(table))
    for rows in steps:
        weights[rows] = 2 / len(rows)
    return weights


def pairs_of(table: SampleTable, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chosen rows and the rejected rows of P pairs: two arrays [P] int64 of indices into ``rows``, in the order of
    ``unit_id``. The row with the higher reward is the chosen row.
    """
    order = np.lexsort((-table.reward[rows], table.unit_id[rows]))
    return order[0::2], order[1::2]
