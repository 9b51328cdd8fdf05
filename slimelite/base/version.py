"""``--version`` for every program: the package's commands and the scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from slimelite import __version__

if TYPE_CHECKING:
    import argparse

TEXT = f"slimelite {__version__}"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` answer ``--version``."""
    parser.add_argument("--version", action="version", version=TEXT)


def answer_version(argv: Sequence[str] | None = None) -> None:
    """Print the version and exit if ``--version`` is in ``argv`` before any ``--``. If ``argv`` is None, this process's
    command line is used.

    This function is for programs that read their command line without argparse, or whose parser has subcommands.
    """
    words = sys.argv[1:] if argv is None else argv
    if "--version" in takewhile(lambda word: word != "--", words):
        print(TEXT)
        raise SystemExit(0)
