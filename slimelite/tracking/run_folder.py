"""The files of a run folder that are written whole: configuration, versions, status, samples.

::

    config.yaml            resolved arguments; --config reads it back
    config.json            the same with what was derived, and why
    versions.json          packages, commit, hardware
    status.json            running, finished, failed or interrupted; how far; the error
    metrics.jsonl          every metric (see metrics_file.py)
    curves.png             the curves of metrics.jsonl
    rollouts/0000012.parquet        the samples of rollout 12
    dropped/0000012.parquet         some of the groups that were not trained on, and why (rollout/dropped.py)
    eval/gsm8k-0000012.parquet      the answers of an evaluation after 12 rollouts
    log.txt                the console and our log, with times
    stderr.txt             what libraries print
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimelite.arguments import Args
from slimelite.arguments.base import group_flags, group_title, groups_of
from slimelite.arguments.secret import HIDDEN, masked
from slimelite.files import FULL, whole
from slimelite.table import SampleTable

# what says where arguments come from and results go, not what to compute
SOURCES = ("config", "custom_config_path", "dry_run", "run_dir")


class RunFolder:
    """Owns ``path``; every file appears whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.path.mkdir(parents=True, exist_ok=True)

    def save_config(self, args: Args) -> None:
        """config.yaml and config.json."""
        self._write("config.yaml", config_yaml(args))
        self._write("config.json", json.dumps(config_dict(args), indent=1, default=str))

    def save_json(self, name: str, values: Mapping[str, Any]) -> None:
        """A small JSON file."""
        self._write(name, json.dumps(values, indent=1))

    def save_rollout(self, rollout_id: int, table: SampleTable) -> None:
        """The samples of a rollout."""
        table.to_parquet(self.path / "rollouts" / f"{rollout_id:07d}.parquet")

    def save_eval(self, name: str, step: int, table: SampleTable) -> None:
        """The answers to an eval dataset after ``step`` rollouts."""
        table.to_parquet(self.path / "eval" / f"{name.replace('/', '_')}-{step:07d}.parquet")

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        try:
            with whole(path) as partial:
                partial.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            if error.errno not in FULL or not path.is_file():
                raise
            path.write_text(text + "\n", encoding="utf-8")  # what is replaced makes room for it


def config_dict(args: Args) -> dict[str, Any]:
    """All arguments as plain values, secrets masked; ``derivations``: name -> reason."""
    values = dataclasses.asdict(args)
    values["derivations"] = {d.name: d.reason for d in args.derivations}
    return {name: masked(name, value) for name, value in values.items()}


def config_yaml(args: Args) -> str:
    """The flags that have a value, by group, as ``--config`` reads them; the reason beside derived ones."""
    import yaml

    reasons = {d.name: d.reason for d in args.derivations}
    lines = ["# resolved arguments of this run; `python train.py --config` with this file repeats it"]
    lines += ["# " + " ".join(note.split()) for note in args.notes]
    lines += [f"# no effect here: {name}: {why}" for name, why in args.no_effect]
    if args.custom_config:
        keys = ", ".join(args.custom_config)
        lines.append(f"# plugins also had {keys}: give --custom-config-path {args.custom_config_path} again")
    for group in groups_of(type(args)):
        lines += ["", f"# {group_title(group)[0]}"]
        for flag in group_flags(group):
            value = masked(flag.name, getattr(args, flag.name))
            if value is None or flag.name in SOURCES:
                continue
            if value == HIDDEN:
                lines.append(f"# {flag.name}: not saved; give it again")
                continue
            text = yaml.safe_dump({flag.name: value}, default_flow_style=True, width=10**6).strip()[1:-1]
            lines.append(text + (f"  # {reasons[flag.name]}" if flag.name in reasons else ""))
    return "\n".join(lines)
