"""What is left in an engine's memory after `Engine.release_memory` and `Engine.resume_memory`.

Each engine has one `EngineMemory` in its record (`slimelite.engines.registry`). The options that a server is started
with, what a weight sync may leave out and the host memory in the plan follow from it. The servers of the tests lose
what a real one loses, whatever the record says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# SGLang's option for speculative decoding. 0.5.20 loads the folder of an update from disk into the draft model as well,
# and no field of the request prevents it (its BaseSpecWorker.update_weights_from_disk)
DRAFTS = "speculative_algorithm"
NO_DRAFTS_BY_DISK = (
    "with --update-weight-transport disk SGLang would load the policy's weights into the draft model too; take another "
    "transport, such as nccl or http"
)


class Content(Enum):
    """A kind of tensor in an engine's device memory.

    ``WEIGHTS``: the policy's parameters, the frozen ones under an adapter too, and buffers of the model's file such as
    the biases of routers, which are parameters of an engine. ``TABLES``: buffers that the engine computes itself, such
    as rotary tables. ``ADAPTER``: an adapter that is sent by itself. ``DRAFT``: weights of a draft model.
    """

    WEIGHTS = "weights"
    TABLES = "tables"
    ADAPTER = "adapter"
    DRAFT = "draft"


@dataclass(frozen=True)
class EngineMemory:
    """What a release leaves.

    ``lost``: what is gone; all else is there again after the release. ``backups``: what is lost -> the ``--sglang-*``
    option that has it copied to host memory for as long as it is released. ``unset``: variables of the environment that
    an engine which releases memory does not get.
    """

    lost: frozenset[Content] = frozenset()
    backups: Mapping[Content, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def needed(self, options: Mapping[str, object], *, adapter_alone: bool) -> dict[str, bool]:
        """The options without which an engine that releases its memory would lose what no weight sync brings again.

        ``options``: its other ``--sglang-*`` options; ``adapter_alone``: a sync sends the adapter and no weights.
        """
        unsent = [Content.WEIGHTS] if adapter_alone else []
        unsent += [Content.DRAFT] if options.get(DRAFTS) else []
        return {self.backups[content]: True for content in unsent if content in self.lost}

    def survives(self, content: Content, options: Mapping[str, object]) -> bool:
        """Whether ``content`` outlives a release of an engine that was started with ``options``."""
        return content not in self.lost or bool(options.get(self.backups.get(content, "")))

    def on_host(self, options: Mapping[str, object], *, adapter_alone: bool) -> frozenset[Content]:
        """What takes host memory, as much as on the device, while the memory of an engine is released."""
        chosen = {**options, **self.needed(options, adapter_alone=adapter_alone)}
        return frozenset(content for content in self.lost if self.survives(content, chosen))


KEEPS_ALL = EngineMemory()
