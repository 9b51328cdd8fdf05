#!/usr/bin/env python
"""`slimelite env check` on every set of reasoning-gym, every game of TextArena and every planted fault.

    python scripts/lab/environment_alarms.py RESULTS.jsonl [--only reasoning-gym|textarena|own|planted]

It checks one environment after the other, each as a user would, and appends the result to the file. A name that is
already in the file is left out. At the end it prints the table of docs/agents.md. Human findings about single
environments are in this file. An alarm for one of `FAULTY` is right, and any other alarm is false.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from slimelite.base.version import add_version

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "tests" / "apps" / "planted" / "faulty_environments.py"
# for all of one environment; its processes are then killed [s]
LIMIT_SECONDS = 300.0
# environments of others with a fault of their own, read in their code
FAULTY = {
    "reasoning-gym:complex_arithmetic": "the reply nan is half right",
    "reasoning-gym:game_of_life_halting": "any reply but an empty one is right",
    "reasoning-gym:isomorphic_strings": "its questions depend on Python's hash seed",
    "reasoning-gym:ransom_note": "its questions depend on Python's hash seed",
    "reasoning-gym:word_ladder": "its own answers depend on Python's hash seed",
    "textarena:CharacterConclave-v0": "every move raises a TypeError",
    "textarena:ConnectFour-v0": "a long reply is searched without end",
    "textarena:Countdown-v0": "a move that it cannot read raises a ValueError",
    "textarena:Cryptarithm-v0": "a move that it cannot read raises a ValueError",
    "textarena:GuessTheNumber-v0": "a number of 5,000 digits raises a ValueError",
    "textarena:LinesOfAction-v0": "a long reply is searched without end",
    "textarena:MarketEntryGame-v0": "a move that it cannot read begins an endless loop",
    "textarena:Othello-v0": "a number of 5,000 digits raises a ValueError",
    "textarena:Poker-v0": "it asks for another move after any number of moves that it cannot read",
    "textarena:PublicGoodsGame-v0": "a move that it cannot read begins an endless loop",
    "textarena:RushHour-v0": "its reset computes for up to a second, and holds the event loop",
    "textarena:SantoriniBaseFixed-v0": "it asks for another move after any number of moves that it cannot read",
    "textarena:SimpleTak-v0": "a number of 5,000 digits raises a ValueError",
    "textarena:Slitherlink-v0": "a move that it cannot read raises a ValueError",
    "textarena:ThreeCardMonte-v0": "a move that it cannot read raises a ValueError",
    "textarena:ThreePlayerTicTacToe-v0": "a number of 5,000 digits raises a ValueError",
    "textarena:TicTacToe-v0": "a number of 5,000 digits raises a ValueError",
}


def planted() -> dict[str, list[str]]:
    """Class -> the checks that find its fault."""
    classes = [node for node in ast.parse(PLANTED.read_text()).body if isinstance(node, ast.ClassDef)]
    return {node.name: (ast.get_docstring(node) or "").split(", ") for node in classes if node.name != "Sound"}


def names(only: str | None) -> Iterator[tuple[str, str]]:
    """Yields a source and an environment for each."""
    if only in (None, "own"):
        yield from (("own", name) for name in ("calculator", "nim", "nim:random", "nim:perfect", f"{PLANTED}:Sound"))
    if only in (None, "planted"):
        yield from (("planted", f"{PLANTED}:{name}") for name in planted())
    if only in (None, "reasoning-gym"):
        from reasoning_gym.factory import DATASETS

        yield from (("reasoning-gym", f"reasoning-gym:{name}?size=12") for name in sorted({*DATASETS} - {"composite"}))
    if only in (None, "textarena"):
        from textarena.envs.registration import ENV_REGISTRY

        games: dict[str, str] = {}  # one of each; its variants differ in sizes and in what a wrapper shows
        for name in sorted(ENV_REGISTRY):
            games.setdefault(name.partition("-v0")[0], name)
        yield from (("textarena", f"textarena:{name}") for name in games.values())


def check(environment: str, rows: Path | None) -> dict[str, Any]:
    """The report of ``slimelite env check``. If it takes too long, ``problem`` says so."""
    words = [sys.executable, "-m", "slimelite.apps.env", "check", environment, "--json"]
    # one call has a second where a hang is planted, and else what train.py gives it: the machine may be busy
    limits = ["--call-timeout", "1", "--seconds", "20"] if rows else ["--call-timeout", "60", "--seconds", "60"]
    words += [*(["--prompt-data", str(rows)] if rows else []), *limits]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output = process.communicate(timeout=LIMIT_SECONDS)[0]
        return dict(json.loads(output)[0])
    except subprocess.TimeoutExpired:
        return {"environment": environment, "problem": f"it took longer than {LIMIT_SECONDS:.0f} s", "faults": []}
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def verdict(source: str, report: dict[str, Any]) -> str:
    """Whether a report is right: its class for the table."""
    name, faults = report["environment"], {fault["check"] for fault in report["faults"]}
    if source == "planted":
        return "found" if faults & {*planted()[name.rpartition(":")[2]]} else "missed"
    if report["problem"] is not None:
        return "took too long" if "took longer" in report["problem"] else "cannot begin"
    if name.partition("?")[0] in FAULTY:
        return "right flag" if faults else "missed"
    return "false alarm" if faults else "no flag"


def table(lines: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """The counts by source, and each environment with an alarm."""
    counts = Counter((source, verdict(source, report)) for source, report in lines)
    kinds = ("no flag", "right flag", "false alarm", "found", "missed", "cannot begin", "took too long")
    yield "| | " + " | ".join(kinds) + " |\n|---|" + "---:|" * len(kinds)
    for source in dict.fromkeys(source for source, _ in lines):
        yield f"| {source} | " + " | ".join(str(counts[source, kind]) for kind in kinds) + " |"
    yield ""
    for source, report in lines:
        said = verdict(source, report)
        if said not in ("no flag", "found"):
            faults = "; ".join(f"{fault['check']}: {fault['says']}" for fault in report["faults"])
            yield f"{said}: {report['environment']}: {report['problem'] or faults}"


def main() -> None:
    """Check what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_version(parser)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", choices=("reasoning-gym", "textarena", "own", "planted"))
    options = parser.parse_args()
    os.chdir(ROOT)
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    known = {report["environment"] for _, report in lines}
    with tempfile.TemporaryDirectory() as folder, options.results.open("a") as out:
        sums = [(3 * i + 1, 5 * i + 2) for i in range(12)]
        rows = Path(folder, "rows.jsonl")
        rows.write_text("\n".join(json.dumps({"input": f"{a}+{b}=?", "label": str(a + b)}) for a, b in sums))
        for source, name in names(options.only):
            if name not in known:
                begin = time.monotonic()
                report = check(name, rows if str(PLANTED) in name else None)
                lines.append((source, report))
                out.write(json.dumps((source, report)) + "\n")
                out.flush()
                said = verdict(source, report)
                print(f"{time.monotonic() - begin:.0f} s  {name}: {said}", file=sys.stderr, flush=True)
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
