"""What a newcomer sees first: README's commands, the licence, and the remedies that messages print."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# https://www.apache.org/licenses/LICENSE-2.0.txt
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


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
