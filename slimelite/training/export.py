"""A Hugging Face folder of the policy, that `from_pretrained` and any engine opens."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor

from slimelite.files import free_space
from slimelite.model_files import write_weights
from slimelite.training.model import PolicyModel
from slimelite.training.parallel import World
from slimelite.training.weights import full_weights

SHARD_BYTES = 5 * 1000**3

# what a model folder holds beside config and weights: copied as it is, so that token ids stay the same
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "chat_template*",
    "generation_config.json",
)


def save_hf(directory: Path, model: PolicyModel, world: World, tokenizer: str | None) -> None:
    """Write config, weights and tokenizer files (collective; rank 0 writes).

    The weights have the dtype that the trainer computes in and the engines sample with: what is saved is what was
    evaluated. ``tokenizer``: a folder or hub id whose tokenizer files are copied.
    """
    weights = full_weights(model, world.compute_dtype, world.device)
    if world.rank > 0:
        for _ in weights:
            pass
        return
    directory.mkdir(parents=True, exist_ok=True)
    try:
        _write_weights(directory, weights)
        config = copy.deepcopy(model.hf.config)
        config.dtype, config.architectures = world.compute_dtype, [type(model.hf).__name__]
        config.save_pretrained(directory)
        _copy_tokenizer(tokenizer, directory)
    except (SafetensorError, OSError) as error:
        for left in directory.glob("model-*.partial"):
            left.unlink()
        raise OSError(
            f"{directory}: the model cannot be written ({error}); {free_space(directory)} are free there, now that "
            "what was half written is removed: make room or give --save-hf another place"
        ) from error


def _copy_tokenizer(tokenizer: str | None, directory: Path) -> None:
    if tokenizer is None:
        return
    source = Path(tokenizer)
    if not source.is_dir():
        source = Path(snapshot_download(tokenizer, allow_patterns=list(COMPANIONS)))
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            shutil.copy(file, directory / file.name)


def _write_weights(directory: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Safetensors of at most 5 GB, written as the weights come, so that no more than one is in memory."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def write() -> None:
        shards.append(list(pending))
        write_weights(pending, directory / f"model-{len(shards):05d}.partial")
        pending.clear()

    for name, tensor in weights:
        if pending and size + tensor.nbytes > SHARD_BYTES:
            write()
            size = 0
        pending[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    files: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"model-{i:05d}.partial").replace(directory / file)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
