"""``slimelite env check``: plays scripted episodes to check whether an environment is fit for training.

The episodes find faults before you spend GPU hours. The environment runs in two separate processes. One process plays
all scripts. The other process plays only the first scripts, so that the results of both can be compared. With
``--hf-checkpoint``, a model also plays groups of episodes. The spread of the rewards in a group shows whether the model
can learn from them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

from slimelite.apps.env_checks import CHECKS, Finding, Observed, judge, mean
from slimelite.base.lifecycle import start_module
from slimelite.base.processes import waited

PROBE = "slimelite.environments.probe"
# time limit for the environment's imports and its rows [s]; the first import of reasoning-gym compiles for 25 s
START_SECONDS = 300.0
# the probe may be silent for this much longer than the time limit of one call [s]
GRACE_SECONDS = 2.0
POLL_SECONDS = 0.1
CLASS_METHODS = {"reset", "step", "tools", "score"}
FINE, FAULTY, UNUSABLE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status: 0 without faults, 1 with faults, 2 if an environment cannot be checked.

    Raises:
        ValueError: a file or class does not exist, or a number is out of range.
    """
    words = list(argv)
    own, more = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = _parser().parse_args(own)
    if more and options.hf_checkpoint is None:
        raise ValueError("the flags of train.py (after --) need --hf-checkpoint: add it, or leave these flags out")
    if min(options.rows, options.max_turns, options.call_timeout, options.groups, options.samples) <= 0:
        raise ValueError("--rows, --max-turns, --call-timeout, --groups and --samples must be numbers above 0")
    targets = [name for target in options.environments for name in classes_of(target)]
    status, reports = FINE, list[dict[str, Any]]()
    for name in targets:
        report = check(name, options)
        if options.hf_checkpoint is not None and report["characters_a_step"] is not None:  # a step succeeded
            from slimelite.apps.env_model import play

            report["model"] = play(name, options, more)
        reports.append(report)
        status = max(status, UNUSABLE if report["problem"] else FAULTY if report["faults"] else FINE)
        if not options.json:
            print("\n".join(_lines(report)), flush=True)
    if options.json:
        print(json.dumps(reports, indent=1))
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slimelite env", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="check")
    check = commands.add_parser(
        "check",
        help="play scripted episodes and report faults",
        description="Play scripted episodes of environments in separate processes, and report faults. The exit status "
        "is 0 if there are no faults, 1 if there are some, and 2 if an environment cannot be checked.",
        epilog="After -- write flags of train.py for the model's episodes, such as -- --rollout-max-response-len 512.",
    )
    add = check.add_argument
    add(
        "environments",
        nargs="+",
        metavar="NAME|CLASS|FILE",
        help="an environment, written as in --environment of train.py; or a .py file, to check all its environment "
        "classes",
    )
    add(
        "--prompt-data",
        metavar="FILE",
        help="the rows for the episodes, like --prompt-data of train.py (default: the environment's own rows)",
    )
    add("--input-key", default="input", help="column of the prompt (default: %(default)s)")
    add("--label-key", default="label", help="column of the label, the golden answer (default: %(default)s)")
    add("--metadata-key", default="metadata", help="column of the metadata (default: %(default)s)")
    add(
        "--import-file",
        action="append",
        default=[],
        metavar="FILE",
        help="run this Python file first, like --import-file of train.py",
    )
    add("--rows", type=int, default=12, metavar="N", help="number of rows to play (default: %(default)s)")
    add("--max-turns", type=int, default=16, metavar="N", help="maximum replies of an episode (default: %(default)s)")
    add(
        "--call-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="time limit of one call of the environment, in seconds (default: %(default)s)",
    )
    add(
        "--seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="start no new scripted episode after this many seconds (default: %(default)s)",
    )
    add("--hf-checkpoint", metavar="MODEL", help="also let this model play groups of episodes")
    add(
        "--groups",
        type=int,
        default=8,
        metavar="N",
        help="number of groups that this model plays (default: %(default)s)",
    )
    add("--samples", type=int, default=8, metavar="N", help="episodes in each group (default: %(default)s)")
    add("--json", action="store_true", help="print all findings as JSON")
    return parser


