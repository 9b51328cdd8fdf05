"""Each row of docs/data_formats.md is read with the flags beside it; files of every kind give the same rows."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slimelite.arguments import make_args
from slimelite.data.prompts import PAIR, load_prompts
from slimelite.data.reader import read_rows
from slimelite.data.texts import read_texts
from slimelite.samples.sample import Sample

from .tokenizers import byte_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "data_formats.md"
ROWS = re.findall(r"^<!-- rows: (.*?) -->\n```json\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE)
BASE = (
    "--hf-checkpoint m --rollout-max-response-len 8 --rollout-batch-size 4 --num-rollout 1 --n-samples-per-prompt {n}"
)
QUESTION = {"role": "user", "content": "What is 2+3?"}
ANSWER = {"role": "assistant", "content": "5"}


def load(file: Path, flags: str | list[str], warnings: list[str]) -> Sample:
    words = flags.split() if isinstance(flags, str) else flags
    flags = " ".join(words)
    paired, supervised = "dpo" in flags, "loss-type" in flags
    base = BASE.format(n=1 if supervised else 4) + (" --ref-load m" if "dpo" in flags or "kto" in flags else "")
    args = make_args([*base.split(), "--prompt-data", str(file), *words])
    return load_prompts(
        args,
        byte_tokenizer() if args.apply_chat_template else None,
        [str(file)],
        replies=(args.chosen_key, args.rejected_key) if paired else None,
        keep_messages=True,
        note=warnings.append,
        warn=warnings.append,
    )[0]


@pytest.mark.parametrize(("flags", "row"), ROWS)
def test_each_row_of_the_page_is_read_with_its_flags(flags: str, row: str, tmp_path: Path) -> None:
    file, warnings = tmp_path / "rows.jsonl", list[str]()
    file.write_text(row + "\n")
    sample = load(file, flags, warnings)
    named = "--input-key" in flags
    assert [text for text in warnings if f"{file}: read as " in text] == ([] if named else warnings)
    assert len(warnings) == (0 if named else 1)
    text = json.loads(row)
    if "loss-type" not in flags:
        assert sample.label == text["answer"]
        assert ("Rome" if "tools" in text else "2+3") in sample.prompt
    elif PAIR in sample.metadata:
        replies = sample.metadata[PAIR]
        assert replies in (["5", "6"], [[QUESTION, ANSWER], [QUESTION, {**ANSWER, "content": "6"}]])
    else:
        question = {**QUESTION, "content": "Add the numbers.\n\n2 and 3"} if "instruction" in text else QUESTION
        assert sample.metadata["messages"] == [*([SYSTEM] if "system" in text else []), question, ANSWER]
        assert sample.label == text.get("label")


def test_the_page_has_every_shape() -> None:
    assert len(ROWS) == 11


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [{"from": "human", "value": "What is 2+3?"}, {"from": "gpt", "value": "5"}]
SFT, DPO, KTO = "--loss-type sft_loss", "--loss-type dpo_loss", "--loss-type kto_loss --label-key label"
OTHER = {**ANSWER, "content": "6"}


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (SFT, {"conversations": TURNS}),
        (SFT, {"messages": [QUESTION, ANSWER]}),
        (SFT, {"prompt": "What is 2+3?", "completion": "5"}),
        (SFT, {"prompt": [QUESTION], "completion": [ANSWER]}),
        (SFT, {"instruction": "What is 2+3?", "output": "5"}),
        (KTO, {"prompt": "What is 2+3?", "completion": "5", "label": True}),
        (DPO, {"prompt": [QUESTION], "chosen": "5", "rejected": "6"}),
        (DPO, {"prompt": [QUESTION], "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}),
        (DPO, {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}),
        (f"{DPO} --apply-chat-template", {"prompt": "What is 2+3?", "chosen": "5", "rejected": "6"}),
        ("--rm-type math --apply-chat-template", {"prompt": "What is 2+3?"}),
        ("--rm-type math --apply-chat-template", {"messages": [QUESTION]}),
    ],
)
@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_system_prompt_in_its_own_column_is_read(
    flags: str, row: dict[str, Any], column: str, tmp_path: Path
) -> None:
    file, said = tmp_path / "rows.jsonl", list[str]()
    for system in ("Be brief.", "", None):
        file.write_text(json.dumps({**row, column: system}))
        sample = load(file, flags, said)
        first = [SYSTEM] if system else []
        if PAIR in sample.metadata:
            assert sample.metadata[PAIR] == [[*first, QUESTION, reply] for reply in (ANSWER, OTHER)]
        answers = [] if "--rm-type" in flags or "dpo" in flags else [ANSWER]
        assert sample.metadata["messages"] == [*first, QUESTION, *answers]
        assert ("Be brief." in str(sample.prompt)) == bool(system)
    assert not [text for text in said if "is not used" in text]


def test_messages_that_begin_with_a_system_prompt_keep_it(tmp_path: Path) -> None:
    file, developer = tmp_path / "rows.jsonl", {**SYSTEM, "role": "developer"}
    for row, first in (
        ({"conversations": [{"from": "system", "value": "Be brief."}, *TURNS]}, SYSTEM),
        ({"messages": [developer, QUESTION, ANSWER]}, developer),
    ):
        for system, unused in (("Be verbose.", True), ("Be brief.", False)):
            said = list[str]()
            file.write_text(json.dumps({**row, "system": system}))
            assert load(file, SFT, said).metadata["messages"] == [first, QUESTION, ANSWER]
            warning = f"{file}: the column 'system' is not used: some messages already begin with another"
            assert any(text.startswith(warning) for text in said) == unused


def test_a_developer_prompt_is_part_of_both_replies(tmp_path: Path) -> None:
    file, developer = tmp_path / "rows.jsonl", {**SYSTEM, "role": "developer"}
    pair = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, OTHER]}
    file.write_text(json.dumps({"prompt": [developer, QUESTION], **pair}))
    assert load(file, DPO, []).metadata[PAIR] == [[developer, *messages] for messages in pair.values()]


@pytest.mark.parametrize(
    ("flags", "row", "remedy"),
    [
        (SFT, {"messages": [QUESTION, ANSWER], "system": [SYSTEM]}, "its value is not text; write it as the first"),
        ("--rm-type math", {"prompt": "What is 2+3?"}, "a text has no place for it; add --apply-chat-template"),
        (DPO, {"prompt": "What is 2+3?", "chosen": "5", "rejected": "6"}, "add --apply-chat-template"),
        ("--rm-type math --input-key q", {"q": "What is 2+3?"}, "write it as the first message of 'q'"),
        (f"{SFT} --input-key c", {"c": TURNS}, "write it as the first message of 'c'"),
    ],
)
def test_a_system_prompt_that_is_not_used_is_a_warning(
    flags: str, row: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    file, said = tmp_path / "rows.jsonl", list[str]()
    file.write_text(f"{json.dumps({'system': 'Be brief.', **row})}\n" * 2)
    load(file, flags, said)
    (warning,) = [text for text in said if "is not used" in text]
    assert warning.startswith(f"{file}: the column 'system' is not used: ")
    assert remedy in warning


def test_a_second_column_with_another_system_prompt_is_a_warning(tmp_path: Path) -> None:
    file, said = tmp_path / "rows.jsonl", list[str]()
    file.write_text(json.dumps({"messages": [QUESTION, ANSWER], "system": "Be brief.", "system_prompt": "Be kind."}))
    assert load(file, SFT, said).metadata["messages"] == [SYSTEM, QUESTION, ANSWER]
    assert any(text.startswith(f"{file}: the column 'system_prompt' is not used: ") for text in said)


def test_earlier_turns_of_alpaca_come_first(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.jsonl", {"instruction": "What is 2+3?", "output": "5", "system": "Be brief."}
    file.write_text(json.dumps({**row, "history": [["Hi", "Hello"]]}))
    hello = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert load(file, SFT, []).metadata["messages"] == [SYSTEM, *hello, QUESTION, ANSWER]
    for history in (["Hi", "Hello"], "Hi"):
        file.write_text(json.dumps({**row, "history": history}))
        with pytest.raises(ValueError, match=re.escape(f"got {{'history': {history!r}}}; fix them")):
            load(file, SFT, [])
    table = tmp_path / "rows.csv"
    for history, turns in (([], []), ([["Hi", "Hello"]], hello)):
        for cell in (json.dumps(history), repr(history)):
            with table.open("w", newline="") as out:
                csv.writer(out).writerows([[*row, "history"], [*row.values(), cell]])
            assert load(table, SFT, []).metadata["messages"] == [SYSTEM, *turns, QUESTION, ANSWER]


def as_array(value: object) -> str:
    return str(np.array(value, dtype=object))


# pandas writes the second form, and the third form for columns that it read from parquet
@pytest.mark.parametrize("write", [json.dumps, repr, as_array])
@pytest.mark.parametrize(
    ("flags", "row"),
    [
        (SFT, {"messages": [QUESTION, ANSWER]}),
        (SFT, {"conversations": TURNS}),
        (SFT, {"prompt": [QUESTION], "completion": [{"content": "5", "role": "assistant"}]}),
        (DPO, {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [OTHER]}),
    ],
)
def test_messages_in_cells_of_csv_files_are_read(
    flags: str, row: dict[str, Any], write: Callable[[object], str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([list(row), list(map(write, row.values()))])
    sample = load(file, flags, [])
    if PAIR in sample.metadata:
        assert sample.metadata[PAIR] == [[QUESTION, ANSWER], [QUESTION, OTHER]]
    else:
        assert sample.metadata["messages"] == [QUESTION, ANSWER]


def test_a_text_in_messages_of_an_array_stays_unchanged(tmp_path: Path) -> None:
    file, turns = tmp_path / "rows.csv", [{**QUESTION, "content": "f } {\n's\" } {"}, ANSWER]
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([["messages"], [as_array(turns)]])
    assert load(file, SFT, []).metadata["messages"] == turns


@pytest.mark.parametrize(
    "label",
    [
        *('[{"value": 3}]', '[{"content": "a"}]', "[{'name': 'x'}]", '[{"role": ', "[{}]"),
        *("[{'role'}]", "[{'role': 1, []: 2}]", "[{'role': 1}], 2"),
    ],
)
def test_a_cell_of_a_csv_file_with_other_objects_stays_text(label: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([["question", "answer"], ["What is 2+3?", label]])
    assert rows_of(file) == [{"question": "What is 2+3?", "answer": label}]


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("question (e.g. a; b; c),answer", "x,y"),
        ("question (e.g. a; b; c),answer", '"x\ny, z",y'),
        ("question (x, y, z);answer", "x;y"),
        ("question (x, y, z);answer", "\nx;y"),
    ],
)
def test_other_separators_in_the_names_of_columns_do_not_separate(header: str, row: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"{header}\n{row}\n")
    ((name, _),) = [each.items() for each in rows_of(file)]
    assert name[0].startswith("question (")
    sample = load(file, ["--rm-type", "math", "--input-key", name[0], "--label-key", "answer"], [])
    assert sample.label == "y"
    assert [*read_texts(str(file), "answer")] == ["y"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", 'prompt;completion\n"Add 2, 3, and 4; please";x\n'),
        ("a.csv", 'prompt\tcompletion\n"Add 2, 3, and 4; please"\tx\n'),
        ("a.tsv", 'prompt\tcompletion\n"Add 2, 3, and 4; please"\tx\n'),
        ("a.json", '{"data": [{"prompt": "Add 2, 3, and 4; please", "completion": "x"}], "version": 1}'),
    ],
)
def test_tables_with_other_separators_and_wrapped_lists_are_read(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert rows_of(file) == [{"prompt": "Add 2, 3, and 4; please", "completion": "x"}]
    messages = [{**QUESTION, "content": "Add 2, 3, and 4; please"}, {**ANSWER, "content": "x"}]
    assert load(file, SFT, []).metadata["messages"] == messages


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        # without quotes around cells, as GLUE's files
        ('"Yes\tA\nNo\tB\nhe: "\tC\n', [('"Yes', "A"), ("No", "B"), ('he: "', "C")]),
        ('"Yes" he said\tA\n', [('"Yes" he said', "A")]),
        ('"Yes\tA\n', [('"Yes', "A")]),
        # with quotes, as pandas writes texts with a quote, a tab or a new line
        ('"""Yes"" he said"\tA\n', [('"Yes" he said', "A")]),
        ('"a\tb"\tA\n', [("a\tb", "A")]),
        ('"a\nb"\tA\nc\tB\n', [("a\nb", "A"), ("c", "B")]),
    ],
)
def test_quotes_in_a_file_with_tabs_are_texts_if_they_do_not_enclose_cells(
    text: str, rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    for name in ("a.tsv", "a.csv"):
        file = tmp_path / name
        file.write_text("q\tlabel\n" + text)
        assert [tuple(row.values()) for row in rows_of(file)] == rows, name


def test_texts_of_one_column_may_have_several_lines(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('q\n"a\nb"\n')
    assert rows_of(tmp_path / "a.tsv") == [{"q": "a\nb"}]


def test_a_reply_that_is_one_message_is_read(tmp_path: Path) -> None:
    """As LLaMA-Factory writes pairs."""
    file = tmp_path / "rows.jsonl"
    chosen, rejected = TURNS[1], {"from": "gpt", "value": "6"}
    file.write_text(json.dumps({"conversations": TURNS[:1], "chosen": chosen, "rejected": rejected}))
    assert load(file, DPO, []).metadata[PAIR] == [[QUESTION, ANSWER], [QUESTION, OTHER]]


QUIZ = {"q": "What is 2+3?", "options": ["4", "5"], "right": 1}
PLAIN = {"question": "What is 2+3?", "answer": "5"}
JUDGED = {"question": "What is 2+3?", "reply": "5", "liked": True}
LISTED = "What is 2+3?\nA. 4\nB. 5"
BESIDE = {"prompt_id": "a1", "source": "web", "Category": "sums", "system": "Be brief."}
REPLIES = {"chosen": "5", "rejected": "6"}


@pytest.mark.parametrize(
    ("flags", "row", "expected"),
    [
        ("--rm-type math", QUIZ, (LISTED, "B")),
        ("--rm-type math --label-key label", {**QUIZ, "right": "B"}, (LISTED, "B")),
        ("--rm-type math --label-key right", {**QUIZ, "right": "5"}, (LISTED, "B")),
        ("--rm-type math", {**QUIZ, "right": "2"}, (LISTED, "B")),  # it can only be counted from 1
        ("--rm-type math", PLAIN, ("What is 2+3?", "5")),
        ("--rm-type math --input-key question --label-key anwser", PLAIN, ("What is 2+3?", "5")),
        ("--rm-type math", {"frage": "What is 2+3?"}, ("What is 2+3?", None)),
        ("--rm-type math", {"it's": "What is 2+3?", "antwort": 5}, ("What is 2+3?", None)),
        ("--loss-type sft_loss", QUIZ, ([{**QUESTION, "content": LISTED}, ANSWER], None)),
        ("--loss-type sft_loss", {**QUIZ, "right": "B)"}, ([QUESTION, {**ANSWER, "content": "B)"}], None)),
        ("--loss-type sft_loss", PLAIN, ([QUESTION, ANSWER], None)),
        ("--loss-type sft_loss", {"Frage": "What is 2+3?", "Antwort": 5}, ([QUESTION, ANSWER], None)),
        ("--loss-type sft_loss", {"turns": ["What is 2+3?", "5"]}, ([QUESTION, ANSWER], None)),
        (
            "--loss-type sft_loss",
            {"dialog": [{"speaker": "Ann", "text": "What is 2+3?"}, {"speaker": "Bob", "text": "5"}]},
            ([QUESTION, ANSWER], None),
        ),
        (
            "--loss-type sft_loss",
            {
                "dialog 💬": [
                    {"speaker": who, "text": what} for who, what in zip(("System", "Ann", "AI"), "abc", strict=True)
                ]
            },
            (
                [
                    {"role": who, "content": what}
                    for who, what in zip(("system", "user", "assistant"), "abc", strict=True)
                ],
                None,
            ),
        ),
        ("--loss-type sft_loss", {"dialog": [QUESTION, ANSWER]}, ([QUESTION, ANSWER], None)),
        ("--loss-type sft_loss --input-key q", {"turns": ["What is 2+3?", "5"]}, ([QUESTION, ANSWER], None)),
        ("--loss-type kto_loss --label-key label", JUDGED, ([QUESTION, ANSWER], True)),
        ("--loss-type dpo_loss", QUIZ, (QUIZ["q"], None)),
        ("--loss-type dpo_loss", {"question": QUIZ["q"], "good": "5", "bad": "4"}, (QUIZ["q"], None)),
        ("--loss-type dpo_loss", {"question": QUIZ["q"], "chosen": "5", "rejected": "4"}, (QUIZ["q"], None)),
        ("--loss-type dpo_loss", {"frage": QUIZ["q"], "chosen": "5", "rejected": "4"}, (QUIZ["q"], None)),
        ("--loss-type dpo_loss", {**BESIDE, "frage": QUIZ["q"], "chosen": "5", "rejected": "4"}, (QUIZ["q"], None)),
        ("--rm-type math", {**BESIDE, "frage": "What is 2+3?"}, ("What is 2+3?", None)),
    ],
)
def test_other_rows_get_the_flags_or_the_line_that_converts_them(
    flags: str, row: dict[str, Any], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"see docs/data_formats\.md") as error:
        load(file, flags, [])
    text = str(error.value).rpartition("; if ")[2]
    assert repr(next(name for name in row if name not in BESIDE)) in text
    convert, _, code = text.partition(" (see docs/data_formats.md): ")
    if code:
        exec(shlex.split(code)[2])
        name, *advice = shlex.split(convert.partition("then give --prompt-data ")[2])
        file = tmp_path / name
        assert ("leave out --input-key, " in convert) == ("--input-key" in flags)
        flags = flags.partition(" --input-key")[0]
    else:
        advice = shlex.split(text.partition("add ")[2].removesuffix(": see docs/data_formats.md"))
    sample = load(file, [*flags.split(), *advice], [])
    pair = sample.metadata.get(PAIR)
    assert pair in (None, ["5", "4"])
    assert (pair is not None) == ("dpo" in flags)
    assert (sample.metadata.get("messages", sample.prompt), sample.label) == expected


@pytest.mark.parametrize(
    ("flags", "row", "advice"),
    [
        ("--loss-type dpo_loss", PLAIN, "a pair needs two replies to one prompt"),
        ("--loss-type dpo_loss", REPLIES, r"a pair of texts needs a column with the prompt: see docs/data_formats.md$"),
        ("--loss-type dpo_loss", {**BESIDE, **REPLIES}, "needs a column with the prompt: see"),
        (
            "--loss-type dpo_loss",
            {"id": "a1", "aaa": "x", "zzz": "y", **REPLIES},
            "needs a column with the prompt; if 'aaa' or 'zzz' is the prompt, name it with --input-key: see",
        ),
        ("--rm-type math", {"id": "a1"}, "name the prompt's column with --input-key"),
        ("--loss-type sft_loss", {"text": "Once"}, "train on it with --loss-type pretrain_loss --text-key text"),
        ("--loss-type kto_loss --label-key label", PLAIN, "needs a prompt, a reply and a label"),
        ("--rm-type math", {"n": 1}, "name the prompt's column with --input-key"),
        (
            "--loss-type sft_loss",
            {"dialog": [{"speaker": who, "text": "Hi"} for who in ("Ann", "Bob", "Cleo")]},
            "a message needs one of the roles system, user, assistant and tool, not 'Cleo'",
        ),
    ],
)
def test_rows_that_lack_a_part_are_told_which(flags: str, row: dict[str, Any], advice: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=advice):
        load(file, flags, [])


def test_a_malformed_row_gets_no_advice_about_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"messages": [QUESTION, ANSWER]}) + "\n" + json.dumps({"messages": [{"content": "5"}]}) + "\n"
    )
    with pytest.raises(ValueError, match=r"message 0 needs a role and a content.*--skip-bad-rows$"):
        load(file, "--loss-type sft_loss", [])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(str(path))]


