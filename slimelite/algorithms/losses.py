"""Registries of losses, off-policy corrections, KL estimators, reductions and DPO losses, with one record for each."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.base.registry import Function, Registry


@dataclass(frozen=True)
class Choice:
    """One value of an option. The code that reads the option has a branch for each value. Your own losses and
    corrections have a ``function`` instead.
    """

    name: str
    summary: str
    function: Function | None = None  # or "package.module:function"
    reads: tuple[str, ...] = ()  # flags that have an effect with this value, but not with every other one
    slime: str = ""  # slime's function that does the same


@dataclass(frozen=True)
class LossType(Choice):
    """A loss to minimise, see `slimelite.training.loss.micro_batch_loss`. A loss of your own is ``fn(args, batch,
    log_probs, entropy) -> (losses, metrics)``.

    ``batch``: the R response tokens of a micro-batch, see `slimelite.training.batch.MicroBatch`. ``log_probs`` (with a
    gradient) and ``entropy``: [R], of the policy. ``losses``: [R], reduced as ``--loss-aggregation`` says. ``metrics``:
    (sum, weight) pairs by name.
    """

    title: str = ""  # the method's own name, such as DPO
    policy: bool = False  # an estimator's policy loss: corrections apply, and an advantage of 0 gives no gradient
    supervised: bool = False  # responses come from the data set: none was sampled, so there are no old log-probs
    paired: bool = False  # it compares the two replies of a pair
    compares: bool = False  # with a reference model
    judged: bool = False  # a row's label says whether its reply is desirable; a step measures its KL beforehand
    chosen: bool = False  # a token's weight is that of a mean over the tokens of the step's chosen replies
    scores: bool = False  # it trains a reward model: the row of a conversation ends in one token, whose place is scored
    documents: bool = False  # it learns from packed documents, which are no samples
    columns: tuple[str, ...] = ()  # columns of the sample table that must be filled in every row


LOSSES = Registry(
    "loss",
    "--loss-type",
    (
        LossType(
            "policy_loss",
            "the policy loss that goes with --advantage-estimator",
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
            "the loss of preference pairs, as --dpo-loss chooses it",
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

# see `slimelite.training.loss.corrected`. One of your own is fn(args, batch, losses, own) -> (losses, metrics): losses
# [R] of the policy, 0 where a token is dropped; own [R] the log-probs of the trainer before the rollout's first step,
# batch.rollout_log_probs [R] those of the engine
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
            "a token is weighted by its ratio, and by 0 outside the --tis-clip bounds",
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
        Choice("token", "each token has a ratio"),
        Choice("sequence", "a response has one ratio, the product of its tokens'"),
        Choice("geometric", "a response has one ratio, the geometric mean of its tokens'"),
    ),
    closed=True,
)

MODES = Registry(
    "correction mode",
    "--mis-mode",
    (
        Choice("truncate", "the weight is min(ratio, upper)"),
        Choice("mask", "the weight is the ratio inside the bounds, and 0 outside", reads=("mis_lower_bound",)),
        Choice("clip", "the weight is the ratio, clamped into the bounds", reads=("mis_lower_bound",)),
        Choice("none", "every weight is 1"),
    ),
    closed=True,
)


@dataclass(frozen=True)
class KlKind(Choice):
    """An estimate of the KL from d = log_probs − base, see `policy.kl_estimate`."""

    pulls: bool = True  # the gradient is not zero on average, so that as a loss it pulls towards the reference


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
        Choice("rollout", "the loss is the mean over responses of each response's token mean"),
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
            "−log σ(β·Δ), Δ the difference of the replies' summed log-ratios",
            reads=("dpo_label_smoothing",),
        ),
        Choice("ipo", "(Δ − 1/(2β))², Δ the difference of the replies' mean log-ratios"),
    ),
    closed=True,
)
