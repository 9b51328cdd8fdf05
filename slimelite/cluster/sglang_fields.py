"""From the run's arguments to the fields of an SGLang server."""

from __future__ import annotations

from typing import Any

from slimelite.arguments import Args
from slimelite.engines.sglang.process import ON_CPU


def server_fields(args: Args, index: int, **placement: Any) -> dict[str, Any]:
    """The fields of SGLang's ServerArgs for engine number ``index``: what our flags imply, --sglang-*, what we decide.

    ``placement``: ``host``, ``port`` and what else depends on where the engine is (``base_gpu_id``, ``nnodes``,
    ``node_rank``, ``dist_init_addr``, ``load_format``, ...). None is "not given".
    """
    place = args.engine_place(index)
    options = {**args.sglang_overrides, **place.overrides}
    implied = {
        "mem_fraction_static": args.sglang_mem_fraction_static,
        "max_running_requests": args.sglang_max_running_requests,
        "context_length": args.sglang_context_length,
        # on a GPU the trainer computes in bf16 whatever the model's config says; SGLang would take fp16 for an fp32 one
        **(ON_CPU if args.device == "cpu" else {"dtype": "bfloat16"}),
    }
    decided = {
        "model_path": str(args.hf_checkpoint),
        "device": args.device,
        "tp_size": place.width // options.get("pp_size", 1),
        "random_seed": args.rollout_seed + index,
        "enable_memory_saver": bool(args.offload_rollout),
        "skip_server_warmup": True,
    }
    fields = {**implied, **options, **decided, **placement}
    return {name: value for name, value in fields.items() if value is not None}
