"""Evaluation tasks: shipped files on rows of their datasets' forms, examples, and what is wrong with files and rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments.evaluation import SUFFIXES, Task, load_task, shipped_tasks
from slimelite.arguments.flags import group_flags
from slimelite.data.reader import READERS, ZIPPED, BadRows, read_rows
from slimelite.data.rendering import TaskRows

STEPS = "Let's think step by step and output the final answer within \\boxed{}.\nAnswer:"
FUNCTION = 'def one():\n    """ One. """\n'
# task -> a row as the hub or a repository has it, the end of its prompt without a chat template, its label
ROWS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "gsm8k": (
        {"question": "2 hens lay 3 eggs each. How many?", "answer": "2*3 = 1,006\n#### 1,006"},
        "Question: 2 hens lay 3 eggs each. How many? " + STEPS,
        "1006",
    ),
    "svamp": (
        {"Body": "Dan had 4 $ and spent 3", "Question": "What is left?", "Answer": 1.0},
        "Question: Dan had 4 $ and spent 3. What is left? " + STEPS,
        "1",
    ),
    "math500": (
        {"problem": "What is $1/2$?", "solution": "It is $\\boxed{0.5}$.", "answer": "0.5"},
        "Question: What is $1/2$? " + STEPS,
        "0.5",
    ),
    "mmlu": (
        {"question": "Which? ", "subject": "college_physics", "choices": ["up", "down", "left", "right"], "answer": 2},
        "Which?\nA. up\nB. down\nC. left\nD. right\nAnswer:",
        "C",
    ),
    "mmlu-stem": (
        {"question": "Which?", "type": "college_physics", "choices": ["up", "down", "left", "right"], "answer": 3},
        "Which?\nA. up\nB. down\nC. left\nD. right\nAnswer:",
        "D",
    ),
    "arc": (
        {"question": "Which?", "choices": {"text": ["up", "down"], "label": ["1", "2"]}, "answerKey": "2"},
        "Question: Which?\nAnswer:",
        "down",
    ),
    "arc-easy": (
        {"question": "Which?", "choices": {"text": ["up", "down"], "label": ["A", "B"]}, "answerKey": "A"},
        "Question: Which?\nAnswer:",
        "up",
    ),
    "openbookqa": (
        {"question_stem": "Fire is", "choices": {"text": ["wet", "hot"], "label": ["A", "B"]}, "answerKey": "B"},
        "Fire is",
        "hot",
    ),
    "commonsense-qa": (
        {"question": "Where?", "choices": {"text": ["here", "there"], "label": ["A", "B"]}, "answerKey": "B"},
        "Question: Where?\nAnswer:",
        "there",
    ),
    "hellaswag": (
        {"activity_label": "Tea", "ctx": "She boils", "endings": ["water.", "a cat."], "label": "0"},
        "Tea: She boils",
        "water.",
    ),
    "piqa": (
        {"goal": "open a jar", "sol1": "turn the lid", "sol2": "eat it", "label": 0},
        "Question: open a jar\nAnswer:",
        "turn the lid",
    ),
    "boolq": (
        {"question": "is it wet", "passage": "It rains.", "answer": True},
        "Passage: It rains.\nQuestion: is it wet?\nAnswer:",
        "yes",
    ),
    "copa": (
        {"premise": "It fell.", "choice1": "I dropped it.", "choice2": "It rains.", "question": "cause", "label": 0},
        "It fell because",
        "i dropped it.",
    ),
    "winogrande": (
        {"sentence": "Ann saw Eve, and _ waved.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        "Ann saw Eve, and",
        "Eve",
    ),
    "lambada": ({"text": "he came in and said hello"}, "he came in and said", "hello"),
    "humaneval": (
        {
            "prompt": FUNCTION,
            "canonical_solution": "    return 1\n",
            "test": "def check(c): pass",
            "entry_point": "one",
        },
        FUNCTION.rstrip(),
        None,
    ),
    "ifbench": (
        {
            "key": "1",
            "prompt": "Say it with 2 nouns.",
            "instruction_id_list": ["format:emoji"],
            "kwargs": [{"N": None}],
        },
        "Say it with 2 nouns.",
        None,
    ),
    "ifeval": (
        {"prompt": "Say it in lower case.", "instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]},
        "Say it in lower case.",
        None,
    ),
}
SUMS = "name: sums\ndata: sums.jsonl\nprompt: '{{ a }}+{{ b }}='\nlabel: a + b\nscorer: gsm8k\n"
PICK = "name: pick\ndata: pick.jsonl\nkind: multiple-choice\nprompt: '{{ q }}'\nchoices: options\nlabel: right\n"


def jsonl(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def written(folder: Path, text: str) -> str:
    (folder / "task.yaml").write_text(text)
    return str(folder / "task.yaml")


def rendered(task: str, path: str, shots: int = 0, *, chat: bool = False, examples: str | None = None) -> list[Any]:
    return [row for _, row in TaskRows(task, chat=chat).read(path, shots, examples, BadRows())]


def test_a_check_at_start_reads_only_the_first_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", *({"a": a, "b": 1} for a in range(5)))
    rows = TaskRows(written(tmp_path, SUMS), chat=False)
    assert [row["label"] for _, row in rows.read(file, 0, None, BadRows(), first=2)] == [1, 2]
    assert len([*rows.read(file, 0, None, BadRows())]) == 5


def test_every_shipped_task_has_a_row_here() -> None:
    assert sorted(ROWS) == shipped_tasks()
    assert all(load_task(name).name == name and load_task(name).about for name in ROWS)
    assert set(SUFFIXES) == {*READERS, ZIPPED}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_shipped_task_makes_a_prompt_and_a_label(name: str, tmp_path: Path) -> None:
    row, prompt, label = ROWS[name]
    path = jsonl(tmp_path / "rows.jsonl", row)
    (plain,) = rendered(name, path)
    (chat,) = rendered(name, path, chat=True)
    assert (plain["prompt"], plain["label"]) == (prompt, label)
    assert chat["label"] == label
    assert plain["metadata"]["row"] == "row 0 (line 1)"
    if load_task(name).chooses:
        assert plain["metadata"]["choices"][plain["metadata"]["right"]] == label
        assert (plain["metadata"]["delimiter"], chat["metadata"]["delimiter"]) == (" ", "")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gsm8k", " 2*3 = 1,006 The answer is \\boxed{1006}.\n\n"),
        ("svamp", "Answer: The answer is \\boxed{1}.\n\n"),
        ("mmlu", "Answer: C\n\n"),
        ("arc", "Answer: down\n\n"),
        ("winogrande", "and Eve waved.\n\n"),
        ("lambada", "said hello\n\n"),
        ("humaneval", 'One. """\n    return 1\n\ndef one():'),
    ],
)
def test_an_example_shows_the_right_answer(name: str, shown: str, tmp_path: Path) -> None:
    row, prompt, _ = ROWS[name]
    examples = jsonl(tmp_path / "examples.jsonl", row, row)
    (asked,) = rendered(name, jsonl(tmp_path / "rows.jsonl", row), 1, examples=examples)
    assert asked["prompt"].startswith(prompt)
    assert shown in asked["prompt"]
    assert asked["prompt"].endswith(prompt)
    assert asked["prompt"].count(prompt) == 2


