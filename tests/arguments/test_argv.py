"""Command lines of slime's and miles' scripts, as their launchers build them, through the dry run's checks.

``slime_argv.jsonl`` has facts alone: project and commit, script, and the argument vector, with placeholders for paths.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import ArgumentError, make_args
from slimelite.plan.devices import Machine
from slimelite.preflight import inspect

ROWS = [json.loads(line) for line in (Path(__file__).parent / "slime_argv.jsonl").read_text().splitlines()]
NODE = Machine(gpus=8, sglang=True)

# name in the vectors -> layers, width, MLP, heads, key/value heads, head width, vocabulary, rope base, tied embeddings
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, float, bool]] = {
    "qwen2.5-0.5b": ("qwen2", 24, 896, 4864, 14, 2, 64, 151936, 1e6, True),
    "qwen2.5-3b": ("qwen2", 36, 2048, 11008, 16, 2, 128, 151936, 1e6, True),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1e6, True),
    "qwen3-4b": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e6, True),
    "qwen3-4b-instruct-2507": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 5e6, True),
    "qwen3-8b": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 1e6, False),
    "qwen3-32b": ("qwen3", 64, 5120, 25600, 64, 8, 128, 151936, 1e6, False),
    "qwen3-30b-a3b": ("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, 1e6, False),
    "qwen3.5-0.8b": ("qwen3_5", 24, 1024, 3584, 8, 2, 256, 248320, 1e7, True),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", 40, 2048, 5632, 16, 2, 256, 248320, 1e7, False),
    "glm-z1-9b": ("glm4", 40, 4096, 13696, 32, 2, 128, 151552, 1e4, False),
}
# what else the config.json of a mixture or of Qwen3.5 says; those of Qwen3.5 nest the language model
LINEAR: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}
MORE: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3.5-0.8b": {**LINEAR, "linear_num_value_heads": 16},
    "qwen3.5-35b-a3b": {
        **LINEAR,
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
# script -> the flags that change results, and are not here
REFUSED = {
    "tests/test_sglang_config_mixed_offload.py": {"--sglang-config"},
}


# what {SGLANG_CONFIG} stands for
GROUPS = {
    "tests/test_qwen2.5_0.5B_sglang_config.py": """
sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}
      - {worker_type: placeholder, num_gpus: 2}
""",
    "tests/test_sglang_config_mixed_offload.py": """
sglang:
  - {name: actor, update_weights: true, server_groups: [{worker_type: regular, num_gpus: 4}]}
  - {name: ref, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 4}]}
""",
}


@pytest.fixture
def places(tmp_path: Path, model: Path) -> dict[str, str]:
    """Placeholder -> a path here: models with the right config, a byte-level tokenizer and no weights."""
    found = {"{OUT}": str(tmp_path / "out"), "{MEGATRON}": str(tmp_path / "torch_dist")}
    for name, shape in SHAPES.items():
        kind, layers, width, mlp, heads, groups, head, vocabulary, base, tied = shape
        folder = tmp_path / name
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).symlink_to(model / file)
        config = {
            "model_type": kind,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": head,
            "vocab_size": vocabulary,
            "rope_theta": base,
            "tie_word_embeddings": tied,
            "rms_norm_eps": 1e-5 if kind == "glm4" else 1e-6,
            "max_position_embeddings": 40960,
            "hidden_act": "silu",
            **({"partial_rotary_factor": 0.5} if kind == "glm4" else {}),
            "attention_bias": kind == "glm4",
            **MORE.get(name, {}),
        }
        if kind.startswith("qwen3_5"):
            config = {"model_type": kind, "text_config": {**config, "model_type": f"{kind}_text"}}
        (folder / "config.json").write_text(json.dumps(config))
        found[f"{{MODEL:{name}}}"] = str(folder)
    data = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    data.write_text("\n".join(json.dumps({"prompt": messages, "messages": messages, "label": "2"}) for _ in range(64)))
    found["{DATA}"] = str(data)
    talks = tmp_path / "talks.jsonl"
    talk = {"messages": [*messages, {"role": "assistant", "content": "2"}]}
    talks.write_text("\n".join([json.dumps(talk)] * 128))
    found["{TALKS}"] = str(talks)
    found["{SGLANG_CONFIG}"] = str(tmp_path / "groups.yaml")
    return found


def _problems(argv: list[str]) -> tuple[list[str], Any]:
    try:
        args = make_args(["--dry-run", *argv], machine=NODE)
    except ArgumentError as error:
        return error.problems, None
    return inspect(args, NODE).problems, args


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['project'].split()[0]}-{row['script']}" for row in ROWS])
def test_it_passes_or_is_refused_for_what_changes_results(row: dict[str, Any], places: dict[str, str]) -> None:
    argv = [re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], word) for word in row["argv"]]
    Path(places["{SGLANG_CONFIG}"]).write_text(GROUPS.get(row["script"], ""))
    if row["entry"] == "train_async.py":
        argv.append("--async-rollout")
    problems, args = _problems(argv)
    assert {problem.split()[0] for problem in problems} == REFUSED.get(row["script"], set()), problems
    if args is not None:
        ranks = int(argv[argv.index("--actor-num-gpus-per-node") + 1]) if "--actor-num-gpus-per-node" in argv else 8
        assert args.actor_num_gpus_per_node == ranks, "a layout of Megatron's takes no ranks away"
