"""From a run's arguments to its engines, of whatever kind `slimelite.engines.registry` says they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimelite.arguments import Args
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids
from slimelite.engines.protocol import Codec, Engine, EngineSetup, SyncSetup
from slimelite.engines.registry import ENGINES, ServerParts
from slimelite.registry import function

LOCAL_HOST = "127.0.0.1"


def server_parts(args: Args) -> ServerParts | None:
    """What the run's engines consist of when they are servers; None: they are built in our own processes."""
    return ENGINES[args.rollout_backend].server


def engine_setup(args: Args, index: int, host: str = LOCAL_HOST) -> EngineSetup:
    """What engine number ``index`` is built with."""
    place = args.engine_place(index)
    return EngineSetup(
        model_path=str(args.hf_checkpoint),
        device=args.device,
        seed=args.rollout_seed + index,
        host=host,
        log=Path(args.run_dir).absolute() / "logs" / f"{args.rollout_backend}_{index}.log",
        max_running_requests=args.sglang_max_running_requests,
        max_context_len=args.sglang_context_length,
        memory_share=args.sglang_mem_fraction_static,
        releases_memory=bool(args.offload_rollout),
        width=place.width,
        options={**args.sglang_overrides, **place.overrides},
    )


def build_engine(args: Args, index: int, host: str = LOCAL_HOST) -> Engine:
    """Engine number ``index`` in this process; ``host``: where its HTTP front would listen."""
    build = ENGINES[args.rollout_backend].build
    assert build is not None, "an engine that is a server has a process of its own"
    engine: Engine = function(build)(engine_setup(args, index, host), _codec(args))
    return engine


def build_server(args: Args, index: int, host: str = LOCAL_HOST) -> Any:
    """The process of server number ``index``, which listens on ``host``; it is not started yet."""
    return function(_parts(args).process)(engine_setup(args, index, host))


def connect(args: Args, server: Any, owner: Any) -> Engine:
    """The engine behind a server; ``owner`` can start it anew (None: someone else's server)."""
    engine: Engine = function(_parts(args).connect)(engine_setup(args, 0), _codec(args), server, owner)
    return engine


def external_servers(args: Args) -> list[Any]:
    """The servers that someone else runs."""
    found: list[Any] = function(_parts(args).external)(args.rollout_external_engine_addrs, str(args.hf_checkpoint))
    return found


def server_sync(args: Args, device: torch.device, host: str = LOCAL_HOST) -> Any:
    """The way of weights on ``device`` to the servers; ``host``: a name of this machine that they can reach."""
    setup = SyncSetup(
        model_path=str(args.hf_checkpoint),
        transport=str(args.update_weight_transport),
        device=device,
        host=host,
        directory=args.update_weight_disk_dir,
        keep_folders=args.update_weight_disk_keep_files,
        timeout_s=60.0 * args.distributed_timeout_minutes,
    )
    return function(_parts(args).sync)(setup)


def _parts(args: Args) -> ServerParts:
    parts = server_parts(args)
    assert parts is not None, f"the {args.rollout_backend} engine is no server"
    return parts


def _codec(args: Args) -> Codec:
    tokenizer = load_tokenizer(args.tokenizer)
    return Codec(
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        eos_token_ids=stop_token_ids(args.tokenizer, tokenizer),
    )
