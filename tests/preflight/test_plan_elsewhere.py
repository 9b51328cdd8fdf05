"""A dry run for GPUs that are not here, on a machine without SGLang."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import train
from tests.preflight.test_preflight import RUN


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang is not found, and runs begin in an empty folder."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sglang" else find(name, *more)
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("named", ["", "--rollout-backend sglang"])
def test_sglang_is_planned_as_the_gpus_machine_would_run_it(
    named: str, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--hf-checkpoint {model} --prompt-data {data} {RUN} --eval-prompt-data sums {data}@[:10]"
    status = train.main([*words.split(), "--colocate", "--dry-run", "--plan-gpu", "h100:8", *named.split()])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "KV pool graphs" in said, "SGLang's share of a GPU and its CUDA graphs"
    assert ("sglang  (--plan-gpu plans for a machine with SGLang" in said) is (named == "")
    assert "8 GPU(s) of --plan-gpu" in said


@pytest.mark.usefixtures("laptop")
def test_prompts_that_were_measured_are_known_to_the_plan(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--rollout-max-prompt-len is not given, and there is no --use-dynamic-batch-size."""
    words = f"--hf-checkpoint {model} --prompt-data {data} {RUN} --eval-prompt-data sums {data}@[:10]"
    assert train.main([*words.split(), "--colocate", "--dry-run", "--plan-gpu", "h100:8"]) == 0
    said = capsys.readouterr().out
    assert "prompts, the longest of " in said
    assert "will it fit (predicted)\n  fits: " in said
