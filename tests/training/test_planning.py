"""The invariants of slimelite/training/planning.py, by their numbers there."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import tokens_of, tree_table

from slimelite.samples.table import SampleTable
from slimelite.training import planning as module
from slimelite.training.planning import SHORTEST, PackingLimits, Prefixes, deal, split_steps, tokens_shared

few = settings(max_examples=80, deadline=None, database=None)


@st.composite
def ids(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """rollout ids (with fan-out siblings), unit ids (some pairs)."""
    n = draw(st.integers(1, 40))
    rollout_ids = np.cumsum(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    unit_ids = np.arange(n) // 2 if draw(st.booleans()) else np.arange(n)
    if draw(st.booleans()):
        order = np.array(draw(st.permutations(range(n))))
        rollout_ids, unit_ids = rollout_ids[order], unit_ids[order]
    return rollout_ids, unit_ids


@st.composite
def tables(draw: st.DrawFn) -> SampleTable:
    """Rows with common prompts, common headers of prompts, equal rows, and rows that go on from another."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows: list[tuple[list[int], list[int]]] = []
    header = rng.integers(0, 3, draw(st.sampled_from([0, 5, 40]))).tolist()
    for _ in range(draw(st.integers(1, 6))):
        prompt = header + rng.integers(0, 3, rng.integers(1, 60)).tolist()
        for _ in range(rng.integers(1, 7)):
            kind = rng.random()
            if rows and kind < 0.1:
                rows.append(rows[rng.integers(len(rows))])
            elif rows and kind < 0.3:
                before, answer = rows[rng.integers(len(rows))]
                rows.append(
                    (before + answer + rng.integers(0, 3, 4).tolist(), rng.integers(0, 3, rng.integers(0, 30)).tolist())
                )
            else:
                rows.append((prompt, rng.integers(0, 3, rng.integers(0, 40)).tolist()))
    rng.shuffle(rows)
    table = tree_table(rows)
    if draw(st.booleans()):
        table.unit_id = np.arange(len(rows)) // 2
    return table


limits = st.one_of(
    st.builds(PackingLimits, st.integers(1, 400)), st.builds(PackingLimits, st.none(), st.integers(1, 5))
)


def dealt_of(
    table: SampleTable, rows: np.ndarray, world: int, limit: PackingLimits, *, shares: bool = True
) -> list[list[np.ndarray]]:
    return deal(table, rows, world, limit, shares=shares)


def tree_tokens(table: SampleTable, parts: list[np.ndarray]) -> int:
    rows, shared = tokens_shared(table, parts, shares=True)
    return int((table.total_lengths[rows] - shared).sum())


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(ids(), st.integers(1, 12))
@few
def test_steps(table: tuple[np.ndarray, np.ndarray], batch: int) -> None:
    rollout_ids, unit_ids = table
    steps = split_steps(rollout_ids, unit_ids, batch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(rollout_ids)))  # 1
    assert all((np.diff(s) > 0).all() for s in steps)
    assert [min(s) for s in steps] == sorted(min(s) for s in steps)  # 1
    for column in (rollout_ids, unit_ids):  # 3
        owner = {int(i): k for k, s in enumerate(steps) for i in column[s]}
        assert all(owner[int(i)] == k for k, s in enumerate(steps) for i in column[s])
        assert sum(len(np.unique(column[s])) for s in steps) == len(np.unique(column))
    sizes = [len(np.unique(rollout_ids[s])) for s in steps]
    assert all(size >= batch for size in sizes[:-1])  # 2
    assert sizes[-1] >= 1
    if (unit_ids == np.arange(len(unit_ids))).all():
        assert all(size == batch for size in sizes[:-1])  # 2
    again = split_steps(rollout_ids.copy(), unit_ids.copy(), batch)
    assert all(np.array_equal(a, b) for a, b in zip(steps, again, strict=True))  # 9


@given(tables(), st.integers(1, 5), limits, st.data())
@few
def test_micro_batches(table: SampleTable, world: int, limit: PackingLimits, data: st.DataObject) -> None:
    unit_ids, lengths = table.unit_id, table.total_lengths
    chosen = data.draw(st.lists(st.sampled_from(np.unique(unit_ids).tolist()), unique=True))
    rows = np.flatnonzero(np.isin(unit_ids, chosen))
    dealt = dealt_of(table, rows, world, limit)
    flat = [mb for rank in dealt for mb in rank]
    assert sorted(np.concatenate(flat).tolist()) == rows.tolist()  # 4
    assert sum(len(np.unique(unit_ids[mb])) for mb in flat) == len(chosen)  # 4
    unit_rows = {u: int((unit_ids[rows] == u).sum()) for u in chosen}
    for mb in flat:  # 5
        units = np.unique(unit_ids[mb])
        if limit.max_tokens is not None:
            most = max(tree_tokens(table, [mb]), int(table.response_lengths[mb].sum()))
            assert most <= limit.max_tokens or len(units) == 1
        else:
            largest = max((unit_rows[int(u)] for u in units), default=1)
            assert len(mb) <= limit.micro_batch_size + largest - 1
    assert len({len(rank) for rank in dealt}) == 1  # 6
    assert len(dealt[0]) >= 1
    if (unit_ids == np.arange(len(unit_ids))).all():
        tokens = [tree_tokens(table, [np.concatenate(rank)]) for rank in dealt]
        assert max(tokens) - min(tokens) <= max(lengths[rows], default=0)  # 7
        if world == 1 and limit.max_tokens is not None:
            order = Prefixes.of(table, shares=True)
            first, shared = order.within(rows, np.zeros_like(rows))
            for clump in np.split(rows[first], np.flatnonzero(shared == 0)[1:]):  # 8
                if max(tree_tokens(table, [clump]), table.response_lengths[clump].sum()) <= limit.max_tokens:
                    assert len({k for k, mb in enumerate(flat) if np.isin(clump, mb).any()}) <= 1
    again = dealt_of(tree_table(tokens_of(table), table.unit_id), rows.copy(), world, limit)
    assert all(np.array_equal(a, b) for x, y in zip(dealt, again, strict=True) for a, b in zip(x, y, strict=True))  # 9


