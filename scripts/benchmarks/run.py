"""Answer questions about speed. Each compares with a rival or a limit that is measured in turn in the same run.

    python scripts/benchmarks/run.py --list
    python scripts/benchmarks/run.py grpo-tiny engine-tiny --out now.json
    TRL_PYTHON=~/trl/bin/python python scripts/benchmarks/run.py grpo-135m --rounds 1
    python scripts/benchmarks/run.py grpo-tiny --before ../earlier-checkout     # now, before and TRL, in turn

`setup_rivals.sh` makes the rivals' environments. CPU-seconds cover all processes that a command starts (`tree.py`),
each with one compute thread. If a rival is not given, it is left out together with the answers that need it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import micro  # noqa: E402, F401  (it registers its questions)
from harness import ROOT, Report, SideFailed, answer, commit, in_turn, table, versions  # noqa: E402
from questions import QUESTIONS  # noqa: E402
from sides import Setting  # noqa: E402

from slimelite.base.version import add_version  # noqa: E402


def say(line: str) -> None:
    """Print progress at once."""
    print(line, flush=True)


def ask(name: str, setting: Setting) -> dict[str, Any]:
    """The result of one question: its sides' figures, its answers, and the machine's load."""
    question = QUESTIONS[name]
    say(f"{name}: {question.text}")
    load, began, setting.notes = [os.getloadavg()[0]], time.monotonic(), {}
    entry: dict[str, Any] = {"question": question.text, "sides": {}, "answers": []}
    try:
        plan = question.plan(setting, say)
        entry |= {"rounds": plan.rounds, "sides": in_turn(plan.sides, plan.rounds, setting.work, say)}
        entry["answers"] = [found for asked in plan.answers if (found := answer(asked, entry["sides"]))]
    except SideFailed as error:
        entry["failed"] = str(error)[-1500:]
        say(f"  FAILED: {entry['failed']}")
    load.append(os.getloadavg()[0])
    own = ("quick", "rounds", "steps", "prompts", "trl_batch")
    given = {option: value for option in own if (value := getattr(setting, option))}
    options = [f"--{k.replace('_', '-')}" + ("" if value is True else f" {value}") for k, value in given.items()]
    entry |= {
        "command": " ".join(["python scripts/benchmarks/run.py", name, *options]),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "load": [round(x, 1) for x in load],
    }
    return entry | {"seconds": round(time.monotonic() - began), "notes": setting.notes}


def main() -> int:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("questions", nargs="*", help="names from --list (default: all questions)")
    parser.add_argument("--list", action="store_true", help="print the questions and end")
    parser.add_argument(
        "--quick", action="store_true", help="only the tiny questions, with one or two steps each, to see that they run"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write; if it exists, the results are added to it")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "benchmarks", help="folder for models, prompts and run folders"
    )
    parser.add_argument("--slimelite", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--before", type=Path, help="an earlier checkout, measured in turn with the other")
    parser.add_argument("--trl", default=os.environ.get("TRL_PYTHON"), help="Python of TRL's environment ($TRL_PYTHON)")
    parser.add_argument(
        "--vllm", default=os.environ.get("VLLM_PYTHON"), help="Python of vLLM's environment ($VLLM_PYTHON)"
    )
    parser.add_argument(
        "--llama", default=os.environ.get("LLAMA_PYTHON"), help="Python of llama.cpp's environment ($LLAMA_PYTHON)"
    )
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M's folder (default: random weights of its shape)")
    parser.add_argument(
        "--data", type=Path, help="parquet with the columns messages and label, for SmolLM2's questions"
    )
    parser.add_argument(
        "--rounds", type=int, help="how often each side runs (default: depends on the question, usually 3)"
    )
    parser.add_argument("--steps", type=int, help="training steps of a run (default: depends on the question)")
    parser.add_argument("--prompts", type=int, help="prompts in a GRPO step of SmolLM2 (default: 8)")
    parser.add_argument(
        "--trl-batch", type=int, help="TRL's batch size (default: the fastest of 8, 16, 64 and all rows)"
    )
    given = parser.parse_args()
    if given.list:
        for name, question in QUESTIONS.items():
            print(f"{name:18} {question.minutes:4g} min  {question.text}")
        return 0
    wanted = given.questions or [name for name, question in QUESTIONS.items() if question.quick or not given.quick]
    if unknown := [name for name in wanted if name not in QUESTIONS]:
        parser.error(f"no question {unknown[0]!r}; there are: {', '.join(QUESTIONS)}")
    if given.smollm2 and not given.data:
        parser.error("--smollm2 needs --data: prompts made for random weights have one word a token, real ones do not")
    checkouts = {"": given.slimelite.resolve(), **({"@before": given.before.resolve()} if given.before else {})}
    own = ("work", "smollm2", "data")
    paths = {name: path.resolve() for name in own if (path := getattr(given, name))}
    rest = {
        name: getattr(given, name)
        for name in ("trl", "vllm", "llama", "rounds", "steps", "prompts", "trl_batch", "quick")
    }
    setting = Setting(checkouts=checkouts, **paths, **rest)
    setting.work.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {"commits": {name.lstrip("@") or "now": commit(path) for name, path in checkouts.items()}}
    rivals = {name: versions(path) for name in ("trl", "vllm", "llama") if (path := rest[name])}
    head["versions"] = {"slimelite": versions(sys.executable), **rivals}
    report = Report(given.out or setting.work / "report.json", head)
    for name in wanted:
        report.add(name, ask(name, setting))
    shown = {"questions": {name: report.data["questions"][name] for name in wanted}}
    print(table(shown))
    failed = [
        n for n, x in shown["questions"].items() if "failed" in x or any("failed" in y for y in x["sides"].values())
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
