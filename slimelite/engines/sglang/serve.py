"""An SGLang server from its fields, in JSON:   python -m slimelite.engines.sglang.serve '{"model_path": ..., ...}'

SGLang's fields change from version to version. A field that the installed SGLang does not have is an error that names
the nearest one; the rest becomes the command line of ``sglang.launch_server``, which is printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import runpy
import shlex
import sys
from collections.abc import Collection, Mapping
from typing import Any


def installed_options() -> dict[str, argparse.Action]:
    """The options of the installed SGLang's command line, by field. Importing them takes seconds."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}


def check_fields(fields: Collection[str], installed: Collection[str]) -> list[str]:
    """One problem for each of ``fields`` that SGLang does not have."""
    problems = []
    for name in fields:
        if name not in installed:
            near = difflib.get_close_matches(name, installed, n=1, cutoff=0.7)
            hint = f"; did you mean --sglang-{near[0].replace('_', '-')}?" if near else ""
            problems.append(f"--sglang-{name.replace('_', '-')} is not an option of the installed SGLang{hint}")
    return problems


def command_line(fields: Mapping[str, Any], installed: Mapping[str, argparse.Action]) -> list[str]:
    """``fields`` as words for SGLang's parser."""
    words = []
    for name, value in fields.items():
        action = installed[name]
        if isinstance(value, bool):
            words += [option for option in action.option_strings if option.startswith("--no-") is not value][:1]
        elif isinstance(value, list) and action.nargs is not None:
            words += [action.option_strings[0], *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, list | dict) else str(value)
            words.append(f"{action.option_strings[0]}={text}")
    return words


def main() -> None:
    """Check, print and start."""
    fields = json.loads(sys.argv[1])
    installed = installed_options()
    if problems := check_fields(fields, installed):
        sys.exit("\n".join(problems))
    sys.argv[1:] = command_line(fields, installed)
    print("python -m sglang.launch_server", shlex.join(sys.argv[1:]), flush=True)
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
