"""Advantages, losses and what goes with them; the formulas are in docs/algorithms.md."""

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
        "these named sets of flags stand below the command line and --config; docs/algorithms.md says what they hold: "
        + ", ".join(PRESETS),
        ALWAYS,
        metavar="NAME",
    )
    loss_type: str = flag("policy_loss", "training minimises this loss", ALWAYS, choices=LOSSES)
    advantage_estimator: str = flag(
        "grpo",
        lambda: (
            "rewards become advantages in this way, and the policy loss goes with it ("
            + "; ".join(f"{estimator.name}: {estimator.summary}" for estimator in ESTIMATORS.values())
            + ")"
        ),
        POLICY,
        choices=ESTIMATORS,
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "rewards do not become advantages: the loss has none, as with sft_loss or a custom_loss",
        POLICY,
        negative="--disable-compute-advantages-and-returns",
    )
    rewards_normalization: bool = flag(
        True,
        "a reward is not compared with those of its group: the raw reward is the advantage",
        POST_PROCESS | (ADVANTAGES & COMPARES),
        negative="--disable-rewards-normalization",
    )
    grpo_std_normalization: bool = flag(
        True,
        "the advantages of a group are not divided by its standard deviation: they are Dr.GRPO's",
        POST_PROCESS
        | (
            ADVANTAGES
            & chosen(ESTIMATORS, lambda e: e.divides_by_std)
            & when("rewards compared within their group", lambda a: a.rewards_normalization)
        ),
        negative="--disable-grpo-std-normalization",
    )
    normalize_advantages: bool = flag(
        False,
        "the advantages of the whole batch are whitened; an estimator that is defined so does it anyway",
        TRAINING & ADVANTAGES,
    )
    gamma: float = flag(
        1.0,
        "rewards are discounted by this factor a token",
        TRAINING
        & (use_of("--custom-advantage-function-path") | (ADVANTAGES & chosen(ESTIMATORS, lambda e: e.discounts))),
        at_least=0,
        at_most=1,
    )
    lambd: float = flag(1.0, "GAE weighs longer returns by this factor a token", CRITIC, at_least=0, at_most=1)

    eps_clip: float = flag(
        0.2, "the ratio of new to old policy may fall to 1 less this", POLICY_TRAINING, at_least=0, infinite=True
    )
    eps_clip_high: float = flag(
        None,
        "the ratio of new to old policy may rise to 1 plus this",
        POLICY_TRAINING,
        at_least=0,
        infinite=True,
        auto="--eps-clip",
    )
    eps_clip_c: float | None = flag(
        None,
        "dual clip bounds the loss of negative advantages at this ratio",
        POLICY_TRAINING & chosen(ESTIMATORS, lambda e: e.dual_clip),
        above=1,
        infinite=True,
    )
    value_clip: float = flag(
        0.2,
        "the value loss lets a value move by this from what it was before the step",
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
        "the loss is a mean over rollouts of their token means, a mean over tokens, or a sum over a constant length "
        "(Dr.GRPO)",
        TRAINING,
        choices=AGGREGATIONS,
    )

    kl_coef: float = flag(
        0.0,
        "the KL to the reference has this weight in the reward, where the estimator takes one; --use-kl-loss puts "
        "it into the loss",
        POLICY_TRAINING,
        at_least=0,
    )
    use_kl_loss: bool = flag(
        False, "the KL to the reference is added to the loss, with --kl-loss-coef", POLICY_TRAINING
    )
    kl_loss_coef: float = flag(
        0.0,
        "the KL has this weight in the loss; with 0 no reference model is loaded",
        POLICY_TRAINING & when("--use-kl-loss", lambda a: a.use_kl_loss or not a.job.sampled).strictly(),
        at_least=0,
    )
    kl_loss_type: str = flag(
        "low_var_kl", "the KL is estimated in this way", POLICY_TRAINING & REFERENCE, choices=KL_KINDS
    )
    use_unbiased_kl: bool = flag(
        False, "the KL estimate is weighted by the ratio of new to old policy", POLICY_TRAINING & REFERENCE
    )
    log_ref_kl: bool = flag(False, "the KL to the reference is logged although no coefficient uses it", POLICY_TRAINING)

    use_rollout_logprobs: bool = flag(False, "the engine's log-probs are the old ones of the loss", POLICY_TRAINING)

    custom_loss_function_path: str | None = plugin(
        "is the loss of --loss-type custom_loss",
        chosen(LOSSES, lambda loss: "custom_loss_function_path" in loss.reads),
        required=True,
    )
    custom_advantage_function_path: str | None = plugin("sets the advantages of a rollout", TRAINING & ADVANTAGES)
    custom_pg_loss_reducer_function_path: str | None = plugin(
        "makes the policy loss of a step out of that of its tokens, instead of --loss-aggregation", POLICY_LOSS
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
        "chosen", "this column has the preferred reply: text, messages, or the whole conversation", NEW_ROLLOUTS & PAIRS
    )
    rejected_key: str = flag("rejected", "this column has the other reply", NEW_ROLLOUTS & PAIRS)
    dpo_loss: str = flag(
        "sigmoid", "a pair has this loss; ipo averages over a reply's tokens", TRAINING & DPO, choices=DPO_KINDS
    )
    dpo_beta: float = flag(
        0.1, "the policy is pulled to the reference model this strongly", TRAINING & COMPARED, above=0
    )
    dpo_label_smoothing: float = flag(
        0.0,
        "this share of the pairs is assumed to have its preference the wrong way round",
        TRAINING & DPO & chosen(DPO_KINDS, lambda kind: "dpo_label_smoothing" in kind.reads),
        at_least=0,
        below=0.5,
    )
    kto_desirable_weight: float = flag(1.0, "desirable replies have this weight", TRAINING & KTO, at_least=0)
    kto_undesirable_weight: float = flag(1.0, "the other replies have this weight", TRAINING & KTO, at_least=0)
    orpo_lambda: float = flag(0.1, "the odds ratio has this weight beside the likelihood", TRAINING & ORPO, at_least=0)


