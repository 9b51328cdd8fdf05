"""Registries of losses, off-policy corrections, KL estimators, reductions and DPO losses, with one record for each."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.base.registry import Function, Registry


@dataclass(frozen=True)
class Choice:
    """One value of an option. The code that reads the option has a branch for each built-in value. A loss or a
    correction of your own has a ``function`` instead of such a branch.
    """

    name: str
    summary: str
    function: Function | None = None  # or "package.module:function"
    reads: tuple[str, ...] = ()  # flags that have an effect with this value, but not with all values
    slime: str = ""  # the function of slime that does the same


@dataclass(frozen=True)
class LossType(Choice):
    """A loss that training minimises, see `slimelite.training.loss.micro_batch_loss`. The function of your own loss has
    the signature ``fn(args, batch, log_probs, entropy) -> (losses, metrics)``.

    ``batch``: the R response tokens of a micro-batch, see `slimelite.training.batch.MicroBatch`. ``log_probs`` (with a
    gradient) and ``entropy``: [R], of the policy. ``losses``: [R]; ``--loss-aggregation`` selects how they are reduced
    to one number. ``metrics``: (sum, weight) pairs by name.
    """

    title: str = ""  # the name of the method, such as DPO
    policy: bool = False  # an estimator's policy loss: corrections apply, and an advantage of 0 gives no gradient
    supervised: bool = False  # responses come from the data set, not from an engine, so there are no old log-probs
    paired: bool = False  # the loss compares the two replies of a pair
    compares: bool = False  # the loss compares the policy with a reference model
    judged: bool = False  # each row is labelled desirable or not, and each step first measures the KL
    chosen: bool = False  # the token weights give a mean over the tokens of all chosen replies of the step
    scores: bool = False  # the loss trains a reward model, which scores each conversation at its last token
    documents: bool = False  # the loss trains on packed documents instead of samples
    columns: tuple[str, ...] = ()  # columns of the sample table that must be filled in every row


LOSSES = Registry(
    "loss",
    "--loss-type",
    (
        LossType(
            "policy_loss",
            "the policy loss of the estimator that --advantage-estimator selects",
            policy=True,
        ),
        LossType("sft_loss", "the negative log-likelihood of the data's responses", title="SFT", supervised=True),
        LossType(
            "pretrain_loss",
            "the negative log-likelihood of the data's documents, packed to --seq-length",
            title="pretraining",
            supervised=True,
            documents=True,
        ),
        LossType(
            "dpo_loss",
            "the loss of preference pairs that --dpo-loss selects",
            reads=("dpo_loss", "dpo_label_smoothing"),
            title="DPO",
            supervised=True,
            paired=True,
            compares=True,
        ),
        LossType(
            "kto_loss",
            "the KTO loss of single replies, each labelled desirable or not in --label-key",
            reads=("kto_desirable_weight", "kto_undesirable_weight"),
            title="KTO",
            supervised=True,
            compares=True,
            judged=True,
        ),
        LossType(
            "orpo_loss",
            "ORPO: the likelihood of chosen replies plus the odds ratio of pairs, without a reference model",
            reads=("orpo_lambda",),
            title="ORPO",
            supervised=True,
            paired=True,
            chosen=True,
        ),
        LossType(
            "reward_model_loss",
            "the Bradley–Terry loss of pairs, which trains a reward model",
            title="reward model",
            supervised=True,
            paired=True,
            scores=True,
        ),
        LossType(
            "custom_loss",
            "the loss that your --custom-loss-function-path returns",
            reads=("custom_loss_function_path",),
        ),
    ),
)

# see `slimelite.training.loss.corrected`. The function of your own correction has the signature
# fn(args, batch, losses, own) -> (losses, metrics). losses: [R] of the policy; the function returns 0 for a dropped
# token. own: [R], the trainer's log-probs before the rollout's first step. batch.rollout_log_probs: [R], the engine's
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
            reads=_CLIP,
            slime=f"{_SLIME}.vanilla_tis_function",
        ),
        Choice(
            "icepop",
            "a token is weighted by its ratio, or by 0 if the ratio is outside the --tis-clip bounds",
            reads=_CLIP,
            slime=f"{_SLIME}.icepop_function",
        ),
        Choice("mis", "tokens are weighted and dropped according to the --mis-... flags", slime=_MIS),
        Choice("custom", "your --custom-tis-function-path weights and drops tokens", reads=_CLIP),
    ),
)

LEVELS = Registry(
    "correction level",
    "--mis-level",
    (
        Choice("token", "each token has its own ratio"),
        Choice("sequence", "a response has one ratio, the product of its tokens' ratios"),
        Choice("geometric", "a response has one ratio, the geometric mean of its tokens' ratios"),
    ),
    closed=True,
)

MODES = Registry(
    "correction mode",
    "--mis-mode",
    (
        Choice("truncate", "the weight is min(ratio, upper)"),
        Choice("mask", "the weight is the ratio if it is within the bounds, else 0", reads=("mis_lower_bound",)),
        Choice("clip", "the weight is the ratio, clamped into the bounds", reads=("mis_lower_bound",)),
        Choice("none", "every weight is 1"),
    ),
    closed=True,
)


@dataclass(frozen=True)
class KlKind(Choice):
    """A formula that estimates the KL from d = log_probs − base, see `policy.kl_estimate`."""

    pulls: bool = True  # its expected gradient is not zero, so a loss with it pulls the policy towards the reference


KL_KINDS = Registry(
    "estimator of the KL",
    "--kl-loss-type",
    (
        KlKind("k1", "d, the difference of the two log-probs", pulls=False),
        KlKind("k2", "d² / 2"),
        KlKind("k3", "e^(−d) − 1 + d"),
        KlKind("low_var_kl", "k3 clamped to ±10"),
    ),
    closed=True,
)

AGGREGATIONS = Registry(
    "reduction",
    "--loss-aggregation",
    (
        Choice("rollout", "the loss is averaged over the tokens of each response, then over responses"),
        Choice("token", "the loss is the mean over tokens"),
        Choice("constant", "the loss is the sum over tokens divided by a constant length (Dr.GRPO)"),
    ),
    closed=True,
)

DPO_KINDS = Registry(
    "loss of a pair",
    "--dpo-loss",
    (
        Choice(
            "sigmoid",
            "−log σ(β·Δ), where Δ is the difference of the replies' summed log-ratios",
            reads=("dpo_label_smoothing",),
        ),
        Choice("ipo", "(Δ − 1/(2β))², where Δ is the difference of the replies' mean log-ratios"),
    ),
    closed=True,
)
