"""Write prompts as slime reads them: parquet with the columns messages, label and metadata.

    python scripts/prepare_data.py gsm8k --source hub --out data/gsm8k          # train.parquet, test.parquet
    python scripts/prepare_data.py svamp --source SVAMP/ --out data/svamp       # from a folder of the original files
    python scripts/prepare_data.py quickstart --out data/quickstart             # offline: task, tokenizer, model shape
    python scripts/prepare_data.py smoltalk --out data/smoltalk                 # conversations, for midtraining and SFT
    python scripts/prepare_data.py spelling --rows 5000 --out data/spelling     # made here, as counting and identity

`--source` is `hub` (needs `pip install -e '.[hub]'`) or a folder with the original files: train and test as .jsonl or
.parquet (GSM8K, MATH-500, MMLU), or SVAMP.json. Files that already have the three columns are copied. For spelling and
counting, `--source` may be texts that words are taken from. For identity it may be a .jsonl file with your own
conversations.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.base.version import add_version
from slimelite.data.reader import read_rows

sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
import talks

BOXED = " Let's think step by step and output the final answer within \\boxed{}."
STEM = {
    *("abstract_algebra", "anatomy", "astronomy", "college_biology", "college_chemistry", "college_computer_science"),
    *("college_mathematics", "college_physics", "computer_security", "conceptual_physics", "electrical_engineering"),
    *("elementary_mathematics", "high_school_biology", "high_school_chemistry", "high_school_computer_science"),
    *("high_school_mathematics", "high_school_physics", "high_school_statistics", "machine_learning"),
}

# worked examples for --shots; written for this project
SHOTS = [
    ("There are 9 birds on a fence. 4 of them fly away. How many birds are left?", "9 - 4 = 5\n#### 5"),
    ("Tom has 6 boxes with 8 pens in each box. How many pens does Tom have?", "6 * 8 = 48\n#### 48"),
    ("Ann had 12 apples and bought 7 more. How many apples does she have now?", "12 + 7 = 19\n#### 19"),
    ("35 children sit in 5 equal rows. How many children are in each row?", "35 / 5 = 7\n#### 7"),
]
SHOTS_SYSTEM = "Write one calculation, then #### and the answer."

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Where the original is, and the function that converts a row (None: the row is left out)."""

    convert: Callable[[Row, str, int], Row | None]
    hub: dict[str, str]  # split -> dataset id for `read_rows`
    files: tuple[str, ...] = ("{split}.jsonl", "{split}.parquet", "{split}-*.parquet", "*_{split}.json")


def row_of(question: str, label: str, metadata: Row) -> Row:
    """One prompt with its label."""
    return {"messages": [{"role": "user", "content": question}], "label": label, "metadata": metadata}


def gsm8k(row: Row, split: str, index: int) -> Row:
    """The label is the text after ``####``, without thousands separators."""
    label = row["answer"].split("####")[-1].strip().replace(",", "")
    metadata = {"split": split, "index": index, "answer": row["answer"], "question": row["question"]}
    return row_of(row["question"] + BOXED, label, metadata)


def svamp(row: Row, split: str, index: int) -> Row:  # noqa: ARG001
    """Body and question, as one sentence each."""
    body, answer = row["Body"].strip().rstrip(". "), float(row["Answer"])
    question = f"{body}{' ' if body.endswith((',', '?', '!')) else '. '}{row['Question'].strip()}"
    label = str(int(answer)) if answer.is_integer() else str(answer)
    return row_of(question + BOXED, label, {"id": row["ID"], "type": row["Type"]})


def math500(row: Row, split: str, index: int) -> Row:  # noqa: ARG001
    """Problems of the MATH test set, answers in LaTeX."""
    metadata = {"subject": row["subject"], "level": str(row["level"]), "unique_id": row["unique_id"]}
    return row_of(row["problem"] + BOXED, row["answer"], metadata)


