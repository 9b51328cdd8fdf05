"""``slimelite push`` against a hub on loopback, by huggingface_hub's own client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from slimelite.apps.command import main
from tests.support.fake_hub import MAY_NOT_WRITE, fake_hub

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"numbers", "README.md": b"a card"}


def push(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slimelite.apps.command", "push", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder; whether its weights are some does not matter to a hub."""
    model = tmp_path / "model"
    model.mkdir()
    for name, content in {**ADAPTER, "config.json": b"{}", "model.safetensors.partial": b"half"}.items():
        (model / name).write_bytes(content)
    return model


def test_a_folder_arrives_whole_and_a_file_beside_it(folder: Path, tmp_path: Path) -> None:
    with fake_hub() as hub:
        environment = hub.environment(str(tmp_path / "home"))
        done = push(environment, str(folder), "me/model", "--private", "--message", "the first")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{hub.url}/me/model\n", "")
        there = {**ADAPTER, "config.json": b"{}"}
        assert hub.repos["me/model"]["main"] == there
        assert hub.private == {"me/model"}
        (tmp_path / "it.gguf").write_bytes(b"GGUF")
        assert push(environment, str(tmp_path / "it.gguf"), "me/model", "--branch", "gguf").returncode == 0
        assert hub.repos["me/model"] == {"main": there, "gguf": {"it.gguf": b"GGUF"}}
        assert hub.commits == ["the first", "Upload it.gguf with slimelite"]


@pytest.mark.parametrize(
    ("changes", "repo", "message"),
    [
        ({"HF_HUB_OFFLINE": True}, "me/model", "HF_HUB_OFFLINE is set, so nothing is uploaded"),
        ({"token": ""}, "me/model", "there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN"),
        ({}, "model", "'model' is not a repository name of the hub"),
        ({"token": "hf_other"}, "me/model", "does not accept the token"),
        ({}, f"{MAY_NOT_WRITE}model", "the token has no permission to write to other/model (you have no rights there)"),
        ({"ENDPOINT": "http://127.0.0.1:9"}, "me/model", "the hub at http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_is_in_the_way_is_one_line(
    changes: dict[str, Any],
    repo: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_hub() as hub, hub.talking(monkeypatch):
        for name, value in changes.items():
            if name == "token":
                monkeypatch.setenv("HF_TOKEN", value)
            else:
                monkeypatch.setattr(constants, name, value)
        assert main(["push", str(folder), repo]) == 1
        assert hub.commits == []
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1, printed


def test_a_run_without_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"hf_checkpoint": "base", "save_hf": null, "save": null}')
    with fake_hub() as hub, hub.talking(monkeypatch):
        assert main(["push", str(tmp_path), "me/model"]) == 1
    assert "is a run that wrote no model" in capsys.readouterr().err
