"""The text of ``--help``: every flag, by group."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from slimelite.arguments.flags import Flag, group_flags, group_title, groups_of
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
        title, description = group_title(group)
        lines = [title.upper()]
        lines += textwrap.wrap(description, width, initial_indent="  ", subsequent_indent="  ")
        parts.append("\n".join(lines + [_entry(flag, width) for flag in group_flags(group)]))
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
    """What holds when the flag is not given, or "" when that says nothing."""
    if flag.auto is not None:
        return flag.auto
    if flag.default in (None, [], {}, False) or flag.kind is bool:
        return ""
    return _plain(flag.default)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _entry(flag: Flag, width: int) -> str:
    default = shown_default(flag)
    text = f"{flag.help} (default: {default})" if default else flag.help
    indent = " " * 8
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join([f"  {usage(flag)}", *wrapped])
