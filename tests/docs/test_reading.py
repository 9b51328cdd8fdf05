"""How pages are laid out for a reader: a command early, tutorials in order, a front page of two screens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
FIRST = 400  # words before the first thing to do
SCREENS = 2 * 60  # lines; pictures and tables fold and grow


def pages(section: str) -> list[str]:
    """The pages of a section of the site, in order."""
    (listed,) = re.findall(rf"(?ms)^  - {section}:\n(.*?)(?=^  - |\Z)", NAV)
    return re.findall(r": ([\w/]+\.md)$", listed, re.MULTILINE)


def words_before_a_command(text: str) -> int:
    """The words of a page before its first shell block; comments of HTML do not count."""
    before, fence, _ = text.partition("```bash\n")
    assert fence, "there is no command"
    return len(re.sub(r"<!--.*?-->", "", before, flags=re.DOTALL).split())


@pytest.mark.parametrize("page", pages("How to"))
def test_a_how_to_page_begins_with_something_to_do(page: str) -> None:
    assert words_before_a_command((DOCS / page).read_text()) <= FIRST


@pytest.mark.parametrize("path", [ROOT / "README.md", DOCS / "index.md", *(DOCS / page for page in pages("Tutorial"))])
def test_the_index_and_tutorials_begin_with_a_command(path: Path) -> None:
    assert words_before_a_command(path.read_text()) <= 100


def test_a_page_that_talks_first_is_seen() -> None:
    with pytest.raises(AssertionError, match="no command"):
        words_before_a_command("# Title\n\nwords\n")
    assert words_before_a_command("one two <!-- not run: three -->\n```bash\nfour\n```\n") == 2


def test_tutorials_are_numbered_in_their_order() -> None:
    names = pages("Tutorial")
    assert names[0] == "tutorial.md"
    titles = [(DOCS / name).read_text().splitlines()[0] for name in names[1:]]
    assert [title.split()[1] for title in titles] == [f"{number}." for number in range(2, len(names) + 1)]
    assert [f"| {n} | [" in (DOCS / "index.md").read_text() for n in range(1, len(names) + 1)] == [True] * len(names)


def test_the_front_page_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= SCREENS
