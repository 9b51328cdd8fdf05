"""Reads documents from parquet, jsonl or plain-text files, or from hub datasets. A document is one text. The files may
be larger than the machine's memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import logging
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.data.hub import HubFile, hub_files
from slimelite.data.reader import HUB_ID, BadRows, csv_texts, separator_of

logger = logging.getLogger(__name__)

# name endings of files of documents
ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".txt")
# CSV files are read by `slimelite.data.reader`
CSV = ".csv"
# messages show this many characters of the name of a column
LONGEST_NAME = 60
# further name endings of files in a folder: plain texts, and tables of texts
PLAIN = (".md", ".rst", ".text", CSV)
# a plain-text file is read in pieces; each piece ends at the first end of a line after this number of bytes
PIECE = 1 << 16
# reasons why a document is left out
EMPTY, NUL, ENCODING, MALFORMED, BROKEN = "empty", "with a NUL", "not UTF-8", "malformed", "cut short or unreadable"
# the value for a row without the column of texts
ABSENT = object()


class NoColumn(ValueError):
    """A data file lacks the column that should contain the texts."""


def find_files(spec: str, *, plain: bool = False) -> list[Path | HubFile]:
    """The files of documents that ``spec`` names: a file, a folder (with its subfolders), a pattern, or a hub dataset.

    ``plain``: also accept plain-text files. A single plain-text file may have any ending. In a folder, it must have one
    of the endings in `PLAIN`.

    Raises:
        ValueError: ``spec`` names no existing file with an accepted ending.
    """
    path, endings = Path(spec), (*ENDINGS, *PLAIN) if plain else ENDINGS
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(endings) and file.is_file())
    elif any(sign in spec for sign in "*?["):
        files = sorted(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor) if path.anchor else path)))
        files = [file for file in files if file.is_file()]
    else:
        files = [path]
    if not path.exists() and HUB_ID.fullmatch(spec):
        return [*hub_files(spec, ENDINGS)]
    if not files:
        raise ValueError(f"{spec}: there is no file with the ending {', '.join(endings)}")
    for file in files:
        if not file.is_file():
            raise ValueError(f"no such file: {file}")
        if not plain and not file.name.endswith(endings):
            raise ValueError(f"{file}: the name of a file of documents must end with {', '.join(ENDINGS)}")
    return [*files]


def read_texts(spec: str, column: str = "text", *, skip_bad: bool = False, flag: str = "--text-key") -> Iterator[str]:
    """Yield each text in the files of ``spec`` (see `find_files`), in order. Only one batch of rows, or one piece of a
    plain-text file, is in memory at a time.

    ``column``: the column with the text, in files with columns. ``flag``: the flag with which the user sets this
    column, for error messages. A CSV file is read into memory as a whole. If ``spec`` is a folder, its CSV files
    without the column are left out, with a warning. With ``skip_bad``, rows that cannot be trained on are left out, and
    a warning gives their number and examples.

    Raises:
        ValueError: there is no such file or column, or a file is cut short. If rows cannot be trained on, the error is
            raised after the last row of their file.
    """
    for file in find_files(spec, plain=True):
        if isinstance(file, Path):
            if file.suffix == CSV and str(file) != spec and column not in (names := _csv_columns(file)):
                logger.warning(f"{file} is left out: it has no column {column!r}; its columns are {names} ({flag})")
                continue
            yield from _texts(str(file), str(file), column, flag, skip_bad=skip_bad)
            continue
        with tempfile.TemporaryDirectory() as folder, file.downloaded(Path(folder)) as copy:
            yield from _texts(copy, f"{file.dataset}: {file.file}", column, flag, skip_bad=skip_bad)


def _texts(path: str, name: str, column: str, flag: str, *, skip_bad: bool) -> Iterator[str]:
    """The texts of one file. Error messages call the file ``name``."""
    bad = BadRows(skip=skip_bad)
    rows = path.endswith(tuple(ending for ending in ENDINGS if READERS[ending] is not _text_document))
    if rows:
        documents = read_documents(path, column, flag)
    else:
        pieces = _csv_documents(path, column, flag) if path.endswith(CSV) else _pieces(path)
        documents = ((place, *_checked(value, column, flag)) for place, value in pieces)
    for place, text, kind in documents:
        if kind == BROKEN:
            raise ValueError(f"{name} is {BROKEN}: {place}")
        bad.rows += 1
        if text is None:
            bad.add(place, kind)
        else:
            yield text
    bad.close(name)


def _pieces(file: str) -> Iterator[tuple[str, object]]:
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    with open(file, "rb") as content:
        while data := content.read(PIECE) + content.readline(PIECE):
            try:
                # the decoder keeps an incomplete character until the next piece; at the end of the file, the character
                # is damaged
                text = decoder.decode(data, final=len(data) < PIECE)
                if text.strip():
                    yield f"bytes from {start}", text
            except UnicodeDecodeError:
                decoder.reset()
                yield f"bytes from {start}", data
            start = content.tell()


def read_documents(path: str, column: str, flag: str = "--text-key") -> Iterator[tuple[str, str | None, str]]:
    """Yield (place, text, "") for each document of a file. If the document cannot be trained on, yield (place, None,
    kind of problem) instead. ``flag``: the flag with which the user sets ``column``, for error messages.

    Only a part of the file is in memory at a time. But a ``.txt`` file is a single document, and is read as a whole.
    """
    read = next(reader for ending, reader in READERS.items() if path.endswith(ending))
    try:
        for place, value in read(path, column):
            yield (place, *_checked(value, column, flag))
    except NoColumn as error:
        raise ValueError(f"{error} ({flag})") from error
    except (pa.ArrowInvalid, OSError, EOFError, zlib.error) as error:
        yield f"{error}", None, BROKEN


def _checked(value: object, column: str, flag: str) -> tuple[str | None, str]:
    if value is ABSENT:
        return None, f"without a column {column!r} ({flag})"
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return None, ENCODING
    if not isinstance(value, str):
        return None, MALFORMED
    if not value.strip():
        return None, EMPTY
    if "\0" in value:
        return None, NUL
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a character (a lone surrogate), which JSON can contain
        return None, ENCODING
    return value, ""


def _parquet_documents(path: str, column: str) -> Iterator[tuple[str, object]]:
    with pq.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            raise NoColumn(f"{path} has no column {column!r}; its columns are {file.schema_arrow.names}")
        row = 0
        for batch in file.iter_batches(1024, columns=[column]):
            values = batch.column(0)
            texts = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
            for value in (values.cast(pa.large_binary()) if texts else values).to_pylist():
                yield f"row {row}", value
                row += 1


def _csv_documents(path: str, column: str, flag: str) -> Iterator[tuple[str, object]]:
    if column not in (names := _csv_columns(Path(path))):
        raise ValueError(f"{path} has no column {column!r}; its columns are {names} ({flag})")
    for place, row in csv_texts(path, slice(None), []):
        yield place, None if isinstance(row, str) else row.get(column, "")


def _csv_columns(path: Path) -> list[str]:
    """The names of the columns. In a file without a header these are texts, so a long name is cut."""
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as file:
        names = next(csv.reader(file, delimiter=separator_of(file)), [])
    return [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names]


def _jsonl_documents(path: str, column: str) -> Iterator[tuple[str, object]]:
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
                yield f"line {number}", row.get(column, ABSENT) if isinstance(row, dict) else None
            except UnicodeDecodeError as error:
                yield f"line {number}", error.object
            except (ValueError, RecursionError):
                yield f"line {number}", None


def _text_document(path: str, _column: str) -> Iterator[tuple[str, object]]:
    yield "the file", Path(path).read_bytes()


READERS: dict[str, Callable[[str, str], Iterator[tuple[str, object]]]] = {
    ".parquet": _parquet_documents,
    ".jsonl": _jsonl_documents,
    ".jsonl.gz": _jsonl_documents,
    ".txt": _text_document,
}
