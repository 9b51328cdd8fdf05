"""Writes a checkpoint while training continues (``--async-save``)."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event, Thread

from slimelite.models.checkpoints import Checksums, part_file, writing

POLL_S = 0.1


class Saving(Thread):
    """Waits until every rank has written its part of the checkpoint ``final``, and then completes the checkpoint (see
    `writing`).

    The ranks and the caller write the parts of the checkpoint to ``directory``. If the run dies before the checkpoint
    is complete, the previous checkpoint remains the newest checkpoint.
    """

    def __init__(self, final: Path, size: int, retain: int | None, ranks: int) -> None:
        super().__init__(name="saving", daemon=True)
        self.final = final
        self._size, self._retain, self._ranks = size, retain, ranks
        self._made, self._begun, self._dropped = Event(), Event(), Event()
        self._directory: Path | None = None
        self._error: BaseException | None = None
        self.start()

    def directory(self) -> Path:
        """The folder for the parts of the checkpoint.

        Raises:
            OSError: the folder cannot be created.
        """
        self._made.wait()
        if self._directory is None:
            self.finish()
        assert self._directory is not None
        return self._directory

    def begin(self) -> None:
        """Record that every rank is writing, and that the caller has written its own part."""
        self._begun.set()

    def drop(self) -> None:
        """Stop writing, and remove the unfinished checkpoint."""
        self._dropped.set()
        self._begun.set()
        self.join()

    @property
    def failed(self) -> bool:
        """Whether writing has ended with an error. `finish` raises this error."""
        return self._error is not None

    def finish(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            OSError: the checkpoint could not be written.
        """
        self.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Complete the checkpoint on this thread (see the class)."""
        try:
            with writing(self.final, self._size, self._retain) as (directory, checksums):
                self._directory = directory
                self._made.set()
                self._begun.wait()
                for rank in range(self._ranks):
                    checksums.update(self._part(part_file(directory, rank)))
        except BaseException as error:  # `finish` raises it in the caller's thread
            self._error = error
        finally:
            self._made.set()

    def _part(self, file: Path) -> Checksums:
        while not file.is_file():
            if self._dropped.wait(POLL_S):
                raise InterruptedError("the run ended before the checkpoint was complete")
        result = json.loads(file.read_text())
        file.unlink()
        if "error" in result:
            raise OSError(result["errno"], result["error"])
        checksums: Checksums = result["checksums"]
        return checksums
