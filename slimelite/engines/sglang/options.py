"""What an SGLang server is started with, next to the run's own arguments."""

from __future__ import annotations

import json
import sys
from typing import Any

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


def server_command(fields: dict[str, Any]) -> list[str]:
    """The command that starts the server with ``fields`` in this Python; see `slimelite.engines.sglang.serve`."""
    return [sys.executable, "-m", "slimelite.engines.sglang.serve", json.dumps(fields)]
