"""Which forward passes a rollout needs before and beside training's own, for each way to correct, penalise and measure.

The numbers are rows: 16 of the rollout, of which the first optimizer step has 8 if there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimelite.training.columns import TokenColumns, passes
from slimelite.training.trainer import Trainer
from tests.training.tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of

ALL, LATER, TWO = 16, 8, {"num_steps_per_rollout": 2, "global_batch_size": 8}
TIS, MIS = {"correction": "tis"}, {"correction": "mis"}
ENGINE = {"use_rollout_logprobs": True}
KL = {"use_kl_loss": True, "use_reference": True, "kl_loss_coef": 0.1}
REF, OLD = ("ref_log_probs", ALL), ("log_probs", ALL)

# flags -> the passes with one step a rollout, and with two
NEEDS: dict[str, tuple[dict[str, Any], list[tuple[str, int]], list[tuple[str, int]]]] = {
    "ppo clip": ({}, [], [("log_probs", LATER)]),
    "gspo": ({"advantage_estimator": "gspo"}, [], [("log_probs", LATER)]),
    "engine's log-probs": (ENGINE, [], []),
    "engine's log-probs, opsm": ({**ENGINE, "use_opsm": True}, [], []),
    "engine's log-probs, kl loss": ({**ENGINE, **KL}, [REF], [REF]),
    "engine's log-probs, unbiased kl": ({**ENGINE, **KL, "use_unbiased_kl": True}, [REF], [REF]),
    "engine's log-probs, rejection": (
        {**ENGINE, **MIS, "mis_mode": "none", "mis_rejection_level": "token"},
        [],
        [("log_probs", LATER)],
    ),
    "engine's log-probs, every token's stats": ({**ENGINE, "token_stats": "all"}, [], [("token_stats", LATER)]),
    "opsm": ({"use_opsm": True}, [], [("log_probs", LATER)]),
    "tis": (TIS, [], [("log_probs", LATER)]),
    "icepop": ({"correction": "icepop"}, [], [("log_probs", LATER)]),
    "mis": (MIS, [], [("log_probs", LATER)]),
    "mis, normalized": ({**MIS, "mis_batch_normalize": True}, [OLD], [OLD]),
    "kl loss": (KL, [REF], [REF, ("log_probs", LATER)]),
    "kl as a metric": ({**KL, "kl_loss_coef": 0.0}, [REF], [REF, ("log_probs", LATER)]),
    "kl in the reward": ({"use_reference": True, "kl_coef": 0.1}, [REF, OLD], [REF, OLD]),
    "every token's stats": ({"token_stats": "all"}, [], [("log_probs", LATER)]),
    "the first rollout is checked": ({"ci_test": True}, [OLD], [OLD]),
    "sft": ({"loss_type": "sft_loss", "compute_advantages_and_returns": False}, [], []),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[Trainer]:
    """One for all cases, which give it their arguments."""
    with one_rank(tiny_args(model, **KL)) as trainer:
        yield trainer


@pytest.mark.parametrize("case", NEEDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_passes(trainer: Trainer, case: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, *needs = NEEDS[case]
    table, made, run = random_table(masked=0.0), [], Trainer._pass
    args = tiny_args(trainer.args.hf_checkpoint, **{"token_stats": "computed", **given}, **(TWO if steps == 2 else {}))

    def counted(self: Trainer, name: str, columns: Any, dealt: list[list[np.ndarray]]) -> None:
        made.append((name, sum(len(rows) for parts in dealt for rows in parts)))
        run(self, name, columns, dealt)

    table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
    monkeypatch.setattr(Trainer, "_pass", counted)
    monkeypatch.setattr(trainer, "args", args)
    monkeypatch.setattr(trainer, "reference", trainer.reference if args.use_reference else None)
    trainer._fresh = True  # --ci-test checks the first rollout
    metrics = trainer.train(0, table)
    assert made == needs[steps - 1]
    later = steps == 1 or "log_probs" in dict(made)  # whether more than the first step's log-probs are known
    assert ("rollout/log_probs" in metrics) == ("rollout/entropy" in metrics) == later
    measured = ["train/train_rollout_logprob_abs_diff" in of_step for of_step in trainer.step_metrics]
    assert measured == [args.job.sampled, later and args.job.sampled][:steps]
    stats = trainer.token_stats
    assert stats is not None
    known = ~np.isnan(stats.log_probs)
    first = table.response_offsets[8]
    assert known[:first].all()
    assert known[first:].all() == (later or args.token_stats == "all")


@pytest.mark.parametrize("given", [{}, TIS, KL, {"advantage_estimator": "gspo"}, {"use_opsm": True}, ENGINE])
def test_a_pass_over_every_row_trains_the_same(
    model: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit with the engine's log-probs, and to rounding (1e-5 of a weight) where a part of a pass is spared."""
    table, found = random_table(), []
    for long_way in (False, True):
        if long_way:
            monkeypatch.setattr("slimelite.training.columns.pass_begins", lambda *_: 0)
        with one_rank(tiny_args(model, **given, **TWO)) as trainer:
            metrics = [trainer.train(i, table) for i in range(2)]
            found.append((metrics, weights_of(trainer)))
    (short, weights), (long, theirs) = found
    for a, b in zip(short, long, strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout/log_probs", "rollout/entropy"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
    for name, weight in weights.items():
        if given == ENGINE:
            assert torch.equal(weight, theirs[name]), name
        else:
            torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-5)


def test_a_plan_changes_nothing_and_asks_for_nothing_twice(model: Path) -> None:
    args = tiny_args(model, **KL, token_stats="all", **TWO)
    table = random_table(masked=0.0)
    columns = TokenColumns.from_table(table, [np.arange(8), np.arange(8, 16)])
    before = {name: value.clone() for name, value in vars(columns).items() if isinstance(value, torch.Tensor)}
    computed = np.arange(16) % 2 == 0
    first, rest = passes(args, columns), passes(args, columns, computed)
    assert {name: rows.tolist() for name, rows in first.items()} == {"ref_log_probs": list(range(16))}
    assert rest["log_probs"].tolist() == [8, 10, 12, 14]
    assert rest["token_stats"].tolist() == list(range(1, 16, 2))
    assert all(
        torch.equal(value.nan_to_num(9.0), vars(columns)[name].nan_to_num(9.0)) for name, value in before.items()
    )
    found = torch.where(torch.from_numpy(np.isin(columns.segments, rest["log_probs"])), -1.0, torch.nan)
    columns.fill("log_probs", (found, -found))
    assert columns.old.isnan().any(), "NaN where nothing was computed"
    assert passes(args, columns, computed).keys() == {"token_stats"}
    assert passes(args, columns, computed, checked=True)["log_probs"].tolist() == list(range(0, 16, 2))
