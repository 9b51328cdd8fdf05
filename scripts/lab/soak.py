"""A long run whose processes are killed and stopped one after the other: what is lost, and what grows.

python scripts/lab/soak.py                      # 1,000 rollouts, a fault each minute, and the same undisturbed
python scripts/lab/soak.py --rollouts 60 --every 20
python scripts/lab/soak.py --async-rollout
python scripts/lab/soak.py --agents             # a third of the samples are episodes of three turns, in processes
python scripts/lab/soak.py --sglang --rollouts 200 --every 300

The script trains a tiny model with Ray, one trainer and one embedded engine, or one server with --sglang. SGLang does
not sample the same tokens twice on a CPU, so the script does not compare its weights. Faults go in turn to the driver,
the trainer, the engine, the rollout manager, raylet, GCS and, with --agents, a process of environments. A fault is
SIGKILL or SIGSTOP; the driver gets no SIGSTOP, because nobody watches it. The time to the next fault begins with the
first checkpoint after the previous fault. The status is 1 if

- a rollout or a sample is missing or appears twice,
- the weights differ in any bit from those of an undisturbed run,
- the undisturbed run restarted, or the disturbed run restarted more often than it had faults,
- a process or a folder of Ray is left at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slimelite.base.version import add_version  # noqa: E402
from slimelite.models.checkpoints import MARKER  # noqa: E402
from slimelite.samples.table import SampleTable  # noqa: E402
from slimelite.tracking.metrics_file import read_metrics  # noqa: E402
from tests.conftest import sglang_variables  # noqa: E402

FLAGS = """
    --launcher ray --device cpu
    --hf-checkpoint data/model --prompt-data data/train.parquet --input-key messages --label-key label
    --apply-chat-template --rollout-shuffle --custom-rm-path reward.py:chance
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 16
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 1e-3
    --save-interval 5 --max-restarts 100000 --hang-timeout 10
"""
EMBEDDED = "--rollout-backend embedded --deterministic-mode"
# a server whose scheduler was killed takes six seconds to end
SGLANG = "--rollout-backend sglang --sglang-max-total-tokens 16384 --sglang-max-running-requests 32 --hang-timeout 20"
# a reward that nobody learns, so that every step moves the weights until the end
REWARD = """
import zlib


async def chance(args, sample, **kwargs):
    return zlib.crc32(repr((sample.prompt, sample.response)).encode()) % 1000 / 1000
"""
# one question in three begins an episode of three turns, the others end after one; the same reward grades them
ENVIRONMENT = """
from slimelite.environments.protocol import Start, Step


class ThreeTurns:
    def reset(self, row):
        self.turns, self.question = 0, row.prompt[-1]
        self.last = 1 if sum(self.question["content"].encode()) % 3 else 3
        return Start([self.question])

    def step(self, reply):
        self.turns += 1
        return Step([self.question], done=self.turns == self.last)
"""
AGENTS = """
    --environment environment.py:ThreeTurns --environment-processes 2 --environment-call-timeout 5
    --rollout-max-context-len 128
