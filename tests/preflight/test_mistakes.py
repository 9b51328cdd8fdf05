"""Mistakes that are found before torch and transformers are imported, and what is said of them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from preflight.test_preflight import CPU, RUN, parse, problems
from slimelite.preflight import inspect

ROOT = Path(__file__).parents[2]
# runs command lines, [program, words] each, in a process in which torch and transformers cannot be imported
PROGRAM = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("torch", "transformers"), name

sys.meta_path.insert(0, Blocked())
import train
from slimelite.apps import command

for program, words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = (train if program == "train.py" else command).main(words)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue() + err.getvalue()]))
"""


@pytest.fixture
def run(model: Path, data: Path, tmp_path: Path) -> str:
    """A command line for which everything is right, and which reads a parquet file too."""
    rows = [{"messages": [{"role": "user", "content": "1+1="}], "label": "2"}] * 100
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    return f"--hf-checkpoint {model} --prompt-data {tmp_path}/sums.parquet --eval-prompt-data sums {data} {RUN}"


def test_mistakes_are_answered_without_torch_and_transformers(run: str, model: Path, tmp_path: Path) -> None:
    empty, bare = tmp_path / "empty", tmp_path / "bare"
    empty.mkdir()
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    (tmp_path / "odd.yaml").write_text("lr: [1\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": 3, "label": "2"}\n')
    labels = tmp_path / "labels.jsonl"
    labels.write_text('{"messages": [{"role": "user", "content": "1+1="}], "label": true}\n')
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    mistakes = [
        ("--prompt-data gone.parquet", "--prompt-data: no such file: gone.parquet"),
        (f"--prompt-data {tmp_path}", f"{tmp_path} is a folder; name one file or split of it"),
        ("--label-key answer", "no column 'answer'"),
        ("--input-key question", "no column 'question'"),
        (f"--prompt-data {rows}", "text or a list of messages is expected, not 3"),
        (f"--prompt-data {labels} --rm-type gsm8k", "gsm8k needs a number as label"),
        ("--rm-type maths", "did you mean"),
        ("--hf-checkpoint /models/none", "--hf-checkpoint /models/none: no such folder"),
        ("--hf-checkpoint models/of/mine", "--hf-checkpoint models/of/mine: no such folder"),
        (f"--hf-checkpoint {model}/config.json", "config.json: is a file; name the folder that contains it"),
        (f"--hf-checkpoint {bare}", f"--hf-checkpoint: no tokenizer at '{bare}', which must be"),
        ("--num-layers 3", "--num-layers is 3 but the model's config.json has 2"),
        ("--dynamic-sampling-filter-path slimelite.rollout.filters.nothing", "slimelite.rollout.filters has no"),
        ("--load-debug-rollout-data r/{rollout_id}.parquet", "no saved rollout at r/0.parquet"),
        (f"--run-dir {rows}", f"--run-dir: {rows} cannot be written to"),
        ("--launcher local --label-key answer", "no column 'answer'"),
        ("--dry-run --label-key answer", "--prompt-data: "),
        ("--dry-run --lerning-rate 1 --prompt-data gone.parquet", "no such file: gone.parquet"),
        (f"--config {tmp_path}/odd.yaml", "odd.yaml: is not YAML"),
    ]
    commands = [("train.py", f"{run} {words}".split(), says) for words, says in mistakes]
    commands += [
        ("slimelite", f"serve {empty}".split(), "config.json: is missing"),
        ("slimelite", f"serve {bare}".split(), "it has none: copy tokenizer.json and"),
        (
            "slimelite",
            f"serve {model} --port {port}".split(),
            f"--port {port} is taken on 127.0.0.1: choose another port",
        ),
        ("slimelite", ["chat", "/models/none"], "no such folder"),
        ("slimelite", f"eval {model} --tasks gsm9k".split(), "gsm9k: there is no such task; did you mean gsm8k?"),
        ("slimelite", f"eval {model} --tasks gsm8k --data {tmp_path}/none".split(), "folder of data does not exist"),
        ("slimelite", f"view {empty}".split(), "is not a run folder"),
    ]
    asked = json.dumps([[program, words] for program, words, _ in commands])
    with taken:
        command = [sys.executable, "-c", PROGRAM, asked]
        done = subprocess.run(
            command, input="hello", cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (_, words, says), (status, text) in zip(commands, answers, strict=True):
        assert status in (1, 2), (words, text)
        assert says in text, (words, text)
        assert "Traceback" not in text


def test_documents_are_looked_at_before_the_start(model: Path, tmp_path: Path) -> None:
    good, other, odd = (tmp_path / f"{name}.jsonl" for name in ("good", "other", "odd"))
    good.write_text('{"text": "One."}\n' * 100)
    other.write_text('{"content": "One."}\n' * 100)
    odd.write_text('{"text": "One."}\n{"text": 3}\n')
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    settings = json.loads((plain / "tokenizer_config.json").read_text())
    (plain / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    words = "--loss-type pretrain_loss --num-rollout 1 --rollout-batch-size 2 --eval-interval 1"

    def said(prompts: Path | str, held: Path | str = good, more: str = "", folder: Path = model) -> str:
        return "\n".join(problems(f"{words} --hf-checkpoint {folder} --prompt-data {prompts} --eval-bpb {held} {more}"))

    assert said(good) == ""
    missing = said("nowhere.jsonl", "nowhere2.jsonl")
    assert "--prompt-data: no such file: nowhere.jsonl" in missing
    assert "--eval-bpb: no such file: nowhere2.jsonl" in missing
    lacks = "the first 64 documents cannot be trained on: 64 without a column 'text' (--text-key) (first: line 1)"
    assert lacks in said(other)
    assert said(other, other, "--text-key content") == ""
    assert "1 of the first 2 documents cannot be trained on: 1 malformed (first: line 2)" in said(good, odd)
    assert said(odd, more="--skip-bad-rows") == ""
    assert "has no eos_token, the token that ends a document" in said(good, folder=plain)


def test_a_dry_run_with_a_mistake_says_what_is_left_out(run: str) -> None:
    """Memory and tokens take the imports that the answer to a mistake does not wait for."""
    (left,) = [w for w in inspect(parse(f"{run} --dry-run --label-key answer"), CPU).warnings if "until the" in w]
    assert left.startswith("not checked until the problems are fixed: tokenizer, memory, and the prompts")
    good = inspect(parse(f"{run} --dry-run"), CPU)
    assert left not in good.warnings
    assert "--prompt-data: 100 prompts, the longest of 23 tokens" in good.facts


def test_the_first_rows_may_all_be_left_out(run: str, tmp_path: Path) -> None:
    """Such as those of a file that is sorted by length: a start then reads it as a dry run does."""
    file, short = tmp_path / "sums.parquet", [{"role": "user", "content": "1+1="}]
    long = [{"role": "user", "content": "1+1=" * 50}]
    for last, said in ((short, []), (long, [f"--prompt-data: no prompts left of ['{file}']: left out 65 of 65"])):
        rows = [{"messages": messages, "label": "2"} for messages in [*[long] * 64, last]]
        pq.write_table(pa.Table.from_pylist(rows), file)
        found = problems(f"{run} --rollout-max-prompt-len 40")
        assert [problem.partition(" prompts: they have more")[0] for problem in found] == said


def test_a_file_without_rows_is_named(run: str, tmp_path: Path) -> None:
    file = tmp_path / "sums.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    assert problems(run) == [f"--prompt-data: {file} holds no rows"]


def test_a_disk_without_room_for_a_checkpoint(
    run: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"model.embed_tokens.weight": np.zeros((512, 16), np.float16)}
    save_file(weights, model / "model.safetensors")  # the shapes alone are looked at
    disk = namedtuple("disk", "total used free")(10**9, 0, 512 * 16 * 12 - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: disk)
    words = f"{run} --save {tmp_path}/saved/here --save-interval 1"
    assert problems(words) == [
        f"--save {tmp_path}/saved/here: a checkpoint takes about 98.3 kB, but only 98.3 kB are free: make room, or "
        "name another folder"
    ]
    assert not any("a checkpoint takes" in problem for problem in problems(f"{words} --no-save-optim"))
    assert not any("a checkpoint takes" in problem for problem in problems(f"{words} --lora-rank 4"))
    assert not any("a checkpoint takes" in problem for problem in problems(f"{words} --debug-rollout-only"))