def mmlu_stem(row: Row, split: str, index: int) -> Row | None:  # noqa: ARG001
    """Four choices. The label is the letter of the right one."""
    subject = row.get("type") or row["subject"]
    if subject not in STEM:
        return None
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
    question = f"{row['question']}\n{choices}\nAnswer with the letter of the correct option, as 'Answer: X'."
    return row_of(question, "ABCD"[row["answer"]], {"subject": subject, "choices": row["choices"]})


def gsm8k_talk(row: Row, split: str, index: int) -> Row:
    """The worked answer as a reply. The calculator's marks are removed, and its number is in a box."""
    ours = gsm8k(row, split, index)
    steps = re.sub(r"<<.*?>>", "", row["answer"].split("####")[0]).strip()
    return talks.talk(
        ours["messages"][0]["content"], f"{steps}\nThe answer is \\boxed{{{ours['label']}}}.", ours["label"]
    )


TASKS = {
    "gsm8k": Task(gsm8k, {"train": "openai/gsm8k:main:train", "test": "openai/gsm8k:main:test"}),
    "svamp": Task(svamp, {"train": "ChilleD/SVAMP:train", "test": "ChilleD/SVAMP:test"}),
    "math500": Task(math500, {"test": "HuggingFaceH4/MATH-500:test"}),
    "mmlu_stem": Task(mmlu_stem, {"test": "cais/mmlu:all:test"}),
    # whole conversations
    "smoltalk": Task(
        talks.smoltalk,
        {"train": "HuggingFaceTB/smol-smoltalk:train", "test": "HuggingFaceTB/smol-smoltalk:test"},
    ),
    "mmlu_auxiliary": Task(
        talks.mmlu_auxiliary,
        {"train": "cais/mmlu:auxiliary_train:train"},
        ("auxiliary_train/train-*.parquet", "auxiliary_train*.parquet", "{split}.jsonl"),
    ),
    "arc_talks": Task(
        talks.arc,
        {
            "ARC-Easy/train": "allenai/ai2_arc:ARC-Easy:train",
            "ARC-Challenge/train": "allenai/ai2_arc:ARC-Challenge:train",
        },
        ("{split}-*.parquet", "{split}.jsonl"),
    ),
    "gsm8k_talks": Task(gsm8k_talk, {"train": "openai/gsm8k:main:train", "test": "openai/gsm8k:main:test"}),
}
MADE = ("spelling", "counting", "identity")


def originals(task: Task, source: str) -> dict[str, str]:
    """Split -> the spec that `read_rows` reads."""
    if source == "hub":
        return task.hub
    # the 1,000 problems of SVAMP.json come as one file; the last 300 are kept for evaluation
    if whole := next(Path(source).rglob("SVAMP.json"), None):
        return {"train": f"{whole}@[:700]", "test": f"{whole}@[700:]"}
    found = {}
    for split in task.hub:
        names = (name.format(split=split) for name in task.files)
        files = (f for name in names for f in sorted(Path(source).rglob(name), key=lambda f: (len(f.parts), f)))
        if file := next(files, None):
            found[split] = str(file)
    if not found:
        looked_for = [name.format(split=split) for split in task.hub for name in task.files]
        raise ValueError(f"{source!r} has none of {looked_for}; --source names the folder of the original files")
    return found


def converted(task: Task, original: str, split: str) -> Iterator[Row]:
    """The rows of one split."""
    for index, (place, row) in enumerate(read_rows(original)):
        try:
            ours = task.convert(row, split, index)
        except KeyError as error:
            raise ValueError(f"{original}, {place}: no column {error}; it has {sorted(row)}") from error
        if ours is not None:
            yield ours


def few_shot(row: Row, shots: int) -> Row:
    """The question after ``shots`` worked examples that are answered with ``#### n``, for models too small to follow
    BOXED."""
    messages = [{"role": "system", "content": SHOTS_SYSTEM}]
    for question, answer in SHOTS[:shots]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = row["messages"][-1]["content"].removesuffix(BOXED)
    return {**row, "messages": [*messages, {"role": "user", "content": asked}]}


