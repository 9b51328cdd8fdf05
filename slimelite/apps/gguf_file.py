"""Writes a model as one GGUF file, the format of llama.cpp and Ollama, with the package gguf.

Tensors and fields have the same names as in llama.cpp's ``convert_hf_to_gguf.py``. Weights are read one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slimelite.base.files import whole
from slimelite.data.tokenizer import beginning, load_tokenizer, stop_token_ids
from slimelite.models.checkpoints import read_json
from slimelite.models.families import FAMILIES
from slimelite.models.files import load_config, weight_sources
from slimelite.models.sources import everything

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from slimelite.models.sources import Source

# model_type -> llama.cpp's name of the architecture
ARCHITECTURES = {name: family.gguf for name, family in FAMILIES.items() if family.gguf}
CONVERTER = "llama.cpp's convert_hf_to_gguf.py supports more models and tokenizers"
# --dtype -> the type of matrices, and of the file
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}

# the pattern that splits a text before a byte-level tokenizer's merges, after `SAME` -> llama.cpp's name for it
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {f"{_WORDS}|\\p{{N}}{{1,3}}|{_REST}": "llama-bpe", f"{_WORDS}|\\p{{N}}|{_REST}": "qwen2"}
# a part of a pattern -> the equivalent part that `SPLITS` uses
SAME = {
    r"'(?i:[sdmt]|ll|ve|re)": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    "?+": "?",
    "++": "+",
    r"\s*[\r\n]|": r"\s*[\r\n]+|",
    r"\p{N}{1,1}": r"\p{N}",
}


def write_gguf(folder: Path, out: Path, dtype: str, *, name: str, tokenizer: bool = True) -> None:
    """Write the model in ``folder`` (a Hugging Face folder with safetensors) to the file ``out``.

    Args:
        dtype: the type of the matrices; one of `TYPES`. Vectors, such as norms, are always f32.
        name: the name of the model that other programs show.
        tokenizer: False leaves the tokenizer out. llama.cpp then accepts only token ids.

    Raises:
        ValueError: the model, its tokenizer or a weight cannot be written. The message names a remedy.
    """
    config = load_config(str(folder))
    writer = described(folder, config, dtype, name=name, tokenizer=tokenizer)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    sources = weight_sources(str(folder), empty)
    if sources is None:
        raise ValueError(
            f"{folder} has no plain weights in safetensors files: save the model again with save_pretrained"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as partial:
        _write_tensors(writer, partial, sources, config, dtype)


def described(folder: Path, config: PretrainedConfig, dtype: str, *, name: str, tokenizer: bool) -> gguf.GGUFWriter:
    """The description of the model in ``folder``, without its weights. The arguments are those of `write_gguf`.

    Raises:
        ValueError: the model or its tokenizer cannot be written.
    """
    check_family(config)
    writer = gguf.GGUFWriter(None, ARCHITECTURES[config.model_type])
    writer.add_name(name)
    writer.add_file_type(TYPES[dtype][1])
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, config)
    if tokenizer:
        add_tokenizer(writer, folder, int(config.vocab_size))
    else:
        writer.add_tokenizer_model("no_vocab")
    return writer


def check_family(config: PretrainedConfig) -> None:
    """Check that the model's family is supported, and that llama.cpp would compute the model in the same way.

    Raises:
        ValueError: the family is not supported, or llama.cpp would compute the model differently.
    """
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(f"a model of family {kind} is not supported, only {', '.join(ARCHITECTURES)}: {CONVERTER}")
    rope = str(rope_of(config)["rope_type"])
    reason = {
        f"its rope_type is {rope}": rope not in ("default", "llama3"),
        "its attention has sliding windows": bool(getattr(config, "use_sliding_window", False)),
        "its attention has biases": kind == "qwen3" and bool(config.attention_bias),
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
    }
    if why := [text for text, is_so in reason.items() if is_so]:
        raise ValueError(f"this {kind} model is not supported, because {why[0]}: {CONVERTER}")


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """The settings of the rotary position embedding (RoPE), such as ``rope_type`` and ``rope_theta``."""
    return {"rope_type": "default", **(config.rope_parameters or {})}


def add_shape(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    """Add the fields of config.json, under llama.cpp's names."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope_of(config)["rope_theta"]))
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    """Add vocabulary, merges, special tokens and chat template. ``size``: rows of the embedding.

    Raises:
        ValueError: the tokenizer is not a byte-level BPE, llama.cpp cannot split texts in the same way, or more than
            three tokens end a reply.
    """
    tokenizer = load_tokenizer(str(folder))
    file = folder / "tokenizer.json"
    content = read_json(file) if file.is_file() else {}
    writer.add_tokenizer_model("gpt2")  # any byte-level BPE
    writer.add_tokenizer_pre(splitting(content))
    tokens, types = vocabulary(tokenizer.backend_tokenizer, size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]])
    begin = beginning(tokenizer)
    if begin not in ([], [tokenizer.bos_token_id]):
        raise ValueError(
            f"texts begin with the tokens {begin}, but GGUF allows only one bos token or none: {CONVERTER}"
        )
    writer.add_add_bos_token(bool(begin))
    add_ends(writer, stop_token_ids(str(folder), tokenizer), tokenizer.eos_token_id)
    for add, number in {
        writer.add_bos_token_id: tokenizer.bos_token_id,
        writer.add_pad_token_id: tokenizer.pad_token_id,
    }.items():
        if number is not None:
            add(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def add_ends(writer: gguf.GGUFWriter, ends: Sequence[int], eos: int | None) -> None:
    """Add the tokens that end a reply. In GGUF, the first of them ends a text, the second ends a turn, and the third
    ends a message, as in Llama 3.1.

    Raises:
        ValueError: more than three tokens end a reply.
    """
    first = eos if eos is not None and eos in ends else ends[0]
    ids = [first, *(end for end in ends if end != first)]
    adders = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    if len(ids) > len(adders):
        raise ValueError(
            f"{len(ids)} tokens end a reply, but GGUF allows three: shorten eos_token_id in generation_config.json"
        )
    for add, number in zip(adders, ids, strict=False):
        add(number)


def vocabulary(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int]]:
    """The text and the type of each of ``size`` token ids. Embedding rows without a token are padding."""
    kinds = gguf.TokenType
    added = tokenizer.get_added_tokens_decoder()
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(kinds.UNUSED)] * size
    for text, number in tokenizer.get_vocab().items():
        if number < size:
            tokens[number], types[number] = text, int(kinds.NORMAL)
    for number, token in added.items():
        if number < size:
            tokens[number] = token.content
            types[number] = int(kinds.CONTROL if token.special else kinds.USER_DEFINED)
    return tokens, types


