"""``train.py --stages sft.yaml rl.yaml``: several runs, each from the model of the one before.

A stage is a YAML file of flags, as ``--config`` reads it; the other flags of the command line hold for every stage,
and win. Stage 0 of ``--run-dir out`` with the file ``sft.yaml`` has the run folder ``out/0-sft``, with its checkpoints
and its model inside. The same command goes on after a crash: finished stages are left out, and the one that was
interrupted resumes from its newest checkpoint, if it has a ``save_interval``, or begins again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from slimelite.arguments.help import is_asked
from slimelite.lifecycle import read_status


@dataclass(frozen=True)
class Stage:
    """One run of several; ``argv``: its command line, without the flags that follow from the stage before."""

    folder: Path
    argv: list[str]

    @property
    def model(self) -> Path:
        """The Hugging Face folder that the stage ends with."""
        return self.folder / "model"

    @property
    def finished(self) -> bool:
        """Whether an earlier start ran the stage to its end."""
        return read_status(self.folder).get("status") == "finished" and self.model.is_dir()


def run_stages(run: Callable[[list[str] | None], int]) -> int:
    """``run`` with the command line of this process, or with that of each stage in turn; returns the exit status.

    A stage that fails or is stopped ends the command with its status.
    """
    argv = sys.argv[1:]
    if "--stages" not in argv or is_asked(argv):
        return run(None)
    try:
        stages = read_stages(argv)
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    model: list[str] = []
    for number, stage in enumerate(stages):
        if stage.finished:
            print(f"stage {number} of 0 to {len(stages) - 1} is finished: {stage.model}")
        else:
            print(f"stage {number} of 0 to {len(stages) - 1}: {stage.folder}")
            if status := run([*stage.argv, *model]):
                return status
        if stage.model.is_dir():  # not after a dry run, whose later stages start from the first one's model
            model = ["--hf-checkpoint", str(stage.model)]
    return 0


def read_stages(argv: Sequence[str]) -> list[Stage]:
    """The stages of a command line that has ``--stages``.

    Raises:
        ValueError: no file is named, or one cannot be read; ``--run-dir`` is missing; ``--config`` is given, too.
    """
    begin = argv.index("--stages")
    end = next((i for i in range(begin + 1, len(argv)) if argv[i].startswith("--")), len(argv))
    files, common = [Path(word) for word in argv[begin + 1 : end]], [*argv[:begin], *argv[end:]]
    if not files:
        raise ValueError("--stages names no file: give one of flags for each stage, as in --stages sft.yaml rl.yaml")
    if any(word.partition("=")[0] == "--config" for word in common):
        raise ValueError("--config and --stages exclude each other: put the flags into the files of --stages")
    if "--run-dir" not in common[:-1]:
        raise ValueError("--stages needs --run-dir: each stage has its run, its checkpoints and its model in there")
    folder = Path(common[common.index("--run-dir") + 1])
    contents = [_flags(file) for file in files]
    first = contents[0].get("hf_checkpoint")
    stages = []
    for number, (file, flags) in enumerate(zip(files, contents, strict=True)):
        place = folder / f"{number}-{file.stem}"
        own = ["--run-dir", str(place), "--save-hf", str(place / "model")]
        own += ["--load", str(place / "checkpoints")]
        if "save_interval" in flags or "--save-interval" in common:
            own += ["--save", str(place / "checkpoints")]
        if number and first and "hf_checkpoint" not in flags:
            own += ["--hf-checkpoint", str(first)]
        if {"lora_rank", "lora_adapter_path"} & flags.keys() or {"--lora-rank", "--lora-adapter-path"} & set(common):
            own += ["--lora-merge"]  # the next stage starts from a whole model
        stages.append(Stage(place, ["--config", str(file), *common, *own]))
    return stages


def _flags(file: Path) -> dict[str, object]:
    """The flags in a file of a stage, by name."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--stages {file}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--stages {file}: is no mapping of flags to values")
    return {str(name).replace("-", "_"): value for name, value in found.items()}
