"""SGLang servers of a run: what ours are started with, and how the rollout side reaches each."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from transformers import AutoConfig

from slimelite.arguments import Args
from slimelite.cluster.sglang_fields import server_fields
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids
from slimelite.engines.sglang.client import ServerOwner, SglangEngine
from slimelite.engines.sglang.control import Server
from slimelite.engines.sglang.options import server_command
from slimelite.engines.sglang.server import SglangServer

# SGLang ends a request this much below its context length [tokens]
CONTEXT_MARGIN = 2


def build_server(args: Args, index: int, host: str) -> SglangServer:
    """Server number ``index`` of the run, on an address of this machine; it is not started yet."""
    config = AutoConfig.from_pretrained(str(args.hf_checkpoint)).get_text_config()
    length = args.sglang_context_length
    if length is not None:
        length = min(length + CONTEXT_MARGIN, max(config.max_position_embeddings, length))
    folder = Path(str(args.hf_checkpoint))
    # of a folder without weights the trainer makes random ones; the first sync brings them
    random = folder.is_dir() and not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]

    def command(host: str, port: int) -> list[str]:
        load_format = "dummy" if random else args.sglang_overrides.get("load_format")
        return server_command(
            server_fields(args, index, host=host, port=port, context_length=length, load_format=load_format)
        )

    return SglangServer(command, host, Path(args.run_dir).absolute() / "logs" / f"sglang_{index}.log")


def connect(args: Args, url: str, owner: ServerOwner | None) -> SglangEngine:
    """The engine behind the server at ``url``."""
    tokenizer = load_tokenizer(args.tokenizer)
    return SglangEngine(
        url,
        model_path=str(args.hf_checkpoint),
        eos_token_ids=stop_token_ids(args.tokenizer, tokenizer),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        tp_size=args.rollout_num_gpus_per_engine,
        owner=owner,
    )


def weight_target(args: Args, url: str) -> Server:
    """The server as the trainers' weight sync knows it."""
    return Server(url, args.rollout_num_gpus_per_engine)


def external_urls(args: Args) -> list[str]:
    """Base URLs of ``--rollout-external-engine-addrs``, each of a server that runs a model like ours.

    Raises:
        ValueError: one does not answer, or runs another kind of model.
    """
    ours = AutoConfig.from_pretrained(str(args.hf_checkpoint)).model_type
    urls = []
    for address in args.rollout_external_engine_addrs:
        url = (address if "://" in address else f"http://{address}").rstrip("/")
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
                info = json.load(answer)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--rollout-external-engine-addrs {address}: no SGLang server answers there ({error})"
            ) from error
        if info["model_type"] != ours:
            raise ValueError(
                f"--rollout-external-engine-addrs {address}: runs {info['model_path']}, a {info['model_type']} model; "
                f"--hf-checkpoint {args.hf_checkpoint} is {ours}"
            )
        urls.append(url)
    return urls
