"""Pages that say where things are name what is there, all of it and nothing else."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT, blocks

AGENTS = ROOT / "AGENTS.md"
# of a shell, or of an environment that is made once
SHELL = ("export", "source")


def tracked(*words: str) -> list[str]:
    """Files of the checkout that git knows or would take, from the root."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *words]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def test_every_script_has_one_line() -> None:
    lines = re.findall(r"^\| `([\w./-]+)` \| \S", (ROOT / "scripts" / "README.md").read_text(), re.MULTILINE)
    assert sorted(f"scripts/{name}" for name in (*lines, "README.md")) == sorted(tracked("scripts"))


def test_scripts_that_are_named_exist() -> None:
    """In docs, comments and commands; not in tests, which have scripts of slime's, nor in the changelog."""
    kinds = (".md", ".py", ".sh", ".toml", ".yaml", ".yml", ".txt", ".sbatch", "Makefile", "Dockerfile", ".ci/run")
    pages = [name for name in tracked() if name.endswith(kinds) and not name.startswith(("tests/", "CHANGELOG"))]
    named = {
        (page, path)
        for page in pages
        for path in re.findall(r"(?<![\w/.-])scripts/[\w./-]+\.(?:py|sh)\b", (ROOT / page).read_text())
    }
    assert len(named) > 100
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).is_file()] == []


def test_paths_of_agents_md_exist() -> None:
    text = AGENTS.read_text()
    named = set(re.findall(r"`((?:slimelite|tests|docs|scripts)/[^`\s]*|[\w.]+\.(?:py|md))`", text))
    named |= set(re.findall(r"\]\(([^)#]+)", text))
    rooms = {f"slimelite/{path.name}/" for path in (ROOT / "slimelite").iterdir() if path.name.isidentifier()}
    assert {room for room in rooms if (ROOT / room / "__init__.py").exists()} <= named, "a room is missing"
    assert len(named) > 50
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert len(text.splitlines()) <= 120


def test_paths_of_the_design_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    named = set(re.findall(r"`([a-z_]+/[\w./]*)`", text))
    assert len(named) > 30
    assert [name for name in sorted(named) if not any((ROOT / at / name).exists() for at in ("", "slimelite"))] == []
    rooms = {path.parent.name for path in (ROOT / "slimelite").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)) == rooms
    assert len(text.splitlines()) <= 200


def commands() -> list[list[str]]:
    """The commands of AGENTS.md in words, without what a shell does itself."""
    lines = [line for block in blocks(AGENTS) for line in block.text.splitlines() if line]
    lines += re.findall(r"`(python -m [^`]+)`", AGENTS.read_text())
    found = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [words for words in found if words and words[0] not in SHELL]


def tried(words: list[str]) -> list[str]:
    """The command as it says what it would do, and does nothing."""
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    if words[-1] in ("--check", "--help") and words[0] == "python":
        return words
    return [*words, "--collect-only" if "pytest" in words else "--help"]


def test_commands_of_agents_md_can_be_given() -> None:
    given = commands()
    # pytest collects all that need no more than a path at once
    plain = [words for words in given if words[:4] == ["python", "-m", "pytest", "-q"] and "-k" not in words]
    together = ["python", "-m", "pytest", "-q", *dict.fromkeys(path for words in plain for path in words[4:])]
    others = [words for words in given if words not in plain]
    assert (len(plain), len(others)) > (5, 5)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for words in (together, *others):
        done = subprocess.run(
            tried(words), cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout[-500:]} {done.stderr[-500:]}"
