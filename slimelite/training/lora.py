"""LoRA adapters (arXiv:2106.09685): low-rank changes of frozen weight matrices, and their files in peft's format."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import textwrap
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from slimelite.arguments.training import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ALL_LINEAR, GROUPS, LoraArgs
from slimelite.base.files import whole as written_whole
from slimelite.base.files import write_text
from slimelite.engines.protocol import AdapterFormat
from slimelite.models.files import has_experts, write_weights
from slimelite.training.parallel import whole
from slimelite.training.quantized import FrozenLinear

# names of an adapter's parameters, the same as in peft for a linear layer
PARTS = ("lora_A", "lora_B")
PEFT_PREFIX = "base_model.model."
# Linear layers of a mixture-of-experts model that are not experts: dense layers, shared experts, routers. In
# transformers 4 the experts had these names. So peft 0.19 to 0.21.2 confuses these layers with experts: if they are
# listed as target_modules, peft drops their adapters and creates new adapters on the experts (huggingface/peft#3711).
# If they are listed as target_parameters, peft loads their adapters.
TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj")


class Adapter(nn.Module):
    """The base class of the two kinds of adapted modules. The frozen weight keeps the name that it has in the model
    without adapters. ``lora_A`` and ``lora_B`` are additional fp32 parameters. As in peft, the product B·A is 0 at the
    start.
    """

    weight: Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scaling: float
    dropout: float
    # whether the adapter's output may be added in place to the frozen weight's output. With selective recomputation it
    # may not, because the frozen weight's output is kept for the backward pass
    in_place = True
    # peft's names of the two parts in a file
    peft_parts: tuple[str, str]

    def adapt(self, rows: int, columns: int, args: LoraArgs, device: str | None) -> None:
        """Add the trainable parameters ``lora_A`` [rank, ``columns``] and ``lora_B`` [``rows``, rank] to the module.

        ``device``: the device of these parameters; None: the weight's device.
        """
        self.scaling, self.dropout = args.lora_scaling, args.lora_dropout
        device = device or str(self.weight.device)
        self.lora_A = nn.Parameter(torch.empty(args.lora_rank, columns, device=device))
        self.lora_B = nn.Parameter(torch.zeros(rows, args.lora_rank, device=device))

    def parts(self) -> list[Tensor]:
        """The frozen weight, A and B. These tensors may be sharded."""
        return [self.weight, self.lora_A, self.lora_B]

    @abstractmethod
    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """``weight`` plus the adapter's change, in fp32 or float64. ``a``, ``b``: the whole A and B, not shards of
        them."""


class LoraLinear(Adapter, FrozenLinear):
    """Computes W x + scaling · B A dropout(x). This module replaces the layer ``base``, and uses the weight and bias of
    ``base``."""

    peft_parts = ("lora_A.weight", "lora_B.weight")

    def __init__(self, base: nn.Linear, args: LoraArgs, device: str | None = None) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.adapt(base.out_features, base.in_features, args, device)
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] the layer's output for ``x`` [..., in]."""
        # there is no dropout in passes without gradient (such as old log-probs), because engines have no dropout either
        kept = F.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x
        low_rank = F.linear(F.linear(kept, self.lora_A), self.lora_B)
        out = self.product(x)
        in_place = self.in_place and not self.is_quantized  # bitsandbytes returns a view
        return (out.add_ if in_place else out.add)(low_rank, alpha=self.scaling)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """[out, in] the merged weight; see `Adapter.merged`."""
        return torch.add(weight, b @ a, alpha=self.scaling)


class LoraEmbedding(Adapter, nn.Embedding):
    """Computes E[i] + scaling · B A[:, i]. This module replaces the layer ``base``, and uses the weight of ``base``. As
    in peft, there is no dropout, and A (not B) starts at 0.
    """

    peft_parts = ("lora_embedding_A", "lora_embedding_B")

    def __init__(self, base: nn.Embedding, args: LoraArgs, device: str | None = None) -> None:
        super().__init__(base.num_embeddings, base.embedding_dim, base.padding_idx, device="meta")
        self.weight = base.weight
        self.adapt(base.embedding_dim, base.num_embeddings, args, device)
        nn.init.zeros_(self.lora_A)
        nn.init.normal_(self.lora_B)

    def forward(self, input: Tensor) -> Tensor:
        """[..., d] the embeddings of the token ids ``input`` [...]."""
        low_rank = F.embedding(input, self.lora_A.T) @ self.lora_B.T
        return super().forward(input).add(low_rank, alpha=self.scaling)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """[V, d] the merged weight; see `Adapter.merged`."""
        return torch.add(weight, (b @ a).T, alpha=self.scaling)


