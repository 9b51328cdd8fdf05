"""The samples of a run in the format of the page: columns and a vocabulary of token texts, compressed with deflate.
See docs/view.md.

A run has four parts: an index (numbers such as the reward of each sample, for the lists), its prompts (each once), a
vocabulary, and a chunk for each file of samples. The page decodes a chunk when the user opens one of its samples.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slimelite.algorithms.losses import LOSSES
from slimelite.apps.pieces import Pieces
from slimelite.apps.runs import Run
from slimelite.environments.registry import FACTS
from slimelite.samples.sample import UNSTAMPED, label_text
from slimelite.samples.table import SampleTable
from slimelite.tracking.console import verdicts

# a page has at most about this many bytes of samples; from a larger run, it takes only some groups
BUDGET = 14_000_000
# bytes of a response token with its numbers, and of a sample with its row of the index, after deflate and base64
TOKEN_BYTES, SAMPLE_BYTES = 7.0, 24.0
TEXTS = ("prompt", "label", "metadata", "reward_components")  # their size is about their compressed size in parquet
LIGHT = ("group_id", "reward", "prompt", "status", "response_tokens")
# steps of fixed-point numbers: 3 decimals, but 4 for the difference of two log-probs
STEP, FINE_STEP = 1e-3, 1e-4
STALENESS = "rollout/weight_staleness/max"
UNREADABLE = "{0.name} of {0.parent.name} could not be read: {1}"


class Source(NamedTuple):
    """A file of samples. ``kind``: rollout, dropped or eval. ``name``: the eval dataset. ``number``: see `Run`.
    ``rewarded``: whether its samples have rewards; in supervised training, only those of evaluations do."""

    kind: str
    name: str
    number: int
    path: Path
    rewarded: bool


@dataclass
class Part:
    """The part of a source that the page shows: all groups of the source, or some of them. ``facts`` and ``versions``
    describe the whole file of the source."""

    source: Source
    light: pa.Table
    facts: dict[str, float]
    versions: tuple[int, int] | None  # least and greatest weight version
    bytes_per_row: float
    rows: np.ndarray  # [kept rows]

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns two arrays: the number of each row's group, counted from 0 [rows]; and the first row of each group
        [groups]. Groups are in the order of the file."""
        ids = self.light.column("group_id").to_numpy()
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return rank[inverse], first[order]


def samples(run: Run, budget: int = BUDGET) -> dict[str, object]:
    """The samples of ``run`` for the page, in at most about ``budget`` bytes.

    ``index``, ``prompts``, ``vocabulary`` and ``chunks`` come from `pack`. ``sources`` describes each chunk. The field
    ``episodes`` of this description is the number of the chunk's samples that come from an environment or from an
    agent's program. ``notes`` are sentences about missing data.
    """
    parts, notes = [], []
    for source in _sources(run):
        try:
            parts.append(_part(source))
        except (OSError, ValueError, KeyError) as error:  # a run that is still running may remove files
            notes.append(UNREADABLE.format(source.path, error))
    total = sum(len(part.light) for part in parts)
    if sum(_cost(part).sum() for part in parts) > budget:
        _sample_down(parts, budget)
        kept = sum(len(part.rows) for part in parts)
        notes.append(
            f"This page has {kept:,} of the run's {total:,} saved samples, in whole groups. They were chosen in this "
            "order: dropped groups; the best and the worst group of each rollout; all groups of some random prompts. "
            "The numbers in the list of rollouts cover all samples."
        )
    parts = [part for part in parts if len(part.rows) or part.source.kind == "rollout"]
    opened = []
    for part in parts:
        try:
            opened.append((part, SampleTable.from_arrow(_read(part.source.path).take(pa.array(part.rows)))))
        except (OSError, ValueError) as error:  # not a file of slimelite, or just removed
            notes.append(UNREADABLE.format(part.source.path, error))
    parts, tables = [part for part, _ in opened], [table for _, table in opened]
    pieces, gone = Pieces.of_run(run)
    notes += [gone] if gone and tables else []
    sources = [
        {
            "kind": part.source.kind,
            "name": part.source.name,
            "number": part.source.number,
            "unit": run.unit,
            **part.facts,
            "episodes": sum(f'"{FACTS}":' in text for text in table.metadata),
        }
        for part, table in zip(parts, tables, strict=True)
    ]
    chunks = [_chunk(run, part, table, pieces) for part, table in zip(parts, tables, strict=True)]
    prompts: dict[str, int] = {}
    return {
        "notes": notes,
        "total": total,
        "sources": sources,
        "index": _index(run, parts, tables, prompts),
        "prompts": pack({"texts": list(prompts)}, {}),
        "chunks": chunks,
        "vocabulary": pack(*pieces.columns()) if pieces else None,
    }


