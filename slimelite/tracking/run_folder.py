"""Writes files of a run folder completely or not at all: configuration, versions, status, samples. The folder has

::

    config.yaml            the given arguments, and the others in comments; --config reads this file
    config.json            the value of every argument, with the reasons of derived ones
    versions.json          packages, commit, hardware
    status.json            running, finished, failed or interrupted; rollouts done; the error
    metrics.jsonl          every metric, and the format of the folder (see metrics_file.py)
    alarms.jsonl           one alarm per line (see alarms.py); absent if there were no alarms
    curves.png             the curves of metrics.jsonl
    rollouts/0000012.parquet        the samples of rollout 12
    token_stats/0000012.parquet     the trainer's log-probs and entropies of their tokens (table.py)
    dropped/0000012.parquet         some of the groups that were not trained on, and why (rollout/filters.py)
    eval/gsm8k-0000012.parquet      the answers of the evaluation after rollout 12
    eval/gsm8k-start.parquet        the answers of the evaluation before training
    results.json           of ``slimelite eval``: settings and scores of each task (evaluate.py)
    log.txt                the console and our log, with times
    stderr.txt             output that libraries print to standard error
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import slimelite
from slimelite.arguments import Args
from slimelite.arguments.flags import group_flags, group_title, groups_of
from slimelite.arguments.secret import HIDDEN, masked, masked_words
from slimelite.arguments.sources import sglang_entry
from slimelite.base.files import FULL, write_text
from slimelite.samples.table import SampleTable, TokenStats
from slimelite.tracking.alarms import Alarm

# flags that config.yaml leaves out: they name the source of arguments or the place of results, not the computation
SOURCES = ("config", "stages", "custom_config_path", "dry_run", "run_dir")
# folders with a file for each rollout
OF_ROLLOUTS = ("rollouts", "dropped", "token_stats")


class RunFolder:
    """The run folder at ``path``. Unless the disk is full, every file is written completely or not at all.

    ``rollouts``: the number of newest rollouts whose files are kept; None: all.
    """

    def __init__(self, path: str | Path, rollouts: int | None = None) -> None:
        self.path = Path(path).absolute()
        self._rollouts = rollouts
        self.path.mkdir(parents=True, exist_ok=True)

    def save_config(self, args: Args) -> None:
        """Write config.yaml and config.json."""
        self._write("config.yaml", config_yaml(args))
        self._write("config.json", json.dumps(config_dict(args), indent=1, default=str))

    def save_json(self, name: str, values: Mapping[str, object]) -> None:
        """Write a small JSON file."""
        self._write(name, json.dumps(values, indent=1))

    def save_rollout(self, rollout_id: int, table: SampleTable) -> None:
        """Write the samples of a rollout, and remove the files of rollouts that are too old to keep."""
        if self._rollouts == 0:
            return
        table.to_parquet(self.path / "rollouts" / f"{rollout_id:07d}.parquet")
        if self._rollouts is not None:
            for path in (file for folder in OF_ROLLOUTS for file in (self.path / folder).glob("*.parquet")):
                # files of the user have other names, and stay
                if path.stem.isdecimal() and int(path.stem) <= rollout_id - self._rollouts:
                    path.unlink()

    def save_token_stats(self, rollout_id: int, stats: TokenStats) -> None:
        """Write the trainer's log-probs and entropies of a rollout's response tokens."""
        if self._rollouts != 0:
            stats.to_parquet(self.path / "token_stats" / f"{rollout_id:07d}.parquet")

    def save_eval(self, name: str, rollout_id: int, table: SampleTable) -> None:
        """Write the answers to an eval dataset after rollout ``rollout_id`` (-1: before training)."""
        after = "start" if rollout_id < 0 else f"{rollout_id:07d}"
        table.to_parquet(self.path / "eval" / f"{name.replace('/', '_')}-{after}.parquet")

    def forget(self, rollout_id: int, *, ahead: bool = False) -> None:
        """Remove the files of ``rollout_id`` and later rollouts, because a resumed run repeats them or ends earlier.

        ``ahead``: the checkpoint has the samples of ``rollout_id``. If so, the files of this rollout's dropped groups
        stay, because the resumed run does not drop these groups again.
        """
        files = [file for folder in OF_ROLLOUTS for file in self.path.glob(f"{folder}/*.parquet")]
        files += self.path.glob("eval/*-*.parquet")
        for path in files:
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) >= rollout_id + (ahead and path.parent.name == "dropped"):
                path.unlink()

    def save_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Write all alarms of the run. This removes old alarms of rollouts that a resumed run repeats."""
        if alarms:
            self._write("alarms.jsonl", "\n".join(json.dumps(dataclasses.asdict(alarm)) for alarm in alarms))
        else:
            (self.path / "alarms.jsonl").unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        try:
            write_text(path, text + "\n")
        except OSError as error:
            if error.errno not in FULL or not path.is_file():
                raise
            path.write_text(text + "\n", encoding="utf-8")  # full disk: overwriting the old file needs no new space


