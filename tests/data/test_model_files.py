"""models/*.sh: each array defines a model of exactly the published number of parameters."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments.model import ArchitectureArgs, model_config_from_flags

pytestmark = pytest.mark.newest

FOLDER = Path(__file__).parents[2] / "models"
# parameters as Hugging Face counts them, a tied LM head once
PARAMETERS = {
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-14B": 14_770_033_664,
    "qwen2.5-32B": 32_763_876_352,
    "qwen2.5-72B": 72_706_203_648,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "llama3.2-1B": 1_235_814_400,
    "llama3.2-3B": 3_212_749_824,
    "llama3.1-8B": 8_030_261_248,
    "llama3.1-70B": 70_553_706_496,
    "smollm2-135M": 134_515_008,
    "smollm2-360M": 361_821_120,
    "smollm2-1.7B": 1_711_376_384,
}


def model_args(name: str) -> list[str]:
    script = f'set -euo pipefail; source "{FOLDER}/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()


def parsed(words: list[str]) -> ArchitectureArgs:
    hints = {f.name: str(f.type) for f in dataclasses.fields(ArchitectureArgs)}
    values: dict[str, Any] = {}
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        kind = hints[name]
        values[name] = True if kind == "bool" else {"i": int, "f": float}.get(kind[0], str)(words.pop(0))
    return ArchitectureArgs(**values)


def test_every_file_is_checked() -> None:
    assert {f.stem for f in FOLDER.glob("*.sh")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_array_defines_the_published_model(name: str) -> None:
    args = parsed(model_args(name))
    assert args.swiglu
    assert args.disable_bias_linear
    assert args.use_rotary_position_embeddings
    assert args.group_query_attention == (args.num_query_groups is not None)
    assert args.use_rope_scaling == name.startswith("llama3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config_from_flags(args)))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_the_target_scripts_array_is_slimes() -> None:
    words = " ".join(model_args("qwen2.5-0.5B"))
    assert {"--" + part.strip() for part in words.split("--") if part} == {
        *("--swiglu", "--num-layers 24", "--hidden-size 896", "--ffn-hidden-size 4864", "--num-attention-heads 14"),
        *(
            "--group-query-attention",
            "--num-query-groups 2",
            "--use-rotary-position-embeddings",
            "--rotary-base 1000000",
        ),
        *(
            "--disable-bias-linear",
            "--add-qkv-bias",
            "--normalization RMSNorm",
            "--norm-epsilon 1e-6",
            "--vocab-size 151936",
        ),
    }
