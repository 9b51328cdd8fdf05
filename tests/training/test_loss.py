"""Corrections, their slime names, and reducers, in whole optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import CORRECTIONS, Gradient, assert_same_gradient, awkward_table, exact_step, noise
from tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of

from slimelite.training.columns import TokenColumns

PLUGINS = Path(__file__).parent / "plugins.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def step(model: Path, **given: Any) -> tuple[Gradient, dict[str, float]]:
    with one_rank(tiny_args(model, **given)) as trainer:
        return exact_step(trainer, awkward_table())


def test_mis_contains_the_others(model: Path) -> None:
    tis = {"correction": "tis", "tis_clip": 1.05, "tis_clip_low": 0.9}
    clip = {"correction": "mis", "mis_mode": "clip", "mis_upper_bound": 1.05, "mis_lower_bound": 0.9}
    assert_same_gradient(step(model, **tis)[0], step(model, **clip)[0], limit=1e-14)
    assert_same_gradient(
        step(model, **tis | {"correction": "icepop"})[0], step(model, **clip | {"mis_mode": "mask"})[0], limit=1e-14
    )
    # without a veto or a rejection that acts, mode none is no correction
    idle = {"correction": "mis", "mis_mode": "none", "mis_veto_threshold": 1e-6}
    assert_same_gradient(step(model, **idle)[0], step(model)[0], limit=1e-14)


def test_every_correction_is_another_gradient(model: Path) -> None:
    found = [step(model)[0], *(step(model, **given)[0] for given in CORRECTIONS.values())]
    flat = [torch.cat([g.flatten() for g in gradient.values()]) for gradient in found]
    for i, a in enumerate(flat):
        for b in flat[:i]:
            assert (a - b).norm() / b.norm() > 1e-3


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_saved_weights_are_the_correction(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain policy loss with these weights instead of its own has the same gradient."""
    with one_rank(tiny_args(model, **CORRECTIONS[name])) as trainer:
        mine, _ = exact_step(trainer, awkward_table())
        (saved,) = trainer._weights.gather()
    assert saved.isnan().any(), "a row without a trained token was not computed"
    set_weights = TokenColumns.set_weights

    def set_saved(columns: TokenColumns, *given: Any) -> None:
        set_weights(columns, *given)
        assert (columns.pg_weights - saved).nan_to_num().abs().max() > 1e-4
        columns.pg_weights = saved.nan_to_num()

    monkeypatch.setattr(TokenColumns, "set_weights", set_saved)
    assert_same_gradient(step(model)[0], mine)


@pytest.mark.parametrize(
    "given",
    [
        {"correction": "mis", "mis_mode": "truncate", "mis_upper_bound": 1.05, "mis_batch_normalize": True},
        {"custom_pg_loss_reducer_function_path": f"{PLUGINS}:constant_length_reducer"},
    ],
)
def test_a_rollout_has_the_weights_that_flags_made(model: Path, given: dict[str, Any]) -> None:
    table = awkward_table()
    with one_rank(tiny_args(model, global_batch_size=1000)) as trainer:
        table.rollout_log_probs = (trainer.log_probs(table) + noise(table, 0.1, salt=2).numpy()).astype(np.float32)
        trainer.train(0, table)
        assert trainer.trained_columns == {}, "the aggregation alone says the weights"
    with one_rank(tiny_args(model, global_batch_size=1000, **given)) as trainer:
        pg_loss = trainer.train(0, table)["train/pg_loss"]
        (found,) = trainer.trained_columns.values()
    # in the only step a token's loss is its advantage, negated
    assert found.dtype == np.float32
    assert pg_loss == pytest.approx(-np.nansum(found * table.advantage.repeat(table.response_lengths)), rel=1e-4)


def test_what_a_veto_drops_is_as_if_it_were_masked_except_in_the_denominators(model: Path) -> None:
    """Engine log-probs far above the trainer's in one token of the first row: it alone is dropped."""
    table = random_table(masked=0.0)
    removed = []
    with one_rank(tiny_args(model)) as trainer:
        table.rollout_log_probs = trainer.log_probs(table).astype(np.float32)
    table.rollout_log_probs[1] += 12.0
    for given, weight in (({"correction": "mis", "mis_mode": "none", "mis_veto_threshold": 1e-4}, 1.0), ({}, 0.0)):
        with one_rank(tiny_args(model, **given)) as trainer:
            table.advantage[0] = weight
            metrics = trainer.train(0, table)
            removed.append((metrics, weights_of(trainer)))
    (vetoed, with_veto), (_, without) = removed
    assert vetoed["train/veto_response_frac"] == pytest.approx(1 / 16)
    for name, tensor in with_veto.items():
        torch.testing.assert_close(tensor, without[name], rtol=1e-5, atol=1e-6)


def test_a_correction_of_slimes_contract(model: Path) -> None:
    given = {"correction": "custom", "custom_tis_function_path": f"{PLUGINS}:tis_as_slime_does", "tis_clip": 1.05}
    table = awkward_table()
    single = np.flatnonzero(table.response_lengths == 1)
    assert len(single)
    assert table.mask_sums[single].any()
    with one_rank(tiny_args(model, **given, max_tokens_per_gpu=70)) as trainer:
        custom, means = exact_step(trainer, table)
    assert 0.9 < means["my_weight"] < 1.05
    with one_rank(tiny_args(model, correction="tis", tis_clip=1.05)) as trainer:
        table.advantage[single] = 0.0
        builtin, _ = exact_step(trainer, table)
    assert_same_gradient(custom, builtin)


@pytest.mark.parametrize("given", [{}, {"loss_aggregation": "token"}])
def test_a_reducer_replaces_the_aggregation_of_the_policy_loss(model: Path, given: dict[str, Any]) -> None:
    path = f"{PLUGINS}:constant_length_reducer"
    mine, means = step(model, custom_pg_loss_reducer_function_path=path, **given)
    built_in = given or {"loss_aggregation": "constant"}
    theirs, their_means = step(model, **built_in)
    assert_same_gradient(mine, theirs)
    assert means["pg_loss"] == pytest.approx(their_means["pg_loss"])


def test_a_reducer_sees_the_whole_step_and_leaves_other_terms_alone(model: Path) -> None:
    given = {"custom_pg_loss_reducer_function_path": f"{PLUGINS}:longest_response_reducer", "entropy_coef": 0.1}
    found = []
    for packing in ({"max_tokens_per_gpu": 10_000}, {"max_tokens_per_gpu": 40}):
        gradient, means = step(model, **given | packing)
        found.append(gradient)
        plain = step(model, entropy_coef=0.1, **packing)[1]
        assert means["entropy_loss"] == pytest.approx(plain["entropy_loss"])
        assert means["pg_loss"] != pytest.approx(plain["pg_loss"], rel=0.05)
        assert means["loss"] - means["pg_loss"] == pytest.approx(plain["loss"] - plain["pg_loss"])
    assert_same_gradient(*found)


@pytest.mark.parametrize("name", ["largest_loss_reducer", "unclamped_reducer"])
def test_a_reducer_that_is_no_weighted_sum_is_refused(model: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: the function that it returns must compute a finite weighted"):
        step(model, custom_pg_loss_reducer_function_path=f"{PLUGINS}:{name}")
