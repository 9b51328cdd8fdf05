"""Checks of gpu_check.sh about the machine: what a released region of SGLang's memory saver keeps, CUDA IPC with the
settings of a user's shell, and how a step's time is spent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_lab import Lab, NotRun, Number, Numbers
from torch.profiler import ProfilerActivity, profile

# A region with a copy in host memory has its contents after a pause, one without has not; both give their memory back.
SAVER = """
import json, sys, torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
size, found = int(sys.argv[1]), {}
def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
for tag, backup in (("kept", True), ("lost", False)):
    with saver.region(tag=tag, enable_cpu_backup=backup):
        tensor = torch.arange(size, device="cuda", dtype=torch.float32)
    expected, before = tensor.sum().item(), free()
    saver.pause(tag)
    found[f"GB given back, {tag}"] = (free() - before) / 1e9
    saver.resume(tag)
    found[tag] = float(tensor.sum().item() == expected)
    tensor.fill_(1.0)
    found[f"usable, {tag}"] = float(tensor.sum().item() == size)
print(json.dumps(found))
"""
# A bucket made by the trainer's own code goes through CUDA IPC, in a process whose allocator has a user's settings.
SENDER = """
import json, sys
from pathlib import Path
from gpu_lab import Lab
from gpu_memory import another_process_reads
lab = Lab(sys.argv[1], sys.argv[2] == "tiny", Path(sys.argv[3]))
print(json.dumps({name: [n.value, n.high, n.low] for name, n in another_process_reads(lab).items()}))
"""
SHELLS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def child(program: str, *words: str, **variables: str) -> dict[str, object]:
    """The last line of a program in a separate process, parsed as JSON."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    mine = {name: value for name, value in os.environ.items() if name not in SHELLS}
    env = {**mine, "PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, "-c", program, *words], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def saver_keeps(lab: Lab) -> Numbers:
    """torch_memory_saver, with which SGLang releases memory: a pause with a backup, and one without.

    Raises:
        NotRun: the package is not installed, or there is no GPU.
    """
    if find_spec("torch_memory_saver") is None:
        raise NotRun("torch_memory_saver is not installed")
    if not lab.cuda:
        raise NotRun("torch_memory_saver needs a GPU")
    found = child(SAVER, str(lab.size(1 << 28, 1 << 20)))
    numbers = {name: float(str(value)) for name, value in found.items()}
    least = 0.9 * 4 * lab.size(1 << 28, 1 << 20) / 1e9
    return {
        "contents after a pause with a backup": Number(numbers["kept"], low=1.0),
        "contents after one without": Number(numbers["lost"]),
        **{f"usable, {tag}": Number(numbers[f"usable, {tag}"], low=1.0) for tag in ("kept", "lost")},
        **{f"GB given back, {tag}": Number(numbers[f"GB given back, {tag}"], low=least) for tag in ("kept", "lost")},
    }


def shells_do_not_matter(lab: Lab) -> Numbers:
    """CUDA IPC of a bucket, if the shell asks for expandable segments by either name of the variable."""
    numbers: Numbers = {}
    for variable in SHELLS:
        size = "tiny" if lab.tiny else "full"
        found = child(SENDER, lab.device, size, str(lab.work), **{variable: "expandable_segments:True"})
        for name, (value, high, low) in found.items():  # type: ignore[misc]
            numbers[f"{name}, {variable}"] = Number(value, high, low)
    return numbers


def profiled(lab: Lab) -> Numbers:
    """Two steps under torch.profiler, plain and compiled: the share of time without a kernel, and the longest kernels.

    The table of kernels is printed to the log of the group.
    """
    table, numbers = lab.table(lab.size(16, 4), lab.size(512, 8), lab.size(256, 4), lab.size(1024, 8), group=4), {}
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if lab.cuda else [])]
    for name, flags in {"plain": {}, **({"compiled": {"compile": True}} if lab.cuda else {})}.items():
        with closing(lab.trainer(**flags)) as trainer:
            trainer.train(0, table)
            took = lab.seconds(lambda trainer=trainer: trainer.train(1, table))
            with profile(activities=kinds) as seen:
                trainer.train(2, table)
                if lab.cuda:
                    torch.cuda.synchronize()
        averages = seen.key_averages()
        key = "self_device_time_total" if lab.cuda else "self_cpu_time_total"
        print(f"\n{name}\n{averages.table(sort_by=key, row_limit=25, max_name_column_width=60)}", flush=True)
        busy = sum(getattr(each, key) for each in averages) / 1e6
        numbers[f"s {name}"] = Number(took, low=0.0)
        numbers[f"kernels' share of it, {name}"] = Number(busy / took, low=1e-3)
    return numbers
