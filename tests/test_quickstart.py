"""The quickstart's script: a mistake in its flags is told before anything is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "kept"), [("quickstart", "sft/status.json"), ("distill-quickstart", "student/status.json")]
)
def test_a_mistake_is_told_before_the_last_run_is_deleted(script: str, kept: str, tmp_path: Path) -> None:
    """And before the minute of training that comes before the run which gets the flags."""
    scripts, out, student = tmp_path / "scripts", tmp_path / "out", tmp_path / "student"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / f"{script}.sh", scripts)
    (scripts / "setup.sh").write_text("true\n")  # the environment is there
    (scripts / "lib").symlink_to(ROOT / "scripts" / "lib")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    for file in (tmp_path / "data" / "train.parquet", student / "config.json", out / kept):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    folders = {"VENV": str(Path(sys.executable).parents[1]), "DATA": "data", "OUT": "out", "STUDENT": "student"}
    command = ["bash", f"scripts/{script}.sh", "--num-rolout", "80"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | folders, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("train.py: --num-rolout is not a known flag; did you mean --num-rollout?\n")
    assert [str(path.relative_to(out)) for path in out.rglob("*.*")] == [kept]
