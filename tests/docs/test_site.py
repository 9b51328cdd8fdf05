"""The site builds without a warning, and pages name flags that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimelite.arguments import Args
from slimelite.arguments.flags import group_flags, groups_of
from slimelite.arguments.sources import known_flags

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
    "--dashboard-agent-listen-port",
    "--nodes",
    "--follow",
    "--shuffle",
    "--help",
}


def build(site: Path, *options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`make site`; with --quiet mkdocs counts no warnings, and --strict lets everything pass."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site), *options]
    env = {"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_whole_and_fetches_nothing(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert "forward_backward" in page, "the reference of the Python entry comes from its docstrings"
    linked = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?)[^"]*|[^"]*unpkg[^"]*)"', page)
    assert not linked, "a page of the site fetches nothing"
    text = (site / "evaluation.html").read_text()
    assert "eval/&lt;name&gt;" in text
    assert 'rel="next"' in text
    assert 'class="md-footer__link md-footer__link--next"' in text


@pytest.mark.parametrize("line", ["[nowhere](nowhere.md)", "owner/name[:config][:split]", "[view](view.md#nowhere)"])
def test_a_planted_bad_link_fails(tmp_path: Path, line: str) -> None:
    (tmp_path / "docs").mkdir()
    for name, text in (("index", line), ("view", "# Look at a run")):
        (tmp_path / "docs" / f"{name}.md").write_text(text)
    ours = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(ours + "\nnav: [index.md, view.md]\n")
    done = build(tmp_path / "site", cwd=tmp_path)
    assert done.returncode != 0
    assert "Aborted with 1 warnings in strict mode!" in done.stdout + done.stderr


def test_no_page_has_text_in_angle_brackets_that_a_browser_takes_for_a_tag() -> None:
    for page in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md"):
        text = re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
        text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text, flags=re.S)
        assert {*re.findall(r"</?([a-zA-Z][\w-]*)[^>]*>", text)} <= {"picture", "source", "img"}, page


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
