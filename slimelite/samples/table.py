"""A rollout as a table of samples, with one row for each sample. All parts of a run exchange rollouts in this format.

The rollout side sends the table to the trainers. Debug dumps and the run folder contain saved tables. In offline
training (SFT, offline RL, preference pairs), the trainers get their data in such tables too. A column with several
values in each row is one flat array, and offsets such as ``response_offsets`` tell where each row begins. Per-token
data is never stored in Python lists. `sample.COLUMNS` lists the columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.base.files import FORMAT, check_format, whole
from slimelite.samples.sample import COLUMNS, PER_TOKEN, Column, Kept, Sample, Status, label_text

# key in the metadata of a saved table; its value is the format number
SAVED_FORMAT = b"slimelite.samples"

# the offsets that split a ragged column into rows
OFFSETS = {"prompt": "prompt_offsets", "token": "response_offsets", "kept": "kept_offsets"}


class SampleTable:
    """The samples of a rollout. The table has an attribute for each of ``COLUMNS`` and for each of ``OFFSETS``. The
    attribute of a column that the rollout does not have is None.

    A column of numbers is an array of the column's dtype. Its shape is [rows] if each row has one value. Otherwise its
    shape is [prompt tokens], [response tokens] or [kept ids], of all rows together. A column of texts is a list.
    ``*_offsets``: [rows + 1] int64, where each row begins and ends in a flat array. If labels are not text, a saved
    file also has the column ``label_value`` with the labels as JSON. A saved file with the per-token column
    ``advantages`` omits the per-row column ``advantage``. When such a file is read, ``advantage`` is NaN.
    """

    sample_id: np.ndarray
    rollout_id: np.ndarray
    group_id: np.ndarray
    unit_id: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    removed: np.ndarray
    prompt_offsets: np.ndarray
    response_offsets: np.ndarray
    kept_offsets: np.ndarray | None
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray
    weight_versions: np.ndarray
    teacher_log_probs: np.ndarray
    turn_rewards: np.ndarray | None
    role: np.ndarray | None
    kept_counts: np.ndarray | None
    kept_ids: np.ndarray | None
    advantages: np.ndarray | None
    loss_weights: np.ndarray | None
    status: list[str]
    label: list[Any]
    prompt: list[str]
    response: list[str]
    metadata: list[str]
    reward_components: list[str]

    def __init__(self, **columns: object) -> None:
        """``columns``: the values of each column and the offsets, by name."""
        vars(self).update({**dict.fromkeys(COLUMNS), **dict.fromkeys(OFFSETS.values()), **columns})

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def response_lengths(self) -> np.ndarray:
        """[rows] the number of response tokens of each row."""
        return np.diff(self.response_offsets)

    @property
    def total_lengths(self) -> np.ndarray:
        """[rows] the number of prompt and response tokens of each row."""
        return np.diff(self.prompt_offsets) + self.response_lengths

    @property
    def mask_sums(self) -> np.ndarray:
        """[rows] the number of response tokens of each row that are trained on; 0 for removed samples."""
        sums, some = np.zeros(len(self), np.int64), self.response_lengths > 0
        if some.any():
            sums[some] = np.add.reduceat(self.loss_mask, self.response_offsets[:-1][some], dtype=np.int64)
        return np.where(self.removed, 0, sums)

    def compared(self) -> tuple[np.ndarray, np.ndarray]:
        """Two [rows] int64 arrays: the group number and the rollout number of each row. Advantages compare the rollouts
        of a group with each other.

        In an episode with several roles, the rows of different roles are in different groups and rollouts.
        """
        roles = np.zeros(len(self), np.int64) if self.role is None else self.role.astype(np.int64)
        of_group, of_rollout = (np.stack([ids, roles], 1) for ids in (self.group_id, self.rollout_id))
        groups, rollouts = (np.unique(keys, axis=0, return_inverse=True)[1] for keys in (of_group, of_rollout))
        return groups.reshape(-1), rollouts.reshape(-1)

    def numeric_components(self) -> list[dict[str, float]]:
        """For each row, the reward components that are numbers, as [rows] dicts (name -> value). True becomes 1."""
        rows = [json.loads(row) if row and row != "{}" else {} for row in self.reward_components or []]
        return [{k: float(v) for k, v in row.items() if isinstance(v, bool | int | float)} for row in rows]

    def columns(self) -> list[Column]:
        """The columns of `sample.COLUMNS` that this table has."""
        return [column for column in COLUMNS.values() if getattr(self, column.name, None) is not None]

    def row_slice(self, name: str, row: int) -> np.ndarray:
        """The values of row number ``row`` in column ``name``, which has several values in each row. The result is a
        view."""
        offsets = getattr(self, OFFSETS[COLUMNS[name].per])
        values: np.ndarray = getattr(self, name)[offsets[row] : offsets[row + 1]]
        return values

    @classmethod
    def from_samples(cls, groups: Sequence[Sequence[Sample]], reward_key: str | None = None) -> SampleTable:
        """Build a table from groups of finished samples. Each sample without a rollout id counts as a separate rollout.

        Raises:
            ValueError: a sample has no reward, no index or no group index, or has per-token lists of the wrong length.
        """
        samples = [s for group in groups for s in group]
        for s in samples:
            s.check_aligned()
            if s.index is None or s.group_index is None:
                raise ValueError("a sample has no index or no group_index; the data source must set both")
        lengths = {
            "prompt": np.array([s.prompt_length for s in samples], np.int64),
            "token": np.array([s.response_length for s in samples], np.int64),
        }
        if any(s.kept is not None for s in samples):
            lengths["kept"] = np.array([0 if s.kept is None else len(s.kept.ids) for s in samples], np.int64)
        values: dict[str, object] = {OFFSETS[per]: _offsets(counts) for per, counts in lengths.items()}
        values["reward"] = np.array([s.reward_value(reward_key) for s in samples], np.float64)
        for column in [column for column in COLUMNS.values() if column.name not in values]:
            read = [column.read(s) for s in samples]
            if not (column.required or any(value is not None for value in read)):
                continue
            if column.dtype == "str":
                values[column.name] = read
            elif column.per == "sample":
                filled = [column.absent if value is None else value for value in read]
                values[column.name] = np.array(filled, column.dtype)
            elif any(value is not None and len(value) for value in read):
                each = zip(read, lengths[column.per].tolist(), strict=True)
                parts = [v if v is not None and len(v) else np.full(n, column.absent, column.dtype) for v, n in each]
                values[column.name] = _concat(parts, column.dtype)
            else:
                values[column.name] = np.full(lengths[column.per].sum(), column.absent, column.dtype)
        return cls(**values)

    def to_samples(self) -> list[list[Sample]]:
        """The table's samples as a list of groups, in the order of the rows."""
        groups: dict[int, list[Sample]] = {}
        direct, lengths = [column for column in self.columns() if column.of is None], self.response_lengths.tolist()
        for row in range(len(self)):
            sample = Sample(
                group_index=int(self.group_id[row]),
                index=int(self.sample_id[row]),
                rollout_id=int(self.rollout_id[row]),
                unit_id=int(self.unit_id[row]),
                prompt=self.prompt[row],
                tokens=np.concatenate([self.row_slice(f"{part}_tokens", row) for part in ("prompt", "response")]),
                response_length=lengths[row],
                label=self.label[row],
                remove_sample=bool(self.removed[row]),
                status=Status(self.status[row]),
                metadata=json.loads(self.metadata[row]),
            )
            for column in direct:
                setattr(sample, column.name, self._value(column, row))
            if self.kept_counts is not None:
                sample.kept = Kept(self.row_slice("kept_ids", row), self.row_slice("kept_counts", row))
            groups.setdefault(int(self.group_id[row]), []).append(sample)
        return list(groups.values())

    def _value(self, column: Column, row: int) -> object:
        """The value of ``column`` in ``row``; None for a per-token column that is NaN at any token of the row."""
        if column.per == "sample":
            value = getattr(self, column.name)[row]
            return value if column.dtype == "str" else value.item()
        values = self.row_slice(column.name, row)
        if column.dtype.startswith("float") and np.isnan(values).any():
            return None
        values = values.astype(np.int8) if column.dtype == "bool" else values
        return values if column.name in PER_TOKEN else values.tolist()

    def select(self, rows: Sequence[int] | np.ndarray) -> SampleTable:
        """A new table with the rows whose numbers are in ``rows``, in the order of ``rows``."""
        rows = np.asarray(rows, np.int64)
        there = {name: offsets for name in OFFSETS.values() if (offsets := getattr(self, name)) is not None}
        values: dict[str, object] = {name: _offsets(np.diff(offsets)[rows]) for name, offsets in there.items()}
        for column in self.columns():
            whole_column = getattr(self, column.name)
            if column.per != "sample":
                values[column.name] = _concat([self.row_slice(column.name, int(r)) for r in rows], column.dtype)
            else:
                values[column.name] = [whole_column[r] for r in rows] if column.dtype == "str" else whole_column[rows]
        return SampleTable(**values)

    def without_text(self) -> SampleTable:
        """A copy of the table in which all texts are empty, because trainers need no text."""
        blank = {column.name: [""] * len(self) for column in self.columns() if column.dtype == "str"}
        return SampleTable(**{**vars(self), **blank})

    def without_kept(self) -> SampleTable:
        """A copy of the table without the columns of kept token ids (see `sample.Kept`)."""
        return SampleTable(**{**vars(self), "kept_offsets": None, "kept_counts": None, "kept_ids": None})

    def to_arrow(self) -> pa.Table:
        """The table as an Arrow table. Columns with several values in each row become list columns, which any parquet
        tool can read."""
        arrays: dict[str, pa.Array] = {}
        for column in self.columns():
            values = getattr(self, column.name)
            if column.dtype == "str":
                texts = values if column.name != "label" else [None if v is None else label_text(v) for v in values]
                # a plugin's text may contain half of a surrogate pair, which is not valid UTF-8; it becomes \ud800
                readable = [None if v is None else v.encode("utf-8", "backslashreplace") for v in texts]
                arrays[column.name] = pa.array(readable, pa.binary()).cast(pa.string())
            elif column.per == "sample":
                arrays[column.name] = pa.array(values)
            else:
                offsets = pa.array(getattr(self, OFFSETS[column.per]))
                arrays[column.name] = pa.LargeListArray.from_arrays(offsets, pa.array(values))
        typed = [None if isinstance(label, str | None) else json.dumps(label) for label in self.label]
        if any(value is not None for value in typed):
            arrays["label_value"] = pa.array(typed, pa.string())
        if self.advantages is not None:
            del arrays["advantage"]
        return pa.table(arrays, metadata={SAVED_FORMAT: str(FORMAT)})

    @classmethod
    def from_arrow(cls, table: pa.Table) -> SampleTable:
        """Build a table from the result of `to_arrow`.

        Raises:
            ValueError: required columns are missing.
        """
        values: dict[str, Any] = {}
        if "advantages" in table.column_names:
            values["advantage"] = np.full(len(table), np.nan)
        there = {*table.column_names, *values}
        if missing := [column.name for column in COLUMNS.values() if column.required and column.name not in there]:
            raise ValueError(
                f"not a table of samples: columns {missing} are missing; files of --save-debug-rollout-data have them"
            )
        for column in COLUMNS.values():
            if column.name not in table.column_names:
                continue
            array = table.column(column.name).combine_chunks()
            if column.dtype == "str":
                values[column.name] = array.to_pylist()
                continue
            if column.per != "sample":
                values[OFFSETS[column.per]] = _offsets(array.value_lengths().to_numpy(zero_copy_only=False))
                array = array.flatten()
            values[column.name] = array.to_numpy(zero_copy_only=False).astype(column.dtype)
        if "label_value" in table.column_names:
            typed = table.column("label_value").to_pylist()
            values["label"] = [
                text if value is None else json.loads(value) for text, value in zip(values["label"], typed, strict=True)
            ]
        return cls(**values)

    def to_parquet(self, path: str | Path) -> None:
        """Write the table to a parquet file. Until the file is complete, it has a temporary name."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            pq.write_table(self.to_arrow(), partial, compression="zstd")

    @classmethod
    def from_parquet(cls, path: str | Path) -> SampleTable:
        """Read a table from a file that `to_parquet` wrote.

        Raises:
            ValueError: the file does not exist, has another format, or is not a table of samples.
        """
        if not Path(path).is_file():
            raise ValueError(f"no saved rollout at {path}")
        try:
            content = pq.read_table(path)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: {error}") from error
        number = (content.schema.metadata or {}).get(SAVED_FORMAT)
        check_format(Path(path), None if number is None else number.decode())
        try:
            return cls.from_arrow(content)
        except (pa.ArrowInvalid, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Log-probs and entropies of the tokens of a rollout's n samples. The trainer computes these values before its
    first optimizer step on the rollout.

    ``sample_id``: [n] int64. ``offsets``: [n + 1] int64, where the tokens of each sample begin and end. ``log_probs``,
    ``entropy``: [response tokens] float32, in nats; NaN for a sample whose values the trainer did not compute.
    """

    sample_id: np.ndarray
    offsets: np.ndarray
    log_probs: np.ndarray
    entropy: np.ndarray

    def to_parquet(self, path: Path) -> None:
        """Write a parquet file with one row for each sample. If the trainer did not compute a sample's values, the
        sample's lists are null. Until the file is complete, it has a temporary name.
        """
        lengths = np.diff(self.offsets)
        seen = np.bincount(np.repeat(np.arange(len(lengths)), lengths), ~np.isnan(self.log_probs), len(lengths))
        absent = pa.array((lengths > 0) & (seen == 0))
        columns = {"sample_id": pa.array(self.sample_id)}
        for name, values in (("log_probs", self.log_probs), ("entropy", self.entropy)):
            columns[name] = pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(values), mask=absent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            pq.write_table(pa.table(columns), partial, compression="zstd")


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def _concat(parts: Sequence[object], dtype: str) -> np.ndarray:
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate([np.asarray(p, dtype) for p in parts])
