"""Reads the rows of data files. Each row comes with its place in the file, such as "row 3". The rows come from files
(parquet, jsonl, jsonl.gz, json, csv, tsv, arrow), from folders that ``datasets`` saved, or from hub datasets."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from slimelite.base.registry import function
from slimelite.data.shapes import Row, parsed
from slimelite.environments.registry import ENVIRONMENTS, known

logger = logging.getLogger(__name__)

# Python's limit for a cell of a CSV file is 128 KiB, and a cell may hold a whole document
csv.field_size_limit(2**31 - 1)

# the place in the file, such as "row 3 (line 4)" (rows are counted from 0), and the row or why it cannot be read
Found = tuple[str, Row | str]
# (path, slice of rows, required columns, optional columns) -> rows
Reader = Callable[[str, slice, Sequence[str], Sequence[str] | None], Iterator[Found]]

# a table: the names of the columns, and the cells of each row
Cells = tuple[list[str], list[list[str]]]

# how many kinds of problems a message about malformed rows lists at most
EXAMPLES = 3
ZIPPED = ".jsonl.gz"
# a file in a folder that the library datasets saved
SAVED = "state.json"
# prefix of an environment's name; the rows then come from the environment
ENVIRONMENT = "environment:"
# the start of a text that is a list of objects, such as messages
OBJECTS = re.compile(r"""\s*\[\s*\{\s*["']""")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass
class BadRows:
    """Counts the malformed rows of one file. If there are any, `close` raises an error. With ``skip``, `close` calls
    ``warn`` with a message instead."""

    skip: bool = False
    warn: Callable[[str], None] = logger.warning
    rows: int = 0  # rows of the file, good and bad
    count: int = 0
    examples: dict[str, str] = field(default_factory=dict)  # problem -> its first place, for only a few problems

    def add(self, place: str, problem: str) -> None:
        """Count a malformed row. `close` reports the first few different problems, each with the place of its first
        row."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.setdefault(problem, place)

    def close(self, name: str, first: int | None = None) -> None:
        """Report the malformed rows. Call this method after the whole file, or its ``first`` rows, have been read.

        Raises:
            ValueError: there are malformed rows, and ``skip`` is not set.
        """
        if not self.count:
            return
        rows = f"{'the first ' if first == self.rows else ''}{self.rows} rows"
        what = f"{self.count} of {rows} {'are' if self.count > 1 else 'is'} malformed"
        shown = "; ".join(f"{place}: {problem}" for problem, place in self.examples.items())
        if not self.skip:
            raise ValueError(f"{name}: {what}: {shown}; fix them, or leave such rows out with --skip-bad-rows")
        self.warn(f"{name}: {what} and left out: {shown}")


def split_path(spec: str) -> tuple[str, slice]:
    """Split ``path@[a:b]`` into (path, slice). As in a Python slice, a and b may be negative or missing, and a step may
    follow.

    Raises:
        ValueError: the text in brackets is not a slice.
    """
    path, bracket, inside = spec.partition("@[")
    if not bracket:
        return spec, slice(None)
    parts = inside.removesuffix("]").split(":")
    if not inside.endswith("]") or not 2 <= len(parts) <= 3 or (len(parts) == 3 and parts[2].strip() == "0"):
        raise ValueError(f"cannot read the slice of {spec!r}; write path@[a:b]")
    try:
        return path, slice(*(int(p) if p.strip() else None for p in parts))
    except ValueError as error:
        raise ValueError(f"cannot read the slice of {spec!r}; a and b of path@[a:b] must be whole numbers") from error


def read_rows(
    spec: str,
    required: Sequence[str] = (),
    optional: Sequence[str] | None = None,
    bad: BadRows | None = None,
    first: int | None = None,
) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for each row of ``spec``, in order. Each row must have the columns ``required``; other columns
    may be missing.

    ``spec``: a file with an ending of `READERS`, or .jsonl.gz; a folder that ``datasets`` saved (`save_to_disk`); a hub
    dataset ``owner/name[:config][:split]`` (default split ``train``); or ``environment:name[:spec]``, the rows of an
    environment. With ``@[a:b]`` appended, only this slice of the rows is read. ``optional``: further columns to read,
    or None to read all columns. ``first``: read only this number of rows, unless ``spec`` has a slice.

    Raises:
        ValueError: there is no such file, its kind is not supported, the slice is empty, or a required column is
            missing. If rows are malformed, the error is raised after the last row, unless ``bad.skip`` is set. The
            caller may have added malformed rows to ``bad``; they count too.
    """
    bad = bad or BadRows()
    name, part = split_path(spec)
    if part != slice(None):
        first = None
    part = part if first is None else slice(first)
    for place, row in _reader(name)(name, part, [*required], optional):
        bad.rows += 1
        if isinstance(row, str):
            bad.add(place, row)
        elif not row.keys() >= {*required}:
            missing = next(c for c in required if c not in row)
            bad.add(place, f"no column {missing!r}; the row has {sorted(row)}")
        else:
            yield place, row
    if not bad.rows:
        head = part.start is None and part.step is None and part.stop is not None and part.stop > 0
        raise ValueError(f"{name} holds no rows" if head or part == slice(None) else f"{spec!r} selects no rows")
    bad.close(spec, first)


def _reader(name: str) -> Reader:
    """The function that reads the file ``name``. The name has no slice."""
    path = Path(name)
    if name.startswith(ENVIRONMENT):
        return _environment_rows
    if path.is_dir():
        if (path / SAVED).is_file():
            return _saved_rows
        inside = sorted(p.name for p in path.iterdir() if p.suffix in READERS or (p / SAVED).is_file())
        raise ValueError(f"{name} is a folder; name one file or split of it: {inside}")
    read = _jsonl_rows if name.endswith(ZIPPED) else READERS.get(path.suffix)
    if read is None and not path.exists() and HUB_ID.fullmatch(name):
        return _hub_rows
    if read is None or not path.is_file():
        reason = f"cannot read {name}: not one of {', '.join(READERS)}" if path.exists() else _no_file(name, path)
        raise ValueError(f"{reason} (--prompt-data, --eval-prompt-data)")
    return read


def _no_file(name: str, path: Path) -> str:
    beside = {other.stem: other for other in path.parent.glob(f"*{path.suffix}")} if path.suffix else {}
    near = get_close_matches(path.stem, beside, 1, cutoff=0.75)
    return f"no such file: {name}" + (f"; did you mean {beside[near[0]]}?" if near else "")


def column_names(spec: str) -> list[str]:
    """The names of a file's columns. If the file is not parquet, they are the columns of the first readable row. The
    list is empty if no row is readable.

    Raises:
        ValueError: there is no such file, its kind is not supported, or it cannot be read.
    """
    name, _ = split_path(spec)
    if name.endswith(".parquet") and Path(name).is_file():
        try:
            return list(pq.read_schema(name).names)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{name} is not a readable parquet file: {error}") from error
    return list(first_row(spec))


def first_row(spec: str) -> Row:
    """The first readable row of a file, or an empty row if no row is readable.

    Raises:
        ValueError: there is no such file, its kind is not supported, or it cannot be read.
    """
    name, _ = split_path(spec)
    return next((row for _, row in _reader(name)(name, slice(None), [], None) if isinstance(row, dict)), {})


def _environment_rows(path: str, part: slice, *_: object) -> Iterator[Found]:
    try:
        kind, spec = known(path.removeprefix(ENVIRONMENT)) or (None, "")
        if kind is None or kind.rows is None:
            raise ValueError(f"{path}: this environment has no rows; give a file")
        rows = list(function(kind.rows, ENVIRONMENTS.option, kind.name)(spec))
    except ValueError as error:  # the message may name a flag that the user has not given
        raise ValueError(str(error).replace("--environment ", ENVIRONMENT, 1)) from error
    yield from ((f"row {number}", {"label": "", **rows[number]}) for number in range(len(rows))[part])


def _parquet_rows(path: str, part: slice, required: Sequence[str], optional: Sequence[str] | None) -> Iterator[Found]:
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if len({*names}) < len(names):
            twice = min(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path} has several columns {twice!r}; give each column its own name")
        _check_columns(path, names, required)
        table = file.read(columns=[c for c in names if optional is None or c in {*required, *optional}])
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error
    yield from _table_rows(table, part)


def _table_rows(table: pa.Table, part: slice) -> Iterator[Found]:
    places = range(table.num_rows)[part]
    for start in range(0, len(places), 4096):
        chunk = places[start : start + 4096]
        for number, values in zip(chunk, table.take(pa.array(chunk, pa.int64())).to_pylist(), strict=True):
            yield f"row {number}", {k: _without_nulls(v) for k, v in values.items()}


def _arrow_rows(path: str, part: slice, required: Sequence[str], _optional: object) -> Iterator[Found]:
    yield from _saved_table([Path(path)], path, part, required)


def _saved_rows(path: str, part: slice, required: Sequence[str], _optional: object) -> Iterator[Found]:
    """Rows of a folder that ``datasets`` saved. The folder's file ``state.json`` names the data files, in order."""
    try:
        files = [each["filename"] for each in json.loads(Path(path, SAVED).read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}/{SAVED} does not name the dataset's files ({error!r:.80})") from error
    yield from _saved_table([Path(path, file) for file in files], path, part, required)


def _saved_table(files: Sequence[Path], name: str, part: slice, required: Sequence[str]) -> Iterator[Found]:
    tables = []
    for file in files:
        try:
            with pa.memory_map(str(file)) as source:
                try:
                    tables.append(pa.ipc.open_stream(source).read_all())
                except pa.ArrowInvalid:  # the second of Arrow's two formats, which `feather` writes
                    tables.append(pa.ipc.open_file(source).read_all())
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{file} is not a readable Arrow file: {error}") from error
    if not tables:
        raise ValueError(f"{name} holds no rows")
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{name}: its files have different columns ({error})") from error
    _check_columns(name, table.column_names, required)
    yield from _table_rows(table, part)


def _csv_rows(path: str, part: slice, required: Sequence[str], _optional: object) -> Iterator[Found]:
    """The rows of `csv_texts`. A cell with messages, which is text in a CSV file, becomes a list of messages."""
    for place, row in csv_texts(path, part, required):
        yield place, row if isinstance(row, str) else {name: _cell(cell) for name, cell in row.items()}


def csv_texts(path: str, part: slice, required: Sequence[str]) -> Iterator[tuple[str, dict[str, str] | str]]:
    """Rows of a CSV file. Every cell is text, so a label such as 007 stays unchanged. An empty cell is left out."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            separator = "\t" if path.endswith(".tsv") else separator_of(file)
            names, rows = (_tab_lines if separator == "\t" else _csv_lines)(file, separator)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a readable CSV file in UTF-8: {error}") from error
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} has several columns {twice!r}; give each column its own name")
    if rows:
        _check_columns(path, names, required)
    for index in range(len(rows))[part]:
        row = rows[index]
        if len(row) != len(names):
            amount = "more" if len(row) > len(names) else "fewer"
            yield f"row {index}", f"it has {amount} cells than the header has names"
        else:
            yield f"row {index}", {name: cell for name, cell in zip(names, row, strict=True) if cell != ""}


def _csv_lines(file: TextIO, separator: str, quotes: bool = True) -> Cells:
    """The table in ``file``. Without ``quotes``, a quote is a character of the text."""
    lines = csv.reader(file, strict=True, delimiter=separator, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE)
    names, *rows = [row for row in lines if row] or [[]]
    return names, rows


def _tab_lines(file: TextIO, separator: str) -> Cells:
    """The table in ``file``. Many programs write no quotes around cells if tabs separate them. Then every line has the
    right number of cells, and a quote that seems to begin a longer cell is a character of the text."""
    quoted: list[Cells] = []
    try:
        quoted.append(_csv_lines(file, separator))
        if not any("\t" in cell or "\n" in cell for row in quoted[0][1] for cell in row):
            return quoted[0]
    except csv.Error as error:
        failure = error
    file.seek(0)
    with suppress(csv.Error):
        names, rows = _csv_lines(file, separator, quotes=False)
        if len(names) > 1 and all(len(row) == len(names) for row in rows):
            return names, rows
    if not quoted:
        raise failure
    return quoted[0]


def separator_of(file: TextIO) -> str:
    """The character between the cells of a CSV file. With this character, the first row has as many cells as the header
    has names. Afterwards, the position in ``file`` is the start."""

    def fit(separator: str) -> tuple[bool, int]:
        file.seek(0)
        lines = filter(None, csv.reader(file, delimiter=separator))
        names = next(lines, [])
        return len(names) == len(next(lines, names)) > 1, len(names)

    separator = max(",;\t", key=fit)  # the comma if there is only one column
    file.seek(0)
    return separator


def _cell(text: str) -> object:
    """``text``, or the list of messages that it contains as JSON or, as pandas writes it, in Python's form."""
    for value in parsed(text) if OBJECTS.match(text) else ():
        if isinstance(value, list) and isinstance(value[0], dict) and value[0].keys() & {"role", "from"}:
            return value
    return text


def _without_nulls(value: object) -> object:
    """``value`` without the null fields of its structs. In parquet, all rows share one struct type. So a key that a row
    does not have (such as ``tool_calls`` of a plain message) is read as null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def _jsonl_rows(path: str, part: slice, *_: object) -> Iterator[Found]:
    data = Path(path).read_bytes()
    if path.endswith(ZIPPED):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a readable gzip file: {error}") from error
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    for index in range(len(lines))[part]:
        number, line = lines[index]
        try:
            row = _checked(json.loads(line, object_pairs_hook=_object))
        except (ValueError, RecursionError) as error:
            row = f"not JSON ({error})"
        yield f"row {index} (line {number})", row


def _json_rows(path: str, part: slice, *_: object) -> Iterator[Found]:
    try:
        rows = json.loads(Path(path).read_bytes(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}); a file with one object per line must end with .jsonl"
        ) from error
    rows = rows.get("data", rows) if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise ValueError(
            f"{path} contains one {type(rows).__name__}; a .json file must be a list of objects, or an object with "
            "such a list as 'data'"
        )
    for index in range(len(rows))[part]:
        yield f"row {index}", _checked(rows[index])


def _object(pairs: list[tuple[str, object]]) -> Row:
    """A JSON object. A repeated key raises an error, because the json module would silently keep only the last
    value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is given twice")
    return values


def _checked(row: object) -> Row | str:
    return row if isinstance(row, dict) else f"a row must be an object with named columns, not {type(row).__name__}"


def _hub_rows(name: str, part: slice, required: Sequence[str], _optional: object) -> Iterator[Found]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"no file {name!r}; to read it as a hub dataset, run in slimelite's folder: pip install -e '.[hub]'"
        ) from error
    dataset_id, *rest = name.split(":")
    config = rest[0] if len(rest) == 2 else None
    split = rest[-1] if rest else "train"
    try:
        dataset = load_dataset(dataset_id, config, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no file {name!r}, and the hub has no such dataset (owner/name[:config][:split]): {error}"
        ) from error
    _check_columns(name, dataset.column_names, required)
    for index in range(len(dataset))[part]:
        yield f"row {index}", {k: _without_nulls(v) for k, v in dataset[index].items()}


def _check_columns(name: str, columns: Sequence[str], required: Sequence[str]) -> None:
    if missing := [c for c in required if c not in columns]:
        raise ValueError(
            f"{name} has no column {missing[0]!r}; its columns are {sorted(columns)} "
            "(--input-key, --label-key, --chosen-key, --rejected-key)"
        )


# file name suffix -> the function that reads the file
READERS: dict[str, Reader] = {
    ".parquet": _parquet_rows,
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".arrow": _arrow_rows,
}
