"""Makes whole models from adapters and from checkpoints of ``--save``."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from slimelite.arguments.training import ADAPTER_CONFIG, LoraArgs, read_adapter
from slimelite.data.tokenizer import COMPANIONS
from slimelite.models.checkpoints import REMEDY, read_state
from slimelite.models.files import has_weights
from slimelite.training.checkpoint import ADAPTER, CheckpointReader
from slimelite.training.loading import load_model, read_config
from slimelite.training.lora import PARTS, adapters, add_adapters, gathered


@torch.no_grad()
def write_merged(source: Path, base: str, folder: Path, dtype: str) -> None:
    """Write the model at ``base`` with the weights of ``source`` as a Hugging Face folder.

    Args:
        source: a folder with an adapter in peft's format, or a checkpoint of ``--save``.
        base: Hugging Face folder or hub id.
        dtype: the dtype of the weights in ``folder``, "float32" or "bfloat16". The merge is computed in fp32.

    Raises:
        ValueError: there is no model at ``base``, or ``source`` is damaged or belongs to another model.
    """
    adapter = (source / ADAPTER_CONFIG).is_file()
    try:
        config = read_config(base)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{source} belongs to the base model {base}, which does not exist: name the base with --base ({why})"
        ) from error
    if adapter and not has_weights(base):
        raise ValueError(f"{base} has no weights that the adapter in {source} could change")
    hf = load_model(base, config, seed=0, attention="eager", empty=False)
    if adapter:
        add_adapters(hf, LoraArgs(lora_adapter_path=str(source), **read_adapter(str(source))), seed=0)
    else:
        try:
            _read_checkpoint(source, hf, base)
        except ValueError as error:  # the message may advise how to resume a run
            raise ValueError(str(error).replace(REMEDY, "name the folder of another checkpoint")) from error
    for _, module in adapters(hf):
        module.weight.data = gathered(module, torch.float32, None)
        for part in PARTS:
            delattr(module, part)
    hf.to(getattr(torch, dtype)).save_pretrained(folder)
    copy_companions(source, base, folder)


def copy_companions(source: Path, base: str, folder: Path) -> None:
    """Copy the files beside the weights, such as those of the tokenizer, into ``folder``. See `write_merged`."""
    companions = Path(base) if Path(base).is_dir() else Path(snapshot_download(base, allow_patterns=list(COMPANIONS)))
    for place in (companions, source):  # an adapter may have a tokenizer of its own
        for file in {file for pattern in COMPANIONS for file in place.glob(pattern)}:
            shutil.copy(file, folder / file.name)


def _read_checkpoint(source: Path, hf: PreTrainedModel, base: str) -> None:
    """Load a checkpoint into ``hf``. If the checkpoint has adapters, the adapters are added to ``hf`` first."""
    reader = CheckpointReader(source)
    saved = {name.removeprefix("model.") for name in reader.tensors if name.startswith("model.")}
    if lora := read_state(source).get(ADAPTER):
        targets = tuple(sorted(name.removesuffix(".lora_A") for name in saved if name.endswith(".lora_A")))
        # the saved scaling already includes the effect of --lora-type on rank and alpha
        flags = {"lora_rank": lora["rank"], "lora_alpha": lora["scaling"] * lora["rank"], "lora_targets": targets}
        add_adapters(hf, LoraArgs(**flags), seed=0)
    trained: dict[str, Tensor] = {name: p for name, p in hf.named_parameters() if p.requires_grad}
    other = {name for name in saved & trained.keys() if reader.tensors[f"model.{name}"].size != trained[name].shape}
    if odd := (saved ^ trained.keys()) | other:
        what = "has another shape" if min(odd) in other else "is missing in one of them"
        remedy = "name the checkpoint's model with --base"
        raise ValueError(f"{source} is not a checkpoint of {base}: {min(odd)} {what}; {remedy}")
    with warnings.catch_warnings():  # torch warns that there is no process group
        warnings.simplefilter("ignore", UserWarning)
        reader.load({"model": trained})
