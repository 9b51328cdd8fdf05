"""SGLang servers of a run: what ours are started with, how the rollout side reaches each, and how weights get there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from transformers import AutoConfig
from transformers.utils import cached_file

from slimelite.engines.checks import weight_shapes
from slimelite.engines.protocol import Codec, EngineSetup, SyncSetup, WeightBucket
from slimelite.engines.sglang.client import ServerOwner, SglangEngine
from slimelite.engines.sglang.control import Server, ServerError
from slimelite.engines.sglang.process import ON_CPU, SglangServer, server_command
from slimelite.engines.sglang.transports import (
    CONFIG,
    DiskSink,
    GroupSink,
    HttpSink,
    IpcSink,
    ServerSink,
    WeightSyncError,
    from_all,
)
from slimelite.model_files import has_weights

# SGLang ends a request this much below its context length [tokens]
CONTEXT_MARGIN = 2


def server_fields(setup: EngineSetup, **placement: Any) -> dict[str, Any]:
    """The fields of SGLang's ServerArgs for one engine: what our flags imply, --sglang-*, what we decide.

    ``placement``: ``host``, ``port`` and what else depends on where the engine is (``base_gpu_id``, ``nnodes``,
    ``node_rank``, ``dist_init_addr``, ``load_format``, ...). None is "not given".
    """
    implied = {
        "mem_fraction_static": setup.memory_share,
        "max_running_requests": setup.max_running_requests,
        "context_length": setup.max_context_len,
        # on a GPU the trainer computes in bf16 whatever the model's config says; SGLang would take fp16 for an fp32 one
        **(ON_CPU if setup.device == "cpu" else {"dtype": "bfloat16"}),
    }
    decided = {
        "model_path": setup.model_path,
        "device": setup.device,
        "tp_size": setup.width // setup.options.get("pp_size", 1),
        "random_seed": setup.seed,
        "enable_memory_saver": setup.releases_memory,
        "skip_server_warmup": True,
    }
    fields = {**implied, **setup.options, **decided, **placement}
    return {name: value for name, value in fields.items() if value is not None}


def build_server(setup: EngineSetup) -> SglangServer:
    """The server on an address of this machine; it is not started yet."""
    config = AutoConfig.from_pretrained(setup.model_path).get_text_config()
    length = setup.max_context_len
    if length is not None:
        length = min(length + CONTEXT_MARGIN, max(config.max_position_embeddings, length))
    # of a folder without weights the trainer makes random ones; the first sync brings them
    load_format = setup.options.get("load_format") if has_weights(setup.model_path) else "dummy"

    def command(host: str, port: int) -> list[str]:
        return server_command(
            server_fields(setup, host=host, port=port, context_length=length, load_format=load_format)
        )

    return SglangServer(command, setup.host, setup.log)


def connect(setup: EngineSetup, codec: Codec, server: Server, owner: ServerOwner | None) -> SglangEngine:
    """The engine behind ``server``."""
    return SglangEngine(
        server.url,
        model_path=setup.model_path,
        eos_token_ids=codec.eos_token_ids,
        decode=codec.decode,
        tp_size=server.tp_size,
        owner=owner,
    )


def external_servers(addresses: Sequence[str], model_path: str) -> list[Server]:
    """The servers at ``--rollout-external-engine-addrs``, as wide as they say.

    Raises:
        ValueError: one does not answer, or see `check_model`.
    """
    servers = []
    for address in addresses:
        url = (address if "://" in address else f"http://{address}").rstrip("/")
        try:
            server, model = (json.load(urlopen(f"{url}/{path}", timeout=10)) for path in ("server_info", "model_info"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--rollout-external-engine-addrs {address}: no SGLang server answers there ({error})"
            ) from error
        check_model(url, model, model_path)
        servers.append(Server(url, server["tp_size"]))
    return servers


def check_model(url: str, info: Mapping[str, Any], ours: str) -> None:
    """Whether the server at ``url`` has the weights that are trained: SGLang dies of one in another shape.

    Args:
        info: what it answers to ``/model_info``.
        ours: path of the model that is trained.

    Raises:
        ValueError: it runs another model, or one that cannot be looked at from here.
    """
    path = info["model_path"]
    try:
        theirs = weight_shapes(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{url} runs {path}, which cannot be read here, so that nothing tells whether it is --hf-checkpoint "
            f"{ours}: start it with a folder that both machines see, or with a name on the Hugging Face hub"
        ) from error
    different = sorted(name for name, _ in theirs.items() ^ weight_shapes(ours).items())
    if info["model_type"] != AutoConfig.from_pretrained(ours).model_type:
        different = ["model_type"]
    if different:
        raise ValueError(
            f"{url} runs {path}, whose {different[0]} is not that of --hf-checkpoint {ours}: start it with the model "
            "that is trained"
        )


class SglangSync:
    """The `WeightSink` over the servers of a run: it keeps what is worth keeping from one update to the next."""

    def __init__(self, setup: SyncSetup) -> None:
        # through CUDA IPC each rank serves the engine on its own GPU
        self.every_rank = setup.transport == "ipc"
        self.servers: tuple[Server, ...] = ()
        self._setup = setup
        self._shapes = weight_shapes(setup.model_path)
        self._known: tuple[Server, ...] = ()
        self._sink: ServerSink | None = None

    def to(self, servers: Sequence[Server]) -> SglangSync:
        """Itself; the next update goes to ``servers``."""
        self.servers = tuple(servers)
        return self

    def begin(self, version: int) -> None:
        """Meet servers that are new or were restarted, and begin.

        Raises:
            ValueError: a server runs another model.
            WeightSyncError: a server cannot be reached, or does not join the process group.
        """
        failure: Exception | None = None
        try:
            self._meet_the_new()
        except ServerError as error:
            failure = WeightSyncError(f"weights {version} reached no engine: {error}")
        except ValueError as error:
            failure = error
        # of the ranks that talk to servers all go on, or none: the others would wait for one that did not
        for each_failure in from_all(failure) if self.every_rank else [failure]:
            if each_failure is not None:
                raise each_failure
        self._current().begin(version)

    def send(self, bucket: WeightBucket) -> None:
        """See `ServerSink.send`."""
        self._current().send(bucket)

    def end(self) -> None:
        """See `ServerSink.end`."""
        self._current().end()

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self._sink is not None:
            self._sink.close()
        self._sink, self._known = None, ()

    def _current(self) -> ServerSink:
        assert self._sink is not None, "begin comes first"
        return self._sink

    def _meet_the_new(self) -> None:
        infos = [json.loads(server.get("/model_info")) for server in self.servers]
        last = None if self._sink is None else str(self._sink.delivered)
        if self.servers == self._known and all(info["weight_version"] == last for info in infos):
            return
        self.close()
        for server, info in zip(self.servers, infos, strict=True):
            check_model(server.url, info, self._setup.model_path)
            # started without a warm-up request it has not done so yet, and every flush of the cache takes a second
            server.post("/freeze_gc")
        self._sink, self._known = self._make(self.servers), self.servers

    def _make(self, servers: Sequence[Server]) -> ServerSink:
        setup, shapes = self._setup, self._shapes
        if setup.transport == "ipc":
            return IpcSink(servers, shapes)
        if setup.transport == "nccl":
            return GroupSink(servers, shapes, setup.device, setup.host, setup.timeout_s)
        if setup.transport == "disk":
            config = Path(str(cached_file(setup.model_path, CONFIG)))
            return DiskSink(servers, shapes, Path(str(setup.directory)), config, keep=setup.keep_folders)
        return HttpSink(servers, shapes)
