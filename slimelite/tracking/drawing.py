"""Draws the curves of a run folder in a process of its own, while the run goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import slimelite

logger = logging.getLogger(__name__)

# drawing the curves during a run takes at most about this share of its time
DRAWING_SHARE = 0.02


class Drawing:
    """``curves.png`` of the run folder at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        self._began, self._took = time.monotonic(), 1.0

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last drawing; the first one waits too."""
        return self._process is None and time.monotonic() - self._began > self._took / DRAWING_SHARE

    def begin(self) -> None:
        """Draw what is in the folder now, after a drawing that goes on."""
        self.finish()
        search_path = [str(Path(slimelite.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            # -P: the current folder is not searched for modules
            [sys.executable, "-P", "-m", "slimelite.tracking.plot", str(self._path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search_path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl+C in the last moment leaves the picture
        )

    def look(self) -> None:
        """Note whether the drawing has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.finish()

    def finish(self) -> None:
        """Wait for the drawing that goes on, if any; a warning says why there is no picture."""
        if self._process is None:
            return
        _, said = self._process.communicate()
        if self._process.returncode:
            logger.warning("the curves are not drawn: %s", (said.strip().splitlines() or ["killed"])[-1])
        self._took = time.monotonic() - self._began
        self._process = None
