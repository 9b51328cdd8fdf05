from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slimelite.arguments import DataArgs, EvalDataset
from slimelite.data.prompts import load_prompts
from slimelite.samples.sample import Sample

from .tokenizers import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "ls"}}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    limit: int | None = None,
    skip: bool = False,
    keep_messages: bool = False,
    **settings: Any,
) -> list[Sample]:
    path = write(tmp_path / "rows.jsonl", rows)
    return load_prompts(
        DataArgs(**settings),
        TOKENIZER,
        [path],
        max_prompt_len=limit,
        skip_bad_rows=skip,
        keep_messages=keep_messages,
    )


def test_text_and_messages_become_the_same_templated_prompt(tmp_path: Path) -> None:
    rows = [{"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}]
    text, messages = load(tmp_path, rows, keep_messages=True, apply_chat_template=True)
    assert text.prompt == messages.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text.tokens == messages.tokens == TOKENIZER(text.prompt, add_special_tokens=False)["input_ids"]
    assert text.metadata == messages.metadata == {"messages": [{"role": "user", "content": "hi"}]}


def test_without_the_template_text_is_encoded_and_messages_are_kept(tmp_path: Path) -> None:
    text, messages = load(tmp_path, [{"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}])
    assert (TOKENIZER.decode(text.tokens), text.prompt, text.metadata) == ("hi", "hi", {})
    assert (messages.prompt, messages.tokens) == ([{"role": "user", "content": "hi"}], [])


def test_template_settings_and_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(
        "{{ flavour }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    )
    rows = [
        {"input": "a", "t": json.dumps(TOOLS), "m": {"rm_type": "math"}},
        {"input": "b", "t": TOOLS},
        {"input": "c", "t": []},
    ]
    args = DataArgs(
        apply_chat_template=True, apply_chat_template_kwargs={"flavour": "!"}, tool_key="t", metadata_key="m"
    )
    prompts = load_prompts(args, tokenizer, [write(tmp_path / "a.jsonl", rows)])
    assert [p.prompt for p in prompts] == ["![ls]a", "![ls]b", "!c"]
    assert [p.metadata for p in prompts] == [{"rm_type": "math", "tools": TOOLS}, {"tools": TOOLS}, {}]


def test_labels_are_text(tmp_path: Path) -> None:
    rows = [{"input": "q", "y": y} for y in ("a", 3, 0.5, [1, "é"])]
    assert [p.label for p in load(tmp_path, rows, label_key="y")] == ["a", 3, 0.5, [1, "é"]]
    assert [p.label for p in load(tmp_path, rows)] == [None] * 4


def test_the_columns_of_an_eval_dataset_are_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "x", "a": 1}, {"q": "yyyy", "a": 2}])
    dataset = EvalDataset(name="a", path=path, input_key="q", label_key="a")
    assert [(p.prompt, p.label) for p in load_prompts(dataset, TOKENIZER, [path], max_prompt_len=3)] == [("x", 1)]


def test_rows_of_an_environment_have_columns_of_their_own(tmp_path: Path) -> None:
    """A file beside them has those of the flags, with a label or without."""
    a = write(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}])
    for label_key, label in ((None, None), ("a", "y")):
        columns = DataArgs(input_key="q", label_key=label_key)
        prompts = load_prompts(columns, TOKENIZER, [a, "environment:calculator@[:1]"])
        assert [(p.prompt, p.label) for p in prompts] == [("x", label), ("59*63=?", "3717")]
    b = write(tmp_path / "b.jsonl", [{"q": "x", "facts": {"pile": 2}}])
    columns, games = DataArgs(input_key="q", metadata_key="facts"), "environment:nim:random@[:1]"
    for paths in ([b, games], [games]):
        found = load_prompts(columns, TOKENIZER, paths)[-1].metadata
        assert found.keys() == {"pile", "opponent"}, "without them a game is another one"
    assert load_prompts(columns, TOKENIZER, [b])[0].metadata == {"pile": 2}


def test_several_paths_are_one_dataset_in_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"input": "a0"}, {"input": "a1"}])
    pq.write_table(pa.table({"input": ["b0", "b1", "b2"]}), tmp_path / "b.parquet")
    prompts = load_prompts(DataArgs(), TOKENIZER, [a, f"{tmp_path}/b.parquet@[-1:]", f"{a}@[:1]"])
    assert [p.prompt for p in prompts] == ["a0", "a1", "b2", "a0"]


def test_long_prompts_are_left_out_in_order_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"input": "x" * n} for n in (3, 9, 1, 5, 4, 6)]
    with caplog.at_level(logging.WARNING):
        assert [len(p.prompt) for p in load(tmp_path, rows, limit=4)] == [3, 1, 4]
    assert "left out 3 of 6 prompts: they have more than 4 tokens" in caplog.text


def test_the_prompt_of_a_conversation_is_measured_before_its_first_answer(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "a" * 99}
    short, long = ({"role": "user", "content": "u" * n} for n in (5, 30))
    rows = [{"input": [short, answer]}, {"input": [long, answer]}, {"input": [short, answer, short]}]
    # 19 tokens surround a first question; a conversation that ends with a question is a prompt as a whole
    kept = load(tmp_path, rows, limit=40)
    assert [p.prompt for p in kept] == [rows[0]["input"]]


