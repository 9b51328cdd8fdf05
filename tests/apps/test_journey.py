"""``slimelite report`` on a journey of two stages: its numbers are those of the run folders."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import train
from scripts.lib.arithmetic import write_model_folder
from slimelite.apps.command import main
from slimelite.apps.report import read_stages, spent
from slimelite.data.tokenizer import load_tokenizer
from slimelite.preflight import problems_of
from slimelite.stages import run_stages

pytestmark = pytest.mark.e2e
TALK = [{"role": "user", "content": "1+2+3+4=?"}, {"role": "assistant", "content": "#### 10"}]
PICK = "name: pick\ndata: rows.jsonl\nkind: multiple-choice\nprompt: '{{ q }}'\nchoices: '[1, 7]'\nlabel: right\n"


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages of SFT, and a task beside them."""
    root = tmp_path_factory.mktemp("journey")
    write_model_folder(root / "model")
    (root / "sft.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 8)
    (root / "rows.jsonl").write_text("".join(json.dumps({"q": f"{i}+1=?", "right": i % 2}) + "\n" for i in range(6)))
    (root / "pick.yaml").write_text(PICK)
    common = {"prompt_data": [str(root / "sft.jsonl")], "loss_type": "sft_loss", "rollout_batch_size": 4}
    for number, name in enumerate(("mid", "sft")):
        first = {} if number else {"hf_checkpoint": str(root / "model")}
        (root / f"{name}.yaml").write_text(yaml.safe_dump({**common, **first, "num_rollout": 2 - number}))
    flags = ["--launcher", "local", "--input-key", "messages", "--lr", "1e-2", "--run-dir", str(root / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--stages", str(root / "mid.yaml"), str(root / "sft.yaml"), *flags])
        assert run_stages(train.main, problems_of) == 0
    return root


def cells(page: str, title: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (lines[0], *lines[2:])]


def test_the_page_has_what_the_stages_spent_scored_and_answered(journey: Path) -> None:
    words = ["report", str(journey / "out"), "--price", "3600", "--prompts", "3+4+5+6=?", "--max-tokens", "3"]
    assert main([*words, "--tasks", str(journey / "pick.yaml")]) == 0
    markdown, html = ((journey / "out" / f"report.{kind}").read_text() for kind in ("md", "html"))
    stages = read_stages(journey / "out")
    assert [run.name for run in stages] == ["0-mid", "1-sft"]
    head, *rows, together = cells(markdown, "Stages")
    tokenizer = load_tokenizer(str(journey / "model"))
    length = len(tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"])
    for run, row, rollouts in zip(stages, rows, (2, 1), strict=True):
        facts = dict(zip(head, row, strict=True))
        assert (facts["status"], facts["rollouts"], facts["optimizer steps"]) == ("finished", *[str(rollouts)] * 2)
        assert float(facts["tokens"]) == pytest.approx(rollouts * 4 * length, rel=0.02)
        seconds = spent(run)[2] * 3600
        assert float(facts["cost"]) == pytest.approx(seconds, abs=0.01)
        assert 0 < seconds <= float(run.status["updated"]) - float(run.status["began"])
        assert float(facts["FLOPs"]) > 6 * 50_000 * rollouts * 4 * length
    assert float(together[5]) == pytest.approx(3 * 4 * length, rel=0.02)

    head, score, centred = cells(markdown, "Scores")
    for at, stage in enumerate(("0-mid", "1-sft"), 1):
        (results,) = (journey / "out" / "eval" / stage).rglob("results.json")
        metrics = json.loads(results.read_text())["tasks"]["pick"]["metrics"]
        assert score[at].startswith(f"{metrics['eval/pick']:.3f} ±")
        assert centred[at].startswith(f"{metrics['eval/pick-centred']:.3f} ±")
        model = AutoModelForCausalLM.from_pretrained(journey / "out" / stage / "model")
        asked = [{"role": "user", "content": "3+4+5+6=?"}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            whole = model.generate(**ids, max_new_tokens=3, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answer = cells(markdown, "The same prompts after each stage")[1][at]
        assert answer == tokenizer.decode(whole, skip_special_tokens=True).replace("\n", "<br>").strip()
    assert html.count("data:image/png;base64,") == markdown.count("curves.png)") == 2
    assert re.search(r"\| 1-sft \| 1234 \|", markdown)
    assert "<script" not in html


def test_what_a_stage_measures_before_its_first_step_is_the_score_of_the_stage_before(
    journey: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "out"
    shutil.copytree(journey / "out", copy)
    for step, score in ((-1, 0.25), (0, 0.5)):
        with (copy / "1-sft" / "metrics.jsonl").open("a") as metrics:
            record = {"time": 1.0, "kind": "eval", "eval/step": step, "eval/held": score, "eval/held-stderr": 0.125}
            metrics.write(json.dumps(record) + "\n")
    assert main(["report", str(copy)]) == 0
    head, *rows = cells((copy / "report.md").read_text(), "Scores")
    assert head == ["after", "0-mid", "1-sft"]
    assert ["held", "0.250 ±0.125", "0.500 ±0.125"] in rows


def test_a_folder_without_stages_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "has no stages: name the --run-dir of train.py --stages" in capsys.readouterr().err