def write(rows: list[Row], path: Path) -> None:
    """Write a parquet file, and print a line about it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} rows")


def prepare(name: str, source: str, out: Path, shots: int) -> None:
    """Write every split of a task."""
    task = TASKS[name]
    for split, original in originals(task, source).items():
        target = out / f"{split}.parquet"
        ours = original.endswith(".parquet") and "messages" in pq.read_schema(original).names
        if ours and not shots:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, target)
            print(f"{target}: copied from {original}")
            continue
        rows = pq.read_table(original).to_pylist() if ours else list(converted(task, original, split))
        write([few_shot(row, shots) for row in rows] if shots else rows, target)


def made(name: str, source: str, model: str, rows: int, seed: int) -> list[Row]:
    """Conversations that are generated here. For identity, those of ``source`` if it is given.

    Raises:
        ValueError: ``source`` cannot be read.
    """
    rng = random.Random(seed)
    if name == "identity":
        return list(talks.identity(model, rng, rows) if source == "hub" else talks.identity_file(source))
    words = talks.words_of(source, rng, rows)
    return list((talks.spelling if name == "spelling" else talks.counting)(words, rng))


def quickstart(out: Path, seed: int, held_out: int, sft_rows: int, worked_share: float, pairs: int) -> None:
    """Write the tiny arithmetic task: prompts that do not overlap, conversations and preference pairs on the training
    prompts, and a model folder without weights."""
    from arithmetic import all_questions, conversation_row, pair_row, prompt_row, write_model_folder

    rng = random.Random(seed)
    questions = all_questions()
    rng.shuffle(questions)
    heldout, train = questions[:held_out], questions[held_out:]
    write([prompt_row(numbers) for numbers in train], out / "train.parquet")
    write([prompt_row(numbers) for numbers in heldout], out / "heldout.parquet")
    write([conversation_row(rng.choice(train), rng, worked_share) for _ in range(sft_rows)], out / "sft.parquet")
    write([pair_row(rng.choice(train), rng) for _ in range(pairs)], out / "pairs.parquet")
    write_model_folder(out / "model")
    print(f"{out / 'model'}: tokenizer and config of a model without weights")


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("task", choices=[*TASKS, *MADE, "quickstart"])
    parser.add_argument("--source", default="hub", help="hub, or the folder of the original files (default: hub)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--shots",
        type=int,
        default=0,
        choices=range(len(SHOTS) + 1),
        help="worked examples before each question (default: 0)",
    )
    parser.add_argument(
        "--rows", type=int, default=2000, help="spelling, counting, identity: number of rows (default: 2000)"
    )
    parser.add_argument("--name", default="Slim", help="identity: the model's name (default: Slim)")
    parser.add_argument("--seed", type=int, default=0, help="seed of generated data (default: 0)")
    parser.add_argument(
        "--held-out", type=int, default=1000, help="quickstart: number of prompts in heldout.parquet (default: 1000)"
    )
    parser.add_argument("--sft-rows", type=int, default=32_000, help="quickstart: conversations (default: 32000)")
    parser.add_argument(
        "--worked-share",
        type=float,
        default=0.35,
        help="quickstart: share of answers that show their working (default: 0.35)",
    )
    parser.add_argument(
        "--pairs", type=int, default=3200, help="quickstart: number of preference pairs (default: 3200)"
    )
    args = parser.parse_args()
    if args.task == "quickstart":
        quickstart(args.out, args.seed, args.held_out, args.sft_rows, args.worked_share, args.pairs)
        return
    try:
        if args.task in MADE:
            write(made(args.task, args.source, args.name, args.rows, args.seed), args.out / "train.parquet")
            return
        prepare(args.task, args.source, args.out, args.shots)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