# a weight of the Hugging Face model. It is a parameter (sharded or not), or the module that computes the weight from an
# adapter, from 4 bits, or from both
Weight = Tensor | Adapter | FrozenLinear


def frozen(weight: Weight) -> Tensor:
    """The parameter of the model, without the adapter. The result has the weight's shape, dtype and device. (For a
    weight in 4 bits, it has only the weight's shape.)
    """
    if isinstance(weight, FrozenLinear) and weight.is_quantized:
        return weight.outline
    return weight if isinstance(weight, Tensor) else weight.weight


def parts(weight: Weight) -> list[Tensor]:
    """The parameters from which a weight is computed. These parameters may be sharded."""
    if isinstance(weight, Tensor):
        return [weight]
    return weight.parts() if isinstance(weight, Adapter) else [weight.weight]


@torch.no_grad()
def gathered(weight: Weight, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """The whole weight in ``dtype``, with the adapter merged into it (collective). ``device``: the device of the
    result; None: the weight's device.

    The result may share memory with the parameter. Shards are cast before they are gathered, because bf16 halves the
    traffic between ranks. A merged weight is always computed in fp32 from the frozen weight, and is rounded once. So
    the rounding errors of several weight updates do not add up.
    """
    if isinstance(weight, Tensor):
        return whole(weight.detach().to(device=device, dtype=dtype))
    base, *factors = (whole(part.detach().to(device=device)) for part in parts(weight))
    if isinstance(weight, FrozenLinear) and weight.is_quantized:
        base = weight.dequantized(base, torch.float32)
    return (weight.merged(base.to(factors[0].dtype), *factors) if isinstance(weight, Adapter) else base).to(dtype)


def head_weight(head: nn.Module) -> Tensor:
    """The weight [V, d] of an LM head. If the head has an adapter, the result includes it and keeps its gradient."""
    if not isinstance(head, Adapter):
        assert isinstance(head.weight, Tensor)
        return head.weight
    return head.merged(*head.parts())


def add_adapters(hf: PreTrainedModel, args: LoraArgs, seed: int, device: str | None = None) -> None:
    """Freeze ``hf``, and add adapters to the modules that ``args`` name. The adapters are read from
    ``--lora-adapter-path``. Without this flag, the adapters are new, with random values from ``seed``.

    ``device``: the device of the adapters; None: the device of the weights.

    Raises:
        ValueError: a module with a given name does not exist or cannot have an adapter, or the saved adapter belongs to
            another model.
    """
    hf.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in _targets(hf, args):
            base = hf.get_submodule(name)
            kind = LoraLinear if isinstance(base, nn.Linear) else LoraEmbedding
            hf.set_submodule(name, kind(base, args, device))
    if args.lora_adapter_path is not None:
        _load(hf, Path(args.lora_adapter_path))


def quantize_frozen(hf: PreTrainedModel) -> None:
    """Quantize the frozen linear layers of ``hf`` to 4 bits, with or without an adapter; see `check_quantizable`."""
    for name, base in _quantizable(hf):
        module = base
        if not isinstance(module, FrozenLinear):
            module = FrozenLinear(base.in_features, base.out_features, False, device="meta")
            module.weight, module.bias = base.weight, base.bias
            hf.set_submodule(name, module)
        module.quantize()


def check_quantizable(hf: PreTrainedModel) -> None:
    """Raise ValueError if ``--load-in-4bit`` would not change most of ``hf``, or if bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ValueError("--load-in-4bit needs the package bitsandbytes: pip install -e '.[qlora]'")
    kind, layers = hf.config.model_type, sum(module.weight.numel() for _, module in _quantizable(hf))
    if has_experts(hf):
        raise ValueError(
            f"--load-in-4bit: the experts of {kind} are fused weights, which cannot be quantized, so the flag would "
            "save little memory; leave the flag out"
        )
    outer = {id(_weight(module)): _weight(module).numel() for module in _outer(hf)}
    if layers < (sum(parameter.numel() for parameter in hf.parameters()) - sum(outer.values())) / 2:
        raise ValueError(
            f"--load-in-4bit: most layers of {kind} are not torch.nn.Linear, the only class that can be quantized; "
            "leave the flag out"
        )


def _quantizable(hf: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """(name, module) of the linear layers that can be quantized. They are between embedding and LM head, and their rows
    have an even length, because a byte contains two neighbouring numbers of a row."""
    able, outer = _able(hf), _outer(hf)
    return [
        (name, module)
        for name, module in hf.named_modules()
        if (name in able or isinstance(module, LoraLinear))
        and isinstance(module, nn.Linear)
        and module not in outer
        and module.in_features % 2 == 0
    ]


def _outer(hf: PreTrainedModel) -> list[nn.Module]:
    """The embedding and the LM head."""
    return [hf.get_input_embeddings(), hf.get_output_embeddings()]


def check_ranks(hf: PreTrainedModel, args: LoraArgs) -> None:
    """Raise ValueError if the rank of the adapters exceeds the rank of every matrix that gets an adapter."""
    highest = max(min(_weight(hf.get_submodule(name)).shape) for name in _targets(hf, args))
    for option, rank in (("--lora-rank", args.lora_rank), ("--critic-lora-rank", args.critic_lora_rank)):
        if rank > highest:
            raise ValueError(
                f"{option} {rank}: the matrices that get an adapter have at most rank {highest}, so a higher rank "
                "only adds parameters; 8 to 64 is usual"
            )


def _targets(hf: PreTrainedModel, args: LoraArgs) -> list[str]:
    """The names of the modules that get an adapter."""
    head = hf.get_output_embeddings()
    able = _able(hf)
    linear = [name for name, module in able.items() if isinstance(module, nn.Linear) and module is not head]

    def named(wanted: tuple[str, ...], what: str) -> set[str]:
        names: set[str] = set()
        for word in wanted:
            fits = linear if word == ALL_LINEAR else []
            for each in GROUPS.get(word, (word,)):
                fits = fits + [name for name in able if _is_called(name, each)]
            if not fits:
                raise ValueError(f"{what} {word}: {_why_not(hf, word, able)}")
            names.update(fits)
        return names

    chosen = named(args.lora_targets, "--lora-target-modules") - named(args.lora_excluded, "--lora-exclude-modules")
    outer = [name for name in chosen if able[name] in (head, hf.get_input_embeddings())]
    if outer and head.weight is hf.get_input_embeddings().weight:
        raise ValueError(
            f"--lora-target-modules {outer[0].rpartition('.')[2]}: embedding and LM head of this model share one "
            "weight, and an adapter on one of them would make them differ; leave this module out"
        )
    if not chosen:
        raise ValueError("--lora-exclude-modules excludes all modules that would get an adapter; exclude fewer")
    return [name for name in able if name in chosen]


def _able(hf: nn.Module) -> dict[str, nn.Module]:
    """The modules that can have an adapter, by name."""
    read = {kind: _read_weights(kind) for kind in {type(module) for module in hf.modules()}}
    # not subclasses, because they may compute something else. An example is Gemma's scaled embedding
    return {
        name: module
        for name, module in hf.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
        and last_name(name) not in read[type(hf.get_submodule(name.rpartition(".")[0]))]
    }


LOOKS = ("dtype", "device", "shape")


def _read_weights(kind: type[nn.Module]) -> frozenset[str]:
    """The names of modules whose weights a class ``kind`` reads without calling the modules. Mamba does this: it passes
    weights to its kernels. An adapter on such a module would have no effect, and there would be no error.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # a class without a source file
        return frozenset()
    names = set()
    for node in ast.walk(tree):
        # reads of the dtype, device or shape do not count. Slices do not count either: Bloom takes them only to imitate
        # the rounding of the program that trained it
        if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr in LOOKS):
            continue
        for part in ast.iter_child_nodes(node):
            match part:
                case ast.Attribute(attr="weight", value=ast.Attribute(attr=name, value=ast.Name(id="self"))):
                    names.add(name)
    return frozenset(names)


