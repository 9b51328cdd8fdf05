"""Where arguments come from: the command line, YAML files, and presets, which are named sets of flags."""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimelite.arguments.flags import group_flags
from slimelite.arguments.vocabulary import SIMILAR, Settings, Vocabulary, as_words, read_yaml, recorded
from slimelite.base.registry import Registry

# flags that name a file of arguments
FILES = ("--config", "--custom-config-path")
# most bytes of a YAML file, and most values that it has once its aliases are written out
YAML_BYTES, YAML_VALUES = 250_000, 100_000
# metavars in `--help` of the other flags that name files or folders
PATHS = ("PATH", "DIR", "TEMPLATE", "NAME PATH")


@dataclass(frozen=True)
class Preset:
    """``flags`` as on a command line; ``source``: an arXiv number or an address."""

    name: str
    source: str
    flags: str


PRESETS: Registry[Preset] = Registry("preset", "--preset")
for _name, _preset in tomllib.loads(recorded("presets.toml")).items():
    PRESETS.add(Preset(_name, **_preset))


def split_words(argv: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """(option, its words) for each flag of a command line, and the words before the first flag."""
    calls: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            option, equals, value = word.partition("=")
            calls.append((option, [value] if equals else []))
        else:
            (calls[-1][1] if calls else stray).append(word)
    return calls, stray


def read_command_line(argv: Sequence[str], vocabulary: Vocabulary) -> Settings:
    """The settings of a command line.

    A word that begins with ``--`` is a flag, and the words up to the next one are its values; ``--flag=value`` gives a
    value that begins with ``--`` itself. A flag given twice: the last one wins, so ``script.sh --lr 1e-5`` overrides.
    """
    settings = Settings()
    calls, stray = split_words(argv)
    settings.problems += [f"{word} stands before the first flag; flags begin with --" for word in stray]
    for option, words in calls:
        vocabulary.read(option, words, settings)
    for option in FILES:
        if [option for option, _ in calls].count(option) > 1:
            settings.complain(option, "is given twice: take one file, and flags on the command line over it")
    return settings


def read_config(path: str, option: str, vocabulary: Vocabulary, *, own_keys: bool = False) -> Settings:
    """The settings in the YAML mapping at ``path``, with - or _ in keys; ``option``: the flag that named the file.

    With ``own_keys`` a key that is no flag is not an error: the user's plugins read it as ``args.key``.
    """
    settings = Settings()
    content = load_yaml(path, option, settings)
    if content is not None and not isinstance(content, dict):
        settings.complain(option, f"{path}: is not a mapping of arguments")
    if not isinstance(content, dict):
        return settings
    before = len(settings.problems)
    keys = [str(key).replace("_", "-") for key in content]
    for name, value in zip(keys, content.values(), strict=True):
        if keys.count(name) > 1:
            settings.complain(f"--{name}", "is there twice, with - and with _")
        elif own_keys and not vocabulary.knows(name):
            try:
                json.dumps(value, default=str)  # the run writes it into config.json
                settings.custom[name.replace("-", "_")] = value
            except (TypeError, ValueError, RecursionError) as error:
                settings.complain(f"--{name}", f"cannot be written as JSON: {error}")
        elif value is not None:  # null is "not given"
            _read_key(name, value, vocabulary, settings)
    settings.problems[before:] = [f"{path}: {problem}" for problem in settings.problems[before:]]
    return settings


def load_yaml(path: str, option: str, settings: Settings) -> object:
    """The content of a YAML file; a file that cannot be read becomes a problem of ``option``, and gives None."""
    import yaml  # here, so that --help needs the standard library only

    try:
        loader = yaml.SafeLoader(_short_text(path))
        node = loader.get_single_node()
        if _written_out(node, {}) > YAML_VALUES:
            raise ValueError(f"has more than {YAML_VALUES:,} values once its aliases are written out")
        _check_keys(node)
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        settings.complain(option, f"{path}: cannot be read: {error.strerror}")
    except yaml.YAMLError as error:
        settings.complain(option, f"{path}: is not YAML: {' '.join(str(error).split())}")
    except (ValueError, RecursionError) as error:
        settings.complain(option, f"{path}: {error}")
    else:
        if content is None:
            settings.complain(option, f"{path}: is empty")
        return content
    return None


def _short_text(path: str) -> str:
    """The text of a file, unless it may be endless."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder the system has its own words
        raise ValueError("is a pipe or a device; name a file")
    with open(path, "rb") as file:
        text = file.read(YAML_BYTES + 1)
    if len(text) > YAML_BYTES:
        raise ValueError(f"has more than {YAML_BYTES:,} bytes: is it a file of arguments?")
    return text.decode()


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML node has where an alias counts as what it stands for, unless it stands within that."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = 1
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


def read_entry(
    group: type, entry: object, option: str, where: str, settings: Settings, refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values of a mapping in a YAML file whose keys are the flags of ``group``; null is "not given".

    ``refused``: other keys -> why they are not supported. Problems, at ``where``, are of ``option``.
    """
    flags = {f.name: f for f in group_flags(group)}
    values: dict[str, Any] = {}
    if not isinstance(entry, dict):
        settings.complain(option, f"{where}: is not a mapping of settings")
        return {}
    for key, value in entry.items():
        name = str(key).replace("-", "_")
        if why := (refused or {}).get(name):
            settings.complain(option, f"{where}: {key} is not supported: {why}")
        elif name not in flags:
            near = difflib.get_close_matches(name, flags, n=1, cutoff=SIMILAR)
            hint = f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(flags)}"
            settings.complain(option, f"{where}: {key} is not a known key{hint}")
        elif value is not None:
            try:
                values[name] = read_yaml(flags[name], value)
            except (ValueError, RecursionError) as error:
                settings.complain(option, f"{where}: {key} {error}")
    return values


