"""Checks of a Hugging Face folder: a model can be built from its config, and its weights are complete and fit the
model.

If a weight is missing, transformers only prints a warning and keeps random values. So slimelite checks the weights
before it loads them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from slimelite.arguments.model import ArchitectureArgs
from slimelite.models.families import EXPERTS, FAMILIES, family_of, is_true, text_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from slimelite.arguments import Args
    from slimelite.models.sources import Source

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# files that transformers opens: the first that exists
ENTRIES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
# other files that look like parts of a model
PARTS = ("*.safetensors", "pytorch_model*.bin")
# assumed size of a model on the hub [bytes]
UNKNOWN_BYTES = 150 * 10**9
REMEDY = "copy or save the model again"
# config attribute that transforms the logits after hidden·weightᵀ -> the value that has no effect
LOGIT_TRANSFORMS: dict[str, float | None] = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}
# quantization methods whose checkpoints transformers can convert to ordinary weights, on CPUs too
RESTORED = ("fp8", "mxfp4")
# config attributes with the cap of the logits; their names depend on the family
CAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
# common activations of gated MLPs in transformers
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
# `from_pretrained` with ``output_loading_info``, which returns (model, info)
Loader = Callable[..., "tuple[PreTrainedModel, Any]"]


def logit_transform(config: PretrainedConfig) -> tuple[float, float | None]:
    """(factor, cap): logits = cap·tanh(factor·hidden·weightᵀ / cap). If cap is None, the logits are not capped."""
    text = config.get_text_config()
    scale, divisor, multiplier = (
        getattr(text, name, None) or 1.0 for name in ("logit_scale", "logits_scaling", "lm_head_multiplier")
    )
    caps = (getattr(text, name, None) for name in CAPS)
    return multiplier * scale / divisor, next(filter(None, caps), None)


def load_config(path: str) -> PretrainedConfig:
    """The config of the model at ``path`` as transformers reads it, but without the implementations of attention and
    experts that it names.

    slimelite selects these implementations itself, because a config could name any implementation, even a kernel on
    the hub (foreign code).

    Raises:
        OSError: there is no model at ``path``.
        ValueError: the config is damaged, or needs Python code from the model's folder.
    """
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name in ("_attn_implementation", "_experts_implementation"):
        if hasattr(config, name):
            setattr(config, name, None)
    return config


def restore_weights(config: PretrainedConfig) -> str:
    """Let transformers convert the weights of a quantized checkpoint to ordinary weights when it reads them. Returns
    the name of the quantization method if transformers cannot convert these weights, else ""."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return ""
    if not isinstance(quantized, dict) or quantized.get("quant_method") not in RESTORED:
        return str(quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method)
    quantized["dequantize"] = True
    return ""


def has_weights(path: str | Path) -> bool:
    """Whether ``path``, a folder or hub id, has weights. A folder may have only a config, from which a new model is
    made."""
    folder = Path(path)
    if not folder.is_dir():
        return True  # a hub id
    return any((folder / name).is_file() for name in ENTRIES) or any(any(folder.glob(part)) for part in PARTS)


def weight_bytes(path: str) -> int:
    """The size of the weight files at ``path`` [bytes]. For a hub id, whose files may not be downloaded yet, the result
    is `UNKNOWN_BYTES`."""
    folder = Path(path)
    if not folder.is_dir():
        return UNKNOWN_BYTES
    return sum(file.stat().st_size for part in PARTS for file in folder.glob(part))


def hub_folder(name: str) -> str | None:
    """The folder of the hub's cache with the safetensors files of the model ``name``. Missing files are downloaded.

    The result is None if the model has no safetensors files, or if the hub cannot be reached.
    """
    from transformers.utils import cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    try:
        entry = cached_file(name, WHOLE, _raise_exceptions_for_missing_entries=False)
        if entry is None:
            entry = cached_file(name, INDEX)
            get_checkpoint_shard_files(name, entry)
    except (OSError, ValueError):
        return None
    return str(Path(entry).parent)