@dataclass(frozen=True)
class CorrectionArgs(AlgorithmArgs):
    """Train/inference mismatch.

    The ratio is the trainer's probability of a token over the engine's; its metrics are logged whatever is chosen.
    """

    correction: str = flag(
        "none",
        "tokens are weighted or dropped by that ratio: tis truncates it, icepop masks outliers, mis does as the "
        "--mis-... flags say",
        POLICY_LOSS,
        choices=CORRECTIONS,
    )
    use_tis: bool = flag(False, "this is slime's spelling of --correction tis", POLICY_LOSS)
    tis_clip: float = flag(2.0, "the ratio is bounded from above by this", TIS, above=0, infinite=True)
    tis_clip_low: float = flag(0.0, "the ratio is bounded from below by this", TIS, at_least=0)
    mis_level: str = flag(
        "token",
        "the ratio is that of a token, or of its response as the product or geometric mean",
        MIS,
        choices=LEVELS,
        aliases=("--tis-level",),
    )
    mis_mode: str = flag(
        "truncate",
        "the weight is min(ratio, upper), the ratio inside the bounds else 0, the ratio clamped into them, or always 1",
        MIS,
        choices=MODES,
        aliases=("--tis-mode",),
    )
    mis_upper_bound: float = flag(
        2.0, "the ratio is bounded from above by this", MIS, above=0, infinite=True, aliases=("--tis-upper-bound",)
    )
    mis_lower_bound: float | None = flag(
        None,
        "in the modes mask and clip the ratio is bounded from below by this",
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
        MIS & when("a --mis-mode that weighs", lambda a: a.mis_mode != "none"),
        aliases=("--tis-batch-normalize",),
    )
    mis_rejection_level: str | None = flag(
        None,
        "what is outside the rejection bounds at this level is dropped as well",
        MIS,
        choices=LEVELS,
        aliases=("--rs-level",),
    )
    mis_rejection_upper_bound: float | None = flag(
        None,
        "a larger ratio is rejected",
        REJECTION,
        above=0,
        infinite=True,
        auto="--mis-upper-bound",
        aliases=("--rs-upper-bound",),
    )
    mis_rejection_lower_bound: float | None = flag(
        None,
        "a smaller ratio is rejected",
        REJECTION,
        at_least=0,
        auto="--mis-lower-bound where that is given, else 1 / --mis-rejection-upper-bound",
        aliases=("--rs-lower-bound",),
    )
    mis_veto_threshold: float | None = flag(
        None,
        "a response that has a token with a ratio below this is dropped",
        MIS,
        above=0,
        below=1,
        aliases=("--rs-veto-threshold",),
    )
    use_rs: bool | None = flag(
        None,
        "this switch of slime's, on, rejects at --mis-rejection-level (token, if none is given); off, it rejects "
        "nothing",
        MIS,
    )
    custom_tis_function_path: str | None = plugin(
        "is a correction of your own",
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

    Of --advantage-estimator ppo: a second model on the trainer's ranks. What is not here it shares with the policy.
    """

    critic_lr: float = flag(
        None, "the learning rate of the critic rises to this value (AdamW)", CRITIC, at_least=0, auto="--lr"
    )
    critic_lr_warmup_iters: int = flag(
        0, "the critic's learning rate rises for this many optimizer steps", CRITIC, at_least=0
    )
    num_critic_only_steps: int = flag(
        0, "this many rollouts at the start of the run train the critic alone", CRITIC, at_least=0
    )
    critic_load: str | None = flag(
        None,
        "the critic starts from this: a Hugging Face model, or the folder 'critic' of a checkpoint",
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
        "the teacher is a model beside the trainer (--opd-teacher-load) or a server (--rm-url); megatron means trainer",
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