def test_gsm8k_reads_the_files_of_slimes_users_too(tmp_path: Path) -> None:
    row, prompt, label = ROWS["gsm8k"]
    path = jsonl(tmp_path / "rows.jsonl", {"messages": [], "label": label, "metadata": row})
    (asked,) = rendered("gsm8k", path)
    assert (asked["prompt"], asked["label"]) == (prompt, label)


def test_examples_are_turns_of_a_chat(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "sums.jsonl", *({"a": a, "b": 1} for a in range(3)))
    (asked,) = rendered(written(tmp_path, SUMS), path, 2, chat=True)
    assert [(m["role"], m["content"]) for m in asked["prompt"]] == [
        ("user", "0+1="),
        ("assistant", "1"),
        ("user", "1+1="),
        ("assistant", "2"),
        ("user", "2+1="),
    ]


def test_rows_that_are_examples_are_not_asked_and_examples_share_what_the_task_says(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "sums.jsonl", *({"a": a, "b": b} for b in (1, 2) for a in range(3)))
    asked = rendered(written(tmp_path, SUMS + "same: b\n"), path, 1)
    assert [row["prompt"] for row in asked] == [f"0+{b}= {b}\n\n{a}+{b}=" for b in (1, 2) for a in (1, 2)]
    few = jsonl(tmp_path / "few.jsonl", {"a": 9, "b": 1})
    with pytest.raises(ValueError, match=r"3 of 6 rows are malformed: row 3.*few.jsonl has 0 examples for this row"):
        rendered(written(tmp_path, SUMS + "same: b\n"), path, 1, examples=few)


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        (SUMS, {"a": 1}, r"prompt of the task sums: 'b' is undefined"),
        (SUMS + "metadata: {c: c}\n", {"a": 1, "b": 1}, r"c of the task sums: 'c' is undefined"),
        (SUMS, {"a": 1, "b": "x"}, r"label of the task sums: unsupported operand"),
        (PICK, {"q": "?", "options": ["x"], "right": 1}, r"label 1 is not an index of the choices \['x'\]"),
        (PICK, {"q": "?", "options": ["x"], "right": "A"}, r"label 'A' is not an index"),
    ],
)
def test_a_row_that_does_not_fit_is_named(text: str, row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", row)
    with pytest.raises(ValueError, match=r"1 of 1 rows is malformed: row 0 \(line 1\): " + message):
        rendered(written(tmp_path, text), path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("promt: x", "promt is not a known key; did you mean prompt"),
        ("name: x\nprompt: y", "needs `data`"),
        ("name: x\nprompt: y\ndata: a/b", "needs a scorer: one of math"),
        ("name: x\nprompt: y\ndata: a/b\nscorer: mth", r"scorer mth is not a rule \(math\?\)"),
        ("name: x\nprompt: y\ndata: a/b\nkind: multiple-choice", "needs `choices`"),
        (
            "name: x\nprompt: y\ndata: a/b\nkind: choice",
            "kind must be one of generate, multiple-choice, contin.*, not 'choice'",
        ),
        ("name: x\nprompt: y\ndata: a/b\nkind: continuation", "needs a `label`: the text that follows the prompt"),
        ("name: x\nprompt: y\ndata: a/b\nscorer: math\nshared: z", "`shared` is the text after each choice"),
        ("name: x\nprompt: y\ndata: a/b\nscorer: math\nmax_tokens: 0", "max_tokens must be at least 1"),
        ("[1]", "is not a mapping"),
        ("name: x\nname: y", "name is given a second time"),
    ],
)
def test_a_wrong_task_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_task(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_template_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task sums: prompt is not a valid template: expected token"):
        TaskRows(written(tmp_path, SUMS.replace("{{ b }}", "{{ b ")), chat=False)
    with pytest.raises(ValueError, match="task sums: label is not a valid expression"):
        TaskRows(written(tmp_path, SUMS.replace("a + b", "a +")), chat=False)


def test_an_unknown_task_has_a_hint() -> None:
    with pytest.raises(ValueError, match="gsm9k: there is no such task; did you mean gsm8k"):
        load_task("gsm9k")
    with pytest.raises(ValueError, match=r"nothing.yaml: cannot be read: No such file"):
        load_task("nothing.yaml")


def test_files_are_looked_for_in_the_folder_of_data(tmp_path: Path) -> None:
    task = Task(name="x", prompt="p", files=["x/test.*", "x.*"], data="owner/x", scorer="math")
    with pytest.raises(ValueError, match=r"task x: no file in .* matches x/test\.\*, x\.\*"):
        task.settings("x", str(tmp_path), 0, chat=False)
    plain = jsonl(tmp_path / "x.jsonl", {"a": 1})
    assert task.settings("x", str(tmp_path), 0, chat=False)["path"] == plain
    (tmp_path / "x").mkdir()
    first = jsonl(tmp_path / "x" / "test.jsonl", {"a": 1})
    (tmp_path / "x" / "test.txt").write_text("no rows")
    assert task.settings("x", str(tmp_path), 0, chat=False)["path"] == first
    assert task.settings("x", None, 0, chat=False)["path"] == "owner/x"
    jsonl(tmp_path / "x" / "test.json", {})
    with pytest.raises(ValueError, match=r"only one file may match x/test\.\*, not"):
        task.settings("x", str(tmp_path), 0, chat=False)


def test_zipped_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert [row["a"] for _, row in read_rows(str(file))] == [1, 2]
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match="is not a readable gzip file"):
        list(read_rows(str(file)))


def test_the_documentation_lists_every_task_and_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    for name in shipped_tasks():
        task = load_task(name)
        hub = f"`{task.data}`" if task.data else "—"
        assert f"| `{name}` | {task.about} | {hub} | {', '.join(f'`{file}`' for file in task.files)} |" in text
    for key in group_flags(Task):
        assert f"| `{key.name}` | {key.help} |" in text
