"""``slimelite doctor``: finds parts of this machine and its environment that would stop a run or slow it down.

    slimelite doctor                 all checks; exit status 1 if something is broken
    slimelite doctor --versions      only the installed packages, without network access

The command changes nothing. Each finding names the part, the fault, its effect and the remedy.
"""

from __future__ import annotations

import argparse
import glob
import importlib.metadata as metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from slimelite.base.files import beside_package, in_units
from slimelite.plan.devices import host_bytes, this_machine
from slimelite.sandbox.confine import gaps

# the packages that runs are tested with; other packages are dependencies of these
MAIN = ("torch", "transformers", "accelerate", "ray", "sglang", "peft", "wandb", "pyarrow", "datasets", "bitsandbytes")
COSTS = {
    "sglang": "rollouts use the embedded engine",
    "datasets": "datasets cannot be read from the hub",
    "bitsandbytes": "--load-in-4bit cannot be used",
    "peft": "runs still write adapters, but the code in an adapter's card needs peft",
    "langdetect": "the rule language:response_language cannot score",
    "reasoning-gym": "--environment reasoning-gym:TASK cannot be used",
    "textarena": "--environment textarena:GAME cannot be used",
    "mcp": "--environment mcp:COMMAND cannot be used",
}
GLIBC = (2, 28)  # the oldest version for the wheels of torch (manylinux_2_28)
FILES = 4096  # open files: a run on Ray with 8 engines used about 1,500
SPACE = 20e9
SHARED = 1e9
RAY_PORTS = {6379: "GCS", 8265: "dashboard"}
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
HUB_SECONDS = 5


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``state``: "broken" for a fault that stops runs, "warning" for a fault that limits or
    slows runs, "ok" for no fault."""

    part: str
    state: Literal["ok", "warning", "broken"]
    text: str
    remedy: str = ""


def versions() -> Iterator[Finding]:
    """Compare the installed packages with the ranges of pyproject.toml and the tested versions of constraints.txt."""
    try:
        # `packaging` comes with setuptools and pip; only `packaging` can read version ranges
        from packaging.requirements import Requirement

        needs = map(Requirement, metadata.requires("slimelite") or ())
    except ModuleNotFoundError as error:
        remedy = "bash scripts/setup.sh, then source .venv/bin/activate; or pip install -c constraints.txt -e ."
        yield Finding(str(error.name), "broken", f"is not installed for {sys.executable}", remedy)
        return
    tested = _tested()
    required = {need.name.lower(): need for need in needs if not need.marker}  # extras have a marker
    differs, broken = list[str](), False
    for name in sorted({*required, *MAIN, *COSTS}):
        have = _installed(name)
        if have is None:
            broken = broken or name in required
            if name in required:
                yield Finding(name, "broken", "is not installed", "bash scripts/setup.sh, or pip install -e .")
            elif name in COSTS:
                yield Finding(name, "ok", f"is not installed: {COSTS[name]}")
            continue
        if name in required and not required[name].specifier.contains(have, prereleases=True):
            broken = True
            wanted = f"{have} is installed, but slimelite needs {required[name].specifier}"
            yield Finding(name, "broken", wanted, f"pip install '{name}{required[name].specifier}'")
        elif have.partition("+")[0] != tested.get(name, have).partition("+")[0]:
            differs.append(f"{name} {have} (tested: {tested[name]})")
    if differs:
        text = f"these versions differ from the tested ones: {', '.join(differs)}"
        yield Finding("packages", "warning", text, "pip install -c constraints.txt -e . installs the tested versions")
    elif not broken:
        yield Finding("packages", "ok", f"all {len(required)} required packages have the versions of constraints.txt")


def _tested() -> dict[str, str]:
    lines = beside_package("constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip().lower(): version.strip() for name, _, version in pairs}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def system() -> Iterator[Finding]:
    """Check Python, the C library, a compiler, and the limits of a process."""
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(map(int, version.split(".")[:2])) < GLIBC:
        text = f"{version} is older than {'.'.join(map(str, GLIBC))}, which the wheels of torch need"
        yield Finding("glibc", "broken", text, "use a newer system, or a container")
    elif library != "glibc":
        yield Finding("glibc", "warning", f"the C library is {library or 'unknown'}", "wheels of torch need glibc")
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        text = "there is no C compiler (cc, gcc): --compile and Triton's kernels cannot be built"
        yield Finding("compiler", "warning", text, "apt-get install build-essential, or leave --compile out")
    else:
        yield Finding("compiler", "ok", compiler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        text = f"a process may open only {soft} files, but many engines and environments need more"
        yield Finding("open files", "warning", text, f"ulimit -n {FILES if hard < 0 else min(FILES, hard)}")
    cores, threads = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    if threads and (not threads.isdigit() or int(threads) > cores):
        text = f"OMP_NUM_THREADS={threads}, and this machine has {cores} cores: the threads would wait for each other"
        yield Finding("threads", "warning", text, f"export OMP_NUM_THREADS={cores}, or unset it")
    if sys.getfilesystemencoding().lower() != "utf-8":
        encoding = sys.getfilesystemencoding()
        text = f"the encoding of files is {encoding}, not UTF-8: prompts with other characters cannot be written"
        yield Finding("locale", "broken", text, "export PYTHONUTF8=1")
    if missing := gaps():
        text = f"the sandbox of code answers is weaker: {'; '.join(missing)}"
        yield Finding("sandbox", "warning", text, "run on Linux 5.13 or newer, or score code in a container")
    else:
        yield Finding("sandbox", "ok", "code answers run under Landlock, seccomp and limits")


def graphics() -> Iterator[Finding]:
    """Check the GPUs and the driver, and check whether torch can use the GPUs."""
    machine = this_machine()
    if not glob.glob("/dev/nvidia[0-9]*") and not machine.gpus:
        yield Finding("GPU", "ok", f"none: runs use the CPU ({len(os.sched_getaffinity(0))} cores)")
        return
    # in a separate process: importing torch takes seconds, and a broken driver may kill the process
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if len(words) != 3:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("torch", "broken", f"cannot be imported: {last}", "bash scripts/setup.sh")
    elif words[1] == "None":
        text = f"torch {words[0]} is a build for CPUs, and this machine has GPUs"
        yield Finding("GPU", "broken", text, "remove .venv and run bash scripts/setup.sh")
    elif words[2] != "True":
        text = f"torch {words[0]} for CUDA {words[1]} cannot use the GPU; driver {machine.driver or 'not found'}"
        yield Finding(
            "GPU",
            "broken",
            text,
            "update the driver, or install a torch build for the CUDA version that the driver supports",
        )
    else:
        yield Finding("GPU", "ok", f"{machine.gpus} with driver {machine.driver}, torch {words[0]}")
        if machine.sglang:
            from slimelite.engines.sglang.server import missing_for_kernels

            for text in missing_for_kernels():
                yield Finding("SGLang", "warning", text)


def ray() -> Iterator[Finding]:
    """Check whether the Ray cluster of ``RAY_ADDRESS`` answers. If ``RAY_ADDRESS`` is not set, check whether a run can
    start its own Ray on this machine."""
    if address := os.environ.get("RAY_ADDRESS"):
        host, _, port = address.rpartition("//")[2].rpartition(":")
        if not port.isdigit():
            yield Finding("Ray", "ok", f"RAY_ADDRESS={address}: a run will connect to this Ray cluster")
            return
        try:
            socket.create_connection((host or "127.0.0.1", int(port)), 3).close()
            yield Finding("Ray", "ok", f"RAY_ADDRESS={address} answers")
        except (OSError, ValueError) as error:
            text = f"RAY_ADDRESS={address} does not answer ({error}): every run would wait for it"
            yield Finding("Ray", "broken", text, "unset RAY_ADDRESS, or run ray start --head on that machine")
        return
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        text = f"the host name {socket.gethostname()} has no address"
        yield Finding("host name", "warning", text, "add the host name to /etc/hosts, because gloo and Ray look it up")
    for number, purpose in RAY_PORTS.items():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                text = f"port {number} ({purpose}) is taken: `ray start --head` needs it, but a run's own Ray does not"
                yield Finding("Ray", "warning", text, "run ray stop if an old Ray uses the port")


def storage() -> Iterator[Finding]:
    """Check the free disk space, the shared memory and the main memory."""
    for purpose, folder in (("this folder", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(folder)
        text = f"{folder} has {in_units(usage.free)} free"
        if usage.free < SPACE or usage.free < 0.05 * usage.total:
            text += ": a checkpoint needs three to seven times the model's size, and Ray stops if a disk is 95 % full"
            yield Finding(
                purpose,
                "warning",
                text,
                "free some space, or name a folder on another disk (--run-dir, --save, TMPDIR)",
            )
        else:
            yield Finding(purpose, "ok", text)
    named = os.environ.get("TMPDIR")
    if named and not os.access(named, os.W_OK | os.X_OK):
        text = f"TMPDIR={named} cannot be written; {tempfile.gettempdir()} is used"
        yield Finding("temporary files", "warning", text, "name a folder that exists, or unset TMPDIR")
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    if room < SHARED:
        text = f"/dev/shm has {in_units(room)} free: Ray would keep its objects on disk, and NCCL would fail"
        remedy = "remove old files from /dev/shm, or start the container with --shm-size 10g or --ipc host"
        yield Finding("shared memory", "warning", text, remedy)
    yield Finding("memory", "ok", f"{in_units(host_bytes())} for this process and its children")


def hub() -> Iterator[Finding]:
    """Check the Hugging Face hub, its cache, the proxies and the token."""
    environment = os.environ
    cache = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        yield Finding(
            "hub",
            "broken",
            f"the hub's cache {cache} cannot be written",
            "set HF_HOME to a folder that you can write to",
        )
    proxy = _proxy(environment)
    if proxy and not any(word in _lower(environment, "no_proxy") for word in ("localhost", "127.0.0.1", "*")):
        text = f"{proxy} is set and no_proxy does not name localhost: calls to engines on this machine go to the proxy"
        yield Finding("proxy", "warning", text, "export no_proxy=localhost,127.0.0.1")
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding(
            "hub", "ok", "not checked, because HF_HUB_OFFLINE is set; models and data come from local folders"
        )
        return
    endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urlopen(Request(endpoint, method="HEAD"), timeout=HUB_SECONDS).close()
    except HTTPError:
        pass  # the hub answers
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = f"{urlsplit(endpoint).netloc or endpoint} does not answer ({reason}): models cannot be loaded by name"
        way = f" through {proxy}" if proxy else ""
        yield Finding("hub", "warning", text + way, "use local folders and export HF_HUB_OFFLINE=1, or set HTTPS_PROXY")
        return
    token = "a token" if environment.get("HF_TOKEN") or (cache / "token").is_file() else "no token: public models only"
    yield Finding("hub", "ok", f"{endpoint} answers; {token}")


def _proxy(environment: Mapping[str, str]) -> str:
    """The first variable that sets a proxy. Only its name is returned, because its value may contain a password."""
    return next((name for name in PROXIES if environment.get(name)), "")


def _lower(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name, environment.get(name.upper(), "")).lower()


def main(argv: Sequence[str]) -> int:
    """Print the findings. Returns 1 if something is broken, else 0."""
    parser = argparse.ArgumentParser(
        prog="slimelite doctor",
        description="Check this machine and its environment: packages, GPU and driver, compiler, Ray, disk, hub.",
    )
    parser.add_argument("--versions", action="store_true", help="check only the installed packages")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(argv)
    checks = [versions()] if args.versions else [versions(), system(), graphics(), ray(), storage(), hub()]
    findings = [finding for check in checks for finding in check]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print("\n".join(_lines(findings)))
    return int(any(finding.state == "broken" for finding in findings))


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.part) for finding in findings)
    for finding in findings:
        yield f"{finding.state:<8} {finding.part:<{width}}  {finding.text}"
        if finding.remedy:
            yield f"{'':<8} {'':<{width}}  -> {finding.remedy}"
    counts = {state: sum(finding.state == state for finding in findings) for state in ("broken", "warning")}
    yield f"{counts['broken']} broken, {counts['warning']} warnings"
