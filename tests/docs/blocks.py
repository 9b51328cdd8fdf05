"""The shell blocks of README.md and docs/: which of them are run, and why the others are not.

``python tests/docs/blocks.py`` lists those that are not run. A block is run unless the line above it is
``<!-- not run: the reason -->``. `test_blocks.py` runs the blocks of a page in one shell, as a reader pastes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>[^\n]*?) -->\n)?```bash\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A shell block; ``line``: where it starts on its page; ``why``: the reason that it is not run, or None."""

    page: str
    line: int
    text: str
    why: str | None


def blocks(page: Path) -> list[Block]:
    """The shell blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(str(page.relative_to(ROOT)), text.count("\n", 0, found.start()) + 1, found["text"], found["why"])
        for found in BLOCK.finditer(text)
    ]


if __name__ == "__main__":
    for block in (block for page in PAGES for block in blocks(page) if block.why):
        print(f"{block.page}:{block.line}: {block.why}")
