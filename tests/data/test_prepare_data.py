"""scripts/prepare_data.py on a few rows of the originals: GSM8K (MIT, OpenAI), SVAMP (MIT, Arkil Patel), MATH and MMLU
(MIT, Dan Hendrycks)."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.lib.arithmetic import build_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
BOXED = " Let's think step by step and output the final answer within \\boxed{}."
GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072",
}
SVAMP = {
    "ID": "chal-1",
    "Body": "Each pack of dvds costs 76 dollars. If there is a discount of 25 dollars on each pack",
    "Question": "How much do you have to pay to buy each pack?",
    "Equation": "( 76.0 - 25.0 )",
    "Answer": 51.0,
    "Type": "Subtraction",
}
MATH = {
    "problem": "Find $x$.",
    "solution": "",
    "answer": "\\frac{1}{2}",
    "subject": "Algebra",
    "level": 2,
    "unique_id": "test/a/1.json",
}
MMLU = {"question": "Mosquitoes?", "type": "college_biology", "choices": ["w", "x", "y", "z"], "answer": 2}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepare(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments)])
        script.main()

    return run


def rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize(
    ("task", "file", "text", "expected"),
    [
        ("gsm8k", "test.jsonl", json.dumps(GSM8K), (GSM8K["question"] + BOXED, "1072")),
        (
            "svamp",
            "SVAMP.json",
            json.dumps([{**SVAMP, "Body": "no", "Answer": 22090603.0}] * 700 + [SVAMP]),
            (f"{SVAMP['Body']}. {SVAMP['Question']}{BOXED}", "51"),
        ),
        ("math500", "math500_test.json", json.dumps([MATH]), ("Find $x$." + BOXED, "\\frac{1}{2}")),
        (
            "mmlu_stem",
            "test.jsonl",
            json.dumps({**MMLU, "type": "philosophy"}) + "\n" + json.dumps(MMLU),
            ("Mosquitoes?\nA. w\nB. x\nC. y\nD. z\nAnswer with the letter of the correct option, as 'Answer: X'.", "C"),
        ),
    ],
)
def test_originals_become_slimes_rows(
    task: str, file: str, text: str, expected: tuple[str, str], tmp_path: Path, prepare: Callable[..., None]
) -> None:
    (tmp_path / "original" / "deep").mkdir(parents=True)
    (tmp_path / "original" / "deep" / file).write_text(text)
    prepare(task, "--source", tmp_path / "original", "--out", tmp_path / "out")
    (row,) = rows(tmp_path / "out" / "test.parquet")
    assert (row["messages"], row["label"]) == ([{"role": "user", "content": expected[0]}], expected[1])
    assert isinstance(row["metadata"], dict)
    if task == "svamp":
        train = rows(tmp_path / "out" / "train.parquet")
        assert (len(train), train[0]["label"]) == (700, "22090603")
        prepare(task, "--source", tmp_path / "out", "--out", tmp_path / "copy")
        assert rows(tmp_path / "copy" / "train.parquet") == train


def test_quickstart_is_complete_disjoint_and_repeatable(tmp_path: Path, prepare: Callable[..., None]) -> None:
    settings = ("--held-out", "100", "--sft-rows", "500", "--pairs", "50", "--seed", "3")
    for name in ("a", "b"):
        prepare("quickstart", "--out", tmp_path / name, *settings)
    files = [p.relative_to(tmp_path / "a") for p in sorted((tmp_path / "a").rglob("*")) if p.is_file()]
    assert {f.name for f in files} >= {
        "train.parquet",
        "heldout.parquet",
        "sft.parquet",
        "config.json",
        "tokenizer.json",
    }
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    names = ("train", "heldout", "sft", "pairs")
    train, heldout, sft, pairs = (rows(tmp_path / "a" / f"{name}.parquet") for name in names)
    asked = [{row["messages"][0]["content"] for row in part} for part in (train, heldout, sft, pairs)]
    assert [len(train), len(heldout), len(sft), len(pairs)] == [9900, 100, 500, 50]
    assert not asked[0] & asked[1]
    assert asked[2] | asked[3] <= asked[0]
    label = {row["messages"][0]["content"]: row["label"] for row in train}
    for row in pairs:
        assert row["chosen"][0]["content"].endswith(f"\n#### {label[row['messages'][0]['content']]}")
        assert row["rejected"][0]["content"] != f"#### {label[row['messages'][0]['content']]}"
    assert [m["role"] for m in sft[0]["messages"]] == ["user", "assistant"]
    assert (tmp_path / "a" / "model" / "tokenizer.json").is_file()
    assert len(build_tokenizer()) == json.loads((tmp_path / "a" / "model" / "config.json").read_text())["vocab_size"]


def test_wrong_folders_are_answered_in_one_line(
    tmp_path: Path, prepare: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare("svamp", "--source", tmp_path, "--out", tmp_path / "out")
    assert "--source names the folder of the original files" in capsys.readouterr().err
    (tmp_path / "test.jsonl").write_text('{"prompt": 1}')
    with pytest.raises(SystemExit):
        prepare("gsm8k", "--source", tmp_path, "--out", tmp_path / "out")
    assert "no column 'answer'; it has ['prompt']" in capsys.readouterr().err


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
ARC = {"question": "Which?", "choices": {"text": ["up", "down", "left"], "label": ["1", "2", "3"]}, "answerKey": "2"}
OPTION = "\nAnswer with the letter of the correct option, as 'Answer: X'."


@pytest.mark.parametrize(
    ("task", "file", "row", "question", "answer"),
    [
        ("smoltalk", "train.jsonl", {"messages": TALK, "source": "x"}, "Hi", "Hello."),
        (
            "mmlu_auxiliary",
            "auxiliary_train/train-00000.parquet",
            {"train": {"question": "Q", "choices": ["a", "b", "c", "d"], "answer": 3, "subject": ""}},
            "Q\nA. a\nB. b\nC. c\nD. d" + OPTION,
            "Answer: D",
        ),
        ("arc_talks", "ARC-Easy/train-00000.parquet", ARC, "Which?\nA. up\nB. down\nC. left" + OPTION, "Answer: B"),
        (
            "gsm8k_talks",
            "train.jsonl",
            GSM8K,
            GSM8K["question"] + BOXED,
            "Natalia sold 48/2 = 24 clips in May.\nThe answer is \\boxed{1072}.",
        ),
    ],
)
def test_originals_become_conversations(
    task: str, file: str, row: dict[str, Any], question: str, answer: str, tmp_path: Path, prepare: Callable[..., None]
) -> None:
    path = tmp_path / "original" / file
    path.parent.mkdir(parents=True)
    if file.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row))
    prepare(task, "--source", tmp_path / "original", "--out", tmp_path / "out")
    (file_out,) = (tmp_path / "out").rglob("train.parquet")
    (written,) = rows(file_out)
    assert [message["content"] for message in written["messages"]] == [question, answer]


def test_made_conversations_are_right_and_repeatable(tmp_path: Path, prepare: Callable[..., None]) -> None:
    for name in ("spelling", "counting", "identity"):
        for folder in ("a", "b"):
            prepare(name, "--rows", "200", "--name", "Nano", "--out", tmp_path / folder / name)
        file = Path(name) / "train.parquet"
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        for row in rows(tmp_path / "a" / file):
            question, answer = (message["content"] for message in row["messages"])
            if name == "spelling":
                assert answer.replace("-", "") in question
            elif name == "counting":
                letter, word = re.findall(r"\b[a-z]\b", question)[0], re.findall(r"[a-z]+", question)[-1]
                assert answer.endswith(f"#### {word.count(letter)}")
                assert row["label"] == str(word.count(letter))
            else:
                assert "Nano" in answer
    (tmp_path / "own.jsonl").write_text(json.dumps(TALK) + "\n" + json.dumps({"messages": TALK}) + "\n")
    prepare("identity", "--source", tmp_path / "own.jsonl", "--out", tmp_path / "own")
    assert [row["messages"] for row in rows(tmp_path / "own" / "train.parquet")] == [TALK, TALK]
    (tmp_path / "words.txt").write_text("zebra Zebra zebra")
    prepare("spelling", "--source", tmp_path / "words.txt", "--rows", "3", "--out", tmp_path / "words")
    assert {row["messages"][1]["content"] for row in rows(tmp_path / "words" / "train.parquet")} == {"z-e-b-r-a"}