"""
ENVIRONMENTS, SERVER, SCHEDULER = "slimelite.environments.serve", "slimelite.engines.sglang.server", "sglang::scheduler"
# processes that only runs with a certain word have
ONLY_WITH = {ENVIRONMENTS: "--environment", SERVER: "sglang", SCHEDULER: "sglang"}
FAULTS = [
    *[(what, number) for number in (signal.SIGKILL, signal.SIGSTOP) for what in (SCHEDULER, SERVER)],
    *[(ENVIRONMENTS, signal.SIGKILL), (ENVIRONMENTS, signal.SIGSTOP)],
    *[(what, signal.SIGKILL) for what in ("train.py", "ray::trainer", "ray::engine", "ray::rollout", "gcs_server")],
    *[(what, signal.SIGSTOP) for what in ("ray::trainer", "ray::engine", "ray::rollout", "gcs_server")],
    *[("raylet/raylet", signal.SIGKILL), ("raylet/raylet", signal.SIGSTOP)],
]
KINDS = {
    **{f"ray::{kind}": kind for kind in ("trainer", "engine", "rollout")},
    SCHEDULER: "sglang's scheduler",
    SERVER: "sglang's server",
    "raylet/raylet": "raylet",
    "gcs_server": "GCS",
    ENVIRONMENTS: "environments",
    "train.py": "driver",
}
KEPT = "sizes.json"
NICENESS = "RAY_worker_niceness"
POLL_S, LOOK_S, END_S = 0.2, 2.0, 15.0


def _is_program(command: str) -> bool:
    """Whether ``command`` is a program itself, not a watchdog or a shell that has the program's name in its words."""
    return "watchdog" not in command and not command.startswith("sh ")


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; 0 if the folder does not exist."""
    total = 0
    for where, _, files in os.walk(folder):  # of a folder that has just gone it says nothing
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, file)).st_size
    return total


@dataclass
class Run:
    """A run in ``folder``; ``faults``: what was done to it, and after how many rollouts."""

    folder: Path
    faults: list[tuple[str, int]] = field(default_factory=list)
    away: list[float] = field(default_factory=list)  # from each fault to the next checkpoint [s]
    # kind of process and pid -> rollouts done, resident and shared bytes, descriptors and threads, at each look
    sizes: dict[tuple[str, int], list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))
    # rollouts done, and bytes of Ray's folder and of the checkpoints, at each look
    disk: list[tuple[int, ...]] = field(default_factory=list)
    members: set[psutil.Process] = field(default_factory=set)  # every process that it had
    sessions: set[Path] = field(default_factory=set)  # the folders of its Ray
    seconds: float = 0.0
    words: list[str] = field(default_factory=list)

    def play(self, rollouts: int, every: float | None, more: list[str]) -> None:
        """Run to the end. ``every``: seconds of work between two faults; None: no faults."""
        words = [*shlex.split(FLAGS), "--num-rollout", str(rollouts), "--run-dir", str(self.folder / "run")]
        words += ["--save", str(self.folder / "saved"), "--save-hf", str(self.folder / "model"), *more]
        self.words = words
        # Ray's workers would step back for every other program of this machine
        own = {**sglang_variables(), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", NICENESS: "0"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with (self.folder / "console.txt").open("w") as console:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *words],
                cwd=self.folder.parent,
                env={**clean, **own},
                stdout=console,
                stderr=subprocess.STDOUT,
            )
            begin = looked = fault = time.monotonic()
            saved, back = self._saved(), None
            while process.poll() is None:
                time.sleep(POLL_S)
                if time.monotonic() - looked > LOOK_S:
                    self._look(process)
                    looked = time.monotonic()
                if back is None and self._saved() > saved:
                    back = time.monotonic()
                    self.away += [back - fault] * bool(self.faults)
                if every is not None and back is not None and time.monotonic() - back > every and self._hurt(process):
                    fault, saved, back = time.monotonic(), self._saved(), None
        self.seconds = time.monotonic() - begin
        if process.returncode:
            sys.exit(f"exit status {process.returncode}: {self.folder}/console.txt")
        (self.folder / KEPT).write_text(json.dumps([self.seconds, list(self.sizes.items()), self.disk]))

    def recall(self) -> None:
        """Read what an earlier `play` has written in this folder."""
        self.seconds, sizes, self.disk = json.loads((self.folder / KEPT).read_text())
        self.sizes.update({tuple(key): rows for key, rows in sizes})

    def _saved(self) -> int:
        marker = self.folder / "saved" / MARKER
        return int(marker.read_text()) if marker.is_file() else -1

    def _done(self) -> int:
        return len(list((self.folder / "run" / "rollouts").glob("*.parquet")))

    def _family(self, process: subprocess.Popen[bytes]) -> Iterator[tuple[psutil.Process, str]]:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    yield child, " ".join(child.cmdline())[:200]

    def all_faults(self) -> list[tuple[str, signal.Signals]]:
        """The faults of `FAULTS` whose processes this run has."""
        return [fault for fault in FAULTS if ONLY_WITH.get(fault[0], "--num-rollout") in self.words]

    def _hurt(self, process: subprocess.Popen[bytes]) -> bool:
        faults = self.all_faults()
        what, number = faults[len(self.faults) % len(faults)]
        members = [child for child, command in self._family(process) if what in command and _is_program(command)]
        if not members:
            return False
        with suppress(psutil.NoSuchProcess):
            members[0].send_signal(number)
            self.faults.append((f"{what} {signal.Signals(number).name}", self._done()))
            return True
        return False

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        done = self._done()
        for child, command in self._family(process):
            self.members.add(child)
            if said := re.search(r"--log_dir=(\S+)/logs", command):
                self.sessions.add(Path(said[1]))
            kind = next((name for each, name in KINDS.items() if each in command and _is_program(command)), None)
            if kind is not None:
                with suppress(psutil.NoSuchProcess, OSError, TypeError):  # None of a process that has just ended
                    shared = re.search(r"RssShmem:\s*(\d+)", Path(f"/proc/{child.pid}/status").read_text())
                    size = (child.memory_info().rss, 1024 * int(shared[1]), child.num_fds(), child.num_threads())  # type: ignore[index]
                    self.sizes[kind, child.pid].append((done, *size))
        self.disk.append((done, sum(map(bytes_in, self.sessions)), bytes_in(self.folder / "saved")))

    def left(self) -> list[str]:
        """Processes and folders of Ray that are still there some seconds after the end."""
        deadline = time.monotonic() + END_S
        while True:
            alive = [each for each in self.members if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
            folders = [folder for folder in self.sessions if folder.exists()]
            if not (alive or folders) or time.monotonic() > deadline:
                return [*map(str, alive), *map(str, folders)]
            time.sleep(POLL_S)

    def restarts(self) -> int:
        """How often the command has started the run again."""
        return len(re.findall(r"^train.py: start \d+ of", (self.folder / "console.txt").read_text(), re.MULTILINE))

    def samples(self) -> dict[int, tuple[list[int], list[int]]]:
        """Rollout -> ids of its samples, and the rewards of these in thousandths."""
        files = sorted((self.folder / "run" / "rollouts").glob("*.parquet"))
        tables = [SampleTable.from_parquet(file) for file in files]
        return {
            number: (table.sample_id.tolist(), np.round(1000 * table.reward).astype(int).tolist())
            for number, table in enumerate(tables)
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Those of the model at the end."""
        return load_file(self.folder / "model" / "model.safetensors")


