"""``slimelite train``: the same loop and arguments as ``train.py``, from a checkout or an installed wheel."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

from slimelite.base.files import beside_package


def main(argv: Sequence[str]) -> NoReturn:
    """Run ``train.py`` as a program.

    Raises:
        SystemExit: always, with the exit status of ``train.py``.
    """
    loop = str(beside_package("train.py"))
    sys.argv = [loop, *argv]
    runpy.run_path(loop, run_name="__main__")
    raise AssertionError("train.py ends its process")
