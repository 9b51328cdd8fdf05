"""slimelite completion: what Tab offers in bash."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def offered(*words: str) -> list[str]:
    """What Tab offers after ``words``, the last of which is unfinished."""
    function = "_slimelite" if words[0] == "slimelite" else "_slimelite_train"
    script = f"""
        slimelite() {{ {sys.executable} -m slimelite.apps.command "$@"; }}
        python() {{ {sys.executable} "$@"; }}
        eval "$(slimelite completion)"
        COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1}
        {function}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["slimelite", "co"], ["compare", "completion"]),
        (["slimelite", "plot", "runs/a", "--ba"], ["--band"]),
        (["slimelite", "train", "--lr-decay-st"], ["--lr-decay-style"]),
        (["python", "train.py", "--lr", "1", "--use-kl"], ["--use-kl-loss"]),
        (["python", "other.py", "--use-kl"], []),
        (["slimelite", "$(touch X)", "--use-kl"], []),
        (["python", "train.py", "da"], []),  # a file: bash's own completion goes on
    ],
)
def test_tab_offers_commands_and_flags(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected
    assert not (ROOT / "X").exists()


def test_tab_runs_no_file_of_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert offered("python", str(tmp_path / "train.py"), "--use-kl") == []
    assert not (tmp_path / "ran").exists()