def write_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write ``weights`` as a safetensors file with the usual file mode (umask). By default, the safetensors library
    would make the file private."""
    from safetensors.torch import save_file

    file.unlink(missing_ok=True)
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(weights), file, metadata={"format": "pt"})
    file.chmod(mode)


def has_experts(hf: PreTrainedModel) -> bool:
    """Whether the model is a mixture of experts. In such a model, a token uses only some of the weights."""
    config = hf.config.get_text_config()
    return any(getattr(config, field, None) for field in EXPERTS)


def saved_buffers(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a model's files contain, such as the biases of routers, by transformers' names. Parameters are
    not included."""
    saved = hf.state_dict().keys()
    return {name: buffer for name, buffer in hf.named_buffers() if name in saved}


def as_filed(hf: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All ``weights`` of ``hf`` by their names in a model's files. Engines use the same names. The results are views if
    possible.

    In transformers, all experts of a layer are one weight. Files have a matrix for each expert.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(hf, weights)) if has_experts(hf) else weights


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of each weight, from the headers of the safetensors files; None if the weights have an older
    format.

    Raises:
        ValueError: a file is missing, empty, cut short or not a safetensors file. The message names the file.
    """
    entry = _entry(folder)
    if entry is None:
        names = sorted(file.name for part in PARTS for file in folder.glob(part))
        raise ValueError(f"{folder} contains {_some(names) or 'no weights'}, but neither {WHOLE} nor {INDEX}: {REMEDY}")
    if entry not in (WHOLE, INDEX):
        return None
    return {name: shape for file in _safetensors(folder) for name, shape in _header(file).items()}


def _entry(folder: Path) -> str | None:
    """The file that transformers opens; None if there is no such file."""
    return next((name for name in ENTRIES if (folder / name).is_file()), None)


def _safetensors(folder: Path) -> list[Path]:
    """The safetensors files of a model. Their headers are not read.

    Raises:
        ValueError: the index is damaged, or names a file that is missing.
    """
    if _entry(folder) == WHOLE:
        return [folder / WHOLE]
    try:
        files = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is not an index of weights ({error!r:.100}): {REMEDY}") from error
    shards = sorted({str(file) for file in files.values()})
    if missing := [file for file in shards if not (folder / file).is_file()]:
        raise ValueError(f"{folder / INDEX} names {_some(missing)}, but this folder does not contain them: {REMEDY}")
    return [folder / file for file in shards]


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights in a safetensors file. The safetensors library compares the header with the file's
    size."""
    file.open("rb").close()  # raises PermissionError; the library's message would say that the file does not exist
    try:
        with safe_open(file, "np") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        size = file.stat().st_size
        what = f"with {size:,} bytes is cut short or not a safetensors file ({error})" if size else "is empty"
        raise ValueError(f"{file} {what}: {REMEDY}") from error


def check_weights(path: str, empty: PreTrainedModel, *, unread: Iterable[str] = ()) -> None:
    """Check that the weights at ``path`` fit the model ``empty``. Only the headers of the files are read.

    ``unread``: see `load_weights`.

    Raises:
        ValueError: see `weight_shapes` and `load_weights`.
    """
    import torch

    folder = Path(path)
    shapes = weight_shapes(folder) if folder.is_dir() and has_weights(folder) else None
    if shapes is not None:
        _match(path, empty, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, unread)


def weight_sources(path: str, empty: PreTrainedModel, *, unread: Iterable[str] = ()) -> dict[str, Source] | None:
    """Where the weights and saved buffers of the model ``empty`` are in the files at ``path``, by name.

    The weights named in ``unread`` may be missing. The result is None if the weights cannot be read in parts: the files
    have another format, the model is quantized, or ``path`` is not a folder.

    Raises:
        ValueError: see `check_weights`.
    """
    from slimelite.models.sources import Recorder, stored

    folder = Path(path)
    if not folder.is_dir() or getattr(empty.config, "quantization_config", None) or not has_weights(folder):
        return None
    if weight_shapes(folder) is None:
        return None
    try:
        recorder = Recorder(stored(_safetensors(folder)))
    except KeyError:
        return None
    with recorder:
        model = _match(path, empty, recorder.tensors(), unread)
    tensors = dict(model.named_parameters()) | saved_buffers(model)
    sources = {name: recorder.source(tensor) for name, tensor in tensors.items()}
    known = {name: source for name, source in sources.items() if source is not None}
    return known if known.keys() | set(unread) >= sources.keys() else None


