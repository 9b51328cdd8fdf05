"""Devices: the GPUs for which a run can be planned (gpus.toml), and this machine's GPUs and memory. This module needs
no torch."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import tomllib
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

# more GPUs than any machine has
MOST_GPUS = 1024


@dataclass(frozen=True)
class Device:
    """A GPU, or this machine's CPU.

    ``bytes``: size of the device's memory. ``rate``: operations per second of matrix products in the dtype of training.
    Speeds [bytes/s]: ``bandwidth`` of the device's memory, ``link`` to GPUs of the same node, ``pcie`` to the host,
    ``net`` to other nodes. ``node``: the number of these GPUs in a usual machine.
    ``source``: the source of these figures. ``measured``: the figures were measured here, and are not from a data
    sheet. ``capability``: NVIDIA's compute capability.
    """

    name: str
    bytes: int
    rate: float
    bandwidth: float
    link: float
    pcie: float
    net: float
    node: int
    source: str
    measured: bool = False
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Generation:
    """GPUs from a compute ``capability`` on, with ``examples``. ``attention``: the attention kernels of the trainer and
    of SGLang; None: the trainer does not support these GPUs.
    """

    capability: tuple[int, int]
    name: str
    examples: str
    attention: tuple[str, str] | None


# FlashAttention 2 ("only supports Ampere GPUs or newer") and bf16 (SGLang 0.5.20: maybe_downgrade_dtype_for_legacy_gpu)
# begin with Ampere; SGLang's choices are those of its get_default_attn_backend
GENERATIONS = (
    Generation((0, 0), "before Volta", "P100, GTX 10", None),
    Generation((7, 0), "Volta", "V100", None),
    Generation((7, 5), "Turing", "T4, RTX 20", None),
    Generation((8, 0), "Ampere", "A100, A10G, RTX 30", ("FlashAttention 2", "FlashInfer")),
    Generation((8, 9), "Ada", "L4, L40S, RTX 40", ("FlashAttention 2", "FlashInfer")),
    Generation((9, 0), "Hopper", "H100, H200, GH200", ("FlashAttention 2", "FlashAttention 3")),
    Generation((10, 0), "Blackwell", "B200, GB200", ("FlashAttention 2", "TensorRT-LLM's kernels")),
    Generation((12, 0), "Blackwell", "RTX 50", ("FlashAttention 2", "FlashInfer")),
)


def generation(capability: tuple[int, int]) -> Generation:
    """The generation of GPUs with ``capability``."""
    return [each for each in GENERATIONS if each.capability <= capability][-1]


@cache
def gpus() -> dict[str, Device]:
    """The GPUs of gpus.toml by name."""
    rows = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
    return {
        name: Device(
            name,
            row["memory_mib"] * 2**20,
            row["bf16"] * 1e12,
            row["memory"] * 1e9,
            row["link"] * 1e9,
            row["pcie"] * 1e9,
            row["net"] * 1e9,
            row["node"],
            f"{row['source']}; as on {row['checked']}",
            capability=(row["capability"][0], row["capability"][1]),
        )
        for name, row in rows.items()
    }


def planned(text: str) -> tuple[Device, int, int | None]:
    """The GPU of ``--plan-gpu``, the number of GPUs of a node, and the number of nodes (None: not in the text).

    Raises:
        ValueError: the GPU is unknown, or a number is not a positive integer.
    """
    name, colon, counts = text.lower().partition(":")
    count, times, nodes = counts.partition("x")
    if name not in gpus():
        # a name such as a100 is the beginning of several names
        near = [each for each in gpus() if each.startswith(f"{name}-")] or get_close_matches(name, gpus(), n=1)
        hint = (
            f"did you mean {' or '.join(f'{each}{colon}{counts}' for each in near)}?"
            if near
            else f"known GPUs are {', '.join(gpus())}"
        )
        raise ValueError(f"this GPU is not in the planner's list; {hint}")
    if counts and not (count.isdecimal() and int(count)):
        raise ValueError(f"{counts} is not a number of GPUs; write {name}:8")
    if int(count or 1) > MOST_GPUS:
        raise ValueError(f"no machine has {count} GPUs; write {name}:8, and --actor-num-nodes for more machines")
    if times and not (nodes.isdecimal() and int(nodes)):
        raise ValueError(f"{nodes or 'nothing'} is not a number of nodes; write {name}:{count}x2")
    return gpus()[name], int(count or 1), int(nodes) if times else None


def recognized(title: str) -> Device | None:
    """The GPU that nvidia-smi calls ``title``, such as "NVIDIA A100-SXM4-80GB"."""
    joined = title.lower().replace(" ", "")
    names = [name for name in gpus() if all(part in joined for part in name.split("-"))]
    return gpus()[max(names, key=len)] if names else None


def host_bytes() -> int:
    """Memory that this process and its children may use [bytes]: the memory of the machine, or a lower limit."""
    limits = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limits += [int(line) for line in _lines(file) if line.strip().isdecimal()]
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min([*limits, *(limit for limit in soft if limit != resource.RLIM_INFINITY)], default=0)


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class Machine:
    """A machine.

    ``gpus``: the number of GPUs that this process may use. ``sglang``: SGLang is installed. ``gpu_bytes``, ``device``:
    memory and kind of the smallest GPU, if they are known. ``capability``: the lowest compute capability. ``driver``:
    the version of the driver. ``nodes``: how many such machines ``--plan-gpu`` names.
    """

    gpus: int
    sglang: bool = False
    gpu_bytes: int | None = None
    device: Device | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None
    nodes: int | None = None


def this_machine(plan_gpu: str | None = None) -> Machine:
    """The machine of this process, or a machine with SGLang and the GPUs of ``--plan-gpu``. Whether CUDA works on the
    machine's GPUs is not tested here, but at the start of the run.

    Raises:
        ValueError: ``plan_gpu`` is not a known GPU.
    """
    sglang = importlib.util.find_spec("sglang") is not None
    if plan_gpu:
        device, count, nodes = planned(plan_gpu)
        return Machine(count, True, device.bytes, device, device.capability, nodes=nodes)
    gpus = _count_gpus()
    return replace(_nvidia_smi(), gpus=gpus, sglang=sglang) if gpus else Machine(0, sglang)


def _count_gpus() -> int:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


@cache
def _nvidia_smi() -> Machine:
    """The visible GPUs as nvidia-smi reports them. Drivers before 510 do not report the compute capability."""
    for fields in (
        ["memory.total", "driver_version", "uuid", "compute_cap", "name"],
        ["memory.total", "driver_version", "uuid", "name"],
    ):
        # without persistence mode, nvidia-smi takes seconds
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            lines = [line.split(",", len(fields) - 1) for line in answer.splitlines() if line.strip()]
            rows = _visible([dict(zip(fields, map(str.strip, cells), strict=True)) for cells in lines])
            smallest = min(rows, key=lambda row: int(row["memory.total"]))
            device = recognized(smallest["name"])
            lowest = min((_capability(row["compute_cap"]) for row in rows if "compute_cap" in row), default=None)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
        capability = lowest or (device.capability if device else None)
        return Machine(0, False, int(smallest["memory.total"]) * 2**20, device, capability, smallest["driver_version"])
    return Machine(0)


def _visible(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The GPUs in ``rows`` that this process may use. If CUDA_VISIBLE_DEVICES names no GPU of ``rows``, such as a part
    of a GPU, all GPUs are returned."""
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":  # then CUDA's first GPU is the fastest one
        fastest = max(rows, key=lambda row: (_capability(row.get("compute_cap", "0.0")), int(row["memory.total"])))
        rows = [fastest, *(row for row in rows if row is not fastest)]
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = [
        row
        for number, row in enumerate(rows)
        if any(name == str(number) or (name and row["uuid"].startswith(name)) for name in names)
    ]
    return named or rows


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
