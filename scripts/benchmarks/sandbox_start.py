"""What the start and the end of a sandbox cost an episode, beside a program without one and a bare Python.

    python scripts/benchmarks/sandbox_start.py [--episodes 100] [process bwrap ...]

Each round starts ``true`` in every way, one after the other. Processor time is that of all processes of the start and
of the run's own part of it; the table has medians and, in parentheses, the tenth and the ninetieth percentile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slimelite.base.version import add_version
from slimelite.sandbox.registry import SandboxSettings, open_sandbox

NOTHING = ["true"]
BARE = {"no sandbox": NOTHING, "python -I -S -c pass": [sys.executable, "-I", "-S", "-c", "pass"]}
# a model's address; nobody connects
ENDPOINT = "http://127.0.0.1:9"


def cost(name: str) -> tuple[float, float]:
    """Processor time and wall time of one start [s]."""
    own, begin = time.process_time(), time.perf_counter()
    environment = dict(os.environ)
    if name in BARE:
        words = BARE[name]
    else:
        sandbox = open_sandbox(SandboxSettings(name))
        assert sandbox is not None
        own, begin = time.process_time(), time.perf_counter()  # the sandbox is made once a run
        launch = sandbox.launch(NOTHING, {}, ENDPOINT)
        words, environment = launch.words, launch.environment
    process = subprocess.Popen(words, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{name}: exit status {process.returncode}"
    wall = time.perf_counter() - begin
    return used.ru_utime + used.ru_stime + time.process_time() - own, wall


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("sandboxes", nargs="*", default=["process", "bwrap"])
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(args.episodes):
        for name in (*BARE, *args.sandboxes):
            found[name].append(cost(name))
    print("| start | processor time [ms] | wall time [ms] |\n|---|---:|---:|")
    for name, costs in found.items():
        columns = []
        for values in zip(*costs, strict=True):
            tenths = statistics.quantiles(values, n=10)
            low, middle, high = (1000 * value for value in (tenths[0], statistics.median(values), tenths[-1]))
            columns.append(f"{middle:.0f} ({low:.0f} to {high:.0f})")
        print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