BAD = {
    "an empty prompt": ({"input": ""}, "column 'input': the prompt is empty"),
    "a number": ({"input": 3}, "column 'input': text or a list of messages is expected, not 3"),
    "no role": ({"input": [{"content": "x"}]}, "column 'input': message 0 needs a role"),
    "no content": ({"input": [{"role": "user"}]}, r"column 'input': message 0 \(user\) is empty"),
    "no label": ({"input": "x", "y": None}, "column 'y': the label is null"),
    "tools": ({"input": "x", "y": 1, "tools": "{"}, "column 'tools': not JSON"),
    "metadata": ({"input": "x", "y": 1, "metadata": [1]}, "column 'metadata': not an object: .1.; write"),
    "half a character": ({"input": "a\ud800", "y": 1}, r"column 'input': an incomplete character \('\\ud800'"),
    "half a character inside": (
        {"input": [{"role": "user", "content": "\udc00"}], "y": 1},
        "column 'input': an incomplete char",
    ),
    "half a character as label": ({"input": "x", "y": "\ud800"}, "column 'y': an incomplete character"),
    "half a character as key": (
        {"input": "x", "y": 1, "metadata": {"\ud800": 1}},
        "column 'metadata': an incomplete char",
    ),
    "deep": (
        {"input": "x", "y": 1, "metadata": {"a": eval("[" * 150 + "]" * 150)}},
        "column 'metadata': the value is nested",
    ),
    "deeper": ({"input": "x", "y": 1, "metadata": "[" * 10**5}, r"column 'metadata': not JSON \(maximum recursion"),
    "deepest": ("[" * 10**5, r"not JSON \(maximum recursion"),
    "a key twice": ('{"input": "x", "y": 1, "y": 2}', "not JSON .the key 'y' is given twice"),
    "tools that are none": (
        {"input": "x", "y": 1, "tools": [1]},
        "column 'tools': tool 0 must be an object such as .*, not 1",
    ),
    "messages as text": ({"input": '[{"role": "user", "content": "x"}]', "y": 1}, "the messages are text"),
    "a template that refuses": (
        {"input": [{"role": "robot", "content": "x"}], "y": 1},
        "the chat template refuses.*who?",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD.values(), ids=BAD.keys())
def test_a_malformed_row_is_named_or_skipped(
    row: dict[str, Any] | str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picky = "{% if messages[0].role == 'robot' %}{{ raise_exception('who?') }}{% endif %}" + CHATML
    middle = row if isinstance(row, str) else json.dumps({"y": 1, **row})
    (tmp_path / "rows.jsonl").write_text(f'{{"input": "ok", "y": 1}}\n{middle}\n{{"input": "ok", "y": 1}}\n')
    path = str(tmp_path / "rows.jsonl")
    args = DataArgs(label_key="y", apply_chat_template=True)
    with pytest.raises(ValueError, match=rf"rows\.jsonl: 1 of 3 rows is malformed: row 1 \(line 2\): .*{message}"):
        load_prompts(args, byte_tokenizer(picky), [path])
    with caplog.at_level(logging.WARNING):
        assert len(load_prompts(args, byte_tokenizer(picky), [path], skip_bad_rows=True)) == 2
    assert "1 of 3 rows is malformed and left out: row 1 (line 2): " in caplog.text


def test_every_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    """Also those of which nothing but the columns can be checked, for want of a tokenizer."""
    good, bad = write(tmp_path / "good.jsonl", [{"input": "x"}]), write(tmp_path / "bad.jsonl", [{"input": 1}])
    columns = DataArgs(apply_chat_template=True)
    for tokenizer in (TOKENIZER, None):
        with pytest.raises(ValueError, match=r"bad\.jsonl: 1 of 1 rows.*; no such file: gone\.jsonl"):
            load_prompts(columns, tokenizer, [good, bad, "gone.jsonl"])
    (prompt,) = load_prompts(columns, None, [good], max_prompt_len=1)
    assert (prompt.prompt, prompt.tokens) == ("x", [])


def test_nothing_left_says_why(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"1 of 3 rows is malformed.* row 1 \(line 2\).* 2 of 2 prompts: they have more than 1 t"
    ):
        load(tmp_path, [{"input": "long"}, {"input": 3}, {"input": "long"}], limit=1, skip=True)


def test_a_missing_template_is_answered_before_any_file_is_read() -> None:
    with pytest.raises(ValueError, match=r"--apply-chat-template.*no chat template"):
        load_prompts(DataArgs(apply_chat_template=True), byte_tokenizer(None), ["nowhere.jsonl"])


def test_a_column_that_is_named_must_be_there(tmp_path: Path) -> None:
    """Unless it has its usual name; one row that has it suffices."""
    rows: list[dict[str, Any]] = [{"input": "a"}, {"input": "b", "t": TOOLS, "m": {"k": 1}}]
    some, none = (write(tmp_path / name, part) for name, part in (("some.jsonl", rows), ("none.jsonl", rows[:1])))
    assert len(load_prompts(DataArgs(tool_key="t", metadata_key="m"), TOKENIZER, [none, some])) == 3
    assert len(load_prompts(DataArgs(), TOKENIZER, [none])) == 1
    with pytest.raises(ValueError, match=r"no row has a column 'm' \(--metadata-key\); .* 't' \(--tool-key\)"):
        load_prompts(DataArgs(tool_key="t", metadata_key="m"), TOKENIZER, [none])
    # the first rows of a file do not tell
    assert len(load_prompts(DataArgs(tool_key="t"), TOKENIZER, [some], first=1)) == 1
    # except of a parquet file, whose rows all have the same columns
    parquet = tmp_path / "none.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:1]), parquet)
    with pytest.raises(ValueError, match=r"no row has a column 't' \(--tool-key\)"):
        load_prompts(DataArgs(tool_key="t"), TOKENIZER, [str(parquet)], first=1)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["x"]), pa.array(["1"]), pa.array(["2"])], names=["input", "label", "label"])
    pq.write_table(table, tmp_path / "two.parquet")
    with pytest.raises(ValueError, match="several columns 'label'"):
        load_prompts(DataArgs(label_key="label"), TOKENIZER, [str(tmp_path / "two.parquet")])
