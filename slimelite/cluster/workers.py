"""The rollout manager as a launcher places it, with its progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimelite.arguments import Args
from slimelite.cluster.agreement import probe
from slimelite.data.tokenizer import load_tokenizer
from slimelite.engines.protocol import MEMORY_TAGS, Engine
from slimelite.rollout.manager import EvalOutput, RolloutManager, RolloutOutput
from slimelite.table import SampleTable


class RolloutWorker:
    """A `RolloutManager` that can be asked, from another thread, how far it is."""

    def __init__(self, args: Args, engines: Sequence[Engine]) -> None:
        self._progress = (0, 0, "")
        self._engines = list(engines)
        tokenizer = load_tokenizer(args.tokenizer)
        self._vocab_size = len(tokenizer)
        self._temperature = args.rollout_temperature
        self.manager = RolloutManager(args, self._engines, tokenizer, progress=self._report)

    def _report(self, done: int, total: int, note: str) -> None:
        self._progress = (done, total, note)

    def progress(self) -> tuple[int, int, str]:
        """(done, total, note) of the rollout or evaluation going on."""
        return self._progress

    def num_prompts(self) -> int:
        """Prompts in the data source."""
        return self.manager.num_prompts()

    def complete_args(self, start_rollout_id: int, num_rollout: int) -> None:
        """See `RolloutManager.complete_args`."""
        self.manager.complete_args(start_rollout_id, num_rollout)

    def generate(self, rollout_id: int) -> RolloutOutput:
        """See `RolloutManager.generate`."""
        self._progress = (0, 0, "")
        return self.manager.generate(rollout_id)

    def evaluate(self, rollout_id: int) -> EvalOutput:
        """See `RolloutManager.evaluate`."""
        self._progress = (0, 0, "")
        return self.manager.evaluate(rollout_id)

    def probe(self) -> SampleTable:
        """Responses of every engine to compare with the trainer; see `agreement.probe`."""
        return probe(self._engines, self._vocab_size, self._temperature)

    def state_dict(self) -> dict[str, Any]:
        """See `RolloutManager.state_dict`."""
        return self.manager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `RolloutManager.load_state_dict`."""
        self.manager.load_state_dict(state)

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Every engine gives back the memory of ``tags``."""
        self.manager.each_engine("release_memory", tags)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Every engine takes it again."""
        self.manager.each_engine("resume_memory", tags)

    def settle_engines(self) -> None:
        """See `RolloutManager.settle_engines`."""
        self.manager.settle_engines()

    def needs_weights(self) -> bool:
        """See `RolloutManager.needs_weights`."""
        return self.manager.needs_weights()

    def cancel(self) -> None:
        """See `RolloutManager.cancel`."""
        self.manager.cancel()

    def close(self) -> None:
        """See `RolloutManager.close`."""
        self.manager.close()
