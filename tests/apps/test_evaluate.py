"""``slimelite eval`` on a tiny model: table, rows, caching, paired tests, and mistakes before a model is loaded."""

from __future__ import annotations

import json
import os
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.arithmetic import write_model_folder
from slimelite.apps.command import main
from slimelite.apps.eval import RESULTS, _rows
from slimelite.apps.runnable import MADE_OF
from slimelite.apps.runs import Run
from slimelite.data.tokenizer import load_tokenizer
from slimelite.rollout.manager import RolloutManager
from slimelite.samples.table import SampleTable
from tests.data.tokenizers import begin_with

WRITE = "name: write\ndata: rows.jsonl\nprompt: '{{ q }}'\nlabel: label\nscorer: last_number\nmax_tokens: 4\n"
PICK = "name: pick\ndata: rows.jsonl\nkind: multiple-choice\nprompt: '{{ q }}'\nchoices: '[1, 7]'\nlabel: right\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: two models, two tasks and their rows."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        write_model_folder(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"initializer_range": 0.02 + 0.5 * number}))
    rows = [{"q": f"{i}+1=?", "label": i + 1, "right": i % 2} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "write.yaml").write_text(WRITE)
    (tmp_path / "pick.yaml").write_text(PICK)
    return tmp_path


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    said = capsys.readouterr().out
    found: dict[str, Any] = json.loads(said[said.index("\n{") :] if not said.startswith("{") else said)
    return found


@pytest.mark.e2e
def test_two_models_are_scored_compared_and_not_asked_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("one", "two", "--tasks", "pick.yaml,write.yaml", "--output", "out", "--limit", "10", "--no-chat")
    found = evaluated(capsys, *words)
    one, two = found["models"]
    table = SampleTable.from_parquet(folder / "out" / "one" / "eval" / "pick-start.parquet")
    assert len(table) == 10
    assert one["tasks"]["pick"]["metrics"]["eval/pick"] == pytest.approx(table.reward.mean())
    assert one["tasks"]["pick"]["metrics"]["eval/pick-stderr"] > 0
    test = two["tasks"]["pick"]["against_first"]
    assert (test["prompts"], set(test)) == (10, {"prompts", "difference", "standard_error", "p", "of_prompts"})
    mean = {each["name"]: each["tasks"]["pick"]["metrics"]["eval/pick"] for each in found["models"]}
    assert test["difference"] == pytest.approx(mean["two"] - mean["one"])
    assert sorted(Run.read(folder / "out" / "two").scores) == ["eval/pick", "eval/write"]

    written = (folder / "out" / "one" / RESULTS).stat().st_mtime_ns
    assert evaluated(capsys, *words) == found
    assert (folder / "out" / "one" / RESULTS).stat().st_mtime_ns == written
    assert main(["eval", *words]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.strip()][2:5] == ["pick", "pick-centred", "−"]

    os.utime(folder / "one" / "config.json", (1, 1))  # another model was moved here, older than the results
    moved = evaluated(capsys, *words)
    assert (folder / "out" / "one" / RESULTS).stat().st_mtime_ns > written
    (folder / "pick.yaml").write_text(PICK.replace("label: right", "label: 1 - right"))
    (again,) = evaluated(capsys, "one", *words[2:])["models"]
    assert again["tasks"]["pick"]["metrics"]["eval/pick"] == pytest.approx(1 - mean["one"])
    assert again["tasks"]["write"] == moved["models"][0]["tasks"]["write"]  # which has the time that it took


@pytest.mark.e2e
def test_an_interrupted_evaluation_goes_on_and_other_settings_are_asked_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("one", "--tasks", "pick.yaml,write.yaml", "--output", "out", "--no-chat")
    asked: list[str] = []
    real = RolloutManager.evaluate

    @wraps(real)  # a worker is told its name
    def counted(self: RolloutManager, rollout_id: int, names: tuple[str, ...] = ()) -> Any:
        asked.extend(names)
        if asked == ["pick", "write"]:
            raise ValueError("the machine stopped")
        return real(self, rollout_id, names)

    monkeypatch.setattr(RolloutManager, "evaluate", counted)
    assert main(["eval", *words]) == 1
    assert "the machine stopped" in capsys.readouterr().err
    found = evaluated(capsys, *words)
    assert asked == ["pick", "write", "write"]
    assert sorted(Run.read(folder / "out" / "one").scores) == ["eval/pick", "eval/write"]

    sampled = evaluated(capsys, *words, "--samples", "4", "--temperature", "1")["models"][0]["tasks"]
    assert asked == ["pick", "write", "write", "write"]
    assert sampled["pick"] == found["models"][0]["tasks"]["pick"]
    assert {"eval/write-pass@2", "eval/write-pass@4-stderr"} <= set(sampled["write"]["metrics"])
    assert main(["eval", *words, "--samples", "4", "--temperature", "1"]) == 0
    assert "write-pass@4" in capsys.readouterr().out


