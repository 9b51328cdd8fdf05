"""Runs the checks of gpu_group.py, and reports; see gpu_check.sh.

On a GPU every group has its own process, because a process cannot be used after a CUDA error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slimelite.base.version import add_version

# group of checks -> seconds it may take
GROUPS = {"kernels": 80, "trainer": 110, "grpo": 220, "engine": 80, "loop": 130, "sglang": 140, "speed": 100}
GROUPS |= {"machine": 120, "table": 560}
# the groups of a call; each call is at most ten minutes
CALLS = (["kernels", "trainer", "grpo", "engine"], ["loop", "sglang", "speed", "machine"], ["table"])


def run_groups(options: argparse.Namespace, work: Path, groups: list[str]) -> dict[str, Any]:
    """Facts about the machine, and the results of ``groups``. They run in one process whose output goes to a log."""
    name = "-".join(groups)
    results, log = work / f"{name}.json", options.out / f"{name}.log"
    command = [sys.executable, str(Path(__file__).with_name("gpu_group.py")), "--device", options.device]
    command += [*(["--tiny"] if options.tiny else []), "--work", str(work), "--results", str(results), *groups]
    limit = sum(GROUPS[group] for group in groups)
    ended = ""
    try:
        with log.open("w") as output:
            status = subprocess.run(command, stdout=output, stderr=output, timeout=limit).returncode
            ended = f"status {status}" if status else ""
    except subprocess.TimeoutExpired:
        ended = f"stopped after {limit} s"
    found = json.loads(results.read_text()) if results.exists() else {"machine": {}, "checks": []}
    if ended:
        last = (log.read_text().strip().splitlines() or [""])[-1]
        shown = f"{ended}; {last[:200]}; see {log}"
        found["checks"].append({"name": name, "status": "FAIL", "shown": shown, "seconds": 0.0, "numbers": {}})
    for check in found["checks"]:
        print(f"{check['status']}  {check['name']}: {check['shown']}", flush=True)
    return found


def main() -> int:
    """Run every group. Print a line for each check and a table, and write results.json. The exit status is 1 if
    anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, to try the checks themselves")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder for results.json and the logs")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="only these checks")
    parser.add_argument("--call", type=int, choices=range(1, len(CALLS) + 1), help="run only the checks of this call")
    options = parser.parse_args()
    if options.call:
        options.groups = CALLS[options.call - 1]
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    machine: dict[str, str] = {}
    checks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for groups in [options.groups] if options.device == "cpu" else [[group] for group in options.groups]:
            found = run_groups(options, Path(work), groups)
            machine |= found["machine"]
            checks += found["checks"]
    seconds = round(time.perf_counter() - start, 1)
    summary = {"machine": machine, "tiny": options.tiny, "seconds": seconds, "checks": checks}
    (options.out / "results.json").write_text(json.dumps(summary, indent=2))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine.items()) + f"; {seconds} s")
    for check in checks:
        print(f"  {check['name']:40}{check['seconds']:7.1f} s  {check['status']}")
    return int(any(check["status"] == "FAIL" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