@given(tables())
@few
def test_prefixes_are_those_of_every_pair(table: SampleTable) -> None:
    """Against a naive loop: exact with branches at any depth, otherwise less than `SHORTEST` tokens fewer."""
    rows = [p + r for p, r in tokens_of(table)]
    everywhere, apart = (Prefixes.of(table, shares=True, shortest=n) for n in (1, SHORTEST))
    order = np.argsort(everywhere.rank)
    assert [rows[i] for i in order] == sorted(rows)
    for i, j in combinations(range(len(rows)), 2):
        right = common(rows[order[i]], rows[order[j]])
        found, fewer = (int(p.between(np.array([i]), np.array([j]))[0]) for p in (everywhere, apart))
        assert found == right
        assert right - SHORTEST < fewer <= right
        assert fewer == 0 or fewer >= SHORTEST


def test_packing_is_tight() -> None:
    table = tree_table([([i] * n, []) for i, n in enumerate([60, 50, 50, 40, 30, 30, 20, 20])])
    (parts,) = dealt_of(table, np.arange(8), 1, PackingLimits(100))
    assert [table.total_lengths[p].tolist() for p in parts] == [[60, 40], [50, 50], [30, 30, 20, 20]]


def test_rows_by_number() -> None:
    table = tree_table([([i] * n, []) for i, n in enumerate([9, 8, 7, 6, 5])])
    (parts,) = dealt_of(table, np.arange(5), 1, PackingLimits(None, 2))
    assert [p.tolist() for p in parts] == [[0, 1], [2, 3], [4]]


def groups(number: int, size: int, prompt: int, response: int, header: int = 0) -> SampleTable:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 1000, header)
    prompts = [[*start, *rng.integers(0, 1000, prompt)] for _ in range(number)]
    rows = [(p, rng.integers(0, 1000, response).tolist()) for p in prompts for _ in range(size)]
    return tree_table([rows[i] for i in rng.permutation(len(rows))])


def test_a_group_is_cut_only_where_it_does_not_fit() -> None:
    """4 groups of 4 answers of 20 tokens to 100: a group has 180 tree tokens, 480 flat ones."""
    table = groups(4, 4, 100, 20)
    prompts = [tuple(p) for p, _ in tokens_of(table)]
    for limit, sizes in ((720, [16]), (719, [12, 4]), (180, [4] * 4), (179, [3, 3, 3, 3, 1, 1, 1, 1])):
        (parts,) = dealt_of(table, np.arange(16), 1, PackingLimits(limit))
        if limit < 180:  # the rests are together as far as they fit
            assert max(len({prompts[i] for i in part}) for part in parts) == 1
        assert sorted(map(len, parts), reverse=True) == sizes
        assert tree_tokens(table, parts) == 4 * 180 + 100 * max(0, len(parts) - 4)
    (flat,) = dealt_of(table, np.arange(16), 1, PackingLimits(480), shares=False)
    assert sorted(map(len, flat)) == [4, 4, 4, 4]


def test_a_common_header_keeps_groups_together() -> None:
    """All rows share 50 tokens, groups 100 more: cuts are between groups, never through one."""
    table = groups(8, 4, 100, 20, header=50)
    prompts = [tuple(p) for p, _ in tokens_of(table)]
    (parts,) = dealt_of(table, np.arange(32), 1, PackingLimits(50 + 3 * 180))
    assert [len({prompts[i] for i in part}) for part in parts] == [3, 3, 2]
    for world in (2, 3, 5):
        ranks = dealt_of(table, np.arange(32), world, PackingLimits(10**6))
        tokens = [tree_tokens(table, rank) for rank in ranks]
        assert max(tokens) - min(tokens) <= 170
        # each rank's header, and the prompt of the groups that were cut
        assert sum(tokens) <= 50 + 8 * 180 + (world - 1) * 150


def test_planning_takes_n_log_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the rows: about four times the array elements that are touched, counted by the lookups of tokens."""
    counts: dict[int, int] = {}
    original = module.tokens_at

    def counted(table: SampleTable, rows: np.ndarray, depths: np.ndarray) -> Any:
        counts[len(table)] = counts.get(len(table), 0) + len(rows)
        return original(table, rows, depths)

    monkeypatch.setattr(module, "tokens_at", counted)
    for number in (100, 400):
        table = groups(number, 8, 40, 20)
        dealt = dealt_of(table, np.arange(len(table)), 4, PackingLimits(2000))
        assert sum(len(part) for rank in dealt for part in rank) == len(table)
        assert counts[len(table)] <= len(table) * 112  # no token is read twice
    assert counts[3200] == pytest.approx(4 * counts[800], rel=0.05)
