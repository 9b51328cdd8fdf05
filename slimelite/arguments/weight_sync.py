"""How new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag

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
