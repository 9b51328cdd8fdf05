"""The program ``slimelite``, which shows the runs of ``train.py`` and uses their models.

The module of a command is imported only when the command runs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from slimelite.base.version import answer_version


class Command(NamedTuple):
    """One command, with a summary and an example for the list of commands.

    ``module``: the module whose ``main`` takes the command's arguments. ``connects``: the command has network
    connections, and must not end when the other side closes a connection. ``own``: the command handles signals and
    error messages itself.
    """

    summary: str
    example: str
    module: str
    connects: bool = False
    own: bool = False


COMMANDS = {
    "train": Command(
        "start a run, like `python train.py`; it also works in an installed wheel",
        "slimelite train --config run.yaml --lr 1e-6",
        "slimelite.apps.train",
        own=True,
    ),
    "view": Command(
        "write one HTML page that shows runs: curves, times, flags",
        "slimelite view runs/a runs/b -o two.html",
        "slimelite.apps.view",
    ),
    "compare": Command(
        "compare runs in a table: flags that differ, scores with a paired test, tokens, time",
        "slimelite compare runs/a runs/b",
        "slimelite.apps.compare",
    ),
    "plot": Command(
        "draw the curves of runs as a PNG",
        "slimelite plot runs/a runs/b --metric eval/gsm8k -o two.png",
        "slimelite.apps.plot",
    ),
    "make-pairs": Command(
        "make preference pairs for DPO from a run's rollouts",
        "slimelite make-pairs runs/a -o pairs.parquet",
        "slimelite.apps.make_pairs",
    ),
    "serve": Command(
        "serve a model with the APIs of OpenAI, Anthropic and SGLang, and with sessions that keep exact tokens",
        "slimelite serve runs/a --port 8000 --web",
        "slimelite.apps.serve",
        connects=True,
    ),
    "eval": Command(
        "score models on tasks such as gsm8k, mmlu and humaneval, and test whether the scores differ",
        "slimelite eval model-a model-b --tasks gsm8k,mmlu --data data",
        "slimelite.apps.eval",
        connects=True,
    ),
    "env": Command(
        "play scripted episodes of an environment and report its faults, before a model trains in it",
        "slimelite env check my_env.py --prompt-data rows.jsonl",
        "slimelite.apps.env",
    ),
    "report": Command(
        "write one page about the stages of train.py --stages: curves, and cost, scores and answers of each stage",
        "slimelite report runs/journey --tasks arc-easy,gsm8k --price 2.5",
        "slimelite.apps.report",
    ),
    "chat": Command(
        "talk to a model, or to a server, in the terminal",
        "slimelite chat runs/a",
        "slimelite.apps.chat",
        connects=True,
    ),
    "gguf": Command(
        "write a model as one GGUF file, for llama.cpp and Ollama",
        "slimelite gguf runs/a model.gguf --dtype q8_0",
        "slimelite.apps.gguf",
    ),
    "push": Command(
        "upload a model, an adapter or a GGUF file to the Hugging Face hub",
        "slimelite push runs/a me/my-model --private",
        "slimelite.apps.push",
    ),
    "completion": Command(
        "print shell completion (bash and zsh) for this program and train.py",
        'slimelite completion    (in ~/.bashrc: eval "$(slimelite completion)")',
        "slimelite.apps.completion",
    ),
    "doctor": Command(
        "check this machine: packages, GPU and driver, compiler, Ray, disk, hub",
        "slimelite doctor --json",
        "slimelite.apps.doctor",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 for success, 1 for a run that cannot be read, 2 for a wrong command
    line.

    After Ctrl-C the exit status is 130.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv is None and not (name in COMMANDS and COMMANDS[name].own):
        _set_signals(connects=name in COMMANDS and COMMANDS[name].connects)
    if name in ("-h", "--help"):
        print(_help())
        return 0
    answer_version([name, *rest])
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        print(f"slimelite: there is no command {name}{meant}\n\n{_help()}", file=sys.stderr)
        return 2
    command = import_module(COMMANDS[name].module)
    if COMMANDS[name].own:
        command.main(rest)
    try:
        status: int = command.main(rest)
        return status
    except (ValueError, OSError) as error:
        print("\n".join(f"slimelite {name}: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT


def _set_signals(*, connects: bool) -> None:
    """Set which signals end this process: see `Command.connects`."""
    if not connects:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `slimelite compare ... | head` ends without an error message
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup, SIGHUP stays ignored
            # a normal exit removes temporary folders, such as the folder of a merged model
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _help() -> str:
    lines = [
        "usage: slimelite COMMAND ...",
        "",
        "Look at runs and use their models. A run is a folder that train.py wrote, such as runs/a.",
    ]
    for name, command in COMMANDS.items():
        lines += ["", f"  {name:<11}{command.summary}", f"             {command.example}"]
    return "\n".join(
        [*lines, "", "`slimelite COMMAND --help` shows the options of a command. `python train.py` starts a run."]
    )


if __name__ == "__main__":
    sys.exit(main())