def _is_called(name: str, word: str) -> bool:
    """Whether ``word`` refers to the module ``name``: it is the last part of the name, or the whole name."""
    return name == word or name.endswith(f".{word}")


def _why_not(hf: PreTrainedModel, word: str, able: Mapping[str, nn.Module]) -> str:
    """A message why the modules that ``word`` names cannot have an adapter."""
    kind = hf.config.model_type
    if has_experts(hf) and any(word in name.split(".") for name, p in hf.named_parameters() if p.ndim > 2):
        return (
            f"the experts of {kind} are one fused weight, which cannot have an adapter; {ALL_LINEAR} leaves the "
            "experts frozen and adapts the other layers"
        )
    for name, module in hf.named_modules():
        if name in able or getattr(module, "weight", None) is None or _weight(module).ndim < 2:
            continue
        if _is_called(name, word) or (word == ALL_LINEAR and not isinstance(module, nn.Embedding)):
            if type(module) in (nn.Linear, nn.Embedding):
                return f"{kind} uses the module's weight without calling the module, so an adapter would change nothing"
            return (
                f"in {kind} it is a {type(module).__name__}; only torch.nn.Linear and torch.nn.Embedding can have "
                "adapters"
            )
    there = sorted({last_name(name) for name in able})
    near = difflib.get_close_matches(word, there, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*there, ALL_LINEAR])}"
    return f"no module of {kind} has this name; {hint}"


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """(name, module) of each adapted module."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapter))


def last_name(module: str) -> str:
    """The last part of a module's name: ``q_proj`` for ``model.layers.0.self_attn.q_proj``."""
    return module.rpartition(".")[2]


