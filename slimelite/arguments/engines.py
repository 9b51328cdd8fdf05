"""The SGLang engine, and how new weights reach the engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.conditions import INFERENCE, OWN_ENGINES, SGLANG, SYNC, use_of, when
from slimelite.arguments.flags import flag, resolved
from slimelite.arguments.model import EnginePlace
from slimelite.arguments.rollout import RolloutArgs
from slimelite.arguments.sources import known_tables, sglang_options

FAULT_TOLERANCE = SGLANG & use_of("--use-fault-tolerance")


@dataclass(frozen=True)
class SglangArgs(RolloutArgs):
    """SGLang.

    Every other option of SGLang's server can be given as --sglang-<option>.
    """

    sglang_mem_fraction_static: float | None = flag(
        None, "weights and KV cache take this fraction of a GPU's memory", SGLANG & OWN_ENGINES, at_least=0, at_most=1
    )
    sglang_server_concurrency: int = flag(
        512, "each engine has at most this many requests in flight", INFERENCE, at_least=1
    )
    sglang_max_running_requests: int | None = flag(
        None,
        "an engine decodes at most this many sequences at once. The limit of sequences also applies to the embedded "
        "engine",
        OWN_ENGINES,
        at_least=1,
    )
    sglang_context_length: int | None = flag(
        None,
        "an engine's context is at most this long [tokens]",
        INFERENCE,
        at_least=1,
        auto="--rollout-max-context-len, else the model's context, limited by the engine's cache",
    )

    sglang_config: str | None = flag(
        None,
        "this YAML file defines groups of engines, each with its own size and SGLang options (slime's format)",
        SGLANG,
        metavar="FILE",
    )
    rollout_external: bool = flag(
        False,
        "slime's switch for servers that the run does not start",
        INFERENCE & use_of("--rollout-external-engine-addrs").strictly(),
    )
    rollout_external_engine_addrs: list[str] = flag(
        [], "the run uses the SGLang servers at these host:port addresses and starts none of its own", INFERENCE
    )
    use_fault_tolerance: bool = flag(
        False,
        "an engine that does not answer is restarted, and other engines take over its requests. Under Ray, an engine "
        "that died is restarted even without this flag",
        SGLANG,
    )
    rollout_health_check_interval: float = flag(
        30.0, "engines are health-checked at this interval during a rollout [s]", FAULT_TOLERANCE, at_least=1
    )
    rollout_health_check_timeout: float = flag(
        30.0, "an engine that does not answer for this long is considered dead [s]", FAULT_TOLERANCE, at_least=1
    )

    # address of the engine for a generate plugin; it is set for each call
    sglang_router_ip: str | None = resolved(None)
    sglang_router_port: int | None = resolved(None)
    # the other --sglang-* options, by SGLang's field names
    sglang_overrides: dict[str, Any] = resolved({})


Transport = Literal["ipc", "nccl", "http", "disk"]


@dataclass(frozen=True)
class WeightSyncArgs:
    """Weight sync.

    The trainer sends its weights to the engines after every rollout.
    """

    update_weight_buffer_size: int = flag(
        512 * 1024**2,
        "weights are sent to the engines in buckets of this size, rounded up to whole tensors [bytes]. For embedded "
        "engines on a CPU, the default is 67108864, or 16777216 with --launcher local",
        SYNC,
        at_least=1,
    )
    update_weight_transport: Transport | None = flag(
        None,
        "how weights reach SGLang. ipc: CUDA IPC. nccl: a process group (NCCL on GPUs, gloo on a CPU). http: HTTP "
        "requests. disk: a shared folder",
        SYNC & SGLANG,
        auto="disk with --update-weight-disk-dir, http for external servers, ipc with --colocate on GPUs, else nccl",
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "the trainer writes weights to this folder, and the servers read them from it",
        SYNC & SGLANG & when("--update-weight-transport disk", lambda a: a.update_weight_transport == "disk"),
        required=True,
        metavar="DIR",
    )
    update_weight_disk_keep_files: bool = flag(
        False,
        "earlier versions of the weights are kept in --update-weight-disk-dir",
        SYNC & SGLANG & use_of("--update-weight-disk-dir"),
    )
    check_weight_update_equal: bool = flag(
        False,
        "after each sync, every engine samples a few tokens, and their log-probs are compared with the trainer's",
        SYNC,
    )


MODEL_KEYS = {"name", "model_path", "num_gpus_per_engine", "server_groups", "engine_groups", "update_weights"}
GROUP_KEYS = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}


def engine_places(content: object, checkpoint: str | None, gpus: int, width: int) -> Iterator[EnginePlace]:
    """The place of each engine that the ``content`` of ``--sglang-config`` defines.

    The content lists groups of engines, each with a size and settings, in slime's format::

        sglang:
          - name: actor
            server_groups:
              - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.6}}
              - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}
              - {worker_type: placeholder, num_gpus: 2}      # GPUs that stay free

    Args:
        content: the content of the YAML file.
        checkpoint: ``--hf-checkpoint``. A model with this path is the policy.
        gpus: ``--rollout-num-gpus``, the GPUs of all groups together.
        width: ``--rollout-num-gpus-per-engine``, for groups that do not set ``num_gpus_per_engine``.

    Raises:
        ValueError: a setting is not supported.
    """
    models = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ValueError("needs sglang: a list of models, each with its server_groups")
    for model in models:
        _check_keys(f"model {model.get('name')!r}", model, MODEL_KEYS)
    ours = [model for model in models if _is_policy(model, checkpoint)]
    if frozen := [str(model.get("name")) for model in models if model not in ours]:
        raise ValueError(
            f"model {', '.join(map(repr, frozen))} is frozen, but a run starts engines only for the policy: start a "
            "server for this model yourself, and call it from a reward (--rm-url) or a generate function"
        )
    if len(ours) > 1:
        raise ValueError(f"{len(ours)} models are the policy; put all their server_groups under one model")
    width = ours[0].get("num_gpus_per_engine") or width
    groups = ours[0].get("server_groups") or ours[0].get("engine_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"model {ours[0].get('name')!r} needs server_groups: a list")
    first = 0
    for number, group in enumerate(groups):
        yield from _engines_of(group, f"server group {number}", first, width)
        first += group["num_gpus"]
    if first != gpus:
        raise ValueError(f"the server groups have {first} GPUs, but --rollout-num-gpus is {gpus}; make them equal")


def _engines_of(group: dict[str, Any], where: str, first: int, width: int) -> Iterator[EnginePlace]:
    _check_keys(where, group, GROUP_KEYS)
    kind, gpus = group.get("worker_type", "regular"), group.get("num_gpus")
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"{where}: num_gpus is {gpus!r}, but it must be a whole number, at least 1")
    if kind == "placeholder":
        return
    if kind != "regular":
        raise ValueError(f"{where}: worker_type {kind} is not supported: every engine does both prefill and decoding")
    width = group.get("num_gpus_per_engine") or width
    if gpus % width:
        raise ValueError(f"{where}: {gpus} GPUs cannot be divided into engines of {width} GPUs")
    overrides = {str(name).replace("-", "_"): value for name, value in (group.get("overrides") or {}).items()}
    known, set_here = {option.field for option in sglang_options().values()}, known_tables()["sglang_set_here"]
    for name in overrides:
        if name in set_here or name not in known:
            raise ValueError(f"{where}: override {name}: {set_here.get(name, 'SGLang has no such option')}")
    for engine in range(gpus // width):
        yield EnginePlace(first + engine * width, width, overrides)


def _is_policy(model: Mapping[str, object], checkpoint: str | None) -> bool:
    default = model.get("model_path") in (None, checkpoint)
    choice = model.get("update_weights")
    return default if choice is None else bool(choice)


def _check_keys(where: str, entry: Mapping[str, object], known: set[str]) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; known keys are {', '.join(sorted(known))}")
