"""What a newcomer sees first: README's commands, the licence, and the remedies that messages print."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# https://www.apache.org/licenses/LICENSE-2.0.txt
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def a_run() -> str:
    """The commands under README's "A run"."""
    _, _, section = (ROOT / "README.md").read_text().partition("## A run\n")
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1]


@pytest.mark.e2e
def test_the_run_of_the_readme_works_as_pasted(tmp_path: Path) -> None:
    """In a folder that looks like a clone after scripts/setup.sh, without a model hub."""
    for name in ("train.py", "scripts", "slimelite"):
        (tmp_path / name).symlink_to(ROOT / name)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = ["bash", "-e", "-o", "pipefail", "-c", a_run()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "ready to start" in done.stdout
    runs = sorted((tmp_path / "runs").iterdir(), key=lambda folder: folder.stat().st_ctime)
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    losses = [row["train/loss"] for row in rows[0] if "train/loss" in row]
    rewards = [row["rollout/raw_reward"] for row in rows[1] if "rollout/raw_reward" in row]
    assert losses[-1] < losses[0] / 2, "SFT learns"
    assert max(rewards) > 0, "GRPO goes on from what SFT saved"


def test_the_licence_is_apaches_text() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])


def test_what_messages_tell_to_install_can_be_installed() -> None:
    """No index has a package slimelite: an extra is installed from the clone, and exists."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    folders = (ROOT / "slimelite", ROOT / "scripts", ROOT / "docs")
    files = [
        ROOT / "README.md",
        *(f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".md", ".sh")),
    ]
    text = "\n".join(file.read_text() for file in files)
    assert not re.findall(r"pip install [^\n]*slimelite\[", text)
    named = re.findall(r"-e ['\"]?\.\[(\w+)\]", text)
    assert {"hub", "ifbench"} <= set(named) <= extras