def _match(path: str, empty: PreTrainedModel, tensors: Mapping[str, Tensor], unread: Iterable[str]) -> PreTrainedModel:
    """The model ``empty`` with ``tensors``, which have names from the files but no data. transformers matches these
    names with the model's weights."""
    import torch

    options = {"config": copy.deepcopy(empty.config), "state_dict": tensors, "device_map": "meta"}
    load = partial(type(empty).from_pretrained, None, dtype=torch.float32, **options)
    return _load(path, unread, load, bar=False)  # no progress bar: no weights are loaded here


def load_weights(
    kind: type[Any], path: str, config: PretrainedConfig, *, unread: Iterable[str] = (), **options: Any
) -> PreTrainedModel:
    """Call ``from_pretrained`` of ``kind``, an auto class of transformers. If a weight would keep random values, raise
    an error.

    Args:
        path: a folder with weights, or a hub id.
        unread: weights that may be missing, because the caller replaces them.

    Raises:
        ValueError: a weight is missing or has another shape, or a file cannot be read.
    """
    if Path(path).is_dir():
        weight_shapes(Path(path))  # raises an error that names a damaged file
    load = partial(kind.from_pretrained, path, config=config, trust_remote_code=False, **options)
    model = _load(path, unread, load, bar=True)
    if getattr(config, "quantization_config", None) is not None:
        # would give the weights the names of quantized files in `as_filed`; transformers 5.24 deletes it itself
        model.__dict__.pop("_weight_conversions", None)
        for parameter in model.parameters() if "dtype" in options else ():
            # transformers converts MXFP4 to bf16 and ignores the option dtype
            parameter.data = parameter.data.to(options["dtype"])
    return model


