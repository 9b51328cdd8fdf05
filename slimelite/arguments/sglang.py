"""The SGLang engine and its router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimelite.arguments.base import flag, resolved


@dataclass(frozen=True)
class SglangArgs:
    """SGLang.

    Every other option of SGLang's server is taken as --sglang-<option>.
    """

    sglang_mem_fraction_static: float | None = flag(None, "share of GPU memory for weights and KV cache")
    sglang_server_concurrency: int = flag(512, "requests in flight for each engine")
    sglang_max_running_requests: int | None = flag(
        None, "sequences decoded at once in an engine (the embedded one too)"
    )
    sglang_context_length: int | None = flag(
        None,
        "longest context of the engine [tokens]",
        auto="--rollout-max-context-len, or the model's, within its cache",
    )

    # where a generate plugin finds an engine; set for each call
    sglang_router_ip: str | None = resolved(None)
    sglang_router_port: int | None = resolved(None)
    # the other --sglang-* options, by SGLang's field names
    sglang_overrides: dict[str, Any] = resolved({})
