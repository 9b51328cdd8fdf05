"""Pages that say where things are name what is there, all of it and nothing else."""

from __future__ import annotations

import re
import subprocess

from tests.docs.blocks import ROOT


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
