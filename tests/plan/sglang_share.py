"""Prints the share of a GPU that the installed SGLang takes, as JSON rows [MiB, GPUs, options, share]."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
from sglang.srt.arg_groups.model_overrides import qwen3_vl

PHASES = ("decode", "prefill")
FIELDS: dict[str, Any] = dict.fromkeys(
    ("mem_fraction_static", "max_total_tokens", "speculative_algorithm", "moe_a2a_backend", "chunked_prefill_size")
) | dict.fromkeys(
    ("language_only", "language_model_only", "enable_dp_attention", "enable_symm_mem", "disable_cuda_graph_padding"),
    False,
)
FIELDS |= {"device": "cuda", "pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "model_path": "m"}
FIELDS |= dict.fromkeys(("disable_cuda_graph", *(f"disable_{name}_cuda_graph" for name in PHASES)), False)
FIELDS |= dict.fromkeys(f"cuda_graph_{key}_{name}" for key in ("backend", "max_bs", "bs") for name in PHASES)
FIELDS |= {"cuda_graph_config": None, "cuda_graph_tc_compiler": None, "max_prefill_tokens": 16384}
CASES: tuple[dict[str, Any], ...] = (
    {},
    {"chunked_prefill_size": 2048, "cuda_graph_max_bs_decode": 24},
    {"chunked_prefill_size": 8192, "cuda_graph_max_bs_decode": 512},
    {"cuda_graph_backend_prefill": "disabled"},
    {"chunked_prefill_size": -1},
    {"chunked_prefill_size": -1, "max_prefill_tokens": 4096, "cuda_graph_max_bs_prefill": 1024},
    {"cuda_graph_bs_decode": [1, 2, 4]},
    {"disable_cuda_graph": True},
    {"cuda_graph_config": {"decode": {"max_bs": 16}, "prefill": {"backend": "disabled"}}},
)


def share(mib: int, tp: int, options: dict[str, Any]) -> float:
    """What `handle_gpu_memory_settings` declares."""
    seen, server = SimpleNamespace(**FIELDS | {"tp_size": tp} | options), SimpleNamespace()
    memory_hook.get_device_memory_capacity = lambda _: mib
    memory_hook.resolving_view = memory_hook.resolved_view = cuda_graph_hook.resolving_view = lambda _: seen
    for hook in (memory_hook, cuda_graph_hook):
        hook.declare_resolution = lambda _, __, **found: vars(seen).update(found)
    memory_hook.model_config_of = lambda _: SimpleNamespace(is_multimodal=False)
    memory_hook.post_capture_kv_sizing_planned = memory_hook.use_mla_backend = lambda _: False
    memory_hook.get_platform = lambda: SimpleNamespace(is_xpu=False)
    qwen3_vl.expand_multimodal_decode_graph_to_running_limit = lambda *_: None
    cuda_graph_hook.parse_cuda_graph_config(server)
    memory_hook.handle_gpu_memory_settings(server)
    return float(seen.mem_fraction_static)


if __name__ == "__main__":
    sizes = (16384, 24564, 32607, 46068, 81559, 143771, 183359)
    print(json.dumps([[mib, tp, case, share(mib, tp, case)] for mib in sizes for tp in (1, 4) for case in CASES]))
