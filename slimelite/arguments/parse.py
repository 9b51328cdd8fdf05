"""From the command line to a complete, checked `Args`."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from slimelite.arguments.args import Args, Derivation
from slimelite.arguments.derive import derive
from slimelite.arguments.flags import ArgumentError
from slimelite.arguments.help import help_text, is_asked
from slimelite.arguments.machine import Machine, this_machine
from slimelite.arguments.problems import validate, without_effect
from slimelite.arguments.secret import HIDDEN, is_masked
from slimelite.arguments.sources import drop_unusable_paths, read_command_line, read_config, read_presets
from slimelite.arguments.user_code import compose, import_files, load_groups
from slimelite.arguments.vocabulary import Settings, Vocabulary

MASKED = (
    f"has {HIDDEN} where a secret was: a run does not save them. Give the flag with the secret on the command line, or "
    "remove it from the file and export the variable before Ray starts"
)


def parse_args(
    argv: Sequence[str] | None = None,
    groups: Sequence[type] = (),
    *,
    inspect: Callable[[Args], list[str]] = lambda _: [],
) -> Args:
    """`make_args` for a command line: prints the help it asks for, or every problem on a line of its own, and exits.

    Args:
        argv: the words of a command line, without the program's name; None: those of this process.
        groups: dataclasses of `flag` fields of your own; the result is an instance of each.
        inspect: finds further problems; called only for a dry run with wrong arguments, so that it lists all problems.
    """
    own_process = argv is None
    argv = sys.argv[1:] if argv is None else argv
    try:
        if is_asked(argv):
            text = help_text(args_type(argv, groups), argv)
            if own_process:  # `--help | head` ends without a word
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            print(text)
            raise SystemExit(0)
        return make_args(argv, groups)
    except ArgumentError as error:
        problems = error.problems
        if isinstance(error.args_so_far, Args) and error.args_so_far.dry_run:
            again = tuple(problems)  # the pre-flight may meet a problem once more
            problems = [*problems, *(problem for problem in inspect(error.args_so_far) if not problem.endswith(again))]
        print("\n".join(f"train.py: {problem}" for problem in problems), file=sys.stderr)
        raise SystemExit(2) from None


def make_args(argv: Sequence[str], groups: Sequence[type] = (), *, machine: Machine | None = None) -> Args:
    """Complete arguments: command line > ``--config`` > ``--custom-config-path`` > ``--preset`` > defaults,
    then derived values.

    Args:
        argv: as in `parse_args`.
        groups: as in `parse_args`.
        machine: device and numbers of GPUs are derived from it; None: this machine.

    Raises:
        ArgumentError: with every problem found.
    """
    kind = args_type(argv, groups)
    vocabulary = Vocabulary(kind)
    settings = merge_sources(argv, vocabulary)
    own, explicit = dict(settings.values), frozenset(settings.values)
    for name, value in (*settings.values.items(), *((f"sglang_{k}", v) for k, v in settings.sglang.items())):
        if is_masked(value):
            settings.complain("--" + name.replace("_", "-"), MASKED)
    presets, preset_of = read_presets(settings.values.get("preset", []), vocabulary, explicit)
    settings = settings.over(presets)
    chosen = [
        Derivation(name, value, f"--preset {preset_of[name]}")
        for name, value in presets.values.items()
        if name not in explicit
    ]
    misread, blamed = list(settings.problems), set(settings.blamed)
    draft = kind(**settings.values, user_values=own, derivations=tuple(chosen))
    args = derive(draft, explicit, machine or _machine(draft.plan_gpu, settings), settings)
    args = replace(args, custom_config=settings.custom, notes=(*args.notes, *_own_keys(settings, vocabulary)))
    later = settings.problems[len(misread) :] + validate(args)
    # a flag that could not be read has its default here; problems that this default causes are left out
    problems = misread + [p for p in later if not blamed.intersection(re.split(r"[\s:,;]+", p))]
    if problems:
        raise ArgumentError(dict.fromkeys(problems), args)
    no_effect = {**settings.no_effect, **dict(without_effect(args, explicit))}
    return replace(args, no_effect=tuple(no_effect.items()))


def _machine(plan_gpu: str | None, settings: Settings) -> Machine:
    try:
        return this_machine(plan_gpu)
    except ValueError as error:
        settings.complain("--plan-gpu", f"{plan_gpu}: {error}")
        return this_machine()


def args_type(argv: Sequence[str], groups: Sequence[type] = ()) -> type[Args]:
    """`Args` with ``groups`` and those that ``--args-group`` names, on the command line or in ``--config``.

    The files of ``--import-file`` run first, so that the entries that they register are valid choices of flags.
    """
    named = merge_sources(argv, Vocabulary(Args)).values
    files = import_files(named.get("import_file", []))
    return compose([*groups, *load_groups(named.get("args_group", []))], files)


def _own_keys(settings: Settings, vocabulary: Vocabulary) -> Iterator[str]:
    """A note that lists the keys of ``--custom-config-path`` that are no flags: one may be a misspelt flag."""
    if settings.custom:
        near = {key: vocabulary.nearest("--" + key) for key in settings.custom}
        listed = ", ".join(f"{key} (the nearest flag is {flag})" if flag else key for key, flag in near.items())
        yield f"--custom-config-path: no flags of ours, plugins read them as args.<key>: {listed}"


def merge_sources(argv: Sequence[str], vocabulary: Vocabulary) -> Settings:
    """The settings of a command line over those of the YAML files that it names."""
    merged = read_command_line(argv, vocabulary)
    for name, option in (("config", "--config"), ("custom_config_path", "--custom-config-path")):
        if path := merged.values.get(name):
            merged = merged.over(read_config(path, option, vocabulary, own_keys=option == "--custom-config-path"))
    drop_unusable_paths(merged, vocabulary)
    return merged