def peft_weights(hf: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters A and B of every adapter, with their names in peft's files."""
    for name, module in adapters(hf):
        for part, suffix in zip(PARTS, module.peft_parts, strict=True):
            yield f"{PEFT_PREFIX}{name}.{suffix}", getattr(module, part)


def check_readable(hf: PreTrainedModel) -> None:
    """Raise ValueError if peft would not find the adapters of ``hf`` in their file. When peft reads a file, it renames
    the weights, just as transformers renames weights of an older format.
    """
    renamings = [change for change in get_model_conversion_mapping(hf) if isinstance(change, WeightRenaming)]
    for name, _ in adapters(hf):
        if rename_source_key(f"{name}.weight", renamings, [])[0] != f"{name}.weight":
            raise ValueError(
                f"peft would not find the adapter of {name} in the file of --save-hf, because transformers renames "
                f"this module in files of {hf.config.model_type}; add --lora-merge, or leave the module out of "
                "--lora-target-modules"
            )


def peft_config(hf: nn.Module, args: LoraArgs, base: str | None) -> dict[str, object]:
    """The content of peft's ``adapter_config.json`` for the adapters of ``hf``. It lists a module with an adapter by
    the last part of its name, or by its whole name if a module without an adapter has the same last part. In a mixture
    of experts, modules of `TAKEN_FOR_EXPERTS` are under target_parameters instead of target_modules.
    """
    adapted = {name for name, _ in adapters(hf)}
    ambiguous = {last_name(name) for name, _ in hf.named_modules() if name not in adapted}
    mixture = has_experts(hf)
    weights = sorted(name for name in adapted if mixture and last_name(name) in TAKEN_FOR_EXPERTS)
    modules = {name if last_name(name) in ambiguous else last_name(name) for name in adapted.difference(weights)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # the absolute path of a local folder, so peft finds it from any folder; a name on the hub is not changed
        "base_model_name_or_path": str(Path(base).resolve()) if base and Path(base).is_dir() else base,
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "lora_dropout": 0.0 if weights else args.lora_dropout,  # peft refuses dropout with target_parameters
        "use_rslora": args.lora_type == "rslora",
        "target_modules": sorted(modules),
        "target_parameters": [f"{name}.weight" for name in weights] or None,
        "bias": "none",
        "inference_mode": True,
    }


def adapter_format(hf: nn.Module, args: LoraArgs, base: str | None) -> AdapterFormat:
    """The description of the adapters of ``hf`` for engines. Engines always scale by ``lora_alpha`` / rank. So with
    ``--lora-type rslora``, the result has another ``lora_alpha``, with which engines scale like the trainer. Engines
    identify modules by the last part of their names.
    """
    scaled = {"lora_alpha": args.lora_scaling * args.lora_rank, "use_rslora": False}
    modules = sorted({last_name(name) for name, _ in adapters(hf)})
    config = peft_config(hf, args, base) | scaled | {"target_modules": modules, "target_parameters": None}
    return AdapterFormat(config, {name: tuple(part.shape) for name, part in peft_weights(hf)})


def save_adapter(directory: Path, weights: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Write an adapter that peft can load. ``weights``: by their names in peft, see `peft_weights`."""
    with written_whole(directory / ADAPTER_WEIGHTS) as partial:
        write_weights(weights, partial)
    write_text(directory / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def _load(hf: PreTrainedModel, folder: Path) -> None:
    file = folder / ADAPTER_WEIGHTS
    try:
        saved = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read ({error})") from error
    if broken := [name for name, value in saved.items() if not value.isfinite().all()]:
        raise ValueError(f"{min(broken)} in {file} contains NaN or infinity; use an earlier adapter")
    mine = dict(peft_weights(hf))
    for problem, names in (("lacks", mine.keys() - saved.keys()), ("has", saved.keys() - mine.keys())):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"the adapter in {file} {problem} {min(names)}{more}, so it does not fit this model and its "
                f"{ADAPTER_CONFIG}: it belongs to another model, or is damaged"
            )
    for name, parameter in mine.items():
        if parameter.shape != saved[name].shape:
            raise ValueError(
                f"{name} is {list(saved[name].shape)} in {file} and {list(parameter.shape)} in this model: the "
                "adapter belongs to another model"
            )
        if not parameter.is_meta:
            parameter.copy_(saved[name])
