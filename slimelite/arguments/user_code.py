"""Code of the user on every node of a job: files that register entries, groups of flags, and plugins."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from slimelite.arguments.args import Args
from slimelite.arguments.flags import ArgumentError, all_flags

GROUP, FILE = "--args-group", "--import-file"


class Origin(NamedTuple):
    """Where another process, perhaps on another machine, finds a file or the class ``name`` in it."""

    file: str
    # path from the working directory, which a Ray job has on every node
    relative: str
    module: str = ""
    name: str = ""

    @classmethod
    def of(cls, path: str, module: str = "", name: str = "") -> Origin:
        """The origin of the file at ``path``."""
        return cls(os.path.abspath(path), os.path.relpath(path), module, name)

    def path(self) -> str:
        """Where the file is on this machine: the relative path is used if only that exists."""
        return self.relative if os.path.isfile(self.relative) and not os.path.isfile(self.file) else self.file


class Origins(NamedTuple):
    """What another process needs to unpickle arguments: the files of ``--import-file``, and groups of flags."""

    files: tuple[Origin, ...] = ()
    groups: tuple[Origin, ...] = ()


def import_files(paths: Sequence[str]) -> tuple[Origin, ...]:
    """Run the files that ``--import-file`` names, each once in this process.

    Raises:
        ArgumentError: one is not there, or fails.
    """
    origins = tuple(Origin.of(path) for path in dict.fromkeys(paths))
    problems = []
    for origin in origins:
        try:
            _run(origin)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ArgumentError(problems)
    return origins


def load_groups(paths: Sequence[str]) -> list[type]:
    """The classes that ``--args-group`` names.

    Raises:
        ArgumentError: one cannot be loaded, or is no group of flags.
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
            problems.append(f"{GROUP} {path}: is no frozen dataclass with fields made by slimelite.arguments.flag")
    if problems:
        raise ArgumentError(problems)
    return groups


def compose(groups: Sequence[type], files: tuple[Origin, ...] = (), origins: Origins | None = None) -> type[Args]:
    """`Args` with the fields of ``groups`` as well; unpickling an instance runs ``files`` first.

    Instances can be unpickled wherever the files exist. ``origins``: of groups and files, if another process sent them.

    Raises:
        ArgumentError: a group has a flag that is taken already, or is no frozen dataclass.
    """
    if not groups and not files:
        return Args
    flags = [flag for group in (Args, *groups) for flag in all_flags(group).values()]
    taken = [option for flag in flags for option in (flag.option, *flag.aliases)]
    if twice := {option for option in taken if taken.count(option) > 1}:
        raise ArgumentError([f"{', '.join(sorted(twice))}: two groups have this flag; call yours something else"])
    own = {name for group in groups for name in all_flags(group)}
    if reserved := own & {*dir(Args), *(field.name for field in dataclasses.fields(Args))}:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(reserved))
        raise ArgumentError([f"{options}: the arguments have an attribute of this name; call yours something else"])
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
    """(flag, path) of every plugin that is named."""
    for flag in all_flags(type(args)).values():
        if flag.metavar == "PLUGIN":
            value = getattr(args, flag.name)
            yield from ((flag.option, path) for path in (value if flag.many else [value]) if path)
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
