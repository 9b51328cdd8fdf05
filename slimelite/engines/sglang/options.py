"""What an SGLang server is started with."""

from __future__ import annotations

import json
import sys
from typing import Any

from slimelite.arguments import Args

# SGLang's kernels are for GPUs: on a CPU these are its paths in plain PyTorch
ON_CPU: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}


def server_fields(args: Args, index: int, **placement: Any) -> dict[str, Any]:
    """The fields of SGLang's ServerArgs for engine number ``index``: what our flags imply, --sglang-*, what we decide.

    ``placement``: ``host``, ``port`` and what else depends on where the engine is (``base_gpu_id``, ``nnodes``,
    ``node_rank``, ``dist_init_addr``, ``load_format``, ...). None is "not given".
    """
    implied = {
        "mem_fraction_static": args.sglang_mem_fraction_static,
        "max_running_requests": args.sglang_max_running_requests,
        "context_length": args.sglang_context_length,
        **(ON_CPU if args.device == "cpu" else {}),
    }
    decided = {
        "model_path": str(args.hf_checkpoint),
        "device": args.device,
        "tp_size": args.rollout_num_gpus_per_engine // args.sglang_overrides.get("pp_size", 1),
        "random_seed": args.rollout_seed + index,
        "enable_memory_saver": bool(args.offload_rollout),
        "skip_server_warmup": True,
    }
    fields = {**implied, **args.sglang_overrides, **decided, **placement}
    return {name: value for name, value in fields.items() if value is not None}


def server_command(fields: dict[str, Any]) -> list[str]:
    """The command that starts the server with ``fields`` in this Python; see `slimelite.engines.sglang.serve`."""
    return [sys.executable, "-m", "slimelite.engines.sglang.serve", json.dumps(fields)]
