"""Log-ratios of ±1e3, logits of ±1e4, one token, none: every loss and its gradient stay finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import CORRECTIONS, ESTIMATORS
from tiny import loss_batch, one_rank, random_table, save_tiny_model, tiny_args

from slimelite.algorithms.advantages import gae, whiten
from slimelite.algorithms.groups import group_advantages
from slimelite.algorithms.losses import DPO_KINDS, KL_KINDS
from slimelite.algorithms.policy import kl_estimate, value_loss
from slimelite.algorithms.supervised import dpo_loss
from slimelite.samples.table import SampleTable
from slimelite.training.loss import micro_batch_loss
from slimelite.training.model import chunked_log_probs

EXTREME = (0.0, 1e3, -1e3, 20.0, -20.0, 1e-8)
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "kl_loss_type": "k3"}


@pytest.fixture(scope="module")
def table() -> SampleTable:
    """A row of one token, an empty one, a fully masked one, and others."""
    table = random_table(seed=3, groups=5, group_size=4, masked=0.1)
    assert 1 in table.response_lengths
    table.loss_mask[table.response_offsets[9] : table.response_offsets[10]] = False
    return table


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("aggregation", ["rollout", "token"])
def test_losses_and_gradients_are_finite(table: SampleTable, estimator: str, correction: str, aggregation: str) -> None:
    given = ESTIMATORS[estimator] | {"kl_coef": 0.0} | CORRECTIONS[correction] | TERMS
    args = tiny_args("", advantage_estimator=estimator, loss_aggregation=aggregation, **given)
    batch = loss_batch(args, table)
    size = len(batch.mask)
    jumps = torch.tensor(EXTREME)
    batch.old.copy_(-1e3 + jumps[torch.arange(size) % 6])
    batch.rollout_log_probs.copy_(-1e3 + jumps[torch.arange(size) // 6 % 6])
    object.__setattr__(batch, "ref", -1e3 + jumps[torch.arange(size) // 2 % 6])
    # what the mask hides may be anything
    for column in (batch.old, batch.rollout_log_probs, batch.ref, batch.advantages):
        column[~batch.mask] = torch.nan
    log_probs = torch.full((size,), -1e3, requires_grad=True)
    loss = micro_batch_loss(args, batch, log_probs, torch.full((size,), 1e-30))
    loss.total.backward()
    assert loss.total.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    for name, (total, _) in loss.metrics.items():
        assert total.isfinite(), name


@pytest.mark.parametrize("loss", ["policy_loss", "sft_loss"])
def test_rows_of_nothing(loss: str) -> None:
    """A micro-batch of an empty response and one of a fully masked one."""
    table = random_table(masked=2.0)
    args = tiny_args("", loss_type=loss, correction="mis", mis_level="sequence", mis_veto_threshold=1e-4)
    for rows in ([], [0]):
        batch = loss_batch(args, table, rows)
        log_probs = torch.zeros(len(batch.mask), requires_grad=True)
        total = micro_batch_loss(args, batch, log_probs, torch.zeros(len(batch.mask))).total
        assert total == 0
        if len(log_probs):
            (gradient,) = torch.autograd.grad(total, log_probs)
            assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_logits_of_ten_thousand(scale: float, dtype: torch.dtype) -> None:
    hidden = torch.eye(4, 8, dtype=dtype).mul(scale).requires_grad_()
    weight = torch.eye(11, 8, dtype=dtype).requires_grad_()
    log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([0, 1, 9, 10]), entropy_grad=True)
    assert log_probs.isfinite().all()
    assert (entropy >= -1e-2).all()
    gradients = torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in gradients)


def test_a_model_that_is_sure_trains_on(tmp_path: Path) -> None:
    """Weights so large that logits are about 1e4, responses of one token and of none, an engine far away."""
    model = save_tiny_model(tmp_path / "sure", tie_word_embeddings=False)
    table = random_table(longest=1, masked=0.0)
    table.rollout_log_probs[::2] = -1e3
    table.rollout_log_probs[1::2] = 0.0
    given: dict[str, Any] = {"correction": "mis", "mis_level": "sequence", "mis_mode": "mask", "entropy_coef": 0.01}
    with one_rank(tiny_args(model, **given, lr=1e-3)) as trainer:
        with torch.no_grad():
            trainer.model.hf.lm_head.weight.mul_(1e4)
        for i in range(2):
            metrics = trainer.train(i, table)
            assert all(np.isfinite(value) for value in metrics.values())
            assert metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl(kind: str, unbiased: bool) -> None:
    lp = torch.tensor(EXTREME, requires_grad=True)
    base, mask = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    kl = kl_estimate(lp, base, mask, kind, old=-base if unbiased else None)
    (gradient,) = torch.autograd.grad(kl.sum(), lp)
    assert kl.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", DPO_KINDS)
def test_dpo(kind: str) -> None:
    lp = torch.tensor([1e3, -1e3, -1e3, 1e3, 0.0], requires_grad=True)
    segments, mask = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([True] * 4 + [False])
    pairs = torch.tensor([0, 2, 4]), torch.tensor([1, 3, 5])  # the last: a masked and an empty response
    losses, _ = dpo_loss(
        lp, torch.zeros(5), mask, segments, 6, *pairs, beta=0.1, label_smoothing=0.1 * (kind == "sigmoid"), kind=kind
    )
    (gradient,) = torch.autograd.grad(losses.sum(), lp)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def test_values_advantages_and_whitening() -> None:
    values = torch.tensor([1e4, -1e4, 0.0, 1e4], requires_grad=True)
    mask, segments = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 2])
    advantages, returns = gae(torch.tensor([0.0, 1e4, torch.nan, -1e4]), values, mask, segments, gamma=1.0, lambd=1.0)
    losses, _ = value_loss(values, torch.zeros(4), returns, mask, value_clip=0.2)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    for tensor in (advantages, returns, losses, gradient, whiten(advantages, mask), whiten(advantages, mask & False)):
        assert tensor.isfinite().all()
    assert whiten(torch.full((3,), 1e4), torch.ones(3, dtype=torch.bool)).tolist() == [0, 0, 0]
    for estimator in ESTIMATORS:
        ids = np.array([0, 0, 1, 2]), np.arange(4)
        found, _ = group_advantages(np.array([1e30, -1e30, 1e4, 0.0]), *ids, estimator)
        assert np.isfinite(found).all(), estimator
