"""Groups of flags of the user's own, composed into `Args`: by ``--args-group my_file.py:MyArgs``, or as classes."""

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

OPTION = "--args-group"


class Origin(NamedTuple):
    """Where a group's class can be had again, in another process and perhaps on another machine."""

    module: str
    name: str
    file: str
    # from the working directory, which a Ray job has on every node
    relative: str


def load_groups(paths: Sequence[str]) -> list[type]:
    """The classes that ``--args-group`` names.

    Raises:
        ArgumentError: one cannot be loaded, or is no group of flags.
    """
    from slimelite.plugins import load_function

    groups, problems = [], []
    for path in dict.fromkeys(paths):
        try:
            group: Any = load_function(path)
        except Exception as error:  # a user's file may raise anything when it is imported
            problems.append(f"{OPTION} {path}: {error}")
            continue
        if isinstance(group, type) and dataclasses.is_dataclass(group) and all_flags(group):
            groups.append(group)
        else:
            problems.append(f"{OPTION} {path}: is no frozen dataclass with fields made by slimelite.arguments.flag")
    if problems:
        raise ArgumentError(problems)
    return groups


def compose(groups: Sequence[type], origins: tuple[Origin, ...] | None = None) -> type[Args]:
    """`Args` with the fields of ``groups`` as well; instances can be pickled wherever the groups' files are.

    ``origins``: of the groups, where another process has said them.

    Raises:
        ArgumentError: a group has a flag that is taken already, or is no frozen dataclass.
    """
    if not groups:
        return Args
    flags = [flag for group in (Args, *groups) for flag in all_flags(group).values()]
    taken = [option for flag in flags for option in (flag.option, *flag.aliases)]
    if twice := {option for option in taken if taken.count(option) > 1}:
        raise ArgumentError([f"{', '.join(sorted(twice))}: two groups have this flag; call yours something else"])
    found = tuple(_origin(group) for group in groups) if origins is None else origins

    def reduce(args: Args) -> tuple[Callable[..., Args], tuple[Any, ...]]:
        return _restore, (found, {f.name: getattr(args, f.name) for f in dataclasses.fields(args)})

    composed = type("Args", (*reversed(groups), Args), {"__doc__": Args.__doc__, "__reduce__": reduce})
    try:
        return dataclasses.dataclass(frozen=True)(composed)
    except TypeError as error:
        raise ArgumentError([f"{OPTION}: {error}; write @dataclass(frozen=True) above the class"]) from None


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


def _origin(group: type) -> Origin:
    file = os.path.abspath(inspect.getsourcefile(group) or "")
    return Origin(group.__module__, group.__qualname__, file, os.path.relpath(file))


def _restore(origins: tuple[Origin, ...], values: dict[str, Any]) -> Args:
    return _composed(origins)(**values)


@lru_cache
def _composed(origins: tuple[Origin, ...]) -> type[Args]:
    return compose([_find(origin) for origin in origins], origins)


def _find(origin: Origin) -> type:
    from slimelite.plugins import load_function

    if origin.module in sys.modules and origin.module != "__main__":
        return getattr(sys.modules[origin.module], origin.name)
    if os.path.isfile(origin.file) or os.path.isfile(origin.relative):
        file = origin.file if os.path.isfile(origin.file) else origin.relative
        found: Any = load_function(f"{file}:{origin.name}")
        return found
    return getattr(importlib.import_module(origin.module), origin.name)