def _load(path: str, unread: Iterable[str], load: Loader, *, bar: bool) -> PreTrainedModel:
    try:
        with _quiet(bar=bar):
            model, info = load(output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:  # unpickling, conversions and file readers raise errors of many types
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights in {path} cannot be read ({type(error).__name__}: {text}): {REMEDY}") from error
    missing = sorted(set(info["missing_keys"]) - set(unread))
    shapes = [
        f"{name} is {list(shape)} and not {list(own)}" for name, shape, own in sorted(info["mismatched_keys"], key=str)
    ]
    if not missing and not shapes:
        return model
    problems = [f"missing: {_some(missing)}"] * bool(missing) + [f"with another shape: {_some(shapes)}"] * bool(shapes)
    if unknown := sorted(info["unexpected_keys"]):
        problems.append(f"unknown to this model: {_some(unknown)}")
    raise ValueError(f"the weights in {path} do not fit its config.json; {'; '.join(problems)}: {REMEDY}")


@contextmanager
def _quiet(*, bar: bool) -> Iterator[None]:
    """Turn off the warnings of transformers, because `_load` raises an error for weights that do not fit. ``bar``: keep
    the progress bar."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    if not bar:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def shape_problems(config: dict[str, Any]) -> Iterator[str]:
    """Messages about sizes in ``config`` that do not fit together. With such sizes, a model can be built, but cannot
    run."""
    config = text_config(config)
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    counts = (*sizes, "head_dim", "max_position_embeddings")
    parts, small = list[str](), list[str]()
    for name in counts:
        value = config.get(name)
        if isinstance(value, str | float | bool):
            parts.append(f"{name} {value!r:.60}")
        elif isinstance(value, int) and value < 1 and name in sizes:
            small.append(f"{name} {value}")
    if parts or small:
        yield f"{', '.join(parts)}: must be a whole number" if parts else f"{', '.join(small)}: must be at least 1"
        return
    heads, groups, width = config.get(sizes[3]), config.get(sizes[4]), config.get("hidden_size")
    if heads and groups and heads % groups:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
    if heads and width and _rotates(config, config) and (config.get("head_dim") or width // heads) % 2:
        head = f"head_dim {config['head_dim']}" if config.get("head_dim") else f"hidden_size {width} over {heads} heads"
        yield f"{head}: rotary positions need heads of an even width"


def looks_sound(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]] | None) -> bool:
    """Whether ``config`` (parsed config.json) and ``shapes`` (of `weight_shapes`) look like a usable model.

    The check takes milliseconds and does not import torch. Building the model would take seconds. The result is only a
    guess: transformers may build a model although the result is False, or fail although the result is True.
    """
    try:
        from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES as types  # without torch
    except ImportError:  # another version of transformers has the names in another module
        return False
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    numbers: list[Any] = [config.get(name) for name in sizes]
    count, width, heads, inner, known = numbers
    odd = any(config.get(name, harmless) != harmless for name, harmless in LOGIT_TRANSFORMS.items())
    odd |= any(config.get(name) for name in ("auto_map", "quantization_config", "text_config", "use_sliding_window"))
    odd |= config.get("model_type") not in types or config.get("hidden_act") not in ACTIVATIONS
    if odd or not all(isinstance(number, int) for number in numbers):
        return False
    if config.get("layer_types") not in (None, ["full_attention"] * count):
        return False
    if shapes is None:
        return True
    layers: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        if part := re.search(r"\.layers\.(\d+)\.(.+)", name):
            layers.setdefault(part[1], set()).add((part[2], shape))
    # all layers must have the same weights, with the sizes from the config
    if len(layers) != count or len({frozenset(layer) for layer in layers.values()}) != 1:
        return False
    queries = heads * (config.get("head_dim") or width // heads)
    widths = {size for _, shape in layers.popitem()[1] for size in shape}
    embeddings = [shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")]
    head = config.get("tie_word_embeddings") or "lm_head.weight" in shapes
    return {width, queries, inner} <= widths and embeddings == [(known, width)] and bool(head)


def check_quantized(args: Args, config: Mapping[str, object]) -> list[str]:
    """A message if the engine cannot take the trainer's weights because ``config`` (parsed config.json) is the config
    of a quantized model. The trainer itself refuses the methods that are not in `RESTORED`."""
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    takes = args.engine_kind.restores or args.sends_adapter
    if method not in RESTORED or not args.job.syncs or takes:
        return []
    return [
        f"--hf-checkpoint {args.hf_checkpoint}: its weights are quantized ({method}), and the engine "
        f"{args.rollout_backend} cannot load the trainer's weights into quantized layers; save the model once "
        "without quantization (docs/lora.md#quantized-checkpoints), or use --rollout-backend embedded"
    ]


def check_architecture(args: ArchitectureArgs, config: dict[str, Any]) -> list[str]:
    """A message for each architecture flag that contradicts ``config`` (parsed config.json), with both values."""
    config = text_config(config)
    heads = config.get("num_attention_heads")
    rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    head_width = config.get("head_dim") or (
        config["hidden_size"] // heads if heads and "hidden_size" in config else None
    )
    truth: dict[str, object] = {
        "num_layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "ffn_hidden_size": config.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", heads),
        "kv_channels": head_width,
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "normalization": "RMSNorm" if "rms_norm_eps" in config else "LayerNorm",
        "norm_epsilon": config.get("rms_norm_eps", config.get("layer_norm_epsilon")),
        "rotary_base": rope.get("rope_theta"),
        "position_embedding_type": "rope" if _rotates(config, rope) else None,
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "rotary_scaling_factor": rope.get("factor"),
    }
    problems = []
    for name, has in (*truth.items(), *_switches(args, config, rope)):
        value = getattr(args, name)
        if has is not None and value is not None and value != has:
            problems.append(f"--{name.replace('_', '-')} is {value} but the model's config.json has {has}")
    return problems


def _switches(args: ArchitectureArgs, config: dict[str, object], rope: dict[str, object]) -> list[tuple[str, bool]]:
    """(switch, its value in the config) for each switch that the user set. If the flags describe a whole model, some
    switches that are not set are included too."""
    family = family_of(str(config.get("model_type")))
    truth = {
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "use_rotary_position_embeddings": _rotates(config, rope),
        "use_rope_scaling": rope.get("rope_type", rope.get("type", "default")) == "llama3",
        "swiglu": config.get("hidden_act", "silu") == "silu",
        "disable_bias_linear": not config.get("mlp_bias", False),
        "qk_layernorm": family is not None and family.qk_norm,
        "add_qkv_bias": is_true(family.qkv_bias if family else "attention_bias", config),
    }
    known = config.get("model_type") in FAMILIES
    strict = {"untie_embeddings_and_output_weights"} | ({"qk_layernorm", "add_qkv_bias"} if known else set())
    return [(n, has) for n, has in truth.items() if getattr(args, n) or (args.describes_model and n in strict)]


def _rotates(config: dict[str, object], rope: dict[str, object]) -> bool:
    return "rope_theta" in rope or config.get("model_type") in FAMILIES
