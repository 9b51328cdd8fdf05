"""Tokenises documents before pretraining starts. The token ids of each document file are stored in a shard, which the
run memory-maps.

Worker processes (``python -m slimelite.data.shards``) make a shard only once, and store it in a cache folder. Later
runs look it up in the cache by its key, a hash of the shard's inputs: the content of the document file, the column, and
the tokenizer. A shard consists of three files in the cache folder. ``KEY.tokens`` contains the token ids of all
documents, with an end-of-text token after each document. ``KEY.ends.npy`` contains the position where each document
ends. ``KEY.json`` contains `ShardFacts`, and is written last. So if a process is killed while it writes a shard, only
this shard is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

import slimelite
from slimelite.base.files import FORMAT, named, write_text
from slimelite.data.hub import HubFile
from slimelite.data.texts import find_files, read_documents
from slimelite.data.tokenizer import beginning, fingerprint, load_tokenizer

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# number of characters that the tokenizer gets at once; a longer document is cut at the end of a line
CHARACTERS = 2**20
# texts of fewer bytes are tokenised in the calling process, because a worker takes a second to start
FEW_BYTES = 2**24
# the name of an unfinished file ends with the id of the process that writes it; if the file does not change for this
# time [s], the process counts as dead
ABANDONED = 3600
PARTIAL = re.compile(r"[0-9a-f]{32}\.(json|tokens|ends\.npy)\.\d+")
# number of documents of each file that a run checks at its start, before it loads a model
FIRST = 64


@dataclass(frozen=True)
class ShardFacts:
    """Describes a shard (the content of ``KEY.json``).

    ``source``: the file of documents. ``digest``: the hash of the source file's content. ``checksum``: the checksum of
    the shard's token ids and document ends. ``bytes``: the total size of the documents' texts in UTF-8. ``left_out``:
    kind of problem -> number of documents that are left out because of it. ``places``: kind of problem -> place of the
    first such document.
    """

    format: int
    source: str
    digest: str
    checksum: str
    dtype: str
    documents: int
    tokens: int
    bytes: int
    left_out: dict[str, int]
    places: dict[str, str]


@dataclass(frozen=True)
class Shard:
    """The token ids of a file of documents. ``tokens``: [tokens] token ids of all documents. ``ends``: [documents]
    int64, the position in ``tokens`` where each document ends."""

    facts: ShardFacts
    tokens: np.ndarray
    ends: np.ndarray


class TextCoder:
    """Encodes documents as token ids. If a document contains the name of a special token, this name is encoded as plain
    text. ``end``: the id of the end-of-text token, which follows each document in a shard.

    ``start``: the id of the start token. In training it precedes each document, so that the document's first token can
    be predicted. ``digest``: a hash of the tokenizer.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(path)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"{path} has no eos_token, the token that ends a document: name one in the tokenizer's config"
            )
        self.end = int(self._tokenizer.eos_token_id)
        begins = beginning(self._tokenizer)
        bos = begins[-1] if begins else self._tokenizer.bos_token_id
        self.start = self.end if bos is None else int(bos)
        self.dtype = "uint16" if max(self._tokenizer.get_vocab().values()) < 2**16 else "uint32"
        parts = {name: part for name, part in fingerprint(self._tokenizer).items() if name != "chat template"}
        self.digest = _digest(json.dumps(parts).encode())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each of ``texts``, without ``start`` and ``end``."""
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        ids: list[list[int]] = self._tokenizer(list(texts), **options)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the token ids ``ids``, including the names of special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def tokenize(
    specs: Sequence[str],
    coder: TextCoder,
    column: str,
    cache: Path,
    *,
    workers: int,
    skip: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[list[Shard]]:
    """For each of ``specs``, the shards of its document files. Up to ``workers`` processes make the shards that are not
    in the cache.

    ``skip``: leave out documents that cannot be trained on, with a warning for each file. ``progress``: a function that
    is called with (number of shards that are ready, total number of shards).

    Raises:
        ValueError: a file cannot be read, or ``skip`` is off and a document cannot be trained on.
        OSError: the disk of the cache is full.
    """
    files = [find_files(spec) for spec in specs]
    flat = [file for part in files for file in part]
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    size = sum(file.stat().st_size if isinstance(file, Path) else file.size for file in flat)
    jobs, count = [str(file) for file in flat], min(workers, len(flat))
    if count < 2 or size < FEW_BYTES:
        keys = []
        for job in jobs:
            keys.append(make_shard(job, coder, column, cache))
            progress(len(keys), len(jobs))
    else:
        keys = _by_workers(jobs, coder.path, column, cache, count, progress)
    shards = [open_shard(cache, key) for key in keys]
    for job, shard in zip(jobs, shards, strict=True):
        _note_change(cache, job, column, shard.facts.digest)
    _judge(jobs, [shard.facts for shard in shards], skip=skip)
    several = iter(shards)
    parts = [[next(several) for _ in part] for part in files]
    if empty := [spec for spec, part in zip(specs, parts, strict=True) if not any(len(shard.ends) for shard in part)]:
        raise ValueError(f"no documents in {', '.join(empty)}")
    return parts


def check_documents(spec: str, column: str, *, skip: bool) -> None:
    """Check that the files of ``spec`` exist. If they are on this machine, also check the first `FIRST` documents of
    each file.

    Raises:
        ValueError: a file does not exist or has no column ``column``; there are no documents; or ``skip`` is off and a
            document cannot be trained on.
        OSError: a file cannot be read.
    """
    problems, good = [], False
    for file in find_files(spec):
        if not isinstance(file, Path):
            return  # the dataset exists on the hub, and the run will download it
        left_out, places = Counter[str](), dict[str, str]()
        first = islice(read_documents(str(file), column), FIRST)
        count = sum(len(texts) for texts in _batches(first, left_out, places))
        good = good or count > 0 or left_out.total() == FIRST
        problems += [_problem(str(file), left_out, places, f"the first {left_out.total() + count}")] if left_out else []
    _refuse(problems, skip=skip)
    if not good:
        raise ValueError(f"no documents in {spec}")


def _problem(source: str, left_out: Mapping[str, int], places: Mapping[str, str], total: str) -> str:
    kinds = ", ".join(f"{count} {kind} (first: {places[kind]})" for kind, count in left_out.items())
    return f"{source}: {sum(left_out.values())} of {total} documents cannot be trained on: {kinds}"


def _refuse(problems: Sequence[str], *, skip: bool) -> None:
    if problems and not skip:
        more = f"; and {len(problems) - 3} more files" if len(problems) > 3 else ""
        raise ValueError(f"{'; '.join(problems[:3])}{more}; fix these documents, or skip them with --skip-bad-rows")


def _judge(sources: Sequence[str], facts: Sequence[ShardFacts], *, skip: bool) -> None:
    """Warn about the documents that were left out. Without ``skip``, raise an error instead (see `tokenize`)."""
    problems = [
        _problem(source, shard.left_out, shard.places, str(shard.documents + sum(shard.left_out.values())))
        for source, shard in zip(sources, facts, strict=True)
        if shard.left_out
    ]
    _refuse(problems, skip=skip)
    for problem in problems:
        logger.warning("%s; these documents are left out", problem)


def _by_workers(
    jobs: list[str], tokenizer: str, column: str, cache: Path, count: int, progress: Callable[[int, int], None]
) -> list[str]:
    """Make the shards of ``jobs`` with ``count`` processes. Returns the keys of the shards."""
    queue: SimpleQueue[tuple[int, str]] = SimpleQueue()
    for numbered in enumerate(jobs):
        queue.put(numbered)
    keys = [""] * len(jobs)
    search_path = [str(Path(slimelite.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, search_path)), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", "slimelite.data.shards", tokenizer, column, str(cache)]

    def serve(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while True:
            try:
                number, job = queue.get_nowait()
            except Empty:
                return
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or '{"error": "the process ended; see stderr"}')
            if "error" in answer:
                raise ValueError(f"{job}: {answer['error']}")
            keys[number] = answer["key"]
            progress(sum(map(bool, keys)), len(keys))

    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        threads = stack.enter_context(ThreadPoolExecutor(count))
        try:
            for done in [threads.submit(serve, process) for process in processes]:
                done.result()
        except BaseException:
            for process in processes:  # a killed process unblocks the thread that waits for its answer
                process.kill()
            raise
    return keys


def make_shard(source: str, coder: TextCoder, column: str, cache: Path) -> str:
    """Tokenise the file ``source``, unless the cache contains an undamaged shard of this file. Returns the key of the
    shard.

    Raises:
        ValueError: the file cannot be read, or it changed while it was read.
    """
    name = source
    with ExitStack() as stack:
        if (remote := HubFile.parse(source)) is not None:
            digest = remote.digest
        else:
            before = os.stat(source)
            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        made_from = [FORMAT, digest, column, coder.digest, source.endswith(".txt")]
        key = _digest(json.dumps(made_from).encode())
        if _is_whole(cache, key):
            return key
        if remote is not None:
            source = stack.enter_context(remote.downloaded(cache))
        _write(cache, key, name, digest, source, coder, column)
    if remote is None:
        after = os.stat(source)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            _paths(cache, key)[0].unlink()
            raise ValueError(f"{source} changed while it was tokenised; start again when no program writes to it")
    return key


def _note_change(cache: Path, source: str, column: str, digest: str) -> None:
    """Warn if ``source`` had other content when it was tokenised before."""
    last = cache / f"{_digest(json.dumps([os.path.abspath(source), column]).encode())}.last"
    before = last.read_text() if last.is_file() else digest
    if before != digest:
        logger.warning("%s has changed since it was last tokenised, so it was tokenised again", source)
    if before != digest or not last.is_file():
        write_text(last, digest)


def _write(cache: Path, key: str, name: str, digest: str, source: str, coder: TextCoder, column: str) -> None:
    """Write the three files of a shard. The file ``KEY.json`` is written last."""
    facts, tokens, ends = (path.with_suffix(path.suffix + f".{os.getpid()}") for path in _paths(cache, key))
    left_out, places, total, size = Counter[str](), dict[str, str](), 0, 0
    documents, checksum = array("q"), hashlib.blake2b(digest_size=16)
    with named(tokens), open(tokens, "wb") as file:
        for texts in _batches(read_documents(source, column), left_out, places):
            pieces = [list(_pieces(text)) for text in texts]
            several = iter(coder.encode([piece for each in pieces for piece in each]))
            rows = [[*(i for _ in each for i in next(several)), coder.end] for each in pieces]
            for row in rows:
                total += len(row)
                documents.append(total)
            data = np.concatenate([np.array(row, coder.dtype) for row in rows]).tobytes()
            checksum.update(data)
            file.write(data)
            size += sum(len(text.encode()) for text in texts)
    checksum.update(documents.tobytes())
    with named(ends), open(ends, "wb") as file:
        np.save(file, np.frombuffer(documents, np.int64))
    content = ShardFacts(
        *(FORMAT, name, digest, checksum.hexdigest(), coder.dtype, len(documents), total, size),
        dict(left_out),
        places,
    )
    facts.write_text(json.dumps(asdict(content)))
    for written, final in zip((tokens, ends, facts), [*_paths(cache, key)[1:], _paths(cache, key)[0]], strict=True):
        written.replace(final)


def _batches(
    documents: Iterator[tuple[str, str | None, str]], left_out: Counter[str], places: dict[str, str]
) -> Iterator[list[str]]:
    """Yield the texts of ``documents`` in batches of about ``CHARACTERS`` characters. Documents without text are
    counted in ``left_out``."""
    batch, length = list[str](), 0
    for place, text, kind in documents:
        if text is None:
            left_out[kind] += 1
            places.setdefault(kind, place)
            continue
        batch.append(text)
        length += len(text)
        if length >= CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    """``text`` in pieces of at most ``CHARACTERS``, cut at the end of a line if possible."""
    while len(text) > CHARACTERS:
        cut = text.rfind("\n", 0, CHARACTERS) + 1 or CHARACTERS
        yield text[:cut]
        text = text[cut:]
    yield text


def open_shard(cache: Path, key: str) -> Shard:
    """Open the shard with the key ``key``. Its token ids are memory-mapped."""
    description, tokens, ends = _paths(cache, key)
    facts = ShardFacts(**json.loads(description.read_text()))
    mapped = np.memmap(tokens, facts.dtype, "r") if facts.tokens else np.zeros(0, facts.dtype)
    return Shard(facts, mapped, np.load(ends))


def _is_whole(cache: Path, key: str) -> bool:
    """Whether the cache has all files of a shard, unchanged since they were written."""
    description, tokens, ends = _paths(cache, key)
    if not description.is_file():
        return False
    checksum = hashlib.blake2b(digest_size=16)
    try:
        facts = ShardFacts(**json.loads(description.read_text()))
        with open(tokens, "rb") as file:
            while data := file.read(2**22):
                checksum.update(data)
        checksum.update(np.load(ends).tobytes())
    except (OSError, ValueError, TypeError):
        return False
    if facts.checksum != checksum.hexdigest():
        logger.warning("%s is damaged, so %s is tokenised again", tokens, facts.source)
        return False
    return True


def _sweep(cache: Path) -> None:
    """Remove partial shards of killed processes. Several machines may share a cache, so a process id alone is not
    enough. Files older than `ABANDONED` are removed."""
    for path in cache.glob("*.*.[0-9]*"):
        with suppress(FileNotFoundError):
            if PARTIAL.fullmatch(path.name) and time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


def _paths(cache: Path, key: str) -> tuple[Path, Path, Path]:
    return cache / f"{key}.json", cache / f"{key}.tokens", cache / f"{key}.ends.npy"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _main(tokenizer: str, column: str, cache: str) -> None:
    """Read a file name from each line of stdin, and make the shard of this file. The shard's key, or an error, is
    written to stdout."""
    coder = TextCoder(tokenizer)
    for line in sys.stdin:
        try:
            answer = {"key": make_shard(json.loads(line), coder, column, Path(cache))}
        except (ValueError, OSError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
