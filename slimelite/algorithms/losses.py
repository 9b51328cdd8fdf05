"""Registries of losses, off-policy corrections, KL estimators, reductions and DPO losses; one record for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimelite.base.registry import Function, Registry, function


@dataclass(frozen=True)
class Choice:
    """One value of an option, and its function, whose signature is given with the registry. None: it does nothing."""

    name: str
    summary: str
    function: Function | None = None
    reads: tuple[str, ...] = ()  # flags that have an effect with this value, but not with every other one
    slime: str = ""  # slime's function that does the same

    def __call__(self, *inputs: Any) -> Any:
        """The result of the function for ``inputs``."""
        assert self.function is not None, f"{self.name} does nothing"
        holders = (LOSSES, CORRECTIONS, KL_KINDS, DPO_KINDS)
        option = next((holder.option for holder in holders if self in holder.values()), "")
        return function(self.function, option, self.name)(*inputs)


@dataclass(frozen=True)
class LossType(Choice):
    """What is minimised: ``fn(args, batch, log_probs, entropy) -> (losses, metrics)``.

    ``batch``: the R response tokens of a micro-batch, see `slimelite.training.batch.MicroBatch`; ``log_probs``, with a
    gradient, and ``entropy``: [R] of the policy. ``losses``: [R], which ``--loss-aggregation`` reduces; ``metrics``:
    (sum, weight) pairs by name.
    """

    policy: bool = False  # an estimator's policy loss: corrections apply, and an advantage of 0 gives no gradient
    supervised: bool = False  # responses come from the data set: none was sampled, so there are no old log-probs
    paired: bool = False  # it compares the two replies of a pair
    compares: bool = False  # with a reference model
    judged: bool = False  # a row's label says whether its reply is desirable; a step measures its KL beforehand
    chosen: bool = False  # a token's weight is that of a mean over the tokens of the step's chosen replies
    scores: bool = False  # it trains a reward model: the row of a conversation ends in one token, whose place is scored
    columns: tuple[str, ...] = ()  # columns of the sample table that must be filled in every row


_LOSS = "slimelite.training.loss"
LOSSES = Registry(
    "loss",
    "--loss-type",
    (
        LossType(
            "policy_loss",
            "the policy loss that goes with --advantage-estimator",
            f"{_LOSS}:policy_gradient",
            policy=True,
        ),
        LossType(
            "sft_loss", "the negative log-likelihood of the data's responses", f"{_LOSS}:fine_tuning", supervised=True
        ),
        LossType(
            "dpo_loss",
            "the loss of preference pairs that --dpo-loss names",
            f"{_LOSS}:preferences",
            ("dpo_loss", "dpo_label_smoothing"),
            supervised=True,
            paired=True,
            compares=True,
        ),
        LossType(
            "kto_loss",
            "the KTO loss of replies that --label-key calls desirable or not",
            f"{_LOSS}:judgements",
            ("kto_desirable_weight", "kto_undesirable_weight"),
            supervised=True,
            compares=True,
            judged=True,
        ),
        LossType(
            "orpo_loss",
            "the likelihood of chosen replies and the odds ratio of pairs, without a reference",
            f"{_LOSS}:odds_ratios",
            ("orpo_lambda",),
            supervised=True,
            paired=True,
            chosen=True,
        ),
        LossType(
            "reward_model_loss",
            "the Bradley–Terry loss of pairs; what is saved is a reward model",
            f"{_LOSS}:scored_pairs",
            supervised=True,
            paired=True,
            scores=True,
        ),
        LossType(
            "custom_loss",
            "what your --custom-loss-function-path returns",
            f"{_LOSS}:custom",
            ("custom_loss_function_path",),
        ),
    ),
)

# fn(args, batch, losses, own) -> (losses, metrics): losses [R] of the policy, 0 where a token is dropped; own [R] the
# log-probs of the trainer before the rollout's first step, batch.rollout_log_probs [R] those of the engine
_CLIP = ("tis_clip", "tis_clip_low")
_SLIME = "slime.backends.megatron_utils.loss"
_MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
CORRECTIONS = Registry(
    "correction",
    "--correction",
    (
        Choice("none", "tokens are not weighted"),
        Choice(
            "tis",
            "a token is weighted by its ratio, clamped into the --tis-clip bounds",
            f"{_LOSS}:truncate",
            _CLIP,
            f"{_SLIME}.vanilla_tis_function",
        ),
        Choice(
            "icepop",
            "a token is weighted by its ratio, and by 0 outside the --tis-clip bounds",
            f"{_LOSS}:mask_outliers",
            _CLIP,
            f"{_SLIME}.icepop_function",
        ),
        Choice(
            "mis", "tokens are weighted and dropped as the --mis-... flags say", f"{_LOSS}:weigh_and_reject", slime=_MIS
        ),
        Choice("custom", "your --custom-tis-function-path weighs and drops", f"{_LOSS}:correct_by_plugin", _CLIP),
    ),
)

# fn(log_ratio, mask, segments, num_segments) -> log-ratio [T] of the response of each token
_CORRECTIONS = "slimelite.algorithms.corrections"
LEVELS = Registry(
    "correction level",
    "--mis-level",
    (
        Choice("token", "each token has a ratio"),
        Choice("sequence", "a response has one ratio, the product of its tokens'", f"{_CORRECTIONS}:product"),
        Choice(
            "geometric", "a response has one ratio, the geometric mean of its tokens'", f"{_CORRECTIONS}:geometric_mean"
        ),
    ),
)

# fn(ratio, lower, upper) -> weights [T]
MODES = Registry(
    "correction mode",
    "--mis-mode",
    (
        Choice("truncate", "the weight is min(ratio, upper)", f"{_CORRECTIONS}:truncate"),
        Choice(
            "mask",
            "the weight is the ratio inside the bounds, else 0",
            f"{_CORRECTIONS}:mask_outside",
            ("mis_lower_bound",),
        ),
        Choice(
            "clip", "the weight is the ratio, clamped into the bounds", f"{_CORRECTIONS}:clip", ("mis_lower_bound",)
        ),
        Choice("none", "every weight is 1"),
    ),
)


@dataclass(frozen=True)
class KlKind(Choice):
    """An estimate f of the KL from d = log_probs − base: ``fn(d)``, [T], gives f(d), f′(d) and f(d) + f′(d)."""

    bound: float | None = None  # the estimate is clamped to ±bound
    pulls: bool = True  # the gradient is not zero on average, so that as a loss it pulls towards the reference


_POLICY = "slimelite.algorithms.policy"
KL_KINDS = Registry(
    "estimator of the KL",
    "--kl-loss-type",
    (
        KlKind("k1", "d, the difference of the two log-probs", f"{_POLICY}:k1", pulls=False),
        KlKind("k2", "d² / 2", f"{_POLICY}:k2"),
        KlKind("k3", "e^(−d) − 1 + d", f"{_POLICY}:k3"),
        KlKind("low_var_kl", "k3 clamped to ±10", f"{_POLICY}:k3", bound=10.0),
    ),
)

# fn(mask_sums, rollout_ids, max_response_len) -> divisor [N] of the tokens of each row of an optimizer step
_PACKED = "slimelite.algorithms.packed"
AGGREGATIONS = Registry(
    "reduction",
    "--loss-aggregation",
    (
        Choice("rollout", "the loss is the mean over rollouts of their token means", f"{_PACKED}:rollout_divisors"),
        Choice("token", "the loss is the mean over tokens", f"{_PACKED}:token_divisors"),
        Choice(
            "constant",
            "the loss is the sum over tokens, over a constant length (Dr.GRPO)",
            f"{_PACKED}:constant_divisors",
        ),
    ),
)


@dataclass(frozen=True)
class DpoKind(Choice):
    """A loss of preference pairs: ``fn(delta, beta, label_smoothing)`` returns losses [P], where ``delta`` is [P]
    h(chosen) − h(rejected).
    """

    mean: bool = False  # h is the mean of log_probs − ref over the tokens of a reply, not their sum


_SUPERVISED = "slimelite.algorithms.supervised"
DPO_KINDS = Registry(
    "loss of a pair",
    "--dpo-loss",
    (
        DpoKind(
            "sigmoid",
            "−log σ(β·Δ), Δ the difference of the replies' summed log-ratios",
            f"{_SUPERVISED}:sigmoid_loss",
            ("dpo_label_smoothing",),
        ),
        DpoKind(
            "ipo",
            "(Δ − 1/(2β))², Δ the difference of the replies' mean log-ratios",
            f"{_SUPERVISED}:ipo_loss",
            mean=True,
        ),
    ),
)
