"""Learning material without a network, for a small model: texts of this machine's Python packages, and questions about
them.

    python scripts/offline_texts.py texts --out data/texts        # train.jsonl, held_out.jsonl, sources.md
    python scripts/offline_texts.py baselines --out data/texts    # bits per byte of compressors and an n-gram model
    python scripts/offline_texts.py questions --out data/texts    # conversations, prompts and evaluations

Whole packages are held out. Compressors and the n-gram model read the held-out texts as one stream. Each text has a
byte for its end, as in eval/bpb.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
from arithmetic import all_questions, conversation_row, prompt_row
from byte_ngram import END, ByteNgram
from machine_texts import STANDARD, Document, Entry, Source, documents_of, sources

from slimelite.base.version import add_version

# SGLang is installed on some machines only
LEFT_OUT = {"sglang", "sgl-kernel", "slimelite"}
# a package with less text than so many bytes is not held out; and one gives at most so large a part of either side
LEAST, PARTS = 30_000, 6
# a summary of so many characters is asked for
SUMMARY = range(20, 76)
SIDES = ("train", "held_out")
LETTERS = "ABCD"
# xz reads so many bytes at a time
PIECE = 250_000
# of the sums in conversations, this share shows its working: the others are guesses, which RL has to leave
WORKED_SHARE = 0.35

Row = dict[str, Any]


class Lines:
    """The lines of all texts so far. They show whether a new text adds little."""

    def __init__(self) -> None:
        self._known = set[str]()

    def repeated(self, entry: Entry) -> bool:
        """Whether earlier lines are more than half of the entry's text. Its own lines are remembered from now on.

        Generated clients describe a hundred calls in nearly the same words. A compressor sees all of them at once, but
        a model reads them one by one, so their comparison would not be fair.
        """
        lines = [line for line in map(str.strip, entry.text.splitlines()) if line]
        known = sum(len(line) for line in lines if line in self._known)
        self._known.update(lines)
        return 2 * known > sum(map(len, lines))


def split_texts(train_bytes: int, held_bytes: int) -> dict[str, list[tuple[Source, list[Document]]]]:
    """side -> (package, documents), without texts that repeat others of their side.

    A held-out text that the training side has too is left out.

    Raises:
        ValueError: this machine has too few texts.
    """
    budget = {"train": train_bytes, "held_out": held_bytes}
    sides: dict[str, list[tuple[Source, list[Document]]]] = {side: [] for side in SIDES}
    size, known = dict.fromkeys(SIDES, 0), {side: Lines() for side in SIDES}
    several = [source for source in sources() if source.name not in LEFT_OUT]
    read = documents_of(several, max(train_bytes, held_bytes) // PARTS, os.cpu_count() or 1)
    waiting = list[tuple[Source, list[Document]]]()
    for source, found in read:
        total = sum(len(document.text.encode()) for document in found)
        side = "held_out" if source.name != STANDARD and total >= LEAST and size["held_out"] < held_bytes else "train"
        if size[side] >= budget[side]:
            read.close()
            break
        part = list(_first(found, budget[side] // PARTS, known[side]))
        size[side] += sum(len(document.text.encode()) for document in part)
        (waiting if side == "held_out" else sides["train"]).append((source, part))
    for source, part in waiting:
        sides["held_out"].append((source, list(_first(part, held_bytes, known["train"]))))
    size["held_out"] = sum(len(document.text.encode()) for _, part in sides["held_out"] for document in part)
    if size["held_out"] < held_bytes // 2 or size["train"] < train_bytes // 2:
        raise ValueError(f"packages here have {size['train']:,} bytes to train on and {size['held_out']:,} held out")
    return sides


def _first(found: Sequence[Document], most: int, known: Lines) -> Iterator[Document]:
    """Documents up to ``most`` bytes, without entries that repeat ``known`` lines."""
    size = 0
    for document in found:
        document.entries = [entry for entry in document.entries if not known.repeated(entry)]
        if not any(entry.text for entry in document.entries):
            continue
        size += len(document.text.encode())
        if size > most:
            return
        yield document


def write_texts(out: Path, train_bytes: int, held_bytes: int) -> None:
    """``train.jsonl``, ``held_out.jsonl``, the same for questions, and the table ``sources.md``."""
    began = time.perf_counter()
    sides = split_texts(train_bytes, held_bytes)
    lines = ["| package | version | licence | side | documents | bytes |", "|---|---|---|---|---:|---:|"]
    for side, several in sides.items():
        with open(out / f"{side}.jsonl", "w") as texts, open(out / f"{side}_entries.jsonl", "w") as entries:
            for source, found in several:
                for document in found:
                    texts.write(json.dumps({"text": document.text}) + "\n")
                    entries.writelines(json.dumps(asdict(entry)) + "\n" for entry in document.entries if entry.name)
                size = sum(len(document.text.encode()) for document in found)
                facts = (source.name, source.version, source.licence, side, len(found), f"{size:,}")
                lines.append(f"| {' | '.join(map(str, facts))} |")
        count = sum(len(found) for _, found in several)
        size = sum(len(document.text.encode()) for _, found in several for document in found)
        print(f"{side}: {len(several)} packages, {count:,} documents, {size:,} bytes")
    (out / "sources.md").write_text("\n".join(lines) + "\n")
    seconds = time.perf_counter() - began
    print(f"{out / 'sources.md'} names packages and licences; found and read in {seconds:.1f} s")


def baselines(out: Path) -> dict[str, float]:
    """Bits per byte of the held-out texts, by the name of the compressor or model."""
    train, held_out = (_read(out / f"{side}.jsonl") for side in SIDES)
    size, end = sum(map(len, held_out)), bytes([END])
    before, stream = (end.join([*texts, b""]) for texts in (train, held_out))
    pieces = [stream[at : at + PIECE] for at in range(0, len(stream), PIECE)]
    bits = {
        "gzip": 8 * len(gzip.compress(stream, 9)),
        "Kneser-Ney 5-gram of bytes, fitted on the training text": ByteNgram(train).bits(held_out),
        f"xz, {PIECE // 1000} kB at a time": 8 * sum(map(_xz, pieces)),
        "xz, the whole": 8 * _xz(stream),
        "xz, the whole, primed with the training text": 8 * (_xz(before + stream) - _xz(before)),
    }
    return {name: count / size for name, count in bits.items()}


def _read(file: Path) -> list[bytes]:
    with open(file) as lines:
        return [json.loads(line)["text"].encode() for line in lines]


def _xz(data: bytes) -> int:
    """Size of ``data`` after xz [bytes]. Its window has 64 MiB."""
    return len(lzma.compress(data, preset=9))


def summary(entry: Entry) -> str | None:
    """The first line of a docstring, if it is a sentence of a fitting length."""
    line = entry.text.split("\n", 1)[0].strip()
    return line if len(line) in SUMMARY and line.endswith(".") and " " in line and ">>>" not in line else None


def public(entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
    """Classes and functions that a question can be about, with their summaries."""
    named = [(entry, summary(entry)) for entry in entries if not entry.name.split(".")[-1].startswith("_")]
    return [(entry, line) for entry, line in named if line is not None]


def questions(entries: Sequence[Entry], rng: random.Random, rows: int) -> Iterator[Row]:
    """Two kinds of questions in turn: which of four docstrings belongs to this function, and which of four modules has
    it. Labels are letters. ``reply`` is a right answer.

    Raises:
        ValueError: there are too few entries to choose from.
    """
    asked = public(entries)
    if min(len({line for _, line in asked}), len({entry.module for entry, _ in asked})) < 4:
        raise ValueError("the texts have fewer than four functions or modules to choose from")
    for number in range(rows):
        kind = "docstring" if number % 2 else "module"
        drawn = dict[str, tuple[Entry, str]]()
        while len(drawn) < 4:
            entry, line = rng.choice(asked)
            drawn[line if kind == "docstring" else entry.module] = entry, line
        # chosen among four that are there, so that no name tells by how seldom it is right
        options = list(drawn)
        right = rng.choice(options)
        entry, line = drawn[right]
        content = {
            "docstring": f"Which text is of {entry.name}?",
            "module": f"Which module has {entry.name}: {line}",
        }[kind]
        listed = "\n".join(f"{option} -> {letter}" for letter, option in zip(LETTERS, options, strict=True))
        messages = [{"role": "user", "content": f"{content}\n{listed}"}]
        facts = {"rm_type": "multiple_choice", "kind": kind}
        letter = LETTERS[options.index(right)]
        # the reply begins as the texts do that pretraining has read: what comes after a name is what the model knows
        begins = f"{entry.title.split()[0]} {entry.name}\n" + (f"{line}\n" if kind == "module" else "")
        reply = f"{begins}{right} -> {letter}\nAnswer: {letter}"
        yield {"messages": messages, "label": letter, "metadata": facts, "reply": reply}


def write_questions(out: Path, rows: int, held_out: int, seed: int) -> None:
    """Write ``sft.parquet`` and the prompts ``sums.parquet`` and ``questions.parquet``. The same names with
    ``held_out_`` in front have held-out rows."""
    rng = random.Random(seed)
    sums = all_questions()
    rng.shuffle(sums)
    for side, those in (("held_out", sums[:1000]), ("train", sums[1000:])):
        with open(out / f"{side}_entries.jsonl") as lines:
            entries = [Entry(**json.loads(line)) for line in lines]
        asked = list(questions(entries, rng, held_out if side == "held_out" else rows))
        prefix = "held_out_" if side == "held_out" else ""
        write([sum_row(numbers) for numbers in those[: held_out if prefix else rows]], out / f"{prefix}sums.parquet")
        write(asked, out / f"{prefix}questions.parquet")
    talks = [with_reply(row) for row in asked]
    talks += [conversation_row(rng.choice(those), rng, WORKED_SHARE) for _ in range(rows)]
    rng.shuffle(talks)
    write([{"messages": talk["messages"]} for talk in talks], out / "sft.parquet")


def sum_row(numbers: tuple[int, ...]) -> Row:
    """A prompt of the quickstart's task, with its rule."""
    return {**prompt_row(numbers), "metadata": {"rm_type": "gsm8k", "kind": "sum"}}


def with_reply(row: Row) -> Row:
    """The conversation of a question."""
    return {"messages": [*row["messages"], {"role": "assistant", "content": row["reply"]}]}


def write(rows: list[Row], path: Path) -> None:
    """Write a parquet file, and print a line about it."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    add = parser.add_argument
    add("command", choices=("texts", "baselines", "questions"))
    add("--out", type=Path, required=True, help="folder to write")
    add("--train-bytes", type=int, default=24_000_000, help="about how many bytes of texts to train on (%(default)s)")
    add("--held-bytes", type=int, default=1_300_000, help="about how many bytes of held-out texts (%(default)s)")
    add("--rows", type=int, default=10_000, help="conversations with questions, and as many with sums (%(default)s)")
    add("--held-out", type=int, default=1000, help="held-out questions, and as many sums (%(default)s)")
    add("--seed", type=int, default=0, help="seed of all random choices (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.command == "texts":
            write_texts(args.out, args.train_bytes, args.held_bytes)
        elif args.command == "baselines":
            lines = [f"| {name} | {value:.3f} |" for name, value in baselines(args.out).items()]
            print("\n".join(["| | bits per byte |", "|---|---:|", *lines]))
        else:
            write_questions(args.out, args.rows, args.held_out, args.seed)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
