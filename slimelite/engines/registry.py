"""The inference engines that there are, one record each.

Adding one is a record here, or in a file that ``--import-file`` names, and the module that the record refers to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slimelite.registry import Function, Registry


@dataclass(frozen=True)
class ServerParts:
    """What an engine that is a server of its own consists of.

    ``process``: (`EngineSetup`) -> the server's process, not started yet (`start`, `restart`, `close`, `address`).
    ``connect``: (`EngineSetup`, `Codec`, `Server`, owner or None) -> `Engine`, the client of one server.
    ``external``: (addresses, model path) -> the `Server` at each address that a user names.
    ``sync``: (`SyncSetup`) -> `WeightSink` with ``to(servers)`` and ``close``, which sends weights to them directly.
    """

    process: Function
    connect: Function
    external: Function
    sync: Function


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine.

    ``build``: (`EngineSetup`, `Codec`) -> `Engine` in the caller's process; None for a ``server``.
    ``server``: its parts, for an engine that runs as a process of its own and is reached over HTTP.
    ``repeats``: whether the same seeds give the same tokens, bit for bit; or the field of the
    ``--sglang-*`` options that makes it so.
    ``releases_memory``: whether it gives its device memory back while the trainer uses it.
    ``wide``: whether one engine may have several GPUs.
    ``package``: what has to be installed for it.
    ``check_config``: (Hugging Face config) -> None; raises ValueError for a model that it does not compute.
    ``lacking``: () -> sentences about what it would miss on the GPUs of this machine.
    """

    name: str
    build: Function | None = None
    server: ServerParts | None = None
    repeats: bool | str = False
    releases_memory: bool = True
    wide: bool = False
    package: str | None = None
    check_config: Function | None = None
    lacking: Function | None = None

    def repeats_with(self, options: Mapping[str, object]) -> bool:
        """Whether it repeats when its ``--sglang-*`` options are these."""
        return bool(options.get(self.repeats)) if isinstance(self.repeats, str) else self.repeats


ENGINES = Registry[EngineKind]("engine", "--rollout-backend")
ENGINES.add(
    EngineKind(
        "embedded",
        build="slimelite.engines.embedded.engine:build",
        repeats=True,
        check_config="slimelite.engines.embedded.model:check_config",
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
        wide=True,
        package="sglang",
        lacking="slimelite.engines.sglang.server:missing_for_kernels",
    )
)
ENGINES.add(EngineKind("vllm", build="slimelite.engines.vllm:build", releases_memory=False, package="vllm"))
