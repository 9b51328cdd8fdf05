"""What a run leaves for others: the card of its model, whose code runs, and the same files on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from tests.support.fake_hub import MAY_NOT_WRITE, TOKEN, Hub, fake_hub

from .conftest import SMALL_FLAGS, TrainPy

pytestmark = pytest.mark.e2e


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback, which huggingface_hub of this process talks to."""
    with fake_hub() as there, there.talking(monkeypatch):
        yield there


def run_usage(card: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code of a card with the model in ``folder``; returns its variables."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    code, count = re.subn(r'^name = ".*"$', f'name = "{folder}"', code, flags=re.MULTILINE)
    assert count == 1
    variables: dict[str, Any] = {}
    exec(code, variables)
    return variables


def test_an_adapter_goes_to_the_hub_with_a_card_that_says_how_it_was_made(
    small: Path, hub: Hub, train_py: TrainPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small)
    (small / "model" / "README.md").write_text("---\nbase_model: them/sums\nlicense: apache-2.0\n---\n# Sums\n")
    flags = ["--lora-rank", "2", "--save-hf", "out/{rollout_id}", "--run-dir", "out/run", "--num-rollout", "2"]
    done = train_py(*SMALL_FLAGS, *flags, "--push-to-hub", "me/tuned", "--hub-private", "--wandb-key", "secret")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^  hub +{hub.url}/me/tuned$", done.stdout, re.MULTILINE)
    folder = small / "out" / "1"
    assert hub.repos["me/tuned"]["main"] == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert (hub.private, hub.commits) == ({"me/tuned"}, ["run, after rollout 1"])

    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    made_of = {"base_model": "them/sums", "license": "apache-2.0"}
    assert head == {"library_name": "peft", "pipeline_tag": "text-generation", **made_of}
    assert "| method | ppo, LoRA of rank 2, adam lr 0.003, critic lr 0.005, KL reward 0.05 |" in card
    assert "| custom code | --dynamic-sampling-filter-path slime.rollout" in card
    assert "| trained | 2 of 2 rollouts (the last has number 1, the first 0) |" in card
    given = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert given["lora_rank"] == 2
    assert given["prompt_data"] == ["data/train.jsonl"]
    assert "save_hf" not in given
    assert "secret" not in card
    records = [json.loads(line) for line in (small / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = (f"{r['eval/heldout']:.3f} ±{r['eval/heldout-stderr']:.3f}" for r in records if r["kind"] == "eval")
    assert f"| heldout | {before} | {after} |" in card
    variables = run_usage(card, folder, monkeypatch)
    assert variables["output"].shape[1] > variables["inputs"]["input_ids"].shape[1]


def test_the_code_of_a_chat_models_card_runs(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (sft / "model" / "README.md").read_text()
    assert "| method | SFT, muon lr 0.005 |" in card
    assert "This model was not evaluated." in card
    variables = run_usage(card, sft / "model", monkeypatch)
    prompt = variables["tokenizer"].decode(variables["inputs"]["input_ids"][0])
    assert prompt.startswith("<|im_start|>2+2?"), "the words for sums have no letters"


@pytest.mark.parametrize(
    ("repo", "offline", "token", "message"),
    [
        ("me/tuned", True, TOKEN, "--push-to-hub: HF_HUB_OFFLINE is set, so nothing is uploaded"),
        ("me/tuned", False, "", "--push-to-hub: there is no token for the hub"),
        (f"{MAY_NOT_WRITE}tuned", False, TOKEN, "--push-to-hub: the token has no permission to write to other/tuned"),
    ],
)
def test_what_is_in_the_way_of_an_upload_is_said_before_the_run(
    repo: str,
    offline: bool,
    token: str,
    message: str,
    small: Path,
    hub: Hub,
    train_py: TrainPy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(small)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    done = train_py(*SMALL_FLAGS, "--save-hf", "out/model", "--run-dir", "out/run", "--push-to-hub", repo)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "hub" in line] == [
        line for line in done.stderr.splitlines() if line.startswith(f"train.py: {message}")
    ]
    assert message in done.stderr
    assert not (small / "out").exists()
    assert hub.repos == {}


def test_a_hub_that_goes_away_costs_no_run(
    small: Path, hub: Hub, train_py: TrainPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small)
    answer = hub.answer

    def full(method: str, path: str, body: bytes, token: str | None) -> tuple[int, dict[str, Any]]:
        return (403, {"error": "the storage is full"}) if "/commit/" in path else answer(method, path, body, token)

    monkeypatch.setattr(hub, "answer", full)
    flags = ["--save-hf", "out/model", "--run-dir", "out/run", "--num-rollout", "1", "--push-to-hub", "me/tuned"]
    done = train_py(*SMALL_FLAGS, *flags)
    assert done.returncode == 0
    assert json.loads((small / "out" / "run" / "status.json").read_text())["status"] == "finished"
    told = next(line for line in done.stdout.splitlines() if line.startswith("  hub "))
    assert "NOT uploaded, because " in told
    assert "the storage is full" in told
    assert told.endswith(f"; slimelite push {small}/out/model me/tuned uploads it")
