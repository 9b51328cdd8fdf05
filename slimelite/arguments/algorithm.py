"""Advantages, losses and what goes with them; the formulas are in docs/algorithms.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.arguments.flags import flag, resolved
from slimelite.arguments.sources import PRESETS


@dataclass(frozen=True)
class AlgorithmArgs:
    """Algorithm."""

    preset: list[str] = flag(
        [],
        f"named sets of flags, below the command line and --config: {', '.join(PRESETS)}; see docs/algorithms.md",
        metavar="NAME",
    )
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "custom_loss"] = flag("policy_loss", "what is minimised")
    advantage_estimator: str = flag(
        "grpo", "how rewards become advantages, and the policy loss that goes with it", choices=ESTIMATORS
    )
    compute_advantages_and_returns: bool = flag(
        True,
        "off: the loss needs no advantages (sft_loss, custom_loss)",
        negative="--disable-compute-advantages-and-returns",
    )
    rewards_normalization: bool = flag(
        True,
        "compare rewards within their group; off: the raw reward is the advantage",
        negative="--disable-rewards-normalization",
    )
    grpo_std_normalization: bool = flag(
        True, "divide by the group's standard deviation; off: Dr.GRPO", negative="--disable-grpo-std-normalization"
    )
    normalize_advantages: bool = flag(False, "whiten the advantages of the whole batch; implied by reinforce_plus_plus")
    gamma: float = flag(1.0, "discount of future rewards")
    lambd: float = flag(1.0, "lambda of GAE")

    eps_clip: float = flag(0.2, "the ratio may fall to 1 - eps_clip")
    eps_clip_high: float = flag(None, "the ratio may rise to 1 + eps_clip_high", auto="--eps-clip")
    eps_clip_c: float | None = flag(None, "dual clip, above 1: bounds the loss of negative advantages")
    value_clip: float = flag(0.2, "clip of the value loss (ppo)")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    calculate_per_token_loss: bool = flag(False, "mean over tokens: --loss-aggregation token")
    loss_aggregation: Literal["rollout", "token", "constant"] = flag(
        "rollout", "mean over rollouts of their token means, mean over tokens, or sums over a constant length (Dr.GRPO)"
    )

    kl_coef: float = flag(0.0, "weight of the KL to the reference in the reward (ppo, reinforce_plus_plus)")
    use_kl_loss: bool = flag(False, "add the KL to the reference to the loss, with --kl-loss-coef")
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss; 0 loads no reference model")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag("low_var_kl", "estimator of the KL")
    use_unbiased_kl: bool = flag(False, "weight the KL estimate by the ratio of new to old policy")
    log_ref_kl: bool = flag(False, "log the KL to the reference although no coefficient uses it")

    use_rollout_logprobs: bool = flag(False, "the engine's log-probs are the old ones of the loss")

    custom_loss_function_path: str | None = flag(None, "plugin: the loss of --loss-type custom_loss", metavar="PLUGIN")
    custom_advantage_function_path: str | None = flag(
        None, "plugin: sets the advantages of a rollout", metavar="PLUGIN"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "plugin: how the policy loss of tokens becomes that of a step, instead of --loss-aggregation",
        metavar="PLUGIN",
    )

    # a reference model is needed
    use_reference: bool = resolved(False)
    # estimator of the KL in the reward: unbiased, and a reward has no gradient that could vanish
    kl_reward_type: Literal["k1", "k2", "k3", "low_var_kl"] = resolved("k1")

    @property
    def estimator(self) -> Estimator:
        """The record of ``--advantage-estimator``."""
        return ESTIMATORS[self.advantage_estimator]

    @property
    def supervised(self) -> bool:
        """The responses are the data's: none was sampled, so there is neither a temperature nor an old policy."""
        return self.loss_type in ("sft_loss", "dpo_loss")


