"""A long run whose processes are killed and stopped one after the other: what it loses, and what grows.

python scripts/lab/soak.py                      # 1,000 rollouts, a fault each minute, and the same undisturbed
python scripts/lab/soak.py --rollouts 60 --every 20
python scripts/lab/soak.py --async-rollout      # does not compare weights: what is sampled ahead depends on time
python scripts/lab/soak.py --agents             # each sample is an episode of three turns, played in processes

It trains a tiny model with Ray, one trainer and one embedded engine. Faults go in turn to the driver, the trainer, the
engine, the rollout manager, raylet, GCS and, with --agents, a process of environments. They are SIGKILL and SIGSTOP;
the driver gets no SIGSTOP, because nobody watches it. A fault comes only after a checkpoint that is newer than the
previous fault. The status is 1 if a rollout or a sample is missing or appears twice, or if the weights differ in any
bit from those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
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

from slimelite.models.checkpoints import MARKER  # noqa: E402
from slimelite.samples.table import SampleTable  # noqa: E402
from slimelite.tracking.metrics_file import read_metrics  # noqa: E402

FLAGS = """
    --launcher ray --device cpu --rollout-backend embedded --deterministic-mode
    --hf-checkpoint data/model --prompt-data data/train.parquet --input-key messages --label-key label
    --apply-chat-template --rollout-shuffle --custom-rm-path reward.py:digits
    --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 16
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 1e-3
    --save-interval 5 --max-restarts 100000 --hang-timeout 10
"""
# a reward that a random model earns now and then
REWARD = """
async def digits(args, sample, **kwargs):
    return sum(symbol.isdigit() for symbol in sample.response) / max(1, len(sample.response))
"""
# an episode of three turns, which the same reward grades
ENVIRONMENT = """
from slimelite.environments.protocol import Start, Step


class ThreeTurns:
    def reset(self, row):
        self.turns, self.question = 0, row.prompt[-1]
        return Start([self.question])

    def step(self, reply):
        self.turns += 1
        return Step([self.question], done=self.turns == 3)
"""
AGENTS = """
    --environment environment.py:ThreeTurns --environment-processes 2 --environment-call-timeout 5
    --rollout-max-context-len 256
"""
ENVIRONMENTS = "slimelite.environments.serve"
FAULTS = [
    *[(ENVIRONMENTS, signal.SIGKILL), (ENVIRONMENTS, signal.SIGSTOP)],
    *[(what, signal.SIGKILL) for what in ("train.py", "ray::trainer", "ray::engine", "ray::rollout", "gcs_server")],
    *[(what, signal.SIGSTOP) for what in ("ray::trainer", "ray::engine", "ray::rollout", "gcs_server")],
    *[("raylet/raylet", signal.SIGKILL), ("raylet/raylet", signal.SIGSTOP)],
]
POLL_S, LOOK_S = 0.2, 2.0


@dataclass
class Run:
    """A run in ``folder``. ``faults``: each fault, and after how many rollouts it came."""

    folder: Path
    faults: list[tuple[str, int]] = field(default_factory=list)
    # kind of process and pid -> rollouts done, resident bytes, descriptors and threads, at each look
    sizes: dict[tuple[str, int], list[tuple[int, int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0
    words: list[str] = field(default_factory=list)

    def play(self, rollouts: int, every: float | None, more: list[str]) -> None:
        """Run to the end. ``every``: seconds between two faults; None: no faults."""
        words = [*shlex.split(FLAGS), "--num-rollout", str(rollouts), "--run-dir", str(self.folder / "run")]
        words += ["--save", str(self.folder / "saved"), "--save-hf", str(self.folder / "model"), *more]
        self.words = words
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with (self.folder / "console.txt").open("w") as console:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *words],
                cwd=self.folder.parent,
                env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                stdout=console,
                stderr=subprocess.STDOUT,
            )
            begin = fault = looked = time.monotonic()
            saved = self._saved()
            while process.poll() is None:
                time.sleep(POLL_S)
                if time.monotonic() - looked > LOOK_S:
                    self._look(process)
                    looked = time.monotonic()
                due = every is not None and time.monotonic() - fault > every and self._saved() > saved
                if due and self._hurt(process):
                    fault, saved = time.monotonic(), self._saved()
        self.seconds = time.monotonic() - begin
        if process.returncode:
            sys.exit(f"exit status {process.returncode}: {self.folder}/console.txt")

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
        return [fault for fault in FAULTS if fault[0] != ENVIRONMENTS or "--environment" in self.words]

    def _hurt(self, process: subprocess.Popen[bytes]) -> bool:
        faults = self.all_faults()
        what, number = faults[len(self.faults) % len(faults)]
        members = [child for child, command in self._family(process) if what in command and "watchdog" not in command]
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
            kind = next((each for each in ("ray::trainer", "ray::engine", "ray::rollout") if each in command), "")
            kind = kind or ("driver" if "train.py" in command else "")
            if kind:
                with suppress(psutil.NoSuchProcess):
                    size = (done, child.memory_info().rss, child.num_fds(), child.num_threads())
                    self.sizes[kind, child.pid].append(size)

    def samples(self) -> dict[int, tuple[list[int], list[int]]]:
        """Rollout -> the ids of its samples, and their rewards in thousandths."""
        files = sorted((self.folder / "run" / "rollouts").glob("*.parquet"))
        tables = [SampleTable.from_parquet(file) for file in files]
        return {
            number: (table.sample_id.tolist(), np.round(1000 * table.reward).astype(int).tolist())
            for number, table in enumerate(tables)
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the final model."""
        return load_file(self.folder / "model" / "model.safetensors")