def pack(header: Mapping[str, object], columns: Mapping[str, np.ndarray]) -> str:
    """Pack three parts with deflate and base64: the length of the header (uint32), the JSON header, and the columns.

    ``header["columns"]`` becomes a list of [name, dtype, entries]. The numbers of a column are little-endian. A column
    has the lowest bytes of all its numbers first, then all second-lowest bytes, and so on. Bytes in this order compress
    better, because neighbouring bytes are often equal.
    """
    arrays = {name: np.ascontiguousarray(a, a.dtype.newbyteorder("<")) for name, a in columns.items()}
    listed = [[name, f"{a.dtype.kind}{a.dtype.itemsize}", len(a)] for name, a in arrays.items()]
    text = json.dumps({**header, "columns": listed}, separators=(",", ":"), allow_nan=False).encode()
    planes = [a.view(np.uint8).reshape(len(a), a.dtype.itemsize).T.tobytes() for a in arrays.values() if len(a)]
    return b64encode(zlib.compress(len(text).to_bytes(4, "little") + text + b"".join(planes), 6)).decode()


def fixed_point(values: np.ndarray, step: float) -> np.ndarray:
    """``values`` as multiples of ``step``, in int16, or in int32 if a multiple does not fit into int16. The smallest
    integer of the type stands for NaN."""
    known = np.isfinite(values)
    codes = np.rint(np.where(known, values, 0.0).astype(np.float64) / step)
    dtype = np.int16 if np.abs(codes).max(initial=0) < 2**15 else np.int32
    limit = np.iinfo(dtype).max
    return np.where(known, np.clip(codes, -limit, limit), -limit - 1).astype(dtype)


def _sources(run: Run) -> list[Source]:
    rewarded = run.unit == "rollout"
    sources = [Source("rollout", "", number, path, rewarded) for number, path in run.rollouts.items()]
    sources += [Source("dropped", "", number, path, rewarded) for number, path in run.dropped.items()]
    return sources + [
        Source("eval", name, number, path, True) for name, files in run.evals.items() for number, path in files.items()
    ]


def _part(source: Source) -> Part:
    file = pq.ParquetFile(source.path)
    light = file.read(columns=[*LIGHT], use_threads=False)
    rewards, status = light.column("reward").to_numpy(), light.column("status")
    lengths = pc.list_value_length(light.column("response_tokens")).to_numpy()
    light = light.drop_columns(["response_tokens", "status"]).append_column("length", pa.array(lengths))
    described = file.metadata
    stored = [
        group.column(i)
        for group in map(described.row_group, range(described.num_row_groups))
        for i in range(described.num_columns)
    ]
    texts = sum(column.total_compressed_size for column in stored if column.path_in_schema in TEXTS)
    known = [c.statistics for c in stored if c.path_in_schema.startswith("weight_versions.") and c.statistics]
    versions = [version for stats in known if stats.has_min_max for version in (stats.min, stats.max)]
    rows = len(light)
    part = Part(
        source,
        light,
        facts={},
        versions=(min(versions), max(versions)) if versions else None,
        bytes_per_row=SAMPLE_BYTES + 4 / 3 * texts / max(rows, 1),
        rows=np.arange(rows),
    )
    group, first = part.groups()
    known = np.nan_to_num(rewards)
    low, high = np.full(len(first), np.inf), np.full(len(first), -np.inf)
    np.minimum.at(low, group, known)
    np.maximum.at(high, group, known)
    scored = rewards[np.isfinite(rewards) & source.rewarded]
    part.facts = {
        "samples": rows,
        "groups": len(first),
        "equal": int(np.count_nonzero(low == high)),
        "truncated": int(pc.sum(pc.equal(status, "truncated")).as_py() or 0),
        "length": _six_digits(lengths.mean()) if rows else 0.0,
        **({"reward": _six_digits(scored.mean()), "spread": _six_digits(scored.std())} if len(scored) else {}),
    }
    return part


def _read(path: Path) -> pa.Table:
    """All columns. One thread reads files of this size faster than several threads."""
    return pq.ParquetFile(path).read(use_threads=False)


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _cost(part: Part) -> np.ndarray:
    """[rows] the approximate number of bytes that each row needs in the page."""
    return part.light.column("length").to_numpy() * TOKEN_BYTES + part.bytes_per_row


