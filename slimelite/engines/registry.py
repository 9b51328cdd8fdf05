"""The available inference engines, one record each.

To add an engine, write its module and add a record here or in a file of ``--import-file``. The `EngineMemory` of a
record lists the content that is lost after `Engine.release_memory` and `Engine.resume_memory`. This list determines the
options that a server is started with, the weights that a sync may leave out, and the host memory in the plan. The
simulated servers in the tests do not read this list: they lose what a real server loses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from slimelite.base.registry import Function, Registry

# SGLang's option for speculative decoding. In an update from disk, SGLang 0.5.20 also loads the folder into the draft
# model. No field of the request prevents this (see SGLang's BaseSpecWorker.update_weights_from_disk)
DRAFTS = "speculative_algorithm"
NO_DRAFTS_BY_DISK = (
    "with --update-weight-transport disk SGLang would load the policy's weights into the draft model too; use "
    "another transport, such as nccl or http"
)


class Content(Enum):
    """A kind of tensor in an engine's device memory.

    ``WEIGHTS``: the policy's parameters, including the frozen parameters under an adapter. Buffers in the model's
    files, such as the biases of routers, belong here too, because an engine treats them as parameters. ``TABLES``:
    buffers that the engine computes itself, such as rotary tables. ``ADAPTER``: an adapter that is sent alone.
    ``DRAFT``: weights of a draft model.
    """

    WEIGHTS = "weights"
    TABLES = "tables"
    ADAPTER = "adapter"
    DRAFT = "draft"


@dataclass(frozen=True)
class EngineMemory:
    """What an engine loses when it releases its memory.

    ``lost``: the content that a release loses. All other content is available again after the memory is resumed.
    ``backups``: lost content -> the ``--sglang-*`` option that keeps a copy of it in host memory during the release.
    ``unset``: environment variables that must not be set for an engine that releases memory.
    """

    lost: frozenset[Content] = frozenset()
    backups: Mapping[Content, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    def needed(self, options: Mapping[str, object], *, adapter_alone: bool) -> dict[str, bool]:
        """The options that an engine needs if it releases its memory. Without these options, the engine would lose
        content that no weight sync restores.

        ``options``: the engine's other ``--sglang-*`` options. ``adapter_alone``: whether a sync sends only the adapter
        and no weights.
        """
        unsent = [Content.WEIGHTS] if adapter_alone else []
        unsent += [Content.DRAFT] if options.get(DRAFTS) else []
        return {self.backups[content]: True for content in unsent if content in self.lost}

    def survives(self, content: Content, options: Mapping[str, object]) -> bool:
        """Whether ``content`` survives a release, for an engine that was started with ``options``."""
        return content not in self.lost or bool(options.get(self.backups.get(content, "")))

    def on_host(self, options: Mapping[str, object], *, adapter_alone: bool) -> frozenset[Content]:
        """The content that is kept in host memory while an engine's memory is released. The content has the same size
        in host memory as on the device."""
        chosen = {**options, **self.needed(options, adapter_alone=adapter_alone)}
        return frozenset(content for content in self.lost if self.survives(content, chosen))


KEEPS_ALL = EngineMemory()


@dataclass(frozen=True)
class ServerAddress:
    """An engine that is a server. The server answers at ``url`` (``http://host:port``) and has ``tp_size`` GPUs.

    ``first_gpu``: index of the server's first GPU among the GPUs of all engines; None: the GPU after the last GPU of
    the previous server.
    """

    url: str
    tp_size: int = 1
    first_gpu: int | None = None


@dataclass(frozen=True)
class ServerParts:
    """The functions for an engine that is a separate server process.

    ``process``: (`EngineSetup`) -> a `ServerProcess` that has not started yet. ``connect``: (`EngineSetup`, `Codec`,
    `ServerAddress`, owner or None) -> `Engine`, the client of one server. ``external``: (addresses, model path) -> the
    `ServerAddress` of each of ``--rollout-external-engine-addrs``. ``sync``: (`SyncSetup`) -> a `Transport`, which
    sends weights to servers.
    """

    process: Function
    connect: Function
    external: Function
    sync: Function


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine.

    ``build``: (`EngineSetup`, `Codec`) -> `Engine` in the caller's process; None if ``server`` is given. ``server``:
    the functions of an engine that is a separate process and is reached over HTTP. ``repeats``: whether the same seeds
    give the same tokens, bit for bit; or the name of the ``--sglang-*`` option that turns this on. ``releases_memory``:
    whether the engine can release its device memory while the trainer works. ``memory``: the content that such a
    release loses. ``wide``: whether one engine may use several GPUs. ``adapters``: whether the engine can sample from a
    LoRA adapter on top of the model's weights. ``scores``: whether the engine gives log-probs of given tokens
    (`Engine.score`). ``kept``: whether the engine returns the tokens that top-p, top-k and min-p kept
    (`SamplingParams.kept`). ``restores``: whether the engine reads a checkpoint in fp8 or mxfp4 as ordinary weights, so
    that the trainer's weights can replace them. ``package``: the Python package that the engine needs.
    ``check_config``: (Hugging Face config) -> None. The function raises ValueError for a model that the engine cannot
    compute. ``lacking``: () -> one sentence for each requirement of the engine on a GPU that this machine does not
    meet.
    """

    name: str
    build: Function | None = None
    server: ServerParts | None = None
    repeats: bool | str = False
    releases_memory: bool = True
    memory: EngineMemory = KEEPS_ALL
    wide: bool = False
    adapters: bool = False
    scores: bool = False
    kept: bool = False
    restores: bool = False
    package: str | None = None
    check_config: Function | None = None
    lacking: Function | None = None

    def repeats_with(self, options: Mapping[str, object]) -> bool:
        """Whether samples are repeatable with these ``--sglang-*`` options."""
        return bool(options.get(self.repeats)) if isinstance(self.repeats, str) else self.repeats


ENGINES = Registry[EngineKind]("engine", "--rollout-backend")
ENGINES.add(
    EngineKind(
        "embedded",
        build="slimelite.engines.embedded.engine:build",
        repeats=True,
        scores=True,
        kept=True,
        restores=True,
        check_config="slimelite.engines.embedded.ways:check_config",
    )
)
ENGINES.add(
    EngineKind(
        "sglang",
        server=ServerParts(
            process="slimelite.engines.sglang.client:build_server",
            connect="slimelite.engines.sglang.client:connect",
            external="slimelite.engines.sglang.client:external_servers",
            sync="slimelite.engines.sglang.sync:build_sink",
        ),
        repeats="enable_deterministic_inference",
        memory=EngineMemory(
            lost=frozenset({Content.WEIGHTS, Content.DRAFT}),
            backups={
                Content.WEIGHTS: "enable_weights_cpu_backup",
                Content.DRAFT: "enable_draft_weights_cpu_backup",
            },
            # torch_memory_saver refuses expandable segments
            unset=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ),
        wide=True,
        adapters=True,
        scores=True,
        kept=True,
        package="sglang",
        lacking="slimelite.engines.sglang.server:missing_for_kernels",
    )
)
ENGINES.add(EngineKind("vllm", build="slimelite.contrib.vllm:build", releases_memory=False, package="vllm"))