@pytest.mark.e2e
def test_questions_begin_as_the_tokenizer_says_and_scores_without_that_are_asked_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(folder / "one"))
    begin_with(tokenizer, tokenizer.eos_token)
    tokenizer.save_pretrained(folder / "one")
    words = ("one", "--tasks", "write.yaml", "--output", "out", "--no-chat")
    evaluated(capsys, *words)
    table = SampleTable.from_parquet(folder / "out" / "one" / "eval" / "write-start.parquet")
    assert table.row_slice("prompt_tokens", 0)[0] == tokenizer.eos_token_id
    results = folder / "out" / "one" / RESULTS
    written = results.read_text()
    evaluated(capsys, *words)
    assert results.read_text() == written
    old = json.loads(written)
    assert old["tasks"]["write"].pop("begins") == [tokenizer.eos_token_id]
    results.write_text(json.dumps(old))
    evaluated(capsys, *words)
    assert "begins" in json.loads(results.read_text())["tasks"]["write"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("one", "--tasks", "gsm9k"), "slimelite eval: --tasks gsm9k: there is no such task; did you mean gsm8k?"),
        (("gone", "--tasks", "write.yaml"), "gone: no such folder"),
        (("one", "--tasks", " ,"), "--tasks names no task: choose from arc, arc-easy"),
        (("one", "one", "--tasks", "write.yaml"), "two models would use the folder"),
        (("one", "--tasks", "write.yaml", "--samples", "2"), "greedy responses to a prompt are all equal"),
        (("one", "--tasks", "gsm8k", "--data", "none"), "none: this folder of data does not exist"),
        (("one", "--tasks", "write.yaml", "--limit", "0"), "slimelite eval: --limit 0: must be at least 1"),
        (("one", "--tasks", "write.yaml", "--engine", "x"), "slimelite eval: --engine x: there is no such engine"),
        (("one", "--tasks", "write.yaml", "--", "--lr-x", "3"), "--lr-x"),
        (("one", "--tasks", "broken.yaml"), "prompt of the task write: 'qq' is undefined"),
        (("low", "--tasks", "gsm9k"), "slimelite eval: --tasks gsm9k: there is no such task"),
        (("one", "--base", "two", "--tasks", "write.yaml"), "--base two is for adapters and checkpoints"),
    ],
)
def test_mistakes_are_lines_before_anything_is_loaded(
    words: tuple[str, ...], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.yaml").write_text(WRITE.replace("{{ q }}", "{{ qq }}"))
    (folder / "low").mkdir()
    (folder / "low" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "one"}))
    assert main(["eval", *words, "--output", "out"] if "--" not in words else ["eval", *words]) in (1, 2)
    said = capsys.readouterr()
    assert says in said.err
    assert all(line.startswith("slimelite eval: ") for line in said.err.splitlines())
    assert not (folder / "out" / "one" / RESULTS).exists()


def test_a_folder_of_another_models_results_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out" / "one").mkdir(parents=True)
    (folder / "out" / "one" / RESULTS).write_text(json.dumps({"model": "/x/one", "run": {}, "tasks": {}}))
    assert main(["eval", "one", "--tasks", "write.yaml", "--output", "out"]) == 2
    assert "has the results of another model, /x/one" in capsys.readouterr().err
    (folder / "out" / "one" / RESULTS).write_text(json.dumps({"format": 2, "tasks": {}}))
    assert main(["eval", "one", "--tasks", "write.yaml", "--output", "out"]) == 1
    assert "results.json: has format 2, but this slimelite reads format 1: use the" in capsys.readouterr().err
    (folder / "low").mkdir()
    (folder / "low" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "one"}))
    (folder / "out" / "low" / "model").mkdir(parents=True)
    (folder / "out" / "low" / "model" / MADE_OF).write_text(json.dumps({"path": "/x/low"}))
    for file in (folder / "one").glob("*token*"):  # an adapter may have the tokenizer alone
        file.rename(folder / "low" / file.name)
    assert main(["eval", "low", "--tasks", "write.yaml", "--output", "out"]) == 1
    said = capsys.readouterr().err
    assert "was made from /x/low, not from" in said
    assert "name another folder with --output" in said
    assert "random" not in said, "the base holds no weights, and it is not what is evaluated"


def test_prompts_that_failed_are_in_the_table() -> None:
    whole = {"eval/x": 0.5, "eval/x-truncated_ratio": 0.0}
    models = [{"name": "a", "tasks": {"x": {"metrics": {**whole, "eval/x/failed_prompts": 3.0}}}}]
    assert [*_rows(models, "x")][1] == ("  prompts without an answer", ["3"])
