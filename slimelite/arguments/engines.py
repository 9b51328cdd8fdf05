"""The SGLang engine, and how new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.flags import flag, resolved


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

    sglang_config: str | None = flag(
        None, "YAML of engine groups with sizes and SGLang options of their own (slime's format)", metavar="FILE"
    )
    rollout_external: bool = flag(False, "slime's switch; --rollout-external-engine-addrs has to be given as well")
    rollout_external_engine_addrs: list[str] = flag(
        [], "host:port of SGLang servers that someone else runs, instead of starting any"
    )
    use_fault_tolerance: bool = flag(False, "start an engine that dies anew, and give its requests to others")
    rollout_health_check_interval: float = flag(30.0, "between two checks of an engine during a rollout [s]")
    rollout_health_check_timeout: float = flag(30.0, "an engine that does not answer for this long is dead [s]")

    # where a generate plugin finds an engine; set for each call
    sglang_router_ip: str | None = resolved(None)
    sglang_router_port: int | None = resolved(None)
    # the other --sglang-* options, by SGLang's field names
    sglang_overrides: dict[str, Any] = resolved({})


Transport = Literal["ipc", "nccl", "http", "disk"]


@dataclass(frozen=True)
class WeightSyncArgs:
    """Weight sync.

    From the trainer into the engines, after every rollout.
    """

    update_weight_buffer_size: int = flag(
        512 * 1024**2, "bucket of weights sent to the engines at a time, rounded up to whole tensors [bytes]"
    )
    update_weight_transport: Transport | None = flag(
        None,
        "the way into SGLang: CUDA IPC, a process group (gloo on a CPU), bodies of HTTP requests, or a folder",
        auto="disk with --update-weight-disk-dir, http into external servers, ipc with --colocate on GPUs, else nccl",
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder that trainer and servers share, for weights that go by disk", metavar="DIR"
    )
    update_weight_disk_keep_files: bool = flag(False, "keep the folders of earlier versions there")
    check_weight_update_equal: bool = flag(
        False, "after each sync compare log-probs of every engine with the trainer's, on tokens it samples for this"
    )
