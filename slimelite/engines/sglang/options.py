"""What a server of a run is started with: SGLang's fields and its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping

from slimelite.engines.protocol import EngineSetup

# these fields select SGLang's plain PyTorch code on a CPU, because its kernels need a GPU
ON_CPU: dict[str, object] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}


def server_fields(setup: EngineSetup, **placement: object) -> dict[str, object]:
    """SGLang's ServerArgs fields for one engine; later sources win: our flags, --sglang-*, fixed values, ``placement``.

    ``placement``: ``host``, ``port`` and other fields that depend on where the engine is (``base_gpu_id``, ``nnodes``,
    ``node_rank``, ``dist_init_addr``, ``load_format``, ...). Fields that are None are left out.
    """
    implied: dict[str, object] = {
        "mem_fraction_static": setup.memory_share,
        "max_running_requests": setup.max_running_requests,
        "context_length": setup.max_context_len,
        # on a GPU the trainer always computes in bf16; SGLang would choose fp16 for a model whose config says fp32
        **(ON_CPU if setup.device == "cpu" else {"dtype": "bfloat16"}),
    }
    if setup.releases_memory and setup.device == "cuda":
        implied["cuda_graph_backend_prefill"] = "disabled"  # SGLang's default there cannot be released
    if setup.adapter is not None:
        # two in a batch: the policy, and none, for requests of someone who looks at the frozen model
        implied |= {"enable_lora": True, "max_lora_rank": setup.adapter.rank, "max_loras_per_batch": 2}
        implied["lora_target_modules"] = list(setup.adapter.modules)
        implied |= {"lora_backend": "torch_native"} if setup.device == "cpu" else {}
    decided = {
        "model_path": setup.model_path,
        "device": setup.device,
        "tp_size": setup.width // setup.options.get("pp_size", 1),
        "random_seed": setup.seed,
        "enable_memory_saver": setup.releases_memory,
        **setup.backups(),
        "skip_server_warmup": True,
    }
    fields = {**implied, **setup.options, **decided, **placement}
    return {name: value for name, value in fields.items() if value is not None}


def server_environment(fields: Mapping[str, object], unset: Collection[str] = ()) -> dict[str, str]:
    """The environment of a server with ``fields``: ours. If the server releases its memory, it lacks the variables
    ``unset``, and its CUDA graphs are released too, if it records none of the "breakable" kind, which cannot be.
    """
    environment = dict(os.environ)
    if not fields.get("enable_memory_saver"):
        return environment
    for name in unset:
        environment.pop(name, None)
    chosen = [fields.get(f"cuda_graph_{name}") for name in ("backend_decode", "backend_prefill", "config")]
    if "breakable" not in json.dumps(chosen) and not fields.get("debug_cuda_graph"):
        environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
        # what NCCL registers of a graph's buffers would point to the memory that they had before a release
        environment.setdefault("NCCL_GRAPH_REGISTER", "0")
    return environment
