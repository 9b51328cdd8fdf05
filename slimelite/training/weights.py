"""Sends the trainer's weights to the engines in buckets, and writes the weights to disk as a Hugging Face folder."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor

from slimelite.arguments import LoraArgs
from slimelite.base.files import free_space
from slimelite.data.tokenizer import copy_tokenizer
from slimelite.engines.protocol import WeightBucket, WeightSink
from slimelite.models.files import INDEX, load_config, write_weights
from slimelite.training.lora import Adapter, Weight, frozen, gathered, parts, peft_weights, save_adapter
from slimelite.training.model import PolicyModel
from slimelite.training.offload import HostMemory
from slimelite.training.parallel import World

# a function (name, whole weight) -> {name in a model's files: tensor}, such as `LanguageModel.as_filed`
Filed = Callable[[str, Tensor], Mapping[str, Tensor]]


def _as_it_is(name: str, weight: Tensor) -> Mapping[str, Tensor]:
    return {name: weight}


@torch.no_grad()
def buckets(
    weights: Iterable[tuple[str, Weight]],
    size: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory: HostMemory | None = None,
    filed: Filed = _as_it_is,
) -> Iterator[WeightBucket]:
    """Whole weights, flattened and joined into buckets (collective). A bucket is complete when it has at least ``size``
    bytes. ``dtype``, ``device``: those of the buckets; None: those of the weights. If ``dtype`` is None, weights of
    different dtypes are in different buckets. ``memory``: the `HostMemory` with offloaded weights. ``filed``: a
    function that returns the tensors of a weight, with their names in the bucket.

    A tensor is never split, because the loaders of SGLang and vLLM take whole tensors. So a bucket may exceed
    ``size`` by a part of its last tensor. Such a tensor must not start a new bucket: the larger matrices of a 32B model
    have slightly more than half of 512 MiB, and each would be sent alone.
    """
    layout: list[list[tuple[str, Weight]]] = [[]]
    for name, weight in weights:
        kind = dtype or frozen(weight).dtype
        other = dtype is None and any(frozen(w).dtype != kind for _, w in layout[-1][:1])
        if other or sum(frozen(w).numel() for _, w in layout[-1]) * kind.itemsize >= size:
            layout.append([])
        layout[-1].append((name, weight))
    for part in filter(None, layout):
        # no local variable refers to the bucket, so it can be freed before the next bucket is filled
        like = frozen(part[0][1])
        yield _fill(part, dtype or like.dtype, device or like.device, memory, filed)


@contextmanager
def shareable() -> Iterator[None]:
    """A context in which newly allocated GPU memory can be shared with another process through CUDA IPC.

    The context turns off expandable segments (``PYTORCH_CUDA_ALLOC_CONF``). To share such segments, a process needs
    the system call pidfd_getfd, which containers forbid. Besides, in torch 2.13 the process that receives such segments
    reserves new virtual addresses for every bucket (pytorch/pytorch#165685, #186213).
    """
    settings = _allocator_settings()
    if "expandable_segments:True" not in settings.replace(" ", ""):
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _allocator_settings() -> str:
    """The settings of the allocator for GPU memory. torch 2.11 does not have a function that returns them, so they are
    read from the environment."""
    if settings := getattr(torch._C, "_accelerator_getAllocatorSettings", None):
        return str(settings())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _fill(
    weights: Sequence[tuple[str, Weight]],
    dtype: torch.dtype,
    device: torch.device,
    memory: HostMemory | None,
    filed: Filed,
) -> WeightBucket:
    outlines = [filed(name, torch.empty(frozen(weight).shape, device="meta")) for name, weight in weights]
    shapes = {name: tuple(outline.shape) for part in outlines for name, outline in part.items()}
    if len(shapes) == 1 and device.type == "cpu" and not (memory and memory.away):
        # no copy: an engine in this process reads the weight directly, and for other engines the message is a copy
        return WeightBucket([*shapes], [*shapes.values()], gathered(weights[0][1], dtype, device).reshape(-1))
    with shareable():
        flat = torch.empty(sum(map(math.prod, shapes.values())), dtype=dtype, device=device)
    bucket = WeightBucket([*shapes], [*shapes.values()], flat)
    places = dict(bucket.tensors())
    for name, tensor in weights:
        with ExitStack() as stack:
            for part in parts(tensor):
                stack.enter_context(memory.present(part) if memory and memory.away else nullcontext())
            for piece, value in filed(name, gathered(tensor, dtype, device)).items():
                places[piece].copy_(value)
            del value  # so only the bucket and one gathered tensor are in memory
    return bucket


def push(
    model: PolicyModel,
    world: World,
    sink: WeightSink | None,
    version: int,
    bucket_bytes: int,
    memory: HostMemory,
    *,
    adapter_alone: bool = False,
) -> dict[str, float]:
    """Send all weights through ``sink``, in the dtype that the trainer computes in (collective). The buffers in the
    model's files are sent too, in their own dtype, because engines have them as parameters.

    Adapters are merged into the weights that they change, and the results are sent. The other weights are frozen, and
    are not sent while the engines still have them from an earlier update. ``adapter_alone``: send only the adapters, in
    one bucket, in fp32, with peft's names.

    ``sink`` is None on ranks that do not send (see `WeightSink`). Weights in ``memory`` are copied to the device one at
    a time.

    Returns:
        the metrics ``perf/update_weights_bytes`` and ``perf/update_weights_buckets``.
    """
    if sink is not None and world.rank > 0 and not sink.every_rank:
        sink = None
    # an error of the sink is raised after the last gather, because the other ranks would wait in the next gather
    failure: Exception | None = None
    merged = set() if adapter_alone else {n for n, weight in model.named_weights() if isinstance(weight, Adapter)}
    partial = False
    try:
        partial = sink is not None and sink.begin(version, merged or None)
    except Exception as error:
        failure = error
    weights, dtype, kept = model.named_weights(), world.compute_dtype, model.saved_buffers()
    filed: Filed = model.as_filed
    if adapter_alone:
        kept = {}
        weights, dtype, bucket_bytes, filed = peft_weights(model.hf), torch.float32, sys.maxsize, _as_it_is
    elif merged and world.all_reduce(torch.tensor(float(partial and world.rank == 0))):  # all ranks use rank 0's answer
        weights, kept = ((name, weight) for name, weight in weights if name in merged), {}
    sent = count = 0
    of_weights = buckets(weights, bucket_bytes, dtype, world.device, memory, filed)
    # buffers keep their dtype: with biases rounded to bf16, a router would choose other experts
    for bucket in chain(of_weights, buckets(kept.items(), bucket_bytes, None, world.device)):
        if sink is not None and failure is None:
            try:
                sink.send(bucket)
            except Exception as error:
                failure = error
        sent += bucket.flat.nbytes
        count += 1
        del bucket  # free it before the next bucket is filled
    if failure is not None:
        raise failure
    if sink is not None:
        sink.end()
    return {"perf/update_weights_bytes": float(sent), "perf/update_weights_buckets": float(count)}


SHARD_BYTES = 5 * 1000**3


def save_hf(
    directory: Path,
    model: PolicyModel,
    world: World,
    tokenizer: str | None,
    describe: Callable[[Path], None],
    adapter: Mapping[str, object] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    chats: bool = True,
) -> None:
    """Write the config, weights, tokenizer files and the model card, README.md (collective; rank 0 writes).

    ``tokenizer``: a folder or hub id whose tokenizer files are copied. ``describe``: a function that writes the model
    card. ``adapter``: write only the adapters, with this config (see `peft_config`). ``dtype``: the dtype of the
    weights, see `saved_dtype`; adapters are always fp32. ``chats``: include the chat template. Without a template,
    other programs use the model to complete text.
    """
    named: Iterable[tuple[str, Weight]] = model.named_weights() if adapter is None else peft_weights(model.hf)
    dtype = dtype if adapter is None else torch.float32
    filed = model.as_filed if adapter is None else _as_it_is
    weights = chain.from_iterable(filed(name, gathered(weight, dtype, world.device)).items() for name, weight in named)
    if world.rank > 0:
        for _ in weights:
            pass
        return
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if adapter is None:
            _write_weights(directory, model, weights, dtype)
            config = copy.deepcopy(model.hf.config)
            config.dtype, config.architectures = dtype, [type(model.hf).__name__]
            config.save_pretrained(directory)
        else:
            save_adapter(directory, {name: tensor.cpu().contiguous() for name, tensor in weights}, adapter)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, directory, chats=chats)
        describe(directory)
    except (SafetensorError, OSError) as error:
        for left in directory.glob("*.partial"):
            left.unlink()
        raise OSError(
            f"{directory}: the model cannot be written ({error}); {free_space(directory)} are free there after the "
            "incomplete files were removed: free disk space or choose another folder for --save-hf"
        ) from error


def saved_dtype(args: LoraArgs, world: World) -> torch.dtype:
    """The dtype of the weights in a saved model: ``--save-hf-dtype``, else the dtype in the config of the model that
    the run started from, else the dtype that the trainer computes in."""
    if args.save_hf_dtype is not None:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.save_hf_dtype]
    named = None if args.hf_checkpoint is None else load_config(args.hf_checkpoint).get_text_config().dtype
    return named if named in (torch.float32, torch.bfloat16, torch.float16) else world.compute_dtype


def _write_weights(
    directory: Path, model: PolicyModel, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write safetensors files of at most 5 GB. To save memory, each file is written as soon as its weights are
    gathered."""
    sizes = dict[str, Tensor]()
    for name, weight in model.named_weights():
        sizes |= model.as_filed(name, torch.empty(frozen(weight).shape, dtype=dtype, device="meta"))
    buffers = model.saved_buffers()
    sizes |= {name: buffer.to("meta") for name, buffer in buffers.items()}
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=SHARD_BYTES)
    pending: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
    for name, tensor in chain(weights, buffers.items()):
        file = plan.tensor_to_filename[name]
        pending[file][name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        if len(pending[file]) == len(plan.filename_to_tensors[file]):
            write_weights(pending[file], directory / f"{file}.partial")
            pending[file].clear()
    for file in pending:
        (directory / f"{file}.partial").replace(directory / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
