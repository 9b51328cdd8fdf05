"""Turns a command line into a complete, checked `Args`. The user's own flags, entries and plugins
exist on every node."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from slimelite.arguments.args import Args, Derivation
from slimelite.arguments.derive import derive
from slimelite.arguments.flags import ArgumentError, all_flags
from slimelite.arguments.help import help_text, is_asked
from slimelite.arguments.problems import validate, without_effect
from slimelite.arguments.secret import HIDDEN, is_masked
from slimelite.arguments.sources import (
    Settings,
    Vocabulary,
    drop_unusable_paths,
    read_command_line,
    read_config,
    read_presets,
)
from slimelite.base.version import answer_version
from slimelite.plan.devices import Machine, this_machine

GROUP, FILE = "--args-group", "--import-file"
TAKEN = "the arguments already have an attribute of this name; choose another name"


class Origin(NamedTuple):
    """Where another process, perhaps on another machine, finds a file, or the class ``name`` in the file."""

    file: str
    # path from the working directory; a Ray job has this directory on every node
    relative: str
    module: str = ""
    name: str = ""

    @classmethod
    def of(cls, path: str, module: str = "", name: str = "") -> Origin:
        """The origin of the file at ``path``."""
        return cls(os.path.abspath(path), os.path.relpath(path), module, name)

    def path(self) -> str:
        """The path of the file on this machine. The relative path is used only if the absolute path does not exist."""
        return self.relative if os.path.isfile(self.relative) and not os.path.isfile(self.file) else self.file


class Origins(NamedTuple):
    """The origins that another process needs to unpickle arguments: files of ``--import-file``, and groups of flags."""

    files: tuple[Origin, ...] = ()
    groups: tuple[Origin, ...] = ()


def import_files(paths: Sequence[str]) -> tuple[Origin, ...]:
    """Run the files of ``--import-file``, each once in this process.

    Raises:
        ArgumentError: a file does not exist, or fails.
    """
    origins, problems = [], []
    for path in dict.fromkeys(paths):
        origins.append(Origin.of(path))
        try:
            _run(origins[-1])
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ArgumentError(problems)
    return tuple(origins)


def load_groups(paths: Sequence[str]) -> list[type]:
    """The classes of ``--args-group``.

    Raises:
        ArgumentError: a class cannot be loaded, or is not a group of flags.
    """
    from slimelite.base.guard import import_failure
    from slimelite.slime.plugins import load_function

    groups, problems = [], []
    for path in dict.fromkeys(paths):
        try:
            group: object = load_function(path)
        except Exception as error:  # a user's file may raise anything when it is imported
            problems.append(import_failure(GROUP, path.partition(":")[0], error))
            continue
        if isinstance(group, type) and dataclasses.is_dataclass(group) and all_flags(group):
            groups.append(group)
        else:
            problems.append(f"{GROUP} {path}: is not a frozen dataclass with fields made by slimelite.arguments.flag")
    if problems:
        raise ArgumentError(problems)
    return groups


def attributes(kind: type[Args]) -> set[str]:
    """The names of all attributes of the arguments, also of those that only plugins get."""
    return {*dir(kind), *kind.__dataclass_fields__, "rollout_context"}


def compose(groups: Sequence[type], files: tuple[Origin, ...] = (), origins: Origins | None = None) -> type[Args]:
    """`Args` with the fields of ``groups`` added. When an instance is unpickled, ``files`` run first.

    Every machine that has these files can unpickle an instance. ``origins``: the origins of groups and files, if
    another process sent them.

    Raises:
        ArgumentError: a flag of a group exists already, or a group is not a frozen dataclass.
    """
    if not groups and not files:
        return Args
    flags = [flag for group in (Args, *groups) for flag in all_flags(group).values()]
    taken = [option for flag in flags for option in (flag.option, *flag.aliases)]
    if twice := {option for option in taken if taken.count(option) > 1}:
        raise ArgumentError([f"{', '.join(sorted(twice))}: two groups define this flag; choose another name for yours"])
    own = {name for group in groups for name in all_flags(group)}
    if reserved := own & attributes(Args):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(reserved))
        raise ArgumentError([f"{options}: {TAKEN}"])
    if origins is None:
        places = [Origin.of(inspect.getsourcefile(g) or "", g.__module__, g.__qualname__) for g in groups]
        origins = Origins(files, tuple(places))

    def reduce(args: Args) -> tuple[Callable[..., Args], tuple[object, ...]]:
        return _restore, (origins, {f.name: getattr(args, f.name) for f in dataclasses.fields(args)})

    composed = type("Args", (*reversed(groups), Args), {"__doc__": Args.__doc__, "__reduce__": reduce})
    try:
        return dataclasses.dataclass(frozen=True)(composed)
    except TypeError as error:
        raise ArgumentError([f"{GROUP}: {error}; write @dataclass(frozen=True) above the class"]) from None


def plugin_paths(args: Args) -> Iterator[tuple[str, str]]:
    """(flag, path) of every plugin that the arguments name."""
    for flag in all_flags(type(args)).values():
        if flag.metavar == "PLUGIN":
            value = getattr(args, flag.name)
            for path in value if flag.many else [value]:
                if path:
                    yield flag.option, path
    for dataset in args.eval_datasets:
        for path in (dataset.custom_rm_path, dataset.custom_generate_function_path):
            if path and path not in (args.custom_rm_path, args.custom_generate_function_path):
                yield f"eval dataset {dataset.name}", path


def _restore(origins: Origins, values: dict[str, Any]) -> Args:
    return _composed(origins)(**values)


@lru_cache
def _composed(origins: Origins) -> type[Args]:
    for origin in origins.files:
        _run(origin)
    return compose([_find(origin) for origin in origins.groups], origins.files, origins)


def _run(origin: Origin) -> None:
    from slimelite.slime.plugins import run_file

    run_file(origin.path(), FILE)


def _find(origin: Origin) -> type:
    from slimelite.slime.plugins import load_function

    if origin.module in sys.modules and origin.module != "__main__":
        return getattr(sys.modules[origin.module], origin.name)
    if os.path.isfile(origin.path()):
        group: Any = load_function(f"{origin.path()}:{origin.name}")
        return group
    return getattr(importlib.import_module(origin.module), origin.name)


MASKED = (
    f"has {HIDDEN} in place of a secret, because a run does not save secrets. Give the flag with the secret on the "
    "command line, or remove the flag from the file and export the environment variable before Ray starts"
)


def parse_args(
    argv: Sequence[str] | None = None,
    groups: Sequence[type] = (),
    *,
    inspect: Callable[[Args], list[str]] = lambda _: [],
) -> Args:
    """`make_args` for a command line. If the command line asks for help, print the help and exit. If there are
    problems, print each of them on its own line and exit.

    Args:
        argv: the words of a command line, without the program's name; None: this process's command line.
        groups: your own dataclasses of `flag` fields. The result is an instance of each of these classes.
        inspect: a function that finds more problems. It is called only for a dry run with wrong arguments, because a
            dry run must list all problems.
    """
    argv = sys.argv[1:] if argv is None else argv
    answer_version(argv)
    try:
        if is_asked(argv):
            _show(help_text(args_type(argv, groups), argv))
            raise SystemExit(0)
        return make_args(argv, groups)
    except ArgumentError as error:
        problems = error.problems
        if isinstance(error.args_so_far, Args) and error.args_so_far.dry_run:
            again = tuple(problems)  # the pre-flight check may find the same problem again
            problems = [*problems, *(problem for problem in inspect(error.args_so_far) if not problem.endswith(again))]
        print("\n".join(f"train.py: {problem}" for problem in problems), file=sys.stderr)
        raise SystemExit(2) from None


def _show(text: str) -> None:
    """Print ``text``. `--help | head` ends without an error message."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # at its exit, Python writes the rest of the text, which must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_args(argv: Sequence[str], groups: Sequence[type] = (), *, machine: Machine | None = None) -> Args:
    """Complete arguments. The sources, from the strongest to the weakest: the command line, ``--config``,
    ``--custom-config-path``, ``--preset``, defaults. After the sources are merged, values that no source sets are
    derived.

    Args:
        argv: as in `parse_args`.
        groups: as in `parse_args`.
        machine: determines the device and the numbers of GPUs; None: this machine.

    Raises:
        ArgumentError: the arguments are wrong. The message lists every problem.
    """
    kind = args_type(argv, groups)
    vocabulary = Vocabulary(kind)
    settings = merge_sources(argv, vocabulary)
    own, explicit = dict(settings.values), frozenset(settings.values)
    for name, value in (*settings.values.items(), *((f"sglang_{k}", v) for k, v in settings.sglang.items())):
        if is_masked(value):
            settings.complain("--" + name.replace("_", "-"), MASKED)
    if settings.custom:
        for name in sorted(settings.custom.keys() & attributes(kind)):
            settings.complain("--custom-config-path", f"{name}: {TAKEN}")
    chosen = []
    if names := settings.values.get("preset"):
        presets, preset_of = read_presets(names, vocabulary, explicit)
        settings = settings.over(presets)
        for name, value in presets.values.items():
            if name not in explicit:
                chosen.append(Derivation(name, value, f"--preset {preset_of[name]}"))
    misread, blamed = list(settings.problems), set(settings.blamed)
    draft = kind(**settings.values, user_values=own, derivations=tuple(chosen))
    try:
        machine = machine or this_machine(draft.plan_gpu)
    except ValueError as error:
        settings.complain("--plan-gpu", f"{draft.plan_gpu}: {error}")
        machine = this_machine()
    args = replace(derive(draft, explicit, machine, settings), custom_config=settings.custom)
    if settings.custom:  # a key may be a misspelt flag
        near = {key: vocabulary.nearest("--" + key) for key in settings.custom}
        listed = ", ".join(f"{key} (the nearest flag is {flag})" if flag else key for key, flag in near.items())
        note = f"--custom-config-path: these keys are not flags of slimelite; plugins read them as args.<key>: {listed}"
        args = replace(args, notes=(*args.notes, note))
    later = settings.problems[len(misread) :] + validate(args)
    # a flag that could not be read has its default value here, and problems that this default causes are left out
    problems = misread + [p for p in later if not blamed.intersection(re.split(r"[\s:,;]+", p))]
    if problems:
        raise ArgumentError(dict.fromkeys(problems), args)
    no_effect = {**settings.no_effect, **dict(without_effect(args, explicit))}
    return replace(args, no_effect=tuple(no_effect.items()))


def args_type(argv: Sequence[str], groups: Sequence[type] = ()) -> type[Args]:
    """`Args` with ``groups`` and with the groups of ``--args-group`` from the command line or ``--config``.

    The files of ``--import-file`` run first, because flags must accept the entries that these files register.
    """
    named = merge_sources(argv, Vocabulary(Args)).values
    if not (groups or named.get("import_file") or named.get("args_group")):
        return Args
    files = import_files(named.get("import_file", []))
    return compose([*groups, *load_groups(named.get("args_group", []))], files)


def merge_sources(argv: Sequence[str], vocabulary: Vocabulary) -> Settings:
    """The settings of a command line, merged with those of the YAML files that it names. The command line overrides the
    files."""
    merged = read_command_line(argv, vocabulary)
    for name, option in (("config", "--config"), ("custom_config_path", "--custom-config-path")):
        if path := merged.values.get(name):
            merged = merged.over(read_config(path, option, vocabulary, own_keys=option == "--custom-config-path"))
    drop_unusable_paths(merged, vocabulary)
    return merged
