"""The float64 gradient of one whole optimizer step, off-policy, on an awkward table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tiny import exact_norms, gradients, random_table

from slimelite.algorithms.estimators import ESTIMATORS as REGISTERED
from slimelite.algorithms.estimators import Estimator
from slimelite.samples.table import SampleTable
from slimelite.training.learner import MetricSums
from slimelite.training.planning import Step, split_steps
from slimelite.training.trainer import Trainer

Gradient = dict[str, torch.Tensor]
MicroBatches = list[np.ndarray]

# widths of a clip that acts, for those that clip more than a ratio of one token
CLIP: dict[str, dict[str, Any]] = {"gspo": {"eps_clip": 0.02}, "cispo": {"eps_clip": 0.1, "eps_clip_high": 0.3}}


def flags_of(estimator: Estimator) -> dict[str, Any]:
    """Every flag that it reads, with a value that acts."""
    return {
        **({"eps_clip_c": 1.5} if estimator.dual_clip and not estimator.sequence_ratio else {}),
        **({"normalize_advantages": True} if estimator.whitens else {}),
        **({"kl_coef": 0.1} if estimator.takes_kl else {}),
        **({"gamma": 0.95} if estimator.discounts else {}),
        **({"use_critic": True, "critic_lr": 1e-2, "lambd": 0.9} if estimator.needs_critic else {}),
        **CLIP.get(estimator.name, {}),
    }


ESTIMATORS = {name: flags_of(estimator) for name, estimator in REGISTERED.items()}
# bounds narrow enough for each to do something in `exact_step`
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"correction": "tis", "tis_clip": 1.05},
    "icepop": {"correction": "icepop", "tis_clip": 1.05, "tis_clip_low": 0.95},
    "mis sequence truncate": {"correction": "mis", "mis_level": "sequence", "mis_upper_bound": 1.1},
    "mis geometric mask": {
        "correction": "mis",
        "mis_level": "geometric",
        "mis_mode": "mask",
        "mis_upper_bound": 1.05,
        "use_opsm": True,
    },
    "mis token clip, rejection": {
        "correction": "mis",
        "mis_mode": "clip",
        "mis_upper_bound": 1.1,
        "mis_rejection_level": "sequence",
        "mis_rejection_upper_bound": 1.3,
    },
    "rejection and veto": {
        "correction": "mis",
        "mis_mode": "none",
        "mis_veto_threshold": 0.8,
        "mis_rejection_level": "geometric",
        "mis_rejection_upper_bound": 1.08,
    },
}
# what each does, as a metric that is neither 0 nor 1
ACTS = {
    "tis": ["tis_clipfrac"],
    "icepop": ["tis_clipfrac"],
    "mis sequence truncate": ["tis_clipfrac"],
    "mis geometric mask": ["tis_clipfrac", "opsm_clipfrac"],
    "mis token clip, rejection": ["tis_clipfrac", "rs_reject_frac"],
    "rejection and veto": ["rs_reject_frac", "veto_response_frac"],
}


def awkward_table() -> SampleTable:
    """Groups of four with fan-out siblings, a removed sample, a fully masked one, two equal ones and masked tools.

    Prompts are long enough for training to compute them once where their samples are in one micro-batch.
    """
    table = random_table(seed=3, groups=5, group_size=4, prompt=(16, 25))
    table = table.select([6 if row == 7 else row for row in range(20)])
    table.sample_id, table.rollout_id, table.unit_id = np.arange(20), np.arange(20), np.arange(20)
    table.advantage[7] = -1.5
    table.rollout_id[1] = table.rollout_id[0]
    table.removed[5] = True
    table.loss_mask[table.response_offsets[9] : table.response_offsets[10]] = False
    for row in np.flatnonzero(table.response_lengths > 8):
        start = table.response_offsets[row]
        table.loss_mask[start + 3 : start + 6] = False
    return table


def exact_step(
    trainer: Trainer, table: SampleTable, arrange: Callable[[MicroBatches], MicroBatches] = lambda parts: parts
) -> tuple[Gradient, dict[str, float]]:
    """The gradient of one optimizer step over the whole table, and the metrics; ``trainer`` is fresh.

    The policy has moved since the rollout began, and the engine disagrees: old and engine log-probs are the policy's
    with noise, of each row by its sample id. ``arrange`` reorders the micro-batches of each rank.
    """
    parts = (trainer, trainer.reference, trainer.teacher, trainer.critic)
    models: list[Any] = [part.model for part in parts if part is not None]
    for model in models:
        model.double()
        exact_norms(model)
    (rows,) = split_steps(table.rollout_id, table.unit_id, 1000)
    columns = trainer._columns(table, [rows])
    columns.old = torch.from_numpy(trainer.log_probs(table)) + noise(table, 0.1, salt=1)
    columns.rollout_log_probs = columns.old + noise(table, 0.1, salt=2)
    sums = MetricSums(trainer.world)
    dealt = trainer._deal(table, rows[table.mask_sums[rows] > 0])
    trainer.gradient(columns, Step(rows, [arrange(parts) for parts in dealt]), sums)
    found = gradients(trainer)
    trainer.model.zero_grad()
    return found, sums.means()[0]


def noise(table: SampleTable, scale: float, salt: int) -> torch.Tensor:
    """[response tokens] float64, the same for a sample wherever it stands."""
    pairs = zip(table.sample_id.tolist(), table.response_lengths.tolist(), strict=True)
    parts = [np.random.default_rng([salt, i]).normal(0, scale, n) for i, n in pairs]
    return torch.from_numpy(np.concatenate(parts))


def assert_same_gradient(mine: Gradient, theirs: Gradient, limit: float = 1e-9) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        scale = theirs[name].norm()
        assert scale > 0, name
        assert (mine[name] - theirs[name]).norm() / scale < limit, name


def assert_same_run(mine: Gradient, theirs: Gradient, start: Gradient, limit: float = 1e-5) -> None:
    """The weights of two fp32 runs, by how far they went: next to that, not to the weights, a wrong step is large.

    All tensors together: Adam makes a full step of a gradient that is nothing but rounding, as those of a key's bias.
    """
    assert mine.keys() == theirs.keys() == start.keys()
    gap = sum(float((mine[name] - theirs[name]).square().sum()) for name in mine) ** 0.5
    way = sum(float((theirs[name] - start[name]).square().sum()) for name in mine) ** 0.5
    assert way > 0
    assert gap / way < limit, f"{gap / way:.1e} of the way"
