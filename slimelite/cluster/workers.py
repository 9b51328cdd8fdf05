"""The plain workers that a launcher places: an engine, and the rollout manager with its progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimelite.arguments import Args
from slimelite.data.tokenizer import load_tokenizer
from slimelite.engines.protocol import Engine
from slimelite.rollout.manager import EvalOutput, RolloutManager, RolloutOutput


class RolloutWorker:
    """A `RolloutManager` that remembers how far its current work is."""

    def __init__(self, args: Args, engines: Sequence[Engine]) -> None:
        self._progress = (0, 0, "")
        tokenizer = load_tokenizer(args.tokenizer)
        self.manager = RolloutManager(args, list(engines), tokenizer, progress=self._report)
