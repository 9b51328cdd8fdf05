"""Reads documents, one text each, from files larger than memory: parquet, jsonl, plain text, datasets of the hub."""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.data.reader import HUB_ID, ZIPPED, BadRows

# a plain text is cut at the first end of a line after so many bytes: a file is read in pieces
PIECE = 1 << 16
# rows of a parquet file that are in memory at once
BATCH = 256
ROWS = (".parquet", ".jsonl", ZIPPED)
PLAIN = (".txt", ".md", ".rst", ".text")


def text_files(spec: str) -> list[str]:
    """The files that ``spec`` names, sorted: a file, a folder, a pattern such as ``shards/*.parquet``; or itself, if it
    is a dataset of the hub, ``owner/name[:config][:split]``.

    Raises:
        ValueError: there is none.
    """
    path = Path(spec)
    if path.is_file():
        return [spec]
    pattern = spec if any(sign in spec for sign in "*?[") else None
    root, inner = (path, "**/*") if pattern is None else (Path(path.anchor or "."), str(path).removeprefix(path.anchor))
    files = sorted(str(file) for file in root.glob(inner) if file.is_file())
    if pattern is None:  # of a folder, the files that are read without being named
        files = [file for file in files if file.endswith((*ROWS, *PLAIN))]
    if files:
        return files
    if not path.exists() and HUB_ID.fullmatch(spec):
        return [spec]
    raise ValueError(
        f"no texts at {spec!r}: name a file, a folder with {', '.join((*ROWS, *PLAIN))}, a pattern in quotation marks, "
        "or a dataset of the hub as owner/name[:config][:split]"
    )


def read_texts(spec: str, column: str = "text", *, skip_bad: bool = False) -> Iterator[str]:
    """Each text of ``spec`` (see `text_files`), in order; memory holds one batch of rows or one piece of a file.

    ``column``: the one with the text, of files that have columns. Rows without a text, empty ones, and such as hold
    NUL or are no UTF-8 are malformed: with ``skip_bad`` they are counted, named in a warning and left out.

    Raises:
        ValueError: there is no such file or column, or at the end of a file with malformed rows.
    """
    for file in text_files(spec):
        bad = BadRows(skip=skip_bad)
        for place, value in _values(file, column):
            bad.rows += 1
            if (problem := _problem(value, column)) is None:
                yield str(value)
            else:
                bad.add(place, problem)
        bad.close(file)


def _problem(value: object, column: str) -> str | None:
    """Why ``value`` is not a text to train on; None if it is one."""
    if isinstance(value, ValueError):
        return str(value)
    if not isinstance(value, str):
        return f"{column!r} holds no text"
    if not value.strip():
        return "an empty text"
    if "\0" in value:
        return "a text with NUL"
    # JSON may hold half of a character that UTF-16 writes as two, and nothing can encode it
    return "half a character" if any("\ud800" <= letter <= "\udfff" for letter in value) else None


def _values(file: str, column: str) -> Iterator[tuple[str, object]]:
    """(place, text, or else what is there instead, or the error) of one file or dataset."""
    if not Path(file).is_file():
        return _hub(file, column)
    if file.endswith(".parquet"):
        return _parquet(file, column)
    return _lines(file, column) if file.endswith((".jsonl", ZIPPED)) else _pieces(file)


def _parquet(file: str, column: str) -> Iterator[tuple[str, object]]:
    try:
        with pq.ParquetFile(file) as content:
            names = content.schema_arrow.names
            if column not in names:
                raise ValueError(f"{file} has no column {column!r}; its columns are {names}")
            row = 0
            for batch in content.iter_batches(BATCH, columns=[column]):
                for value in batch.column(0):
                    yield f"row {row}", _python(value)
                    row += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} is not a readable parquet file: {error}") from error


def _python(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return ValueError("no UTF-8")


def _lines(file: str, column: str) -> Iterator[tuple[str, object]]:
    with gzip.open(file) if file.endswith(ZIPPED) else open(file, "rb") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", _field(line, column)
        except (OSError, EOFError) as error:
            raise ValueError(f"{file} is not a readable gzip file: {error}") from error


def _field(line: bytes, column: str) -> object:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return ValueError("no UTF-8")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON ({error})")
    return row.get(column) if isinstance(row, dict) else None


def _pieces(file: str) -> Iterator[tuple[str, object]]:
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    with open(file, "rb") as content:
        while data := content.read(PIECE) + content.readline(PIECE):
            try:
                # a character that a piece cuts waits in the decoder; at the end of the file it is damaged
                text = decoder.decode(data, final=len(data) < PIECE)
                if text.strip():
                    yield f"bytes from {start}", text
            except UnicodeDecodeError:
                decoder.reset()
                yield f"bytes from {start}", ValueError("no UTF-8")
            start = content.tell()


def _hub(name: str, column: str) -> Iterator[tuple[str, object]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"no file {name!r}; to read it as a hub dataset: pip install -e '.[hub]'") from error
    dataset, *rest = name.split(":")
    try:
        rows: Iterable[dict[str, object]] = load_dataset(
            dataset, rest[0] if len(rest) == 2 else None, split=rest[-1] if rest else "train", streaming=True
        )
        for number, row in enumerate(rows):
            yield f"row {number}", row.get(column)
    except (OSError, ValueError) as error:
        raise ValueError(f"no file {name!r}, and the hub gives no texts for it: {error}") from error