def splitting(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way in which a tokenizer splits texts. ``content``: the content of tokenizer.json.

    Raises:
        ValueError: the tokenizer is not a byte-level BPE, or llama.cpp has no name for its splitting.
    """
    model, before = content.get("model", {}), content.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    kinds = [str(part.get("type")) for part in parts]
    refused = (
        f"the tokenizer ({' and '.join(kinds)}, {model.get('type', 'no tokenizer.json')}) has no name in llama.cpp"
    )
    remedy = "--no-tokenizer leaves the tokenizer out, and programs then accept only token ids"
    if model.get("type") != "BPE" or kinds[-1] != "ByteLevel":
        raise ValueError(f"{refused}: {remedy}; {CONVERTER}")
    # without tokens such as <0x0A>, byte_fallback has no effect
    if model.get("byte_fallback") and any(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        raise ValueError(f"{refused} with byte_fallback: {remedy}; {CONVERTER}")
    normalizer = content.get("normalizer") or {"normalizers": []}
    # llama.cpp does not normalize a text before it splits it; it also ignores the NFC of Qwen's tokenizers
    for step in normalizer.get("normalizers", [normalizer]):
        if (changes := step["type"]) != "NFC":
            raise ValueError(f"the tokenizer's normalizer, {changes}, has no name in llama.cpp: {remedy}; {CONVERTER}")
    if parts[-1].get("add_prefix_space"):
        raise ValueError(f"{refused} with add_prefix_space: {remedy}; {CONVERTER}")
    own = parts[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and own:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and own and parts[0].get("individual_digits"):
        return "smollm"
    isolated = parts[0].get("behavior") == "Isolated" and not parts[0].get("invert")
    if kinds == ["Split", "ByteLevel"] and isolated and not own:
        pattern = str(parts[0]["pattern"].get("Regex"))
        for other, written in SAME.items():
            pattern = pattern.replace(other, written)
        name = SPLITS.get(pattern)
        if name == "llama-bpe" and not model.get("ignore_merges"):
            return "dbrx"  # the same splitting, but merges also apply to a whole word that is a token
        if name is not None:
            return name
    raise ValueError(f"{refused}: {remedy}; {CONVERTER}")


def _write_tensors(
    writer: gguf.GGUFWriter, file: Path, sources: Mapping[str, Source], config: PretrainedConfig, dtype: str
) -> None:
    """Write header, fields and tensors to ``file``. A weight that a tied LM head shares is written once."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    sources = {n: s for n, s in sources.items() if not (config.tie_word_embeddings and n == "lm_head.weight")}
    planned: dict[str, tuple[Source, gguf.GGMLQuantizationType, str]] = {}
    for name, source in sources.items():
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise ValueError(f"{name} has no name in llama.cpp: {CONVERTER}")
        planned[written] = (source, _type_of(source.shape, dtype), name)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for written, (source, kind, _) in planned.items():
        shape = gguf.quant_shape_to_byte_shape(source.shape, kind)
        writer.add_tensor_info(written, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for source, kind, name in planned.values():
        weight = everything(source).to(torch.float32)
        if config.model_type == "llama":
            weight = _interleaved(name, weight, config)
        if kind == gguf.GGMLQuantizationType.F16 and weight.abs().max() > torch.finfo(torch.float16).max:
            raise ValueError(f"{name} has numbers that are too large for f16: use --dtype bf16")
        writer.write_tensor_data(gguf.quantize(weight.numpy(), kind).view(np.uint8))
    writer.close()


def _type_of(shape: tuple[int, ...], dtype: str) -> gguf.GGMLQuantizationType:
    """The type of a tensor. Vectors are f32. A matrix whose rows do not fill blocks of q8_0 is f16, as in llama.cpp."""
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    if dtype == "q8_0" and shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]:
        return gguf.GGMLQuantizationType.F16
    return TYPES[dtype][0]


def _interleaved(name: str, weight: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Reorder the rows of Llama's query and key weights. llama.cpp rotates neighbouring rows, and transformers rotates
    halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def rope_factors(config: PretrainedConfig) -> np.ndarray | None:
    """The divisors of the frequencies for Llama 3's ``rope_type``, [head_dim / 2] float32; None for other types."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = float(rope["rope_theta"]) ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    factors: np.ndarray = (plain / scaled).numpy()
    return factors
