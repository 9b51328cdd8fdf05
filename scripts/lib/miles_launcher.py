"""A Python launcher of miles under scripts/run_slime_script.sh: print the train.py command that replaces it.

    miles_launcher.py SCRIPT [the launcher's own options]

The launcher runs with a replacement for the module of miles that it calls. Nothing is downloaded, converted or started.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import runpy
import shlex
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_shims import ENTRIES, mapped, say

COMMAND_UTILS = "miles.utils.external_utils.command_utils"
Main = Callable[..., object]


@dataclasses.dataclass
class ExecuteTrainConfig:
    """The arguments that every launcher has."""

    cuda_core_dump: bool = False
    num_nodes: int = dataclasses.field(default_factory=lambda: int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    extra_env_vars: str = ""
    output_dir: str = "/root/shared_data"


class CommandUtils(types.ModuleType):
    """The replacement module. `execute_train` prints the command. Any other function does nothing and says so."""

    # GPUs of a node
    NUM_GPUS_OF_HARDWARE: typing.ClassVar = dict.fromkeys(["H100", "H200", "B200", "B300", "MI350X", "MI355X"], 8) | {
        "GB200": 4,
        "GB300": 4,
    }
    GENERATION_HARDWARE: typing.ClassVar = {"H100": "Hopper", "GB200": "Blackwell", "GB300": "Blackwell"}
    ExecuteTrainConfig = ExecuteTrainConfig
    printed = 0

    def __init__(self, script: Path) -> None:
        super().__init__(COMMAND_UTILS)
        self.repo_base_dir = script.parents[1]
        self._script = script

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def left_out(*given: object, **_named: object) -> None:
            say(f"{name} is left out: {' '.join(str(word) for word in given)[:200]}")

        return left_out

    def execute_train(self, train_args: str, *_: object, **named: Any) -> None:
        """Print the command, with each flag and its values on one line."""
        lines: list[str] = []
        for word in shlex.split(train_args):
            if word.startswith("--"):
                lines.append("    " + shlex.quote(mapped(word)))
            elif lines:
                lines[-1] += " " + shlex.quote(mapped(word))
        script = Path(str(named.get("train_script", "train.py"))).name
        lines += [f"    {flag}" for flag in ENTRIES.get(script, [])]
        variables = [f"{name}={shlex.quote(str(value))}" for name, value in (named.get("extra_env_vars") or {}).items()]
        print(" \\\n".join([" ".join([*variables, "python train.py"]), *lines]))
        self.printed += 1

    execute_train_npu = execute_train

    def encode_pseudo_file(self, text: str) -> str:
        """The name of a file with ``text``. miles would put the text itself into the flag."""
        file = Path(f"{self._script.stem}-{len(list(Path().glob(f'{self._script.stem}-*.yaml')))}.yaml")
        file.write_text(text + "\n", encoding="utf-8")
        say(f"{file} is written: the content that a flag takes")
        return str(file)

    def get_default_wandb_args(self, *_: object, **_named: object) -> str:
        return ""

    def get_mooncake_object_store_args(self, *_: object) -> str:
        return ""

    def create_run_id(self) -> str:
        return datetime.datetime.now(datetime.UTC).strftime("%y%m%d-%H%M%S")

    def get_bool_env_var(self, name: str, default: str = "false") -> bool:
        return os.environ.get(name, default).lower() in ("1", "true")

    def get_env_enable_infinite_run(self) -> bool:
        return False

    def resolve_extra_env_vars(self, variables: dict[str, str], _config: object) -> dict[str, str]:
        return variables

    def dataclass_cli(self, main: Main | None = None, **_: object) -> Main:
        """``main``, whose only argument is a dataclass. The options of the command line fill its fields."""
        if main is None:
            return self.dataclass_cli
        command = main
        (kind, *_rest) = typing.get_type_hints(command).values()

        def run(*_: object) -> object:
            return command(read_options(kind))

        run.__name__ = command.__name__
        return run


def read_options(kind: type) -> object:
    """An instance of the dataclass ``kind`` with the values of the command line."""
    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        members = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is types.UnionType else ()
        of = next((member for member in members if member is not type(None)), hints[field.name])
        option = f"--{field.name.replace('_', '-')}"
        if of is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        else:
            parser.add_argument(option, type=of if of in (int, float) else str, default=argparse.SUPPRESS)
    return kind(**vars(parser.parse_args()))


class Typer:
    """The part of ``typer.Typer`` that launchers use: commands by name."""

    def __init__(self, *_: object, **_named: object) -> None:
        self._commands: dict[str, Main] = {}

    def command(self, name: str | None = None, **_: object) -> Callable[[Main], Main]:
        def keep(main: Main) -> Main:
            self._commands[name or main.__name__.replace("_", "-")] = main
            return main

        return keep

    def callback(self, *_: object, **_named: object) -> Callable[[Main], Main]:
        return lambda main: main

    def __call__(self) -> object:
        chosen = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in self._commands else None
        if chosen is None and len(self._commands) > 1:
            raise SystemExit(f"run_slime_script: {sys.argv[0]} takes one of its commands: {', '.join(self._commands)}")
        return self._commands[chosen or next(iter(self._commands))]()


def stand_in(script: Path) -> CommandUtils:
    """Put the replacements where ``script`` imports them. Other modules of miles come from its checkout."""
    utils = CommandUtils(script)
    for name in ("miles", "miles.utils", "miles.utils.external_utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(script.parents[1] / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules[COMMAND_UTILS] = sys.modules["miles.utils.external_utils.exec_command"] = utils
    sys.modules["miles.utils.external_utils"].command_utils = utils  # type: ignore[attr-defined]
    typer: Any = types.ModuleType("typer")
    typer.run, typer.Typer = lambda main: main(), Typer
    typer.Option = typer.Argument = lambda default=None, *_, **_named: default
    sys.modules["typer"] = typer
    return utils


def main() -> int:
    """Answer a launcher with its command. The exit status is 2, because nothing has run."""
    script = Path(sys.argv[1]).resolve()
    if "miles" not in script.read_text(encoding="utf-8"):
        say(f"{script.name} is a Python program, but not a launcher of miles: run it with python")
        return 2
    utils = stand_in(script)
    sys.argv = sys.argv[1:]
    say(f"{script.name} is a launcher of miles; it starts this command:")
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        say(f"{script.name} stops with {type(error).__name__}: {error}")
        return 2
    if not utils.printed:
        say(f"{script.name} starts no training with these options")
    return 2


if __name__ == "__main__":
    sys.exit(main())
