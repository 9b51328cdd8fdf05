"""Advantage estimators, one record for each. A record has the functions that compute advantages from rewards, and the
policy loss that uses the advantages.

::

    # median.py, for ``--import-file median.py --advantage-estimator median``
    import torch
    from slimelite.algorithms.estimators import ESTIMATORS, Estimator

    def minus_median(rewards):
        medians = [rewards.rewards[rewards.group == g].median() for g in range(len(rewards.size))]
        return rewards.rewards - torch.stack(medians)[rewards.group]

    ESTIMATORS.add(Estimator("median", "R − median", group=minus_median))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slimelite.base.registry import Function, Registry


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: the functions that compute advantages, and the flags that these functions read.

    Args:
        name: the value of ``--advantage-estimator``.
        summary: the advantage as a formula, for the help.
        paper: the arXiv number of the estimator's paper.
        group: ``fn(rewards: GroupedRewards) -> [M]`` float64. The function compares the rollouts of each prompt (a
            group), and returns the advantages of all M rollouts; see `groups.GroupedRewards`. None: the advantage is
            the reward.
        token: ``fn(tokens: RolloutTokens) -> [T]``, the advantages of the T packed response tokens of a whole rollout.
            Advantages of unmasked tokens must be finite. The function may also return a pair: these advantages, and the
            returns [T] that a critic learns. See `advantages.RolloutTokens`. None: every token has its row's advantage.
        loss: ``fn(log_probs, log_ratio, advantages, *, eps_clip, eps_clip_high, eps_clip_c) -> losses [T], metrics``,
            all [T]; see `policy.policy_loss`.
        sequence_ratio: the loss reads one ratio for each response: the geometric mean of the ratios of its tokens.
        divides_by_std: ``group`` reads ``--disable-grpo-std-normalization``.
        takes_kl: ``token`` reads the KL that ``--kl-coef`` weights.
        discounts: ``token`` reads ``--gamma``.
        whitens: the paper defines the estimator with whitened advantages (``--normalize-advantages``).
        needs_critic: ``token`` reads the values of a critic, and ``--lambd``.
        compares: the function ``token`` compares the rollouts of one prompt, so each prompt needs several rollouts.
        dual_clip: ``loss`` reads ``--eps-clip-c``.
        open_below: the paper of the estimator does not bound the ratio from below (``--eps-clip 1``).
    """

    name: str
    summary: str
    paper: str = ""
    group: Function | None = None
    token: Function | None = None
    loss: Function = "slimelite.algorithms.policy:ppo_clip_loss"
    sequence_ratio: bool = False
    divides_by_std: bool = False
    takes_kl: bool = False
    discounts: bool = False
    whitens: bool = False
    needs_critic: bool = False
    compares: bool = False
    dual_clip: bool = True
    open_below: bool = False


_GROUPS, _ADVANTAGES = "slimelite.algorithms.groups", "slimelite.algorithms.advantages"
GRPO = Estimator(
    "grpo",
    "(R − mean) / std over the responses to a prompt",
    "2402.03300",
    f"{_GROUPS}:over_std",
    divides_by_std=True,
)
ESTIMATORS = Registry(
    "advantage estimator",
    "--advantage-estimator",
    (
        GRPO,
        replace(
            GRPO,
            name="gspo",
            summary="like grpo, but the loss has one ratio per response",
            paper="2507.18071",
            sequence_ratio=True,
        ),
        replace(
            GRPO,
            name="cispo",
            summary="like grpo, but the clipped ratio is a constant weight in the loss, without a gradient",
            paper="2506.13585",
            loss="slimelite.algorithms.policy:cispo_loss",
            dual_clip=False,
            open_below=True,
        ),
        Estimator("rloo", "R − mean over the other responses to the prompt", "2402.14740", f"{_GROUPS}:leave_one_out"),
        Estimator(
            "reinforce_plus_plus",
            "the discounted sum of (reward − KL) over the token and the tokens after it",
            "2501.03262",
            token=f"{_ADVANTAGES}:reinforce_plus_plus",
            takes_kl=True,
            discounts=True,
            whitens=True,
        ),
        Estimator(
            "reinforce_plus_plus_baseline",
            "R − mean over the responses to a prompt, minus the KL of the token",
            "2501.03262",
            f"{_GROUPS}:minus_mean",
            f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
            takes_kl=True,
            whitens=True,
        ),
        Estimator(
            "ppo",
            "generalized advantage estimation with the values of a critic",
            "1707.06347",
            token=f"{_ADVANTAGES}:ppo",
            takes_kl=True,
            discounts=True,
            needs_critic=True,
        ),
        Estimator(
            "grpo_turns",
            "for the k-th reply, (G − mean) / std over the k-th replies of all episodes of the prompt; G is the "
            "discounted sum of the rewards from that reply on",
            "2505.11821",
            token=f"{_ADVANTAGES}:grpo_turns",
            discounts=True,
            compares=True,
        ),
        Estimator(
            "ppo_turns",
            "like ppo, but each reply of an episode is one time step",
            "1506.02438",
            token=f"{_ADVANTAGES}:ppo_turns",
            takes_kl=True,
            discounts=True,
            needs_critic=True,
        ),
    ),
)
