"""SGLang servers of a run: what ours are started with, and how the rollout side reaches each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from transformers import AutoConfig

from slimelite.arguments import Args
from slimelite.cluster.sglang_fields import server_fields
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids
from slimelite.engines.checks import weight_shapes
from slimelite.engines.sglang.client import ServerOwner, SglangEngine
from slimelite.engines.sglang.control import Server
from slimelite.engines.sglang.process import SglangServer, server_command
from slimelite.model_files import has_weights

# SGLang ends a request this much below its context length [tokens]
CONTEXT_MARGIN = 2


def build_server(args: Args, index: int, host: str) -> SglangServer:
    """Server number ``index`` of the run, on an address of this machine; it is not started yet."""
    config = AutoConfig.from_pretrained(str(args.hf_checkpoint)).get_text_config()
    length = args.sglang_context_length
    if length is not None:
        length = min(length + CONTEXT_MARGIN, max(config.max_position_embeddings, length))
    # of a folder without weights the trainer makes random ones; the first sync brings them
    random = not has_weights(str(args.hf_checkpoint))

    def command(host: str, port: int) -> list[str]:
        load_format = "dummy" if random else args.sglang_overrides.get("load_format")
        return server_command(
            server_fields(args, index, host=host, port=port, context_length=length, load_format=load_format)
        )

    return SglangServer(command, host, Path(args.run_dir).absolute() / "logs" / f"sglang_{index}.log")


def connect(args: Args, server: Server, owner: ServerOwner | None) -> SglangEngine:
    """The engine behind ``server``."""
    tokenizer = load_tokenizer(args.tokenizer)
    return SglangEngine(
        server.url,
        model_path=str(args.hf_checkpoint),
        eos_token_ids=stop_token_ids(args.tokenizer, tokenizer),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        tp_size=server.tp_size,
        owner=owner,
    )


def external_servers(args: Args) -> list[Server]:
    """The servers at ``--rollout-external-engine-addrs``, as wide as they say.

    Raises:
        ValueError: one does not answer, or see `check_model`.
    """
    servers = []
    for address in args.rollout_external_engine_addrs:
        url = (address if "://" in address else f"http://{address}").rstrip("/")
        try:
            server, model = (json.load(urlopen(f"{url}/{path}", timeout=10)) for path in ("server_info", "model_info"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--rollout-external-engine-addrs {address}: no SGLang server answers there ({error})"
            ) from error
        check_model(url, model, args)
        servers.append(Server(url, server["tp_size"]))
    return servers


def check_model(url: str, info: Mapping[str, Any], args: Args) -> None:
    """Whether the server at ``url`` has the weights that are trained: SGLang dies of one in another shape.

    Args:
        info: what it answers to ``/model_info``.

    Raises:
        ValueError: it runs another model, or one that cannot be looked at from here.
    """
    path, ours = info["model_path"], str(args.hf_checkpoint)
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
