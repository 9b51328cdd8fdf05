"""Texts and questions of the installed packages, and what a model of them has to beat."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "lib")]
import offline_texts  # noqa: E402
from byte_ngram import ByteNgram  # noqa: E402
from machine_texts import Document, Entry, Source, documents  # noqa: E402
from speedrun_results import FORM, formed  # noqa: E402

from slimelite.samples.sample import Status  # noqa: E402

TEXTS = [b"abracadabra", b"a banana, a cabana", b"abc" * 9, bytes(range(1, 60))]


def naive(texts: list[bytes], order: int, history: bytes, byte: int) -> float:
    """p(byte | history) by the formula, one count at a time."""
    padded = [bytes(order - 1) + text + b"\0" for text in texts]
    counts = Counter(text[at : at + order] for text in padded for at in range(len(text) - order + 1))
    levels = {order: counts}
    for length in range(order - 1, 0, -1):
        before = defaultdict(set)
        for gram in levels[length + 1]:
            before[gram[1:]].add(gram[0])
        levels[length] = Counter({gram: len(several) for gram, several in before.items()})
    p = 1 / 256
    for length in range(1, order + 1):
        level, context = levels[length], history[len(history) - length + 1 :]
        once, twice = (sum(count == number for count in level.values()) for number in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        after = {gram: count for gram, count in level.items() if gram[:-1] == context}
        if total := sum(after.values()):
            p = (max(after.get(context + bytes([byte]), 0) - discount, 0) + discount * len(after) * p) / total
    return p


@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_ngram_model_is_kneser_and_neys(order: int) -> None:
    model, other = ByteNgram(TEXTS, order), b"abba"
    padded = bytes(order - 1) + other + b"\0"
    bits = [
        -math.log2(naive(TEXTS, order, padded[at : at + order - 1], padded[at + order - 1]))
        for at in range(len(other) + 1)
    ]
    assert model.bits([other]) == pytest.approx(sum(bits), rel=1e-12)
    for history in (b"abra", b"\0\0\0a", b"zzzz"):  # seen, a beginning, never seen
        start = int.from_bytes(history) << 8
        grams = np.arange(start, start + 256, dtype=np.uint64) & np.uint64((1 << 8 * order) - 1)
        assert model.probabilities(grams).sum() == pytest.approx(1, rel=1e-12)


def test_a_module_is_its_docstrings_below_their_names(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(
        '"""The pack."""\nclass A:\n    """An A."""\n'
        '    def go(self, x, *rest, y=1):\n        """Goes.\n\n        Far."""\n'
    )
    (tmp_path / "pack" / "broken.py").write_text('"""Text."""\ndef (')
    (tmp_path / "pack" / "latin.py").write_bytes(b'"""caf\xe9"""')
    (tmp_path / "pack" / "PAGE.md").write_text("# A page\0\n")
    files = sorted((tmp_path / "pack").iterdir())
    found = documents(Source("pack", "1", "MIT", files, [tmp_path], "About it."), 10**6)
    assert sorted(document.text for document in found) == [
        "module pack\nThe pack.\n\nclass A\nAn A.\n\ndef A.go(x, *rest, y)\nGoes.\n\nFar.\n",
        "page pack\nAbout it.\n",
        "page pack/PAGE.md\n# A page\n",
    ]
    assert len(documents(Source("pack", "1", "MIT", files, [tmp_path], "About it."), 1)) == 1


def test_packages_are_on_one_side_and_no_held_out_text_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str, text: str, count: int = 9) -> tuple[Source, list[Document]]:
        entries = [Entry(name, f"f{i}", f"def f{i}()", f"{text} {i}. " * 500) for i in range(count)]
        return Source(name, "1", "MIT", [], []), [Document(name, [entry]) for entry in entries]

    several = [package("python", "same"), package("a", "same"), package("b", "other"), package("small", "tiny", 1)]
    several += [package(f"c{number}", f"more {number}") for number in range(30)]
    monkeypatch.setattr(offline_texts, "sources", lambda: [source for source, _ in several])
    monkeypatch.setattr(offline_texts, "documents_of", lambda *_: (each for each in several))
    sides = offline_texts.split_texts(200_000, 60_000)
    names = {side: [source.name for source, _ in found] for side, found in sides.items()}
    assert names["train"][:2] == ["python", "small"], "the library is trained on, and so are small packages"
    assert names["held_out"][:2] == ["a", "b"]
    assert not {*names["train"]} & {*names["held_out"]}
    texts = {side: {e.text for _, found in sides[side] for d in found for e in d.entries} for side in sides}
    assert texts["train"]
    assert texts["held_out"]
    assert not texts["train"] & texts["held_out"]
    with pytest.raises(ValueError, match="packages here have"):
        offline_texts.split_texts(10**9, 60_000)
    monkeypatch.setattr(offline_texts, "documents_of", lambda *_: (each for each in several[:2]))
    with pytest.raises(ValueError, match="and 0 held out"):  # the library has every line of it
        offline_texts.split_texts(40_000, 30_000)


def test_texts_that_say_little_new_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = "Sends the request to the server.\nRetries it after a time-out.\n"
    texts = {
        "first": f"{usual}Gets a thing.",
        "again": f"{usual}Puts a thing.",  # most of it is known
        "new": f"{usual}" + "Explains at length what no other function of this module does, and why.",
        "bare": "",  # the title of a class
    }
    entries = [Entry("client", name, f"def {name}()", text) for name, text in texts.items()]
    sources = [Source("client", "1", "MIT", [], []), Source("python", "1", "PSF", [], [])]
    found = [(sources[0], [Document("client", entries)])]
    found.append((sources[1], [Document("python", [Entry("os", "first", "def first()", texts["first"])])]))
    monkeypatch.setattr(offline_texts, "sources", lambda: sources)
    monkeypatch.setattr(offline_texts, "documents_of", lambda *_: (each for each in found))
    monkeypatch.setattr(offline_texts, "LEAST", 0)
    monkeypatch.setattr(offline_texts, "PARTS", 1)
    sides = offline_texts.split_texts(120, 250)
    (held_out,) = (document for _, several in sides["held_out"] for document in several)
    assert [entry.name for entry in held_out.entries] == ["new", "bare"], "the library has the first"


def test_how_often_an_option_is_there_says_nothing_of_whether_it_is_right() -> None:
    """One module has half of the functions: it is wrong in three questions of four all the same, as every other."""
    modules = ["big"] * 30 + [f"small_{number}" for number in range(30)]
    entries = [Entry(module, f"f{i}", "def", f"Returns what has the number {i}.") for i, module in enumerate(modules)]
    there, right = Counter[str](), Counter[str]()
    for row in offline_texts.questions(entries, random.Random(0), 6000):
        if row["metadata"]["kind"] == "module":
            _, *options = row["messages"][0]["content"].split("\n")
            names = {option[-1]: option[:-5] for option in options}
            there.update(names.values())
            right[names[row["label"]]] += 1
    assert right["big"] / there["big"] == pytest.approx(0.25, abs=0.03)


def test_the_label_of_a_question_is_the_letter_of_its_answer(tmp_path: Path) -> None:
    entries = [
        Entry(f"pack.m{number % 7}", f"function_{number}", "def", f"Returns what has the number {number}.\n\nMore.")
        for number in range(40)
    ]
    truth = {entry.name: (entry.module, entry.text.split("\n")[0]) for entry in entries}
    for row in offline_texts.questions(entries, random.Random(0), 200):
        first, *options = row["messages"][0]["content"].split("\n")
        name = next(word.strip("?:") for word in first.split() if word.startswith("function_"))
        right = truth[name][row["metadata"]["kind"] == "docstring"]
        assert options["ABCD".index(row["label"])] == f"{right} -> {row['label']}"
        assert len({option[:-5] for option in options}) == 4
        *_, quoted, answer = row["reply"].split("\n")
        assert (quoted, answer) == (f"{right} -> {row['label']}", f"Answer: {row['label']}")
        assert row["reply"].startswith(f"def {name}\n")
        assert FORM["questions"].fullmatch(row["reply"])
    for side in offline_texts.SIDES:
        lines = "".join(json.dumps(vars(entry)) + "\n" for entry in entries)
        (tmp_path / f"{side}_entries.jsonl").write_text(lines)
    offline_texts.write_questions(tmp_path, rows=30, held_out=10, seed=1)
    read = {file.stem: pq.read_table(file).to_pylist() for file in tmp_path.glob("*.parquet")}
    assert {name: len(rows) for name, rows in read.items()} == {
        "sft": 60,
        "sums": 30,
        "questions": 30,
        "held_out_sums": 10,
        "held_out_questions": 10,
    }
    asked = {row["messages"][0]["content"] for row in read["sums"]}
    assert not asked & {row["messages"][0]["content"] for row in read["held_out_sums"]}


@pytest.mark.parametrize(
    ("name", "reply", "good"),
    [
        ("sums", "1+2=3 3+4=7\n#### 7<|im_end|>", True),
        ("sums", "#### 7<|im_end|>", True),
        ("sums", "1+2=3 3+4=7\n#### 7 7<|im_end|>", False),
        ("sums", "7<|im_end|>", False),
        ("questions", "def f\nReturns it. -> B\nAnswer: B<|im_end|>", True),
        ("questions", "def f\nReturns it.\npack.m -> B\nAnswer: B<|im_end|>", True),
        ("questions", "Answer: B<|im_end|>", False),
        ("questions", "def f\nReturns it. -> B\nAnswer: E<|im_end|>", False),
    ],
)
def test_a_reply_is_in_form_as_a_whole_and_if_it_has_ended(name: str, reply: str, *, good: bool) -> None:
    table: Any = SimpleNamespace(status=[Status.COMPLETED, Status.TRUNCATED], response=[reply, reply])
    assert formed(table, FORM[name]) == good / 2


def test_baselines_count_the_same_bytes(tmp_path: Path) -> None:
    texts = {"train": ["some text, some more text, "] * 9, "held_out": ["some text, and an end", "some more"]}
    for side, several in texts.items():
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in several))
    found = offline_texts.baselines(tmp_path)
    size = sum(map(len, texts["held_out"]))
    model = ByteNgram([text.encode() for text in texts["train"]])
    assert found["Kneser-Ney 5-gram of bytes, fitted on the training text"] == pytest.approx(
        model.bits([text.encode() for text in texts["held_out"]]) / size
    )
    assert all(0 < value < 99 for value in found.values()), "no count in so few texts is 1"
    assert found["xz, the whole, primed with the training text"] < found["xz, the whole"]
    assert found["xz, the whole"] == found["xz, 250 kB at a time"]
