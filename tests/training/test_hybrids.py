"""Layers with a state, packed: each row gets the log-probs and gradients that it gets alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrids import HYBRIDS, ODD, Exact, hybrid
from tiny import on_ranks, one_rank, tiny_args
from torch import Tensor
from trees import tree_table

from slimelite.samples.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.model import PolicyModel
from slimelite.training.packing import Packing, may_pack
from slimelite.training.parallel import whole
from slimelite.training.trainer import Trainer

Gradient = dict[str, Tensor]


def three_levels() -> TokenColumns:
    """A header, two prompts that begin with it, answers to each; two of them go on alike; and a row of its own."""
    rng = np.random.default_rng(0)

    def some(count: int) -> list[int]:
        return rng.integers(1, 61, count).tolist()

    header, rows = some(70), []
    for prompt in (header + some(20), header + some(33)):
        begun = some(18)
        rows += [(prompt, some(3)), (prompt, begun + some(66)), (prompt, begun + some(2))]
    return TokenColumns.from_table(tree_table([*rows, (some(2), some(9))]))


def log_probs(model: PolicyModel, columns: TokenColumns, rows: list[int], *, shares: bool = True) -> Tensor:
    return model(MicroBatch(columns, np.array(rows, np.int64), shares=shares), 1.0)[0]


def gradient(model: PolicyModel, loss: Tensor) -> Gradient:
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def weights_of_tokens(columns: TokenColumns, row: int) -> Tensor:
    length = int(columns.table.response_lengths[row])
    return torch.randn(length, generator=torch.Generator().manual_seed(row), dtype=torch.float64)


def assert_close(mine: Gradient, theirs: Gradient, limit: float) -> None:
    """No element differs by more than ``limit`` of the largest."""
    assert mine.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, right in theirs.items():
        assert (mine[name] - right).abs().max() <= limit * largest, name
    assert all(g.any() for name, g in theirs.items() if not name.endswith("lora_A"))  # while the other part is 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_packed_tree_is_its_rows_alone(family: str) -> None:
    """In float64, by the same scan: log-probs, and the gradients of all weights through three levels of states."""
    columns = three_levels()
    model = PolicyModel(hybrid(family).double())
    everyone = list(range(len(columns.table)))
    weights = [weights_of_tokens(columns, row) for row in everyone]
    with Exact():
        packed = log_probs(model, columns, everyone)
        mine = gradient(model, (packed * torch.cat(weights)).sum())
        parts = [log_probs(model, columns, [row]) for row in everyone]
        theirs = gradient(model, torch.stack([(x * w).sum() for x, w in zip(parts, weights, strict=True)]).sum())
    assert MicroBatch(columns, np.array(everyone), shares=True).sequences.nodes.levels.max() == 3
    torch.testing.assert_close(packed, torch.cat(parts), rtol=0, atol=1e-11)
    assert_close(mine, theirs, 1e-10)


@pytest.mark.newest
@pytest.mark.parametrize("family", [*HYBRIDS, *ODD])
def test_a_packed_tree_is_what_transformers_computes(family: str) -> None:
    """In fp32, by transformers' unmodified layers on each row alone."""
    columns, own = three_levels(), hybrid(family, "eager")
    everyone = list(range(len(columns.table)))
    model = PolicyModel(hybrid(family))
    packed = log_probs(model, columns, everyone)
    mine = gradient(model, (packed * torch.cat([weights_of_tokens(columns, row) for row in everyone]).float()).sum())
    right, loss = [], torch.zeros(())
    for row in everyone:
        prompt, response = (columns.table.row_slice(name, row) for name in ("prompt_tokens", "response_tokens"))
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        scores = own(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        right.append(scores.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0])
        loss = loss + (right[-1] * weights_of_tokens(columns, row).float()).sum()
    loss.backward()
    theirs = {f"hf.{name}": p.grad for name, p in own.named_parameters() if p.grad is not None}
    torch.testing.assert_close(packed, torch.cat(right), rtol=0, atol=1e-4)
    assert_close(mine, theirs, 1e-4)


def test_the_decay_of_lightning_attention_is_not_rounded() -> None:
    """In bf16: a decay that bf16 does not have gives something else than the nearest that it has."""
    columns, results = three_levels(), []
    for rounded in (False, True):
        model = hybrid("minimax").bfloat16()
        for layer in model.modules():
            if isinstance(slope := getattr(layer, "slope_rate", None), Tensor):
                exact = slope.float() * 1.003
                layer.slope_rate = exact.bfloat16().float() if rounded else exact
        with torch.no_grad():
            results.append(log_probs(PolicyModel(model), columns, [0]))
    assert not torch.equal(*results)


def step(trainer: Trainer, table: SampleTable) -> Gradient:
    """The gradient of every parameter that is trained, of one step over the whole table."""
    trainer.forward_backward(table)
    return {name: whole(p.grad).clone() for name, p in trainer.model.trained().items()}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers recomputed": {"gradient_checkpointing": True},
    "layers recomputed, products kept": {"gradient_checkpointing": True, "recompute_granularity": "selective"},
    "adapters": {"lora_rank": 4},
    "two ranks": {},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_a_trainer_is_that_of_rows_alone(case: str, tmp_path: Path) -> None:
    hybrid("jamba").save_pretrained(tmp_path)
    columns = three_levels()
    with one_rank(tiny_args(tmp_path, **CASES[case], max_tokens_per_gpu=1)) as trainer:
        theirs = step(trainer, columns.table)
    args = tiny_args(tmp_path, **CASES[case], max_tokens_per_gpu=400)
    if case == "two ranks":
        mine = on_ranks(2, step, args, columns.table)
    else:
        with one_rank(args) as trainer:
            assert trainer.model.shares
            mine = step(trainer, columns.table)
    assert any(".mamba." in name for name in mine)
    assert_close(mine, theirs, 1e-5)


@pytest.mark.parametrize("family", [*HYBRIDS, *ODD])
def test_the_probe_says_so(family: str) -> None:
    assert may_pack(hybrid(family).config, "slimelite_varlen", pairs=True) is Packing.SHARED


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "mamba2", "jamba"])
def test_compiled_layers_with_states_are_plain_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU, and then run without the code that a compiler would write."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    columns, runs = three_levels(), []
    everyone = list(range(len(columns.table)))
    weights = torch.cat([weights_of_tokens(columns, row) for row in everyone]).float()
    for compiled in (False, True):
        model = PolicyModel(hybrid(family))
        if compiled:
            model.compile_layers()
        packed = log_probs(model, columns, everyone)
        runs.append((packed.detach(), gradient(model, (packed * weights).sum())))
    assert counters["stats"]["unique_graphs"]
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=0, atol=1e-5)
    assert_close(runs[1][1], runs[0][1], 1e-5)