def _sample_down(parts: Sequence[Part], budget: int) -> None:
    """Set ``rows`` of each part to whole groups that together fit into ``budget``.

    First come dropped groups, then the best and the worst group of each rollout, then the other groups in the order of
    a hash of the prompt. All groups of a prompt have the same hash, so they come together, from all rollouts and
    evaluations. Dropped, best and worst groups come first from the halves of the run, then from the quarters, and so
    on. So the groups that fit cover the run evenly.
    """
    levels, keys, costs, owners = [], [], [], []
    for i, part in enumerate(parts):
        group, first = part.groups()
        means = np.bincount(group, np.nan_to_num(part.light.column("reward").to_numpy())) / np.bincount(group)
        level = np.full(len(first), 0 if part.source.kind == "dropped" else 2)
        key = np.array([zlib.crc32(text.encode()) for text in part.light.column("prompt").take(first).to_pylist()])
        if part.source.kind == "rollout" and len(first):
            level[[means.argmax(), means.argmin()]] = 1
        spread = int(f"{i:032b}"[::-1], 2)  # the bits of i in reverse order
        levels.append(level)
        keys.append(np.where(level < 2, spread, key))
        costs.append(np.bincount(group, _cost(part)))
        owners += [(i, g) for g in range(len(first))]
    order = np.lexsort((np.concatenate(keys), np.concatenate(levels)))
    kept = order[np.cumsum(np.concatenate(costs)[order]) <= budget]
    chosen: dict[int, list[int]] = {}
    for owner in kept.tolist():
        i, g = owners[owner]
        chosen.setdefault(i, []).append(g)
    for i, part in enumerate(parts):
        part.rows = np.flatnonzero(np.isin(part.groups()[0], chosen.get(i, [])))


def _index(run: Run, parts: Sequence[Part], tables: Sequence[SampleTable], prompts: dict[str, int]) -> str:
    """The numbers of all samples. A number that a sample lacks is NaN. Fills ``prompts``: text -> list position."""
    newest = _newest(run, parts)
    statuses: dict[str, int] = {}
    reasons: dict[str, int] = {"": 0}
    replies: dict[str, int] = {"": 0}
    loss = LOSSES.get(str(run.config.get("loss_type")))
    columns: dict[str, list[np.ndarray]] = {}
    groups = 0
    scores = [table.numeric_components() if {*table.reward_components} - {"{}"} else [] for table in tables]
    components = sorted({name for each in scores for row in each for name in row})
    for i, (part, table) in enumerate(zip(parts, tables, strict=True)):
        rows, kind = len(table), part.source.kind
        if not rows:
            continue
        _, inverse = np.unique(table.group_id, return_inverse=True)
        texts = [json.loads(text).get("dropped", "") if kind == "dropped" else "" for text in table.metadata]
        rewarded, none = part.source.rewarded, np.full(rows, np.nan)
        words = [""] * rows if rewarded or loss is None else verdicts(table, loss)
        part_columns = {
            "chunk": np.full(rows, i),
            "group": inverse + groups,
            "sample": table.sample_id,
            "prompt": np.array([prompts.setdefault(text, len(prompts)) for text in table.prompt]),
            "status": np.array([statuses.setdefault(text, len(statuses)) for text in table.status]),
            "reason": np.array([reasons.setdefault(str(text), len(reasons)) for text in texts]),
            "reply": np.array([replies.setdefault(text, len(replies)) for text in words]),
            "removed": table.removed,
            "length": table.response_lengths,
            "trained": table.mask_sums,
            "reward": table.reward if rewarded else none,
            "advantage": _advantages(table) if rewarded else none,
            "stale": _staleness(table, None if kind == "eval" else newest.get(part.source.number)),
        }
        each = scores[i] or [{}] * rows
        part_columns |= {f"component {name}": np.array([row.get(name, np.nan) for row in each]) for name in components}
        groups += int(inverse.max()) + 1
        for name, values in part_columns.items():
            columns.setdefault(name, []).append(values)
    header = {
        "statuses": list(statuses),
        "reasons": list(reasons),
        "replies": list(replies),
        "components": components,
    }
    return pack(header, {name: _compact(np.concatenate(values)) for name, values in columns.items()})


