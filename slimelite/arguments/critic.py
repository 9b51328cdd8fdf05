"""The critic of ``--advantage-estimator ppo``."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.arguments.base import flag, resolved


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