def slopes(run: Run) -> list[str]:
    """Growth of each worker per 1,000 rollouts, over the second half of its life."""
    rows = ["| worker | resident memory [MB per 1,000 rollouts] | descriptors | threads |", "|---|---:|---:|---:|"]
    for (kind, _), sizes in sorted(run.sizes.items()):
        late = np.array(sizes[len(sizes) // 2 :], dtype=float)
        if len(late) < 10 or late[-1, 0] == late[0, 0]:
            continue
        memory, descriptors, threads = (np.polyfit(late[:, 0], late[:, column], 1)[0] * 1000 for column in (1, 2, 3))
        rows.append(f"| {kind} | {memory / 2**20:.1f} | {descriptors:.1f} | {threads:.1f} |")
    return rows


def problems(run: Run, rollouts: int, undisturbed: Run | None) -> list[str]:
    """Samples and weights that are missing, duplicated or different."""
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
    if undisturbed is not None:
        if samples != undisturbed.samples():
            wrong.append("samples or rewards differ from those of the undisturbed run")
        before, after = undisturbed.weights(), run.weights()
        if different := [name for name in before if not torch.equal(before[name], after[name])]:
            wrong.append(f"{len(different)} of {len(before)} weights differ from the undisturbed run: {different[:3]}")
    return wrong


def main() -> int:
    """The program of the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--async-rollout", action="store_true", help="sample a rollout ahead")
    parser.add_argument("--agents", action="store_true", help="each sample is an episode of three turns")
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
    more = [*(["--async-rollout"] if args.async_rollout else []), *(shlex.split(AGENTS) if args.agents else [])]
    runs = {name: Run(args.out / name) for name in ("undisturbed", "disturbed")}
    for name, run in runs.items():
        run.folder.mkdir()
        run.play(args.rollouts, args.every if name == "disturbed" else None, more)
    wrong = problems(runs["undisturbed"], args.rollouts, None)
    wrong += problems(runs["disturbed"], args.rollouts, None if args.async_rollout else runs["undisturbed"])
    dealt = Counter(what for what, _ in runs["disturbed"].faults)
    possible = [f"{what} {number.name}" for what, number in runs["disturbed"].all_faults()]
    if never := [fault for fault in possible if fault not in dealt]:
        print(f"The run was too short for {', '.join(never)}.")
    records = read_metrics(runs["undisturbed"].folder / "run")
    pace = statistics.median(record["perf/step_time"] for record in records if "perf/step_time" in record)
    lines = [
        f"{args.rollouts} rollouts{' '.join(['', *more])}: {runs['undisturbed'].seconds:.0f} s "
        f"undisturbed (a rollout {pace:.2f} s), {runs['disturbed'].seconds:.0f} s with {sum(dealt.values())} faults: "
        + ", ".join(f"{count} × {what}" for what, count in dealt.items()),
        *(f"WRONG: {each}" for each in wrong or ["nothing"]),
        "",
        "Undisturbed:",
        *slopes(runs["undisturbed"]),
    ]
    print("\n".join(lines))
    (args.out / "result.json").write_text(json.dumps({"wrong": wrong, "faults": runs["disturbed"].faults}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