def test_files_of_every_kind_give_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"question": "2+3?", "answer": "007"},
        {"question": 'a, "b"\nc', "answer": "ü"},
        {"question": "x", "answer": "y"},
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    cells = ['"' + row[name].replace('"', '""') + '"' for row in rows for name in ("question", "answer")]
    lines = [f"{q},{a}" for q, a in zip(cells[::2], cells[1::2], strict=True)]
    (tmp_path / "a.csv").write_text("\ufeffquestion,answer\r\n" + "\r\n".join(lines), encoding="utf-8", newline="")
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    saved = tmp_path / "saved"
    saved.mkdir()
    for number in (0, 1):  # as datasets writes shards
        with pa.ipc.new_stream(saved / f"data-0000{number}-of-00002.arrow", table.schema) as writer:
            writer.write_table(table.slice(2 * number, 2 - number))
    names = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in (0, 1)]
    (saved / "state.json").write_text(json.dumps({"_data_files": names, "_format_type": None}))
    for file in ("a.parquet", "a.jsonl", "a.json", "a.csv", "stream.arrow", "file.arrow", "saved"):
        assert rows_of(tmp_path / file) == rows, file
        assert [row for _, row in read_rows(f"{tmp_path / file}@[1:2]")] == rows[1:2], file


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", b"q,a\n1,2\n3\n", "1 of 2 rows is malformed: row 1: it has fewer cells"),
        ("a.csv", b"q,a\n1,2,3\n", "row 0: it has more cells"),
        ("a.csv", b"q,a\n\xff,2\n", "not a readable CSV file in UTF-8"),
        ("a.csv", b"q,a\n", "holds no rows"),
        ("a.json", b'{"rows": []}', "a .json file must be a list of objects, or an object with such a list as 'data'"),
        ("a.csv", b"q,a,a\n1,2,3\n", "has several columns 'a'"),
        ("a.arrow", b"ARROW", "not a readable Arrow file"),
        ("a/state.json", b"{}", "does not name the dataset's files"),
        ("all/train/state.json", b"{}", r"is a folder; name one file or split of it: \['train'\]"),
    ],
)
def test_files_that_are_broken_are_named(name: str, text: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name.partition("/")[0])


def test_a_turn_of_share_gpt_keeps_what_else_it_says(tmp_path: Path) -> None:
    """Such as that it is not trained."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "step_loss_mask": 0}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"conversations": turns}))
    messages = load(file, "--loss-type sft_loss", []).metadata["messages"]
    assert messages[1] == {"role": "assistant", "content": "b", "step_loss_mask": 0}


def test_a_column_input_of_messages_is_no_part_of_alpaca(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"instruction": "i", "input": [QUESTION], "output": "o"}))
    with pytest.raises(ValueError, match="1 of 1 rows is malformed"):
        load(file, "--loss-type sft_loss", [])
