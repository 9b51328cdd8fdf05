"""Prints the share of a GPU that the installed SGLang takes, as JSON rows [MiB, GPUs, chunk, batch, prompts, share]."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
from sglang.srt.arg_groups.model_overrides import qwen3_vl
from sglang.srt.model_executor.cuda_graph_config import Backend, default_cuda_graph_config

FIELDS: dict[str, Any] = dict.fromkeys(
    ("mem_fraction_static", "max_total_tokens", "speculative_algorithm", "moe_a2a_backend")
) | dict.fromkeys(
    ("language_only", "language_model_only", "enable_dp_attention", "enable_symm_mem", "disable_cuda_graph_padding"),
    False,
)
FIELDS |= {"device": "cuda", "pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "model_path": "m"}


def share(mib: int, tp: int, chunk: int | None, batch: int | None, prompts: bool) -> float:
    """What `handle_gpu_memory_settings` declares; ``prompts``: whether it records CUDA graphs of them."""
    graphs = default_cuda_graph_config()
    graphs.decode.max_bs = batch
    graphs.prefill.backend = Backend.BREAKABLE if prompts else Backend.DISABLED
    seen = SimpleNamespace(**FIELDS, tp_size=tp, chunked_prefill_size=chunk, cuda_graph_config=graphs)
    memory_hook.get_device_memory_capacity = lambda _: mib
    memory_hook.resolving_view = memory_hook.resolved_view = cuda_graph_hook.resolving_view = lambda _: seen
    memory_hook.declare_resolution = lambda _, __, **found: vars(seen).update(found)
    memory_hook.model_config_of = lambda _: SimpleNamespace(is_multimodal=False)
    memory_hook.post_capture_kv_sizing_planned = memory_hook.use_mla_backend = lambda _: False
    memory_hook.get_platform = lambda: SimpleNamespace(is_xpu=False)
    qwen3_vl.expand_multimodal_decode_graph_to_running_limit = lambda *_: None
    memory_hook.handle_gpu_memory_settings(SimpleNamespace())
    return float(seen.mem_fraction_static)


if __name__ == "__main__":
    sizes = (16384, 24564, 32607, 46068, 81559, 143771, 183359)
    cases = [(mib, tp, None, None, prompts) for mib in sizes for tp in (1, 4) for prompts in (False, True)]
    cases += [(mib, 2, *flags, True) for mib in sizes for flags in ((2048, 24), (8192, 512))]
    print(json.dumps([[*case, share(*case)] for case in cases]))