def _compact(values: np.ndarray) -> np.ndarray:
    """The column in the smallest type that fits. Integers that need more than 32 bits become float64, the number type
    of JavaScript."""
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    low, high = values.min(initial=0), values.max(initial=0)
    for dtype in (np.uint8, np.uint16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values.astype(np.float64)


def _advantages(table: SampleTable) -> np.ndarray:
    """[rows] the advantage. If each token has its own advantage, this is the mean over the tokens in the loss."""
    if table.advantages is None:
        return table.advantage
    seen = table.loss_mask & np.isfinite(table.advantages)
    row = np.repeat(np.arange(len(table)), table.response_lengths)[seen]
    counts = np.bincount(row, minlength=len(table))
    sums = np.bincount(row, table.advantages[seen], minlength=len(table))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _newest(run: Run, parts: Sequence[Part]) -> dict[int, float]:
    """Rollout -> version of the weights when the rollout was trained on.

    The metrics have the age of the rollout's oldest token. So the version of the weights is known even if no token has
    this version.
    """
    ages = dict(zip(*(axis.tolist() for axis in run.series.get(STALENESS, (np.zeros(0),) * 2)), strict=True))
    newest = {}
    for part in parts:
        if part.source.kind == "rollout" and part.versions:
            low, high = part.versions
            newest[part.source.number] = max(high, low + ages.get(part.source.number, 0))
    return newest


def _staleness(table: SampleTable, newest: float | None) -> np.ndarray:
    """[rows] weight updates between the oldest token in the loss and version ``newest``; NaN if unknown."""
    row = np.repeat(np.arange(len(table)), table.response_lengths)
    seen = table.loss_mask & (table.weight_versions != UNSTAMPED)
    oldest = np.full(len(table), np.inf)
    np.minimum.at(oldest, row[seen], table.weight_versions[seen])
    return np.where(np.isfinite(oldest), (np.nan if newest is None else newest) - oldest, np.nan)


def _chunk(run: Run, part: Part, table: SampleTable, pieces: Pieces | None) -> str:
    """Texts and per-token numbers of the samples of a source. ``responses``: null for a response that equals
    the joined texts of its tokens."""
    responses: list[str | None] = list(table.response)
    tokens: dict[str, np.ndarray] = {}
    if pieces is not None:
        entries, fits = pieces.encode(table)
        responses = [None if fit else text for fit, text in zip(fits, table.response, strict=True)]
        tokens = {"token": _compact(entries), **_token_columns(run, part, table)}
    header = {
        "responses": responses,
        "labels": [label_text(label) for label in table.label],
        "metadata": table.metadata,
        "rewards": table.reward_components,
    }
    return pack(header, {"lengths": _compact(table.response_lengths), **tokens})


def _token_columns(run: Run, part: Part, table: SampleTable) -> dict[str, np.ndarray]:
    """The page's columns for each response token. A column without any value is left out."""
    untold = ~table.loss_mask & (table.rollout_log_probs == 0)  # tokens that no engine sampled, such as a tool's
    engine = np.where(untold, np.nan, table.rollout_log_probs)
    version = np.where(untold | (table.weight_versions == UNSTAMPED), np.nan, table.weight_versions)
    trainer, entropy = _stats(run, part, table)
    coded = {
        "engine": fixed_point(engine, STEP),
        "difference": fixed_point(trainer - engine, FINE_STEP),
        "entropy": fixed_point(entropy, STEP),
        "version": fixed_point(version, 1.0),
    }
    coded = {name: codes for name, codes in coded.items() if (codes != np.iinfo(codes.dtype).min).any()}
    kept = {"mask": table.loss_mask.astype(np.uint8), **coded}
    for column in table.columns():
        values = getattr(table, column.name)
        if column.per == "token" and column.dtype == "float32" and column.name != "rollout_log_probs":
            kept |= {column.name: values} if np.isfinite(values).any() else {}
    return kept


def _stats(run: Run, part: Part, table: SampleTable) -> tuple[np.ndarray, np.ndarray]:
    """([response tokens] the trainer's log-probs, [response tokens] entropies); NaN for tokens without them."""
    missing = np.full(len(table.response_tokens), np.nan, np.float32)
    path = run.token_stats.get(part.source.number)
    if part.source.kind != "rollout" or path is None or not path.is_file():
        return missing, missing
    stats = _read(path)
    place = {sample: i for i, sample in enumerate(stats.column("sample_id").to_pylist())}
    at = np.array([place.get(sample, -1) for sample in table.sample_id.tolist()])
    result = []
    for name in ("log_probs", "entropy"):
        lists = stats.column(name).combine_chunks()
        values = lists.values.to_numpy(zero_copy_only=False)
        starts = np.append(lists.offsets.to_numpy(), 0)[at]
        fits = (at >= 0) & (np.append(np.diff(lists.offsets.to_numpy()), -1)[at] == table.response_lengths)
        filled = missing.copy()
        target = np.repeat(fits, table.response_lengths)
        within = np.arange(len(filled)) - np.repeat(table.response_offsets[:-1], table.response_lengths)
        filled[target] = values[(np.repeat(starts, table.response_lengths) + within)[target]]
        result.append(filled)
    return result[0], result[1]
