"""Flags of advantages and losses. docs/algorithms.md has the formulas."""

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
    POLICY_KL,
    POLICY_LOSS,
    POLICY_TRAINING,
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

# this plugin gets all arguments, so it may read reward flags that no other code reads
POST_PROCESS = use_of("--custom-reward-post-process-path")
BOUNDED_BELOW = named(MODES, lambda mode: "mis_lower_bound" in mode.reads)
COMPARES = when("an --advantage-estimator that compares the responses to a prompt", lambda a: a.estimator.group)


@dataclass(frozen=True)
class AlgorithmArgs(OfJob):
    """Algorithm."""

    preset: list[str] = flag(
        [],
        "each name stands for a set of flags. The command line and --config override these flags. docs/algorithms.md "
        "lists the flags of each preset. The presets are " + ", ".join(PRESETS),
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
        "the run computes no advantages. Use this switch with a loss that needs no advantages, such as a custom_loss",
        POLICY,
        negative="--disable-compute-advantages-and-returns",
    )
    rewards_normalization: bool = flag(
        True,
        "rewards are not normalized within their group; the raw reward is then the advantage",
        POST_PROCESS | (ADVANTAGES & COMPARES),
        negative="--disable-rewards-normalization",
    )
    grpo_std_normalization: bool = flag(
        True,
        "the advantages of a group are not divided by the standard deviation of its rewards, as in Dr.GRPO",
        POST_PROCESS
        | (
            ADVANTAGES
            & chosen(ESTIMATORS, lambda e: e.divides_by_std)
            & when("a run without --disable-rewards-normalization", lambda a: a.rewards_normalization)
        ),
        negative="--disable-grpo-std-normalization",
    )
    normalize_advantages: bool = flag(
        False,
        "the advantages of the whole batch are whitened. Some estimators always whiten, because whitening is part of "
        "their definition",
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
        1.0, "lambda of GAE: longer returns are weighted by this factor per token", CRITIC, at_least=0, at_most=1
    )

    eps_clip: float = flag(
        0.2,
        "the ratio of new to old policy is clipped at 1 minus this value",
        POLICY_TRAINING,
        at_least=0,
        infinite=True,
    )
    eps_clip_high: float = flag(
        None,
        "the ratio of new to old policy is clipped at 1 plus this value",
        POLICY_TRAINING,
        at_least=0,
        infinite=True,
        auto="--eps-clip",
    )
    eps_clip_c: float | None = flag(
        None,
        "dual clip: for a negative advantage, this ratio bounds the loss",
        POLICY_TRAINING & chosen(ESTIMATORS, lambda e: e.dual_clip),
        above=1,
        infinite=True,
    )
    value_clip: float = flag(
        0.2,
        "in the value loss, a new value is clipped to within this distance of the old value",
        CRITIC,
        at_least=0,
        infinite=True,
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", POLICY_TRAINING)
    calculate_per_token_loss: bool = flag(
        False, "the loss is a mean over tokens, as with --loss-aggregation token", TRAINING
    )
    loss_aggregation: str = flag(
        "rollout",
        "the loss is averaged in this way. rollout: first over the tokens of each response, then over responses. "
        "token: over all tokens. constant: the sum over tokens is divided by a constant length, as in Dr.GRPO",
        TRAINING,
        choices=AGGREGATIONS,
    )

    kl_coef: float = flag(
        0.0,
        "the KL to the reference model is subtracted from the reward with this weight. Some estimators do not support "
        "a KL in the reward. --use-kl-loss adds the KL to the loss instead",
        POLICY_TRAINING,
        at_least=0,
    )
    use_kl_loss: bool = flag(
        False, "the KL to the reference model is added to the loss, weighted by --kl-loss-coef", POLICY_TRAINING
    )
    kl_loss_coef: float = flag(
        0.0,
        "weight of the KL in the loss. With weight 0, no reference model is loaded",
        POLICY_TRAINING & when("--use-kl-loss", lambda a: a.use_kl_loss or not a.job.sampled).strictly(),
        at_least=0,
    )
    kl_loss_type: str = flag(
        "low_var_kl",
        "this estimator computes the KL to the reference model",
        POLICY_KL,
        choices=KL_KINDS,
    )
    use_unbiased_kl: bool = flag(False, "the KL estimate is weighted by the ratio of new to old policy", POLICY_KL)
    log_ref_kl: bool = flag(
        False,
        "the KL to the reference model is logged, even if it is not part of the loss or the reward",
        POLICY_TRAINING,
    )

    use_rollout_logprobs: bool = flag(
        False, "the loss uses the engine's log-probs as the log-probs of the old policy", POLICY_TRAINING
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
    # estimator of the KL in the reward. k1 is unbiased. Its mean gradient is 0, which would matter only in a loss
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

    The losses dpo_loss, orpo_loss and reward_model_loss train on pairs of replies. --input-key names the column of the
    prompt. With these losses, batch sizes count pairs of replies.
    """

    chosen_key: str = flag(
        "chosen",
        "this column contains the preferred reply: text, messages, or the whole conversation",
        NEW_ROLLOUTS & PAIRS,
    )
    rejected_key: str = flag("rejected", "this column contains the rejected reply", NEW_ROLLOUTS & PAIRS)
    dpo_loss: str = flag(
        "sigmoid",
        "loss of each pair. ipo averages over the tokens of a reply",
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
        "the loss assumes that this fraction of the pairs has the chosen and the rejected reply swapped",
        TRAINING & DPO & chosen(DPO_KINDS, lambda kind: "dpo_label_smoothing" in kind.reads),
        at_least=0,
        below=0.5,
    )
    kto_desirable_weight: float = flag(1.0, "desirable replies have this weight", TRAINING & KTO, at_least=0)
    kto_undesirable_weight: float = flag(1.0, "undesirable replies have this weight", TRAINING & KTO, at_least=0)
    orpo_lambda: float = flag(
        0.1, "the odds-ratio term is added to the likelihood term with this weight", TRAINING & ORPO, at_least=0
    )


@dataclass(frozen=True)
class CorrectionArgs(AlgorithmArgs):
    """Train/inference mismatch.

    The ratio of a token is its probability in the trainer, divided by its probability in the engine. Metrics of the
    ratio of trainer to engine probability are logged whatever ``--correction`` is.
    """

    correction: str = flag(
        "none",
        "tokens are weighted or dropped by their ratio of trainer to engine probability. tis truncates the ratio, "
        "icepop masks outliers, mis follows the --mis-... flags, and custom calls --custom-tis-function-path",
        POLICY_LOSS,
        choices=CORRECTIONS,
    )
    use_tis: bool = flag(False, "slime's name for --correction tis", POLICY_LOSS)
    tis_clip: float = flag(
        2.0, "upper bound of the ratio of trainer to engine probability", TIS, above=0, infinite=True
    )
    tis_clip_low: float = flag(0.0, "lower bound of the ratio of trainer to engine probability", TIS, at_least=0)
    mis_level: str = flag(
        "token",
        "the ratio of a token. token: its own ratio. sequence: the product of the ratios of all tokens of its "
        "response. geometric: the geometric mean of these ratios",
        MIS,
        choices=LEVELS,
        aliases=("--tis-level",),
    )
    mis_mode: str = flag(
        "truncate",
        "the weight of a token. truncate: min(ratio, upper bound). mask: the ratio inside the bounds, and 0 outside. "
        "clip: the ratio, clamped to the bounds. none: always 1",
        MIS,
        choices=MODES,
        aliases=("--tis-mode",),
    )
    mis_upper_bound: float = flag(
        2.0,
        "upper bound of the ratio of trainer to engine probability",
        MIS,
        above=0,
        infinite=True,
        aliases=("--tis-upper-bound",),
    )
    mis_lower_bound: float | None = flag(
        None,
        "lower bound of the ratio of trainer to engine probability, for the modes mask and clip",
        MIS
        & when(
            lambda: BOUNDED_BELOW() + ", or --mis-rejection-level",
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
        "tokens or responses are also dropped if their ratio at this level is outside the rejection bounds",
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
        "a response is dropped if one of its tokens has a ratio below this value",
        MIS,
        above=0,
        below=1,
        aliases=("--rs-veto-threshold",),
    )
    use_rs: bool | None = flag(
        None,
        "slime's switch for the rejection of tokens or responses. --use-rs turns on rejection at the level "
        "--mis-rejection-level, by default token. --no-use-rs turns rejection off",
        MIS,
    )
    custom_tis_function_path: str | None = plugin(
        "computes the correction",
        POLICY_LOSS & when("--correction custom", lambda a: a.correction == "custom"),
        required=True,
    )
    use_opsm: bool = flag(False, "off-policy responses with a negative advantage are dropped", POLICY_LOSS)
    opsm_delta: float = flag(
        1e-4,
        "a response is off-policy if its mean log-ratio is above this value",
        POLICY_LOSS & use_of("--use-opsm"),
        at_least=0,
    )


@dataclass(frozen=True)
class CriticArgs(AlgorithmArgs):
    """Critic.

    With --advantage-estimator ppo, a second model, the critic, is trained on the trainer's ranks. The critic has the
    policy's settings, except those for which a critic flag exists.
    """

    critic_lr: float = flag(None, "peak learning rate of the critic (AdamW)", CRITIC, at_least=0, auto="--lr")
    critic_lr_warmup_iters: int = flag(
        0, "the critic's learning rate warms up over this many optimizer steps", CRITIC, at_least=0
    )
    num_critic_only_steps: int = flag(
        0, "in this many rollouts at the start of the run, only the critic is trained", CRITIC, at_least=0
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
        "the teacher. trainer: a model next to the trainer (--opd-teacher-load). sglang: a server (--rm-url). "
        "megatron: the same as trainer",
        DISTILLATION,
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher", TRAINING & DISTILLATION, at_least=0)
    opd_teacher_load: str | None = flag(
        None,
        "the teacher is the model in this Hugging Face folder, or with this hub id",
        TRAINING
        & DISTILLATION.strictly()
        & when("--opd-type trainer", lambda a: a.use_opd and a.opd_type == "trainer"),
        required=True,
        metavar="DIR",
    )
