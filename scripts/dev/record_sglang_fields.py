"""Record the options of the installed SGLang's server in slimelite/arguments/sglang_fields.txt.

    python scripts/dev/record_sglang_fields.py             (after installing SGLang, and again with another version)

Options of versions that were recorded earlier stay, so that a command line for either version can be parsed. A running
engine checks against the installed SGLang.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slimelite.base.version import answer_version
from slimelite.engines.sglang.server import installed_options

PATH = Path(__file__).resolve().parents[2] / "slimelite" / "arguments" / "sglang_fields.txt"
HEADER = """\
# Options of SGLang's server, taken as --sglang-<option>: field, kind (+: several values, *: or none, ?: one or none;
# switch: has --sglang-no-<option> too), options, choices.
# Written by scripts/dev/record_sglang_fields.py from SGLang {}.
"""
# how SGLang's parser reads a word -> our kind; the rest are words that it takes apart itself
KINDS = {
    "int": "int",
    "human_readable_int": "int",
    "float": "float",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
}


def record(field: str, action: argparse.Action, before: str) -> str:
    """The line of one field. ``before``: its present line. The spellings, choices and off switch of that line stay."""
    _, kind_before, spelled_before, choices_before, *_ = [*before.split("\t"), "", "", "", ""]
    if action.nargs == 0:
        can_be_off = isinstance(action, argparse.BooleanOptionalAction) or kind_before == "switch"
        kind = "switch" if can_be_off else "bool"
    else:
        kind = KINDS.get(getattr(action.type, "__name__", ""), "str") + str(action.nargs or "")
    own = field.replace("_", "-")
    options = [option[2:] for option in action.option_strings if not option.startswith("--no-")]
    spelled = merge(own if spelled_before == "-" else spelled_before, options)
    choices = merge(choices_before, map(str, action.choices or []))
    return "\t".join([field, kind, "-" if spelled == own else spelled, choices]).rstrip("\t")


def merge(before: str, now: Iterable[str]) -> str:
    """Comma-separated words. Those of ``before`` come first."""
    return ",".join(dict.fromkeys([*filter(None, before.split(",")), *now]))


def main() -> None:
    """Merge the installed version's fields into the file."""
    before = PATH.read_text(encoding="utf-8")
    versions = sorted({version("sglang"), *re.findall(r"\b0\.\d+\.\d+", before)})
    lines = {line.split("\t")[0]: line for line in before.splitlines() if not line.startswith("#")}
    lines |= {field: record(field, action, lines.get(field, "")) for field, action in installed_options().items()}
    text = HEADER.format(" and ".join(versions)) + "".join(f"{lines[field]}\n" for field in sorted(lines))
    PATH.write_text(text, encoding="utf-8")
    print(f"{PATH}: {len(lines)} fields of SGLang {' and '.join(versions)}")


if __name__ == "__main__":
    answer_version()
    main()
