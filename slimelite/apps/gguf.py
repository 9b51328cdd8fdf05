"""``slimelite gguf``: a model as one file for llama.cpp and Ollama."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slimelite.apps.runnable import resolve_models, runnable
from slimelite.models.checkpoints import read_config

# dtype in a config -> dtype in the GGUF file
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

EXAMPLES = """examples:
  slimelite gguf runs/a model.gguf                   the newest model of a run; an adapter is merged
  slimelite gguf out/model small.gguf --dtype q8_0   8 bits per weight
Supported families are Llama, Qwen2 and Qwen3; llama.cpp's convert_hf_to_gguf.py converts other families.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: there is no such model, or it cannot be written as GGUF.
        OSError: the file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite gguf",
        description="Write a model with its tokenizer and chat template as one GGUF file, for llama.cpp and Ollama.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL|RUN|CHECKPOINT", help="Hugging Face folder, hub id, adapter, checkpoint or run folder"
    )
    parser.add_argument("out", metavar="FILE.gguf", type=Path, help="the file to write")
    parser.add_argument(
        "--base", metavar="MODEL", help="use this base model instead of the one that the adapter or checkpoint names"
    )
    parser.add_argument(
        "--dtype", choices=["f32", "f16", "bf16", "q8_0"], help="dtype of the matrices (default: the model's)"
    )
    parser.add_argument("--name", help="name of the model that programs show (default: the name of the file)")
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="write only the weights: programs then accept only token ids"
    )
    args = parser.parse_args(argv)
    if args.out.suffix != ".gguf":
        parser.error(f"{args.out}: name a file that ends with .gguf")
    source = resolve_models([args.model], args.base)[0]
    from slimelite.apps.gguf_file import write_gguf

    name, tokenizer = args.name or args.out.stem, not args.no_tokenizer
    dtype = args.dtype or DTYPES.get(_dtype_of(source.base or source.path), "f32")
    if source.base is not None:
        _check_merged(Path(source.path), source.base, tokenizer=tokenizer)
    with runnable(source, "float32") as path:
        write_gguf(_here(path), args.out, dtype, name=name, tokenizer=tokenizer)
    print(f"{args.out}: {name}, {dtype}, {args.out.stat().st_size / 1e6:,.1f} MB")
    if tokenizer:
        print(f"llama-cli -m {args.out}     or, in a Modelfile for Ollama: FROM ./{args.out.name}")
    return 0


def _dtype_of(model: str) -> str:
    """The dtype of the weights in a model's config; "None" if the config names no dtype."""
    config = read_config(model)
    return str(config.get("dtype", config.get("torch_dtype")))


def _check_merged(source: Path, base: str, *, tokenizer: bool) -> None:
    """Check the config and the tokenizer of the merged model before the merge, which takes minutes for a large model.

    Raises:
        ValueError: the merged model cannot be written as GGUF.
    """
    from slimelite.apps.gguf_file import described
    from slimelite.apps.merging import copy_companions
    from slimelite.models.files import load_config

    with tempfile.TemporaryDirectory(prefix="slimelite-gguf-") as folder:
        copy_companions(source, base, Path(folder))
        config = load_config(base)
        config.save_pretrained(folder)  # it names tokens that end a reply
        described(Path(folder), config, "f32", name="", tokenizer=tokenizer)


def _here(path: str) -> Path:
    """The folder of a model. A hub id is downloaded, unless the hub's cache has it."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