@dataclass(frozen=True)
class PreferenceArgs:
    """Preference pairs.

    What --loss-type dpo_loss reads: the prompt is in --input-key, and batch sizes count pairs.
    """

    chosen_key: str = flag("chosen", "column of the preferred reply: text, messages, or the whole conversation")
    rejected_key: str = flag("rejected", "column of the other reply")
    dpo_loss: Literal["sigmoid", "ipo"] = flag("sigmoid", "loss of a pair; ipo averages over a reply's tokens")
    dpo_beta: float = flag(0.1, "strength of the pull to the reference model")
    dpo_label_smoothing: float = flag(0.0, "share of pairs whose preference is assumed to be the wrong way round")


Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionArgs:
    """Train/inference mismatch.

    The ratio is the trainer's probability of a token over the engine's; its metrics are logged whatever is chosen.
    """

    correction: Literal["none", "tis", "icepop", "mis", "custom"] = flag(
        "none", "weight or drop tokens by that ratio: truncate it, mask outliers, or one of the --mis-... family"
    )
    use_tis: bool = flag(False, "--correction tis")
    tis_clip: float = flag(2.0, "tis, icepop: upper bound of the ratio")
    tis_clip_low: float = flag(0.0, "tis, icepop: lower bound of the ratio")
    mis_level: Level = flag(
        "token", "ratio of a token, or of its response as the product or geometric mean", aliases=("--tis-level",)
    )
    mis_mode: Literal["truncate", "mask", "clip", "none"] = flag(
        "truncate",
        "weight: min(ratio, upper), the ratio inside the bounds else 0, clamped into them, or always 1",
        aliases=("--tis-mode",),
    )
    mis_upper_bound: float = flag(2.0, "largest ratio", aliases=("--tis-upper-bound",))
    mis_lower_bound: float | None = flag(
        None,
        "smallest ratio of the modes mask and clip",
        auto="1 / --mis-upper-bound",
        aliases=("--tis-lower-bound",),
    )
    mis_batch_normalize: bool = flag(
        False,
        "divide the weights of --correction mis by their mean over the whole optimizer step",
        aliases=("--tis-batch-normalize",),
    )
    mis_rejection_level: Level | None = flag(
        None, "also drop what is outside the rejection bounds at this level", aliases=("--rs-level",)
    )
    mis_rejection_upper_bound: float | None = flag(
        None, "largest ratio that is kept", auto="--mis-upper-bound", aliases=("--rs-upper-bound",)
    )
    mis_rejection_lower_bound: float | None = flag(
        None,
        "smallest ratio that is kept",
        auto="--mis-lower-bound where that is given, else 1 / --mis-rejection-upper-bound",
        aliases=("--rs-lower-bound",),
    )
    mis_veto_threshold: float | None = flag(
        None, "drop a response that has a token with a ratio below this", aliases=("--rs-veto-threshold",)
    )
    use_rs: bool | None = flag(
        None, "slime's switch: on rejects at --mis-rejection-level (token, if none is given), off rejects nothing"
    )
    custom_tis_function_path: str | None = flag(None, "plugin: a correction of your own", metavar="PLUGIN")
    use_opsm: bool = flag(False, "drop off-policy responses with a negative advantage")
    opsm_delta: float = flag(1e-4, "mean log-ratio above which a response is off-policy")


@dataclass(frozen=True)
class CriticArgs:
    """Critic.

    Of --advantage-estimator ppo: a second model on the trainer's ranks. What is not here it shares with the policy.
    """

    critic_lr: float = flag(None, "peak learning rate of the critic (AdamW)", auto="--lr")
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of warm-up of the critic")
    num_critic_only_steps: int = flag(0, "rollouts at the start of the run that train the critic alone")
    critic_load: str | None = flag(
        None,
        "what the critic starts from: a Hugging Face model, or the folder 'critic' of a checkpoint",
        auto="--hf-checkpoint",
        metavar="DIR",
    )

    # ppo trains one
    use_critic: bool = resolved(False)


@dataclass(frozen=True)
class DistillationArgs:
    """On-policy distillation."""

    use_opd: bool = flag(
        False, "subtract --opd-kl-coef x (student's - teacher's log-prob) from every token's advantage"
    )
    opd_type: Literal["trainer", "sglang", "megatron"] | None = flag(
        None, "teacher: a model beside the trainer (--opd-teacher-load) or a server (--rm-url); megatron means trainer"
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher")
    opd_teacher_load: str | None = flag(None, "Hugging Face folder or hub id of the teacher", metavar="DIR")
