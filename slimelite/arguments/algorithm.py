"""Advantages and losses; the formulas are in docs/algorithms.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag, resolved
from slimelite.arguments.presets import PRESETS

AdvantageEstimator = Literal[
    "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]

# those that compare the responses to a prompt with each other
GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
# those whose reward has a KL term
KL_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


@dataclass(frozen=True)
class AlgorithmArgs:
    """Algorithm."""

    preset: list[str] = flag(
        [],
        f"named sets of flags, below the command line and --config: {', '.join(PRESETS)}; see docs/algorithms.md",
        metavar="NAME",
    )
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "custom_loss"] = flag("policy_loss", "what is minimised")
    advantage_estimator: AdvantageEstimator = flag(
        "grpo", "how rewards become advantages, and the policy loss that goes with it"
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
    def supervised(self) -> bool:
        """The responses are the data's: none was sampled, so there is neither a temperature nor an old policy."""
        return self.loss_type in ("sft_loss", "dpo_loss")