def classes_of(target: str) -> list[str]:
    """The environments in ``target``. In a file, a class counts as an environment if it has at least one method of an
    environment.

    The file is parsed, but not executed.

    Raises:
        ValueError: the file cannot be read, or has no such class.
    """
    if not target.endswith(".py"):
        return [target]
    try:
        tree = ast.parse(Path(target).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ValueError(f"{target}, line {error.lineno}: {error.msg}") from error
    named = list[str]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            bases = [ast.unparse(base) for base in node.bases]
            above = any(base.endswith("ToolEnvironment") or f"{target}:{base}" in named for base in bases)
            if methods & CLASS_METHODS or above:
                named.append(f"{target}:{node.name}")
    if not named:
        raise ValueError(
            f"{target} has no class with the methods reset and step (docs/agents.md): name its environment as "
            f"{target}:Class"
        )
    return named


def check(environment: str, options: argparse.Namespace) -> dict[str, Any]:
    """Check an environment. Returns the facts of `_report`, such as ``faults`` and ``rewards``."""
    begin = time.monotonic()
    data = {"path": options.prompt_data, "input": options.input_key, "label": options.label_key}
    with tempfile.TemporaryDirectory(prefix="slimelite-env-") as folder:
        plan = {
            "environment": environment,
            "data": {**data, "meta": options.metadata_key} if options.prompt_data else None,
            "rows": options.rows,
            "turns": options.max_turns,
            "call_seconds": options.call_timeout,
            "seconds": options.seconds,
            "import_files": options.import_file,
        }
        plans = [{**plan, "whole": whole, "canary": f"{folder}/ran-{whole}"} for whole in (True, False)]
        one, two = _observe_all(plans)
    findings = judge(one, two) if one.problem is None else []
    if findings and plans[0]["data"] is None and not any(e["turns"] or e["start"] for e in one.episodes):
        hint = "; the environment's own rows are empty: name a file with --prompt-data"
        findings = [finding._replace(says=finding.says + (hint if not any(one.labels) else "")) for finding in findings]
    return _report(environment, one, findings, time.monotonic() - begin)


def _observe_all(plans: Sequence[Mapping[str, Any]]) -> list[Observed]:
    """Run a probe for each of ``plans`` at the same time, and return their results. Afterwards all processes have
    ended."""
    with tempfile.TemporaryFile("w+") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        processes = [start_module(PROBE, text=True, **pipes) for _ in plans]
        try:
            seen = [Observed() for _ in plans]
            threads = list[threading.Thread]()
            for process, plan, observed in zip(processes, plans, seen, strict=True):
                assert process.stdin is not None
                process.stdin.write(json.dumps(plan) + "\n")
                process.stdin.flush()
                limit = plan["call_seconds"] + GRACE_SECONDS
                threads.append(threading.Thread(target=_observe, args=(process, limit, observed), daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        last = (errors.read()[-2000:].strip().splitlines() or [""])[-1]
    for observed in seen:
        if observed.died is not None and last:
            observed.died += f"; the last line of stderr: {last:.200}"
    return seen


def _observe(process: subprocess.Popen[str], silent_seconds: float, observed: Observed) -> None:
    """Read the output of a probe into ``observed`` until the probe ends. A probe that is silent for too long is killed.

    Time in which the probe waits for a processor does not count, so a busy machine is not a fault of the environment.
    """
    assert process.stdout is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    playing, limit = "its start", START_SECONDS
    while True:
        before, left = waited(process.pid), limit
        while left > 0:
            try:
                line = lines.get(timeout=left)
                break
            except queue.Empty:
                now = waited(process.pid)
                before, left = now, now - before
        else:
            observed.hung = playing
            process.kill()
            return
        if not line:
            break
        event = json.loads(line)
        if event["event"] in ("begin", "ready"):
            playing, limit = event.get("name", "its start"), silent_seconds
        if event["event"] == "ready":
            observed.labels = event["labels"]
        elif event["event"] == "problem":
            observed.problem = event["message"]
        elif event["event"] == "episode":
            observed.episodes.append(event)
        elif event["event"] == "end":
            observed.end = event
    if not observed.end and observed.problem is None:
        status = process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        observed.died = f"{playing} ({how})"


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Put each line of ``stream`` into ``lines``, and an empty line at the end of the stream."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _report(environment: str, one: Observed, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """The dict that `--json` prints."""
    calls = [each for episode in one.episodes for each in episode.get("seconds", [])[1:]]
    turns = [turn for episode in one.episodes for turn in episode["turns"]]
    rewards: dict[str, list[float]] = {}
    for kind in dict.fromkeys(episode["kind"] for episode in one.episodes):
        episodes = one.golden() if kind == "golden" else one.of(kind)
        each = [e["reward"] for e in episodes if e["reward"] is not None]
        if each:
            rewards[kind] = [min(each), fmean(each), max(each)]
    return {
        "environment": environment,
        "problem": one.problem,
        "faults": [finding._asdict() for finding in findings],
        "not_checked": _not_checked(one) if one.problem is None else list(CHECKS),
        "rows": len(one.labels),
        "episodes": len(one.episodes),
        "skipped": one.end.get("skipped", 0),
        "seconds": seconds,
        "rewards": rewards,
        "call_seconds": {"median": median(calls), "max": max(calls)} if calls else None,
        "characters_a_step": fmean([turn["characters"] for turn in turns]) if turns else None,
        "turns": {"mean": len(turns) / len(one.episodes), "max": max(len(e["turns"]) for e in one.episodes)}
        if one.episodes
        else None,
    }


def _not_checked(one: Observed) -> dict[str, str]:
    """The checks that could not run, each with the reason."""
    if not any(e["turns"] for e in one.episodes):
        return dict.fromkeys((name for name in CHECKS if name != "runs"), "no step succeeded")
    reasons: dict[str, str] = {}
    scored = any(e["reward"] is not None for e in one.episodes)
    if not scored:
        reasons |= dict.fromkeys(("golden answer", "cheap answers"), "no step has a reward, so a run needs --rm-type")
    elif mean(one.golden()) is None:
        reasons["golden answer"] = "rows have no label, and the class has no method golden"
    if not any(e["start"] and e["start"]["tools"] != "[]" for e in one.episodes):
        reasons["tools"] = "the environment has no tools"
    return reasons


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    name = report["environment"]
    if report["problem"] is not None:
        yield f"{name}\n  cannot be checked: {report['problem']}"
        return
    cut = f", {report['skipped']} left out because of the time limit (--seconds)" if report["skipped"] else ""
    yield f"{name}: {report['rows']} rows, {report['episodes']} episodes in {report['seconds']:.1f} s{cut}"
    for title, (healthy, _) in CHECKS.items():
        faults = [fault["says"] for fault in report["faults"] if fault["check"] == title]
        for says in faults:
            yield f"  FAULT  {title:<15}{says}"
        if not faults and title in report["not_checked"]:
            yield f"  -      {title:<15}not checked: {report['not_checked'][title]}"
        elif not faults:
            yield f"  ok     {title:<15}{healthy}"
    if report["rewards"]:
        yield "  mean reward: " + ", ".join(f"{kind} {each[1]:.3g}" for kind, each in report["rewards"].items())
    if report["call_seconds"]:
        calls = report["call_seconds"]
        says, turns = report["characters_a_step"] or 0, report["turns"]["mean"]
        yield (
            f"  a call takes {1000 * calls['median']:.3g} ms (median), {1000 * calls['max']:.3g} ms at most; the "
            f"messages of a step have {says:.0f} characters; an episode has {turns:.3g} turns"
        )
    if model := report.get("model"):
        from slimelite.apps.env_model import lines

        yield from lines(model)
    number = len(report["faults"])
    yield "  no faults" if not number else f"  {number} fault{'s' if number > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
