"""The SGLang engine, and how new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.conditions import INFERENCE, OWN_ENGINES, SGLANG, SYNC, given, when
from slimelite.arguments.flags import flag, resolved

FAULT_TOLERANCE = SGLANG & given("--use-fault-tolerance")


@dataclass(frozen=True)
class SglangArgs:
    """SGLang.

    Every other option of SGLang's server is taken as --sglang-<option>.
    """

    sglang_mem_fraction_static: float | None = flag(
        None, "weights and KV cache take this share of a GPU's memory", SGLANG & OWN_ENGINES, at_least=0, at_most=1
    )
    sglang_server_concurrency: int = flag(512, "each engine has this many requests in flight", INFERENCE, at_least=1)
    sglang_max_running_requests: int | None = flag(
        None, "an engine, the embedded one too, decodes this many sequences at once", OWN_ENGINES, at_least=1
    )
    sglang_context_length: int | None = flag(
        None,
        "an engine's context is at most this long [tokens]",
        INFERENCE,
        at_least=1,
        auto="--rollout-max-context-len, or the model's, within its cache",
    )

    sglang_config: str | None = flag(
        None,
        "this YAML has engine groups with sizes and SGLang options of their own (slime's format)",
        SGLANG,
        metavar="FILE",
    )
    rollout_external: bool = flag(
        False,
        "this switch of slime's says that somebody else runs the servers",
        INFERENCE & given("--rollout-external-engine-addrs").strictly(),
    )
    rollout_external_engine_addrs: list[str] = flag(
        [], "somebody else runs SGLang servers at these host:port, so none is started", INFERENCE
    )
    use_fault_tolerance: bool = flag(False, "an engine that dies is started anew, and others take its requests", SGLANG)
    rollout_health_check_interval: float = flag(
        30.0, "engines are checked at this interval during a rollout [s]", FAULT_TOLERANCE, at_least=1
    )
    rollout_health_check_timeout: float = flag(
        30.0, "an engine that does not answer for this long is dead [s]", FAULT_TOLERANCE, at_least=1
    )

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
        512 * 1024**2,
        "weights go to the engines in buckets of this size, rounded up to whole tensors [bytes]; 67108864 is the "
        "default for embedded engines on a CPU, 16777216 with --launcher local",
        SYNC,
        at_least=1,
    )
    update_weight_transport: Transport | None = flag(
        None,
        "weights go into SGLang by CUDA IPC, a process group (gloo on a CPU), bodies of HTTP requests, or a folder",
        SYNC & SGLANG,
        auto="disk with --update-weight-disk-dir, http into external servers, ipc with --colocate on GPUs, else nccl",
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "trainer and servers share this folder, for weights that go by disk",
        SYNC & SGLANG & when("--update-weight-transport disk", lambda a: a.update_weight_transport == "disk"),
        required=True,
        metavar="DIR",
    )
    update_weight_disk_keep_files: bool = flag(
        False,
        "the folder keeps earlier versions of the weights",
        SYNC & SGLANG & given("--update-weight-disk-dir"),
    )
    check_weight_update_equal: bool = flag(
        False,
        "after each sync the log-probs of every engine are compared with the trainer's, on tokens it samples for this",
        SYNC,
    )
