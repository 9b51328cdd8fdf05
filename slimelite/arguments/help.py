"""The text of ``--help``: every flag, by group."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterable
from typing import Any

from slimelite.arguments.flags import ALWAYS, Flag, group_flags, group_title, groups_of, listed
from slimelite.arguments.vocabulary import known_flags

INTRODUCTION = """\
usage: train.py --flag value ...

A flag given twice: the last one wins. --no-<switch> turns a switch off. --config FILE takes the same names from YAML.
docs/arguments.md says the same at length."""
PLACEHOLDERS = {int: "INT", float: "FLOAT", str: "TEXT", dict: "JSON"}


def format_help(args_type: type, width: int | None = None) -> str:
    """Help for ``args_type``, wrapped to ``width`` columns (the terminal's if None)."""
    width = min(width or shutil.get_terminal_size().columns, 120)
    parts = [INTRODUCTION]
    for group in groups_of(args_type):
        shared = shared_needs(group)
        lines = [group_title(group)[0].upper()]
        lines += textwrap.wrap(description(group), width, initial_indent="  ", subsequent_indent="  ")
        parts.append("\n".join(lines + [_entry(flag, shared, width) for flag in group_flags(group)]))
    parts.append(_names("Known, without effect here", known_flags(refused=False), width))
    parts.append(_names("Known, and refused with the reason and what to use instead", known_flags(refused=True), width))
    return "\n\n".join(parts)


def _names(title: str, names: Iterable[str], width: int) -> str:
    listed = " ".join(sorted({"--router-..." if name.startswith("router-") else f"--{name}" for name in names}))
    indent = "  "
    wrapped = textwrap.wrap(listed, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join([title.upper(), *wrapped])


def usage(flag: Flag) -> str:
    """How the flag is written: ``--lr FLOAT``, or ``--mis-level, --tis-level TEXT`` where it has an alias."""
    option = ", ".join((flag.option, *flag.aliases))
    if flag.kind is bool:
        both = flag.default is not False and flag.negative is None
        return f"{option} / {flag.off_option}" if both else (flag.negative or option)
    value = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.metavar or PLACEHOLDERS[flag.kind]
    return f"{option} {value}" + (" ..." if flag.many else "")


def shown_default(flag: Flag) -> str:
    """The default as text, or "" if it would tell the reader nothing."""
    if flag.auto is not None:
        return flag.auto
    if flag.default in (None, [], {}, False) or flag.kind is bool:
        return ""
    return _plain(flag.default)


def shared_needs(group: type) -> set[str]:
    """The needs that all flags of ``group`` share; ``--help`` states them once for the group."""
    needs = [flag.needs or ALWAYS for flag in group_flags(group)]
    return set.intersection(*({condition.words for condition in need.conditions} for need in needs))


def description(group: type) -> str:
    """The text below the title of a group."""
    shared = shared_needs(group)
    needs = f" These flags need {listed(sorted(shared))}." if shared else ""
    return f"{group_title(group)[1]}{needs}".strip()


def meaning(flag: Flag, shared: Collection[str] = ()) -> str:
    """What a flag does, its bounds, and what it needs besides ``shared``."""
    sentences = [flag.help[:1].upper() + flag.help[1:].rstrip(".") + "."]
    if flag.bounds:
        sentences.append(f"It is {flag.bounds}.")
    needs = [condition.words for condition in (flag.needs or ALWAYS).conditions]
    if own := [words for words in needs if words not in shared]:
        sentences.append(f"It needs {listed(own)}{', and has to be given there' if flag.required else ''}.")
    return " ".join(sentences)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _entry(flag: Flag, shared: Collection[str], width: int) -> str:
    default = shown_default(flag)
    text = meaning(flag, shared) + (f" Default: {default}." if default else "")
    indent = " " * 8
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join([f"  {usage(flag)}", *wrapped])
