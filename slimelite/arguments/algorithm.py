"""Advantages and losses, with the flags that belong to them. docs/algorithms.md has the formulas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.algorithms.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    DPO_KINDS,
    KL_KINDS,
    LEVELS,
    LOSSES,
    MODES,
    LossType,
)
from slimelite.arguments.conditions import (
    ADVANTAGES,
    COMPARED,
    CRITIC,
    DISTILLATION,
    DPO,
    KTO,
    MIS,
    NEW_ROLLOUTS,
    ORPO,
    PAIRS,
    POLICY,
    POLICY_LOSS,
    POLICY_TRAINING,
    REFERENCE,
    REJECTION,
    TIS,
    TRAINING,
    OfJob,
    chosen,
    named,
    use_of,
    when,
)
from slimelite.arguments.flags import ALWAYS, flag, plugin, resolved
from slimelite.arguments.rollout import RewardArgs
from slimelite.arguments.sources import PRESETS

# this plugin gets the arguments: it may read reward flags that nothing else reads
POST_PROCESS = use_of("--custom-reward-post-process-path")
BOUNDED_BELOW = named(MODES, lambda mode: "mis_lower_bound" in mode.reads)
COMPARES = when("an --advantage-estimator that compares the responses to a prompt", lambda a: a.estimator.group)


@dataclass(frozen=True)
class AlgorithmArgs(OfJob):
    """Algorithm."""

    preset: list[str] = flag(
        [],
        "each name stands for a set of flags, which the command line and --config override; docs/algorithms.md lists "
        "the flags of each: " + ", ".join(PRESETS),
        ALWAYS,
        metavar="NAME",
    )
    loss_type: str = flag("policy_loss", "training minimises this loss", ALWAYS, choices=LOSSES)
    advantage_estimator: str = flag(
        "grpo",
        lambda: (
            "this method turns rewards into advantages and selects the matching policy loss ("
            + "; ".join(f"{estimator.name}: {estimator.summary}" for estimator in ESTIMATORS.values())
            + ")"
        ),
        POLICY,
        choices=ESTIMATORS,
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "the run computes no advantages from rewards, for a loss that uses none, such as a custom_loss",
        POLICY,
        negative="--disable-compute-advantages-and-returns",
    )
    rewards_normalization: bool = flag(
        True,
        "rewards are not normalized within their group: the raw reward is the advantage",
        POST_PROCESS | (ADVANTAGES & COMPARES),
        negative="--disable-rewards-normalization",
    )
    grpo_std_normalization: bool = flag(
        True,
        "the advantages of a group are not divided by its standard deviation, as in Dr.GRPO",
        POST_PROCESS
        | (
            ADVANTAGES
            & chosen(ESTIMATORS, lambda e: e.divides_by_std)
            & when("rewards normalized within their group", lambda a: a.rewards_normalization)
        ),
        negative="--disable-grpo-std-normalization",
    )
    normalize_advantages: bool = flag(
        False,
        "the advantages of the whole batch are whitened; some estimators always do this, because their definition "
        "includes it",
        TRAINING & ADVANTAGES,
    )
    gamma: float = flag(
        1.0,
        "rewards are discounted by this factor per token",
        TRAINING
        & (use_of("--custom-advantage-function-path") | (ADVANTAGES & chosen(ESTIMATORS, lambda e: e.discounts))),
        at_least=0,
        at_most=1,
    )
    lambd: float = flag(
        1.0, "GAE weights longer returns by this factor per token (lambda)", CRITIC, at_least=0, at_most=1
    )

    eps_clip: float = flag(
        0.2, "the ratio of new to old policy is clipped at 1 minus this", POLICY_TRAINING, at_least=0, infinite=True
    )
    eps_clip_high: float = flag(
        None,
        "the ratio of new to old policy is clipped at 1 plus this",
        POLICY_TRAINING,
        at_least=0,
        infinite=True,
        auto="--eps-clip",
    )
    eps_clip_c: float | None = flag(
        None,
        "dual clip: for negative advantages, the loss is bounded at this ratio",
        POLICY_TRAINING & chosen(ESTIMATORS, lambda e: e.dual_clip),
        above=1,
        infinite=True,
    )
    value_clip: float = flag(
        0.2,
        "the value loss clips a new value to within this distance of the old value",
        CRITIC,
        at_least=0,
        infinite=True,
    )
    entropy_coef: float = flag(0.0, "the entropy bonus has this weight", POLICY_TRAINING)
    calculate_per_token_loss: bool = flag(
        False, "the loss is a mean over tokens, as with --loss-aggregation token", TRAINING
    )
    loss_aggregation: str = flag(
        "rollout",
        "rollout: the mean over responses of each response's token mean; token: the mean over all tokens; constant: "
        "the sum over tokens divided by a constant length (Dr.GRPO)",
        TRAINING,
        choices=AGGREGATIONS,
    )

    kl_coef: float = flag(
        0.0,
        "the KL to the reference is subtracted from the reward with this weight, if the estimator supports it; "
        "--use-kl-loss adds the KL to the loss instead",
        POLICY_TRAINING,
        at_least=0,
    )
    use_kl_loss: bool = flag(
        False, "the KL to the reference is added to the loss, weighted by --kl-loss-coef", POLICY_TRAINING
    )
    kl_loss_coef: float = flag(
        0.0,
        "the KL has this weight in the loss; with 0 no reference model is loaded",
        POLICY_TRAINING & when("--use-kl-loss", lambda a: a.use_kl_loss or not a.job.sampled).strictly(),
        at_least=0,
    )
    kl_loss_type: str = flag(
        "low_var_kl", "this estimator computes the KL", POLICY_TRAINING & REFERENCE, choices=KL_KINDS
    )
    use_unbiased_kl: bool = flag(
        False, "the KL estimate is weighted by the ratio of new to old policy", POLICY_TRAINING & REFERENCE
    )
    log_ref_kl: bool = flag(False, "the KL to the reference is logged even if no coefficient uses it", POLICY_TRAINING)

    use_rollout_logprobs: bool = flag(
        False, "the loss takes the engine's log-probs as those of the old policy", POLICY_TRAINING
    )

    custom_loss_function_path: str | None = plugin(
        "computes the loss for --loss-type custom_loss",
        chosen(LOSSES, lambda loss: "custom_loss_function_path" in loss.reads),
        required=True,
    )
    custom_advantage_function_path: str | None = plugin("sets the advantages of a rollout", TRAINING & ADVANTAGES)
    custom_pg_loss_reducer_function_path: str | None = plugin(
        "reduces the per-token policy loss of a step to one number, instead of --loss-aggregation", POLICY_LOSS
    )

    # whether a reference model is needed
    use_reference: bool = resolved(False)
    # estimator of the KL in the reward; k1 is unbiased, and its zero mean gradient would matter only in a loss
    kl_reward_type: str = resolved("k1")

    @property
    def estimator(self) -> Estimator:
        """The record of ``--advantage-estimator``."""
        return ESTIMATORS[self.advantage_estimator]

    @property
    def loss(self) -> LossType:
        """The record of ``--loss-type``."""
        return LOSSES[self.loss_type]


@dataclass(frozen=True)
class PreferenceArgs(AlgorithmArgs):
    """Preferences and reward models.

    Pairs (dpo_loss, orpo_loss, reward_model_loss) have their prompt in --input-key, and batch sizes count pairs.
    """

    chosen_key: str = flag(
        "chosen",
        "this column contains the preferred reply: text, messages, or the whole conversation",
        NEW_ROLLOUTS & PAIRS,
    )
    rejected_key: str = flag("rejected", "this column contains the rejected reply", NEW_ROLLOUTS & PAIRS)
    dpo_loss: str = flag(
        "sigmoid",
        "this loss is computed for each pair; ipo averages over a reply's tokens",
        TRAINING & DPO,
        choices=DPO_KINDS,
    )
    dpo_beta: float = flag(
        0.1,
        "beta of the loss: a larger value keeps the policy closer to the reference model",
        TRAINING & COMPARED,
        above=0,
    )
    dpo_label_smoothing: float = flag(
        0.0,
        "the loss assumes that the chosen and the rejected reply are swapped in this fraction of the pairs",
        TRAINING & DPO & chosen(DPO_KINDS, lambda kind: "dpo_label_smoothing" in kind.reads),
        at_least=0,
        below=0.5,
    )
    kto_desirable_weight: float = flag(1.0, "desirable replies have this weight", TRAINING & KTO, at_least=0)
    kto_undesirable_weight: float = flag(1.0, "the other replies have this weight", TRAINING & KTO, at_least=0)
    orpo_lambda: float = flag(
        0.1, "the odds-ratio term is added to the likelihood term with this weight", TRAINING & ORPO, at_least=0
    )


@dataclass(frozen=True)
class CorrectionArgs(AlgorithmArgs):
    """Train/inference mismatch.

    The ratio is the trainer's probability of a token divided by the engine's. Its metrics are always logged.
    """

    correction: str = flag(
        "none",
        "tokens are weighted or dropped by that ratio: tis truncates it, icepop masks outliers, mis follows the "
        "--mis-... flags",
        POLICY_LOSS,
        choices=CORRECTIONS,
    )
    use_tis: bool = flag(False, "this is slime's spelling of --correction tis", POLICY_LOSS)
    tis_clip: float = flag(2.0, "the ratio is bounded from above by this", TIS, above=0, infinite=True)
    tis_clip_low: float = flag(0.0, "the ratio is bounded from below by this", TIS, at_least=0)
    mis_level: str = flag(
        "token",
        "the ratio of each token is its own (token), or its response's product (sequence) or geometric mean "
        "(geometric) of token ratios",
        MIS,
        choices=LEVELS,
        aliases=("--tis-level",),
    )
    mis_mode: str = flag(
        "truncate",
        "the weight is min(ratio, upper) with truncate, the ratio inside the bounds and 0 outside with mask, the "
        "ratio clamped to the bounds with clip, and always 1 with none",
        MIS,
        choices=MODES,
        aliases=("--tis-mode",),
    )
    mis_upper_bound: float = flag(
        2.0, "the ratio is bounded from above by this", MIS, above=0, infinite=True, aliases=("--tis-upper-bound",)
    )
    mis_lower_bound: float | None = flag(
        None,
        "the modes mask and clip bound the ratio from below by this",
        MIS
        & when(
            lambda: BOUNDED_BELOW() + ", or with --mis-rejection-level",
            lambda a: "mis_lower_bound" in MODES[a.mis_mode].reads or a.mis_rejection_level,
        ),
        at_least=0,
        auto="1 / --mis-upper-bound",
        aliases=("--tis-lower-bound",),
    )
    mis_batch_normalize: bool = flag(
        False,
        "the weights of --correction mis are divided by their mean over the whole optimizer step",
        MIS & when("a --mis-mode other than none", lambda a: a.mis_mode != "none"),
        aliases=("--tis-batch-normalize",),
    )
    mis_rejection_level: str | None = flag(
        None,
        "tokens or responses whose ratio at this level is outside the rejection bounds are dropped as well",
        MIS,
        choices=LEVELS,
        aliases=("--rs-level",),
    )
    mis_rejection_upper_bound: float | None = flag(
        None,
        "a token or response with a larger ratio is rejected",
        REJECTION,
        above=0,
        infinite=True,
        auto="--mis-upper-bound",
        aliases=("--rs-upper-bound",),
    )
    mis_rejection_lower_bound: float | None = flag(
        None,
        "a token or response with a smaller ratio is rejected",
        REJECTION,
        at_least=0,
        auto="--mis-lower-bound if given, else 1 / --mis-rejection-upper-bound",
        aliases=("--rs-lower-bound",),
    )
    mis_veto_threshold: float | None = flag(
        None,
        "a response is dropped if one of its tokens has a ratio below this",
        MIS,
        above=0,
        below=1,
        aliases=("--rs-veto-threshold",),
    )
    use_rs: bool | None = flag(
        None,
        "slime's switch for rejection: on, it rejects at --mis-rejection-level (by default token); off, it rejects "
        "nothing",
        MIS,
    )
    custom_tis_function_path: str | None = plugin(
        "computes your own correction",
        POLICY_LOSS & when("--correction custom", lambda a: a.correction == "custom"),
        required=True,
    )
    use_opsm: bool = flag(False, "off-policy responses with a negative advantage are dropped", POLICY_LOSS)
    opsm_delta: float = flag(
        1e-4,
        "a response whose mean log-ratio is above this is off-policy",
        POLICY_LOSS & use_of("--use-opsm"),
        at_least=0,
    )


@dataclass(frozen=True)
class CriticArgs(AlgorithmArgs):
    """Critic.

    With --advantage-estimator ppo, a second model is trained on the trainer's ranks. For everything else it uses the
    settings of the policy.
    """

    critic_lr: float = flag(None, "peak learning rate of the critic (AdamW)", CRITIC, at_least=0, auto="--lr")
    critic_lr_warmup_iters: int = flag(
        0, "the critic's learning rate warms up over this many optimizer steps", CRITIC, at_least=0
    )
    num_critic_only_steps: int = flag(
        0, "this many rollouts at the start of the run train the critic alone", CRITIC, at_least=0
    )
    critic_load: str | None = flag(
        None,
        "the critic's initial weights come from this Hugging Face model, or from the folder 'critic' of a checkpoint",
        CRITIC,
        auto="--hf-checkpoint",
        metavar="DIR",
    )

    # whether the estimator needs a critic, as ppo does
    use_critic: bool = resolved(False)


@dataclass(frozen=True)
class DistillationArgs(AlgorithmArgs, RewardArgs):
    """On-policy distillation."""

    use_opd: bool = flag(
        False, "every token's advantage is reduced by --opd-kl-coef x (student's - teacher's log-prob)", ALWAYS
    )
    opd_type: Literal["trainer", "sglang", "megatron"] | None = flag(
        None,
        "trainer: the teacher is loaded next to the trainer (--opd-teacher-load); sglang: the teacher is a server "
        "(--rm-url); megatron means trainer",
        DISTILLATION,
    )
    opd_kl_coef: float = flag(1.0, "the reverse KL to the teacher has this weight", TRAINING & DISTILLATION, at_least=0)
    opd_teacher_load: str | None = flag(
        None,
        "the teacher is this Hugging Face folder or hub id",
        TRAINING
        & DISTILLATION.strictly()
        & when("--opd-type trainer", lambda a: a.use_opd and a.opd_type == "trainer"),
        required=True,
        metavar="DIR",
    )
