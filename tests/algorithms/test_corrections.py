"""Mismatch corrections against loops, every level × mode, rejection, veto, opsm, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from ragged import Batch, batches, few, per_token, ratio_of, same
from torch import Tensor

from slimelite.algorithms.corrections import (
    effective_sample_size,
    mis_weights,
    mismatch_metrics,
    opsm_keep,
    rejection_keep,
    veto_keep,
)
from slimelite.algorithms.losses import LEVELS, MODES

WEIGHING = [name for name in MODES if name != "none"]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def naive_ratio(batch: Batch, old: Tensor, roll: Tensor, level: str, row: int, t: int) -> float:
    logs = [float(old[s] - roll[s]) for s in batch.trained(row)]
    x = {"token": float(old[t] - roll[t]), "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[level]
    return math.exp(min(max(x, -20.0), 20.0))


def naive_weight(ratio: float, mode: str, low: float, high: float) -> float:
    if mode == "mask":
        return ratio if low <= ratio <= high else 0.0
    return min(ratio, high) if mode == "truncate" else min(max(ratio, low), high)


@pytest.mark.parametrize("lower", [None, 0.8, 0.0])
@pytest.mark.parametrize("mode", WEIGHING)
@pytest.mark.parametrize("level", LEVELS)
@few
@given(batch=batches)
def test_mis_equals_the_loop(batch: Batch, level: str, mode: str, lower: float | None) -> None:
    old, roll = batch.randn(0.5), batch.randn(0.5)
    low = 1 / 1.5 if lower is None else lower
    ratio = per_token(batch, lambda r, t: scalar(naive_ratio(batch, old, roll, level, r, t)))
    expected = per_token(batch, lambda _, t: scalar(naive_weight(float(ratio[t]), mode, low, 1.5)))
    weights, metrics = mis_weights(
        old, roll, batch.mask, batch.segments, batch.rows, level=level, mode=mode, upper=1.5, lower=lower
    )
    same(weights, expected)
    changed = sum(float(abs(weights[t] - ratio[t])) > 1e-12 for _, t in batch.all_trained())
    assert float(metrics["tis_clipfrac"][0]) == changed
    assert float(metrics["tis"][0]) == pytest.approx(float(ratio.sum()))
    assert float(metrics["tis_weight"][0]) == pytest.approx(float(expected.sum()))
    assert float(metrics["tis"][1]) == int(batch.mask.sum())


@pytest.mark.parametrize("level", LEVELS)
@few
@given(batch=batches)
def test_rejection_equals_the_loop(batch: Batch, level: str) -> None:
    old, roll = batch.randn(0.5), batch.randn(0.5)
    keep, metrics = rejection_keep(old, roll, batch.mask, batch.segments, batch.rows, level=level, upper=1.2)
    kept = [1 / 1.2 <= naive_ratio(batch, old, roll, level, r, t) <= 1.2 for r, t in batch.all_trained()]
    assert keep[batch.mask].tolist() == kept
    assert float(metrics["rs_reject_frac"][0]) == kept.count(False)


@few
@given(batch=batches)
def test_veto_drops_the_whole_response(batch: Batch) -> None:
    old, roll = batch.randn(), batch.randn()
    keep, metrics = veto_keep(old, roll, batch.mask, batch.segments, batch.rows, threshold=0.2)
    bad = {t for _, t in batch.all_trained() if math.exp(old[t] - roll[t]) < 0.2}
    dropped = [bool(bad & set(batch.trained(row))) for row in range(batch.rows)]
    assert keep.tolist() == [not dropped[row] for row in range(batch.rows) for _ in batch.tokens(row)]
    assert float(metrics["veto_token_frac"][0]) == len(bad)
    assert float(metrics["veto_response_frac"][0]) == sum(dropped)
    assert float(metrics["veto_response_frac"][1]) == sum(bool(batch.trained(row)) for row in range(batch.rows))


@few
@given(batch=batches)
def test_opsm_decides_by_response(batch: Batch) -> None:
    lp, old, adv = batch.randn(), batch.randn(), batch.randn()
    keep, metrics = opsm_keep(lp, old, adv, batch.mask, batch.segments, batch.rows, delta=0.1)
    dropped = []
    for row in range(batch.rows):
        tokens = batch.trained(row)
        drift = sum(float(old[t] - lp[t]) for t in tokens) / max(len(tokens), 1)
        dropped.append(sum(float(adv[t]) for t in tokens) < 0 and drift > 0.1)
    assert keep.tolist() == [not dropped[row] for row in range(batch.rows) for _ in batch.tokens(row)]
    assert float(metrics["opsm_clipfrac"][0]) == sum(dropped)
    assert float(metrics["opsm_clipfrac"][1]) == sum(bool(batch.trained(row)) for row in range(batch.rows))


@few
@given(batch=batches)
def test_mismatch_metrics_equal_the_loop(batch: Batch) -> None:
    old, roll = batch.randn(), batch.randn()
    roll[::4] = torch.nan  # the engine gave no log-prob
    metrics = mismatch_metrics(old, roll, batch.mask, clip=1.5, clip_low=0.5)
    x = [float(old[t] - roll[t]) for _, t in batch.all_trained() if t % 4]
    rho = [math.exp(v) for v in x]
    expected = {
        "train_rollout_logprob_abs_diff": sum(map(abs, x)),
        "mismatch_k3": sum(r - 1 - v for r, v in zip(rho, x, strict=True)),
        "mismatch_ratio": sum(rho),
        "mismatch_ratio_sq": sum(r * r for r in rho),
        "mismatch_clipfrac": sum(not 0.5 <= r <= 1.5 for r in rho),
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert float(metrics[name][0]) == pytest.approx(value, rel=1e-9), name
        assert float(metrics[name][1]) == len(x)
    if x:
        ess = effective_sample_size(ratio_of(metrics["mismatch_ratio"]), ratio_of(metrics["mismatch_ratio_sq"]))
        assert ess == pytest.approx(sum(rho) ** 2 / (len(rho) * sum(r * r for r in rho)))


def test_equal_engines_are_left_alone() -> None:
    lp, mask, segments = torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    for mode in WEIGHING:
        weights, _ = mis_weights(lp, lp, mask, segments, 1, level="token", mode=mode, upper=2.0, lower=0.0)
        assert weights.tolist() == [1.0, 1.0]
    metrics = mismatch_metrics(lp, lp, mask)
    assert [ratio_of(m) for m in metrics.values()] == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert effective_sample_size(1.0, 1.0) == 1.0
    assert effective_sample_size(0.0, 0.0) == 0.0
    assert veto_keep(lp, lp, mask, segments, 1, threshold=1e-4)[0].all()


@pytest.mark.parametrize("difference", [-1e3, 1e3])
def test_extreme_ratios_stay_finite(difference: float) -> None:
    old, roll, mask = torch.full((1,), difference), torch.zeros(1), torch.ones(1, dtype=torch.bool)
    row = torch.zeros(1, dtype=torch.long)
    weights, _ = mis_weights(old, roll, mask, row, 1, level="token", mode="clip", upper=2.0, lower=0.0)
    assert weights.item() == (2.0 if difference > 0 else pytest.approx(0.0, abs=1e-8))
    for level in LEVELS:
        for mode in WEIGHING:
            weights, metrics = mis_weights(old, roll, mask, row, 2, level=level, mode=mode, upper=2.0)
            assert weights.isfinite().all()
            assert all(v.isfinite() for pair in metrics.values() for v in pair)
    assert all(v.isfinite() for pair in mismatch_metrics(old, roll, mask).values() for v in pair)


def test_weights_carry_no_gradient() -> None:
    lp = torch.zeros(1, requires_grad=True)
    mask, row = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    assert not mis_weights(lp, lp, mask, row, 1, level="sequence", mode="clip", upper=2.0)[0].requires_grad


def test_unknown_names() -> None:
    one, row = torch.zeros(1), torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match="mode"):
        mis_weights(one, one, one == 0, row, 1, level="token", mode="drop", upper=2.0)
    with pytest.raises(ValueError, match="level"):
        rejection_keep(one, one, one == 0, row, 1, level="word", upper=2.0)