def config_dict(args: Args) -> dict[str, object]:
    """All arguments as plain values, with masked secrets. ``derivations``: name -> reason."""
    values = dataclasses.asdict(replace(args, user_values={}))
    del values["user_values"]
    values["derivations"] = {d.name: d.reason for d in args.derivations}
    return {name: masked(name, value) for name, value in values.items()}


def config_yaml(args: Args) -> str:
    """The given arguments, in the form that ``--config`` reads. The other arguments are in comments, with their
    reasons.

    A run with this file and additional flags therefore computes its defaults and derived values again.
    """
    reasons = {d.name: d.reason for d in args.derivations}
    lines = ["# arguments of this run; `python train.py --config` with this file repeats the run"]
    lines += ["# an argument in a comment was not given: its value is the default, or the reason is next to it"]
    lines += ["# " + " ".join(note.split()) for note in args.notes]
    lines += [f"# no effect here: {name}: {why}" for name, why in args.no_effect]
    if args.custom_config:
        keys = ", ".join(args.custom_config)
        lines.append(f"# plugins also read {keys}: give --custom-config-path {args.custom_config_path} again")
    for group in groups_of(type(args)):
        lines += ["", f"# {group_title(group)[0]}"]
        for name in (flag.name for flag in group_flags(group) if flag.name not in SOURCES):
            value, reason = getattr(args, name), reasons.get(name)
            if name in args.user_values:
                own = args.user_values[name]
                reason = reason and (reason if own == value else f"here {_shown(value)}: {reason}")
                lines.append(entry(name, own) + (f"  # {reason}" if reason else ""))
            elif value is not None:
                lines.append(f"# {entry(name, value)}" + (f"  # {reason}" if reason else ""))
    if args.sglang_overrides:
        options = (sglang_entry(name, value) for name, value in masked("", args.sglang_overrides).items())
        lines += ["", "# SGLang's own options", *(entry(name, value) for name, value in options)]
    return "\n".join(lines)


def entry(name: str, value: object) -> str:
    """A line of YAML. For a secret, the line is a comment without the value."""
    shown = masked(name, value)
    return f"# {name}: not saved; give it again" if shown == HIDDEN else f"{name}: {_shown(shown)}"


def _shown(value: object) -> str:
    """``value`` as YAML on one line."""
    import yaml

    text: str = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False).strip()[1:-1]
    return json.dumps(value) if "\n" in text else text


PACKAGES = ("torch", "transformers", "ray", "sglang", "numpy", "pyarrow", "safetensors", "math-verify", "wandb")


def versions(device: str) -> dict[str, object]:
    """The versions of slimelite, Python and ``PACKAGES`` (None: not installed). The dict also has the commit of
    slimelite, the command line, and facts about this machine.

    ``device``: the run's device; GPUs are listed only for ``cuda``.
    """
    return {
        "slimelite": slimelite.__version__,
        "commit": commit(Path(slimelite.__file__).resolve().parents[1]),
        "command": shlex.join([sys.argv[0], *masked_words(sys.argv[1:])]),
        "python": platform.python_version(),
        **{name: _installed(name) for name in PACKAGES},
        "machine": {
            "platform": platform.platform(),
            "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": _first_value("/proc/meminfo", "MemTotal"),
            "gpus": gpus() if device == "cuda" else [],
        },
    }


def commit(checkout: Path) -> str | None:
    """The commit of a git checkout, with ``-dirty`` if files were changed. None if ``checkout`` is not a git
    checkout."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def gpus() -> list[str]:
    """Name, memory and driver of each GPU of this machine, as nvidia-smi reports them."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str | None:
    """The value of the first ``key: value`` line of a file in /proc."""
    if not Path(path).is_file():
        return None
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
