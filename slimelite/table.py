"""The one currency: a rollout as a table of samples, one row a sample.

It travels from the rollout side to the trainers, is what debug dumps and the run folder hold, and is what
offline training (SFT, offline RL, preference pairs) reads. Ragged columns are one flat array each, cut by
``prompt_offsets`` or ``response_offsets``; nothing per token is a Python list.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.files import whole
from slimelite.sample import Sample, Status, label_text, plain

SCHEMA_VERSION = "1"

# name -> (dtype, which offsets cut it; None: one value a row)
COLUMNS: dict[str, tuple[str, str | None]] = {
    "sample_id": ("int64", None),
    "rollout_id": ("int64", None),  # fan-out siblings share it
    "group_id": ("int64", None),  # samples of one prompt
    "unit_id": ("int64", None),  # rows that must never be split over micro-batches or ranks (a DPO pair)
    "reward": ("float64", None),
    "advantage": ("float64", None),  # of the group, computed once before samples are dealt to ranks
    "removed": ("bool", None),  # masked out of the loss, counted in the group's statistics
    "prompt_tokens": ("int32", "prompt_offsets"),
    "response_tokens": ("int32", "response_offsets"),
    "loss_mask": ("bool", "response_offsets"),
    "rollout_log_probs": ("float32", "response_offsets"),
    "weight_versions": ("int32", "response_offsets"),
    "teacher_log_probs": ("float32", "response_offsets"),  # NaN where no teacher scored the token
}
TEXT_COLUMNS = ("status", "label", "prompt", "response", "metadata", "reward_components")
# columns that older files lack -> what stands in for them
ABSENT = {"reward_components": "{}"}


@dataclass(slots=True)
class SampleTable:
    """Columns of a rollout; see ``COLUMNS`` for dtypes. ``*_offsets``: [rows + 1], int64."""

    sample_id: np.ndarray
    rollout_id: np.ndarray
    group_id: np.ndarray
    unit_id: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    removed: np.ndarray
    prompt_offsets: np.ndarray
    response_offsets: np.ndarray
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray
    weight_versions: np.ndarray
    teacher_log_probs: np.ndarray
    status: list[str]
    # values that JSON knows; a file has ``label_value`` (JSON) beside the text of those that are no text
    label: list[Any]
    prompt: list[str]
    response: list[str]
    metadata: list[str]  # JSON
    reward_components: list[str]  # JSON: a reward that is a dict, of which ``reward`` has one entry; else {}
    # what trained, [response tokens] float32, of a rollout whose tokens had advantages of their own; then a file has
    # this column instead of ``advantage``, which reads as NaN
    advantages: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def response_lengths(self) -> np.ndarray:
        """[rows] response tokens."""
        return np.diff(self.response_offsets)

    @property
    def total_lengths(self) -> np.ndarray:
        """[rows] prompt and response tokens."""
        return np.diff(self.prompt_offsets) + self.response_lengths

    @property
    def mask_sums(self) -> np.ndarray:
        """[rows] response tokens the loss sees; 0 for removed samples."""
        ends = np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])
        sums = ends[self.response_offsets[1:]] - ends[self.response_offsets[:-1]]
        return np.where(self.removed, 0, sums)

    def numeric_components(self) -> list[dict[str, float]]:
        """[rows] the numbers of each row's reward components; True counts as 1."""
        rows = [json.loads(row or "{}") for row in self.reward_components]
        return [{k: float(v) for k, v in row.items() if isinstance(v, bool | int | float)} for row in rows]

    def row_slice(self, name: str, row: int) -> np.ndarray:
        """The part of ragged column ``name`` that belongs to ``row`` (a view)."""
        offsets = getattr(self, COLUMNS[name][1] or "")
        return getattr(self, name)[offsets[row] : offsets[row + 1]]

    @classmethod
    def from_samples(cls, groups: Sequence[Sequence[Sample]], reward_key: str | None = None) -> SampleTable:
        """Build a table from groups of finished samples. Samples without a rollout id become rollouts of their own.

        Raises:
            ValueError: a sample without reward, index or group index, or with misaligned per-token lists.
        """
        samples = [s for group in groups for s in group]
        for s in samples:
            s.check_aligned()
            if s.index is None or s.group_index is None:
                raise ValueError("a sample without index or group_index reached training; the data source sets both")
        lengths = [s.response_length for s in samples]
        ragged: dict[str, list[Any]] = {name: [] for name, (_, offsets) in COLUMNS.items() if offsets}
        for s in samples:
            n = s.response_length
            ragged["prompt_tokens"].append(s.tokens[: len(s.tokens) - n])
            ragged["response_tokens"].append(s.tokens[len(s.tokens) - n :])
            ragged["loss_mask"].append(s.loss_mask if s.loss_mask is not None else [1] * n)
            ragged["rollout_log_probs"].append(s.rollout_log_probs if s.rollout_log_probs else [np.nan] * n)
            ragged["weight_versions"].append(s.weight_versions if s.weight_versions else [0] * n)
            ragged["teacher_log_probs"].append(s.teacher_log_probs if s.teacher_log_probs else [np.nan] * n)
        flat = {name: _concat(parts, COLUMNS[name][0]) for name, parts in ragged.items()}
        ids = np.array([s.index for s in samples], np.int64)
        return cls(
            sample_id=ids,
            rollout_id=np.array([s.index if s.rollout_id is None else s.rollout_id for s in samples], np.int64),
            group_id=np.array([s.group_index for s in samples], np.int64),
            unit_id=np.array([s.index if s.unit_id is None else s.unit_id for s in samples], np.int64),
            reward=np.array([s.reward_value(reward_key) for s in samples], np.float64),
            advantage=np.zeros(len(samples)),
            removed=np.array([s.remove_sample for s in samples], bool),
            prompt_offsets=_offsets([len(p) for p in ragged["prompt_tokens"]]),
            response_offsets=_offsets(lengths),
            **flat,
            status=[str(s.status) for s in samples],
            label=[plain(s.label) for s in samples],
            prompt=[s.prompt if isinstance(s.prompt, str) else json.dumps(s.prompt) for s in samples],
            response=[s.response for s in samples],
            metadata=[json.dumps(plain(s.metadata)) for s in samples],
            reward_components=[json.dumps(plain(s.reward)) if isinstance(s.reward, dict) else "{}" for s in samples],
        )

    def to_samples(self) -> list[list[Sample]]:
        """Groups of samples again, in table order (per-token columns as lists)."""
        groups: dict[int, list[Sample]] = {}
        for row in range(len(self)):
            part = {name: self.row_slice(name, row).tolist() for name, (_, off) in COLUMNS.items() if off}
            teacher = part["teacher_log_probs"]
            rolled = part["rollout_log_probs"]
            sample = Sample(
                group_index=int(self.group_id[row]),
                index=int(self.sample_id[row]),
                rollout_id=int(self.rollout_id[row]),
                unit_id=int(self.unit_id[row]),
                prompt=self.prompt[row],
                tokens=part["prompt_tokens"] + part["response_tokens"],
                response=self.response[row],
                response_length=len(part["response_tokens"]),
                label=self.label[row],
                reward=float(self.reward[row]),
                loss_mask=[int(m) for m in part["loss_mask"]],
                rollout_log_probs=None if np.isnan(rolled).any() else rolled,
                weight_versions=part["weight_versions"],
                teacher_log_probs=None if not teacher or np.isnan(teacher).any() else teacher,
                remove_sample=bool(self.removed[row]),
                status=Status(self.status[row]),
                metadata=json.loads(self.metadata[row]),
            )
            groups.setdefault(int(self.group_id[row]), []).append(sample)
        return list(groups.values())

    def select(self, rows: Sequence[int] | np.ndarray) -> SampleTable:
        """The given rows, in the given order."""
        rows = np.asarray(rows, np.int64)
        values: dict[str, Any] = {}
        for name, (dtype, offsets) in COLUMNS.items():
            if offsets is None:
                values[name] = getattr(self, name)[rows]
            else:
                values[name] = _concat([self.row_slice(name, int(r)) for r in rows], dtype)
        values["prompt_offsets"] = _offsets(np.diff(self.prompt_offsets)[rows])
        values["response_offsets"] = _offsets(self.response_lengths[rows])
        for name in TEXT_COLUMNS:
            column = getattr(self, name)
            values[name] = [column[r] for r in rows]
        if self.advantages is not None:
            parts = [self.advantages[self.response_offsets[r] : self.response_offsets[r + 1]] for r in rows]
            values["advantages"] = _concat(parts, "float32")
        return SampleTable(**values)

    @classmethod
    def concat(cls, tables: Sequence[SampleTable]) -> SampleTable:
        """The rows of all tables, in order."""
        values: dict[str, Any] = {}
        for name, (dtype, _) in COLUMNS.items():
            values[name] = _concat([getattr(t, name) for t in tables], dtype)
        values["prompt_offsets"] = _offsets(np.concatenate([np.diff(t.prompt_offsets) for t in tables]))
        values["response_offsets"] = _offsets(np.concatenate([t.response_lengths for t in tables]))
        for name in TEXT_COLUMNS:
            values[name] = [value for t in tables for value in getattr(t, name)]
        return cls(**values)

    def without_text(self) -> SampleTable:
        """The same rows with empty text columns: what trainers need on the wire."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        blank: dict[str, Any] = {name: [""] * len(self) for name in TEXT_COLUMNS}
        return SampleTable(**{**kept, **blank})

    def to_arrow(self) -> pa.Table:
        """An Arrow table with list columns, readable by any parquet tool."""
        arrays: dict[str, pa.Array] = {}
        for name, (_, offsets) in COLUMNS.items():
            column = getattr(self, name)
            if offsets is None:
                arrays[name] = pa.array(column)
            else:
                arrays[name] = pa.LargeListArray.from_arrays(pa.array(getattr(self, offsets)), pa.array(column))
        for name in TEXT_COLUMNS:
            arrays[name] = pa.array(getattr(self, name) if name != "label" else _texts(self.label), pa.string())
        values = [None if isinstance(label, str | None) else json.dumps(label) for label in self.label]
        if any(value is not None for value in values):
            arrays["label_value"] = pa.array(values, pa.string())
        if self.advantages is not None:
            del arrays["advantage"]
            offsets = pa.array(self.response_offsets)
            arrays["advantages"] = pa.LargeListArray.from_arrays(offsets, pa.array(self.advantages))
        return pa.table(arrays, metadata={"slimelite.samples": SCHEMA_VERSION})

    @classmethod
    def from_arrow(cls, table: pa.Table) -> SampleTable:
        """The inverse of `to_arrow`.

        Raises:
            ValueError: columns are missing.
        """
        there = {*table.column_names, *ABSENT} | ({"advantage"} if "advantages" in table.column_names else set())
        if missing := [n for n in (*COLUMNS, *TEXT_COLUMNS) if n not in there]:
            raise ValueError(
                f"not a table of samples: columns {missing} are missing; write it with --save-debug-rollout-data"
            )
        values: dict[str, Any] = {}
        if "advantages" in table.column_names:
            column = table.column("advantages").combine_chunks()
            values["advantages"] = column.flatten().to_numpy(zero_copy_only=False).astype("float32")
            values["advantage"] = np.full(len(table), np.nan)
        for name, (dtype, offsets) in COLUMNS.items():
            if name in values:
                continue
            column = table.column(name).combine_chunks()
            if offsets is None:
                values[name] = column.to_numpy(zero_copy_only=False).astype(dtype)
                continue
            values[name] = column.flatten().to_numpy(zero_copy_only=False).astype(dtype)
            values[offsets] = _offsets(column.value_lengths().to_numpy(zero_copy_only=False))
        for name in TEXT_COLUMNS:
            found = name in table.column_names
            values[name] = table.column(name).to_pylist() if found else [ABSENT[name]] * len(table)
        if "label_value" in table.column_names:
            typed = table.column("label_value").to_pylist()
            values["label"] = [
                text if value is None else json.loads(value) for text, value in zip(values["label"], typed, strict=True)
            ]
        return cls(**values)

    def to_parquet(self, path: str | Path) -> None:
        """Write the table; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            pq.write_table(self.to_arrow(), partial, compression="zstd")

    @classmethod
    def from_parquet(cls, path: str | Path) -> SampleTable:
        """Read what `to_parquet` wrote.

        Raises:
            ValueError: the file is not there, or is not a table of samples.
        """
        if not Path(path).is_file():
            raise ValueError(f"no saved rollout at {path}")
        try:
            return cls.from_arrow(pq.read_table(path))
        except (pa.ArrowInvalid, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _texts(labels: list[Any]) -> list[str | None]:
    return [None if label is None else label_text(label) for label in labels]


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def _concat(parts: Sequence[Any], dtype: str) -> np.ndarray:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate([np.asarray(p, dtype) for p in parts])