def _check_keys(root: Any) -> None:
    """Raise ValueError for a repeated key, of which PyYAML silently takes the last; ``<<`` may merge the same key."""
    ahead, walked = [root], set()
    while ahead:
        node = ahead.pop()
        if node is None or id(node) in walked or not isinstance(node.value, list):
            continue
        walked.add(id(node))
        keys: set[str] = set()
        for item in node.value:
            ahead.append(item[1] if isinstance(item, tuple) else item)
            if not isinstance(item, tuple):
                continue
            key = item[0]
            if str(key.value) in keys:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is there a second time")
            keys.add(str(key.value))


def _read_key(name: str, value: object, vocabulary: Vocabulary, settings: Settings) -> None:
    if f"--{name}" in FILES:
        settings.complain(f"--{name}", "is for the command line; a file of arguments names no other")
        return
    if isinstance(value, dict) and not vocabulary.knows(name):
        settings.complain(f"--{name}", "is not a flag but a section; a file has no sections: move its keys out of it")
        return
    try:
        if name in vocabulary.switches_on:
            flag = vocabulary.switches_on[name]
            settings.values[flag.name] = read_yaml(flag, value)
        elif name in vocabulary.switches_off:
            flag = vocabulary.switches_off[name]
            settings.values[flag.name] = not read_yaml(flag, value)
        elif value is not False or not vocabulary.knows(name):  # else false means "not given"
            vocabulary.read("--" + name, as_words(value), settings)
    except (ValueError, RecursionError) as error:
        settings.complain("--" + name, str(error))


def read_presets(
    names: Sequence[str], vocabulary: Vocabulary, explicit: Collection[str]
) -> tuple[Settings, dict[str, str]]:
    """The settings of all presets, and the name of the preset that set each field.

    Two presets may not set a field to different values, unless it is in ``explicit``: other sources override presets.
    """
    settings, owner = Settings(), dict[str, str]()
    for name in names:
        try:
            preset = read_command_line(PRESETS[name].flags.split(), vocabulary)
        except ValueError as error:
            settings.problems.append(str(error))
            continue
        for field, value in preset.values.items():
            if field not in explicit and settings.values.setdefault(field, value) != value:
                option = "--" + field.replace("_", "-")
                settings.complain(
                    "--preset", f"{owner[field]} and {name} disagree about {option}: give it, or take one"
                )
            owner.setdefault(field, name)
        settings.problems += preset.problems
    return settings, owner


def drop_unusable_paths(settings: Settings, vocabulary: Vocabulary) -> None:
    """Remove each path that cannot be looked up and report it as a problem; later checks would fail on it."""
    for flag in vocabulary.flags.values():
        if flag.metavar not in PATHS or flag.name not in settings.values:
            continue
        value = settings.values[flag.name]
        for path in value if flag.many else [value]:
            if problem := _unusable(path):
                settings.complain(flag.option, f"{path[:80] + '...' * (len(path) > 80)} {problem}".lstrip())
                del settings.values[flag.name]
                break


def _unusable(path: str) -> str | None:
    """Why ``path`` cannot be used, or None; a path where nothing exists yet can be used."""
    if not path:
        return "is empty: a variable that is not set?"
    try:
        os.stat(f"{path.partition('@[')[0]}/.")  # fails for a folder that we may not enter
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    except ValueError as error:
        return f"cannot be used: {error}"
    return None
