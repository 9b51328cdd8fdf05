"""Contracts of what training calls: losses, advantages, corrections, reducers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training.tiny import loss_batch, random_table, tiny_args

from slimelite.arguments import Args
from slimelite.samples.table import SampleTable
from slimelite.slime.plugins import load_function
from slimelite.training.columns import TokenColumns
from slimelite.training.loss import Loss, micro_batch_loss
from slimelite.training.planning import split_steps

from .conftest import Given


@pytest.fixture
def table() -> SampleTable:
    """Responses of 1 to 16 tokens with masked ones among them, one that is fully masked, and fan-out siblings."""
    table = random_table()
    table.loss_mask[table.response_offsets[3] : table.response_offsets[4]] = False
    table.rollout_id[1] = table.rollout_id[0]
    return table


def losses_of(args: Args, table: SampleTable, rows: list[list[int]]) -> tuple[torch.Tensor, list[Loss]]:
    """The gradient by response token of micro-batches of ``rows``, and their losses."""
    now = -torch.rand(len(table.response_tokens), generator=torch.Generator().manual_seed(1)) - 3.5
    now.requires_grad_()
    losses = []
    for part in rows:
        spans = [np.arange(table.response_offsets[r], table.response_offsets[r + 1]) for r in part]
        tokens = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans]))
        loss = micro_batch_loss(args, loss_batch(args, table, part), now[tokens], torch.ones(len(tokens)))
        loss.total.backward()
        losses.append(loss)
    assert now.grad is not None
    return now.grad, losses


def check(args: Args, table: SampleTable) -> None:
    """Finite, nothing from masked tokens, the same for every packing, and no trouble with an empty micro-batch."""
    together, losses = losses_of(args, table, [list(range(len(table)))])
    apart, _ = losses_of(args, table, [[row] for row in range(len(table))] + [[]])
    assert together.isfinite().all()
    assert together.any()
    assert (together[~torch.from_numpy(table.loss_mask)] == 0).all()
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-7)
    for name, (total, weight) in losses[0].metrics.items():
        assert torch.as_tensor(total).isfinite(), name
        assert torch.as_tensor(weight) >= 0, name


def test_custom_loss(given: Given, table: SampleTable) -> None:
    """``fn(args, batch, log_probs, entropy)`` -> losses [R], {metric: (sum, weight)}; `MicroBatch` has the rest.

    The loss of a token does not depend on which rows are packed with its own: it is weighted for the whole step.
    """
    check(tiny_args("", loss_type="custom_loss", custom_loss_function_path=given("--custom-loss-function-path")), table)


def test_custom_advantage(given: Given, table: SampleTable) -> None:
    """``fn(args, table, columns)`` sets ``columns.advantages`` [N], finite; ``columns.old`` is there for it to read."""
    args = tiny_args("", custom_advantage_function_path=given("--custom-advantage-function-path"))
    columns = TokenColumns.from_table(table, split_steps(table.rollout_id, table.unit_id, 64))
    columns.set_weights(args)
    columns.old = torch.full((len(columns.mask),), -4.0)
    before = {name: value.clone() for name, value in vars_of(columns).items()}
    load_function(str(args.custom_advantage_function_path))(args, table, columns)
    assert columns.advantages.shape == columns.mask.shape
    assert columns.advantages.isfinite().all()
    for name, value in vars_of(columns).items():
        assert name == "advantages" or torch.equal(value.nan_to_num(9.0), before[name].nan_to_num(9.0)), name


def vars_of(columns: TokenColumns) -> dict[str, torch.Tensor]:
    found = {name: getattr(columns, name) for name in columns.__dataclass_fields__}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def test_custom_correction(given: Given, table: SampleTable) -> None:
    """slime's ``fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths,
    **kwargs)`` -> pg_loss, masks, {metric: [R]}; lists have an entry a response.
    """
    check(tiny_args("", correction="custom", custom_tis_function_path=given("--custom-tis-function-path")), table)


@pytest.mark.parametrize("aggregation", ["rollout", "token"])
def test_custom_reducer(given: Given, table: SampleTable, aggregation: str) -> None:
    """slime's ``fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)`` -> losses -> 0-d tensor,
    called with the whole optimizer step.
    """
    path = given("--custom-pg-loss-reducer-function-path")
    check(tiny_args("", loss_aggregation=aggregation, custom_pg_loss_reducer_function_path=path), table)
