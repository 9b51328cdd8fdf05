"""The invariants of slimelite/training/batch.py, by their numbers there."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slimelite.training.batch import PackingLimits, deal, split_steps

few = settings(max_examples=150, deadline=None, database=None)


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """rollout ids (with fan-out siblings), unit ids (some pairs), lengths."""
    n = draw(st.integers(1, 40))
    rollout_ids = np.cumsum(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    paired = draw(st.booleans())
    unit_ids = np.arange(n) // 2 if paired else np.arange(n)
    if draw(st.booleans()):
        order = np.array(draw(st.permutations(range(n))))
        rollout_ids, unit_ids = rollout_ids[order], unit_ids[order]
    return rollout_ids, unit_ids, np.array(draw(st.lists(st.integers(2, 50), min_size=n, max_size=n)))


limits = st.one_of(
    st.builds(PackingLimits, st.integers(1, 120)), st.builds(PackingLimits, st.none(), st.integers(1, 5))
)


@given(tables(), st.integers(1, 12))
@few
def test_steps(table: tuple[np.ndarray, np.ndarray, np.ndarray], batch: int) -> None:
    rollout_ids, unit_ids, _ = table
    steps = split_steps(rollout_ids, unit_ids, batch)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(rollout_ids)))  # 1
    assert [min(s) for s in steps] == sorted(min(s) for s in steps)  # 1
    for ids in (rollout_ids, unit_ids):  # 3
        owner = {int(i): k for k, s in enumerate(steps) for i in ids[s]}
        assert all(owner[int(i)] == k for k, s in enumerate(steps) for i in ids[s])
        assert sum(len(np.unique(ids[s])) for s in steps) == len(np.unique(ids))
    sizes = [len(np.unique(rollout_ids[s])) for s in steps]
    assert all(size >= batch for size in sizes[:-1])  # 2
    assert sizes[-1] >= 1
    if (unit_ids == np.arange(len(unit_ids))).all():
        assert all(size == batch for size in sizes[:-1])  # 2
    again = split_steps(rollout_ids.copy(), unit_ids.copy(), batch)
    assert all(np.array_equal(a, b) for a, b in zip(steps, again, strict=True))  # 8


@given(tables(), st.integers(1, 5), limits, st.data())
@few
def test_micro_batches(
    table: tuple[np.ndarray, np.ndarray, np.ndarray], world: int, limit: PackingLimits, data: st.DataObject
) -> None:
    _, unit_ids, lengths = table
    chosen = data.draw(st.lists(st.sampled_from(np.unique(unit_ids).tolist()), unique=True))
    rows = np.flatnonzero(np.isin(unit_ids, chosen))
    dealt = deal(rows, lengths, unit_ids, world, limit)
    flat = [mb for rank in dealt for mb in rank]
    assert sorted(np.concatenate(flat).tolist()) == rows.tolist()  # 4
    assert sum(len(np.unique(unit_ids[mb])) for mb in flat) == len(chosen)  # 4
    unit_rows = {u: int((unit_ids[rows] == u).sum()) for u in chosen}
    for mb in flat:  # 5
        units = np.unique(unit_ids[mb])
        if limit.max_tokens is not None:
            assert lengths[mb].sum() <= limit.max_tokens or len(units) == 1
        else:
            largest = max((unit_rows[int(u)] for u in units), default=1)
            assert len(mb) <= limit.micro_batch_size + largest - 1
    assert len({len(rank) for rank in dealt}) == 1  # 6
    assert len(dealt[0]) >= 1
    tokens = [sum(int(lengths[mb].sum()) for mb in rank) for rank in dealt]
    unit_tokens = [int(lengths[unit_ids == u].sum()) for u in chosen]
    assert max(tokens) - min(tokens) <= max(unit_tokens, default=0)  # 7
    again = deal(rows.copy(), lengths.copy(), unit_ids.copy(), world, limit)
    assert all(np.array_equal(a, b) for x, y in zip(dealt, again, strict=True) for a, b in zip(x, y, strict=True))  # 8


def test_packing_is_tight() -> None:
    lengths = np.array([60, 50, 50, 40, 30, 30, 20, 20])
    (parts,) = deal(np.arange(8), lengths, np.arange(8), 1, PackingLimits(100))
    assert [lengths[p].tolist() for p in parts] == [[60, 40], [50, 50], [30, 30, 20, 20]]


def test_rows_by_number() -> None:
    (parts,) = deal(np.arange(5), np.array([9, 8, 7, 6, 5]), np.arange(5), 1, PackingLimits(None, 2))
    assert [p.tolist() for p in parts] == [[0, 1], [2, 3], [4]]
