"""The site builds without a warning, and pages name flags that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimelite.arguments import Args
from slimelite.arguments.flags import group_flags, groups_of
from slimelite.arguments.vocabulary import known_flags

ROOT = Path(__file__).resolve().parents[2]
# pages whose flags are all train.py's, or those of a command that the page shows
PAGES = ("from_trl.md", "from_verl.md", "faq.md", "troubleshooting.md", "user_guide.md")
OTHER_COMMANDS = {
    "--margin",
    "--max-pairs-per-group",
    "--help-all",
    "--rm-label",
    "--rm-response",
    "--pid",
    "--ipc",
    "--address",
    "--nodes",
    "--follow",
    "--help",
}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "api.html").read_text()
    assert "forward_backward" in page, "the reference of the Python entry comes from its docstrings"
    linked = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?)[^"]*)"', page)
    assert not linked, "a page of the site fetches nothing"


@pytest.mark.parametrize("page", PAGES)
def test_flags_on_a_page_exist(page: str) -> None:
    ours = [flag for group in groups_of(Args) for flag in group_flags(group)]
    flags = {name for f in ours for name in (f.option, f.off_option, f.negative, *f.aliases) if name}
    known = {f"--{name.split()[0]}" for refused in (False, True) for name in known_flags(refused=refused)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", (ROOT / "docs" / page).read_text()))
    unknown = named - flags - known - OTHER_COMMANDS
    # --sglang-x are the server's; --eval- stands for all flags that start so
    assert not {
        n
        for n in unknown
        if not n.startswith("--sglang-") and not (n.endswith("-") and any(f.startswith(n) for f in flags))
    }