def slope(done: np.ndarray, sizes: np.ndarray) -> str:
    """Growth per 1,000 rollouts, with the standard error of the fit."""
    (grows, _), covariance = np.polyfit(done, sizes, 1, cov=True)
    return f"{1000 * grows:.1f} ± {1000 * covariance[0, 0] ** 0.5:.1f}"


def slopes(run: Run) -> list[str]:
    """Growth of each process and folder per 1,000 rollouts, over the second half of its life."""
    rows = [
        "| process | resident memory now [MB] | growth per 1,000 rollouts [MB] | shared [MB] | descriptors | threads |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (kind, _), sizes in sorted(run.sizes.items()):
        late = np.array(sizes[len(sizes) // 2 :], dtype=float)
        if len(late) < 10 or len(set(late[:, 0])) < 3:
            continue
        late[:, 1:3] /= 2**20
        rows.append(
            f"| {kind} | {late[-1, 1]:.0f} | " + " | ".join(slope(late[:, 0], late[:, n]) for n in range(1, 5)) + " |"
        )
    late = np.array(run.disk[len(run.disk) // 2 :], dtype=float)
    if len(late) >= 10:
        for n, what in ((1, "Ray's folder"), (2, "the checkpoints")):
            rows.append(f"{what}: {late[-1, n] / 2**20:.1f} MB, grows by {slope(late[:, 0], late[:, n] / 2**20)} MB")
    return rows


def problems(run: Run, rollouts: int, undisturbed: Run | None) -> list[str]:
    """What is missing, there twice, or different."""
    wrong, samples = list[str](), run.samples()
    if sorted(samples) != list(range(rollouts)):
        wrong.append(f"{rollouts - len(samples)} rollouts have no file")
    ids = Counter(number for own, _ in samples.values() for number in own)
    if twice := [number for number, times in ids.items() if times > 1]:
        wrong.append(f"{len(twice)} samples are in two rollouts: {twice[:5]}")
    if missing := set(range(max(ids, default=-1) + 1)) - set(ids):
        wrong.append(f"{len(missing)} samples are in none: {sorted(missing)[:5]}")
    records = read_metrics(run.folder / "run")
    for name in ("rollout/raw_reward", "train/loss"):
        if (count := sum(name in record for record in records)) != rollouts:
            wrong.append(f"{name} stands {count} times for {rollouts} rollouts")
    if (again := run.restarts()) > len(run.faults):
        wrong.append(f"it was started again {again} times, for {len(run.faults)} faults")
    if left := run.left():
        wrong.append(f"left at the end: {left[:5]}")
    if undisturbed is not None:
        if samples != undisturbed.samples():
            wrong.append("samples or rewards differ from those of the undisturbed run")
        before, after = undisturbed.weights(), run.weights()
        if different := [name for name in before if not torch.equal(before[name], after[name])]:
            wrong.append(f"{len(different)} of {len(before)} weights differ from the undisturbed run: {different[:3]}")
    return wrong


def report(rollouts: int, more: list[str], undisturbed: Run, disturbed: Run) -> list[str]:
    """Lines about the two runs, the faults, and what grew."""
    dealt = Counter(what for what, _ in disturbed.faults)
    never = [f"{what} {number.name}" for what, number in disturbed.all_faults()]
    never = [fault for fault in never if fault not in dealt]
    pace = statistics.median(
        record["perf/step_time"] for record in read_metrics(undisturbed.folder / "run") if "perf/step_time" in record
    )
    median, longest = statistics.median(disturbed.away or [0.0]), max(disturbed.away, default=0.0)
    stops = re.findall(r" was stopped for ([\d.]+) s", (disturbed.folder / "console.txt").read_text())
    return [
        f"{rollouts} rollouts {' '.join(more)}: {undisturbed.seconds:.0f} s undisturbed (a rollout {pace:.2f} s), "
        f"{disturbed.seconds:.0f} s with {sum(dealt.values())} faults and {disturbed.restarts()} restarts: "
        + ", ".join(f"{count} × {what}" for what, count in dealt.items()),
        f"From a fault to the next checkpoint: {median:.0f} s (median), {longest:.0f} s (longest).",
        *([f"Nobody was stopped for longer than {max(map(float, stops)):.1f} s."] if stops else []),
        *([f"The run was too short for {', '.join(never)}."] if never else []),
        "",
        "Undisturbed, over the second half:",
        *slopes(undisturbed),
    ]


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of work between two faults")
    parser.add_argument("--async-rollout", action="store_true", help="sample a rollout ahead")
    parser.add_argument("--agents", action="store_true", help="a third of the samples are episodes of three turns")
    parser.add_argument("--sglang", action="store_true", help="sample with a real SGLang server")
    parser.add_argument(
        "--undisturbed", type=Path, help="use this folder `undisturbed` of an earlier soak with the same flags"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "soak", help="an empty folder, or one that does not exist yet"
    )
    args = parser.parse_args()
    args.out = args.out.resolve()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    make = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "quickstart", "--out", str(args.out / "data")]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    (args.out / "reward.py").write_text(REWARD)
    (args.out / "environment.py").write_text(ENVIRONMENT)
    more = shlex.split(SGLANG if args.sglang else EMBEDDED) + ["--async-rollout"] * args.async_rollout
    more += shlex.split(AGENTS) * args.agents
    runs = {name: Run(args.out / name) for name in ("undisturbed", "disturbed")}
    if args.undisturbed:
        runs["undisturbed"].folder = args.undisturbed.resolve()
        runs["undisturbed"].recall()
    for name, run in runs.items():
        if not (name == "undisturbed" and args.undisturbed):
            run.folder.mkdir()
            run.play(args.rollouts, args.every if name == "disturbed" else None, more)
    wrong = problems(runs["undisturbed"], args.rollouts, None)
    wrong += problems(runs["disturbed"], args.rollouts, None if args.sglang else runs["undisturbed"])
    print("\n".join([*report(args.rollouts, more, **runs), *(f"WRONG: {each}" for each in wrong or ["nothing"])]))
    (args.out / "result.json").write_text(json.dumps({"wrong": wrong, "faults": runs["disturbed"].faults}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
