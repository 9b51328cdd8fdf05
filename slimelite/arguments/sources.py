"""The sources of arguments: the command line, YAML files, and presets, which are named sets of flags.

An option has the same meaning in all sources, and its words are read in the same way. There are three kinds of
options: (1) flags of a group; (2) options of SGLang's server; (3) flags of slime and Megatron that have no effect here
or are refused (``known_flags.toml``).
"""

from __future__ import annotations

import difflib
import json
import math
import os
import stat
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from slimelite.arguments.flags import Flag, all_flags, group_flags
from slimelite.arguments.secret import may_hold_secrets, without
from slimelite.base.registry import Registry

KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "json": dict}
SWITCHES = {"bool": True, "switch": True, "off": False}
# an unknown name with at least this difflib ratio counts as a misspelling of a known name
SIMILAR = 0.7
SAME = 0.9


@dataclass
class Settings:
    """The arguments from one source."""

    values: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, object] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)
    # keys of --custom-config-path that are not flags; the user's plugins read them
    custom: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # options that already have a problem; later problems that name one of these options are left out
    blamed: set[str] = field(default_factory=set)

    def complain(self, option: str, what: str, *also: str) -> None:
        """Add a problem of ``option``. ``also``: options that the user may have meant."""
        self.problems.append(f"{option} {what}")
        self.blamed.update((option, *also))

    def over(self, below: Settings) -> Settings:
        """The settings of ``self`` and ``below``; ``self`` overrides ``below``."""
        return Settings(
            {**below.values, **self.values},
            {**below.sglang, **self.sglang},
            {**below.no_effect, **self.no_effect},
            {**below.custom, **self.custom},
            [*self.problems, *below.problems],
            self.blamed | below.blamed,
        )


@dataclass(frozen=True)
class KnownFlag:
    """A flag of slime, miles or Megatron that has no field here. ``arity``: how many values the flag takes (-1: one or
    more, None: any number). ``harmless``: the value with which a refused flag is accepted."""

    arity: int | None
    why: str
    refused: bool
    harmless: str | None


@dataclass(frozen=True)
class SglangOption:
    """One option of SGLang's server."""

    field: str
    kind: str
    choices: tuple[str, ...]


def recorded(file: str) -> str:
    """The text of a file in the folder of this module."""
    return (files("slimelite.arguments") / file).read_text(encoding="utf-8")


@cache
def known_tables() -> dict[str, dict[str, str]]:
    """The reason for each name in ``known_flags.toml``: table -> name -> reason."""
    tables = tomllib.loads(recorded("known_flags.toml"))
    return {table: {name: why for why, names in rows.items() for name in names} for table, rows in tables.items()}


@cache
def known_flags(refused: bool | None = None) -> dict[str, KnownFlag]:
    """Flags that have no field here, by name without dashes. ``refused``: only flags with this value of ``refused``;
    None: all flags."""
    if refused is not None:
        return {name: flag for name, flag in known_flags().items() if flag.refused == refused}
    tables, flags = known_tables(), dict[str, KnownFlag]()
    for table in ("no_effect", "refused"):
        for usage, why in tables[table].items():
            name, _, takes = usage.partition(" ")
            arity = None if takes.startswith("[") else -1 if takes.endswith("...") else len(takes.split())
            flags[name] = KnownFlag(arity, why, table == "refused", tables["harmless"].get(name))
    return flags


def known_flag(name: str) -> KnownFlag | None:
    """The known flag called ``name`` (without leading dashes). The entry ``eval-sglang-*`` stands for many names."""
    of_eval = name.startswith("eval-sglang-") and name[12:] in sglang_options()
    return known_flags().get("eval-sglang-*" if of_eval else name)


@cache
def sglang_options() -> dict[str, SglangOption]:
    """Options of SGLang's server, by name without the leading ``--sglang-``."""
    options: dict[str, SglangOption] = {}
    for line in recorded("sglang_fields.txt").splitlines():
        if line.startswith("#"):
            continue
        name, kind, spellings, choices = [*line.split("\t"), "", ""][:4]
        option = SglangOption(name, kind, tuple(choices.split(",")) if choices else ())
        for spelling in spellings.split(",") if spellings != "-" else [name.replace("_", "-")]:
            options[spelling] = option
            if kind == "switch":
                options[f"no-{spelling}"] = SglangOption(name, "off", ())
    return options


def sglang_entry(field: str, value: object) -> tuple[str, object]:
    """The key and value that set SGLang's option ``field`` in a file of arguments."""
    spelled = {o.kind: name for name, o in sglang_options().items() if o.field == field}
    if value is False:
        return f"sglang-{spelled['off']}", True
    kind = next(kind for kind in spelled if kind != "off")
    return f"sglang-{spelled[kind]}", json.dumps(value) if kind == "json" else value


class Vocabulary:
    """Every option that a command line for ``args_type`` may have, without leading dashes."""

    def __init__(self, args_type: type) -> None:
        self.flags = all_flags(args_type)
        self.switches_on = {o.removeprefix("--"): f for f in self.flags.values() for o in (f.option, *f.aliases)}
        self.switches_off = {f.off_option[2:]: f for f in self.flags.values() if f.off_option}

    def knows(self, name: str) -> bool:
        """Whether ``name`` (without leading dashes) is an option."""
        return (
            name in self.switches_on
            or name in self.switches_off
            or known_flag(name) is not None
            or (name.startswith("sglang-") and name[7:] in sglang_options())
        )

    def read(self, option: str, words: Sequence[str], into: Settings) -> None:
        """Read one option of a command line, such as ``--lr`` with ``words`` ["1e-6"], and note its value in ``into``.

        If the option cannot be read, the problem is added to ``into``.
        """
        name = option.removeprefix("--")
        try:
            if name in self.switches_on:
                flag = self.switches_on[name]
                if flag.kind is bool:
                    _expect(words, 0)
                value: Any = True if flag.kind is bool else read_flag(flag, words)
                into.values[flag.name] = [*into.values.get(flag.name, []), *value] if flag.repeat else value
            elif name in self.switches_off:
                _expect(words, 0)
                into.values[self.switches_off[name].name] = False
            elif (known := known_flag(name)) is not None:
                into.no_effect[option] = _read_known(known, words)
            elif name.startswith("sglang-") and name[7:] in sglang_options():
                _read_sglang(sglang_options()[name[7:]], words, into)
            else:
                near = self.nearest(option)
                hint = f"; did you mean {near}?" if near else "; --help-all lists them all"
                into.complain(option, "is not a known flag" + hint, *([near] if near else []))
        except ValueError as error:
            into.complain(option, without(words, str(error)) if may_hold_secrets(option) else str(error))

    def nearest(self, option: str) -> str | None:
        """The known option that is most similar to ``option``. None if no option is similar, or if the option is
        refused."""
        name = option[2:].replace("_", "-")
        names = [
            *self.switches_on,
            *self.switches_off,
            *known_flags(),
            *(f"sglang-{name}" for name in sglang_options()),
        ]
        nearest = ""
        first = name.partition("-")[0] + "-"  # two names are not similar only because they share the first word
        for prefix in ("", first):
            known = [one.removeprefix(prefix) for one in names if one.startswith(first) == bool(prefix)]
            if near := difflib.get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=SIMILAR):
                nearest = prefix + near[0]
        # only for a very similar name, because names of other projects may also mean flags of a different kind
        elsewhere = known_tables()["elsewhere"]
        if near := difflib.get_close_matches(name, elsewhere, n=1, cutoff=SAME):
            nearest = elsewhere[near[0]]
        return f"--{nearest}" if nearest and not self._is_refused(nearest) else None

    def _is_refused(self, name: str) -> bool:
        """Whether the option is refused with a message that names the replacement."""
        option = sglang_options().get(name.removeprefix("sglang-"))
        set_here = option is not None and option.field in known_tables()["sglang_set_here"]
        return name in known_flags(refused=True) or (set_here and name not in self.switches_on)


def read_flag(flag: Flag, words: Sequence[str]) -> Any:
    """The value of a flag with these ``words``. The flag must not be a switch.

    Raises:
        ValueError: the words do not fit the flag. The message does not contain the flag's name.
    """
    own = "; a file of --import-file adds a name of your own" if flag.open else ""
    values = _read_words(flag.kind, words, flag.choices, many=flag.many, own=own)
    if flag.kind is dict and not isinstance(values, dict):
        raise ValueError(f"takes a JSON object, not {words[0]!r}")
    return values


def read_yaml(flag: Flag, value: object) -> object:
    """The value of a flag in a YAML file.

    Raises:
        ValueError: the value does not fit the flag. The message does not contain the flag's name.
    """
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value
    return [] if flag.many and value == [] else read_flag(flag, as_words(value))


def as_words(value: object) -> list[str]:
    """The command-line words for a value of a YAML file. For the value true, the list is empty, because a switch takes
    no value."""
    if value is True:
        return []
    if isinstance(value, dict):
        return [json.dumps(value, default=str)]
    if isinstance(value, list):
        return [word for item in value for word in as_words(item)]
    return [str(value)]


def _read_known(flag: KnownFlag, words: Sequence[str]) -> str:
    """Why ``flag`` has no effect. Raises ValueError if the flag is refused."""
    _expect(words, flag.arity)
    if not flag.refused:
        return flag.why
    value = " ".join(words)
    if flag.harmless is not None and _same(value, flag.harmless):
        return f"{value} is already the default behaviour"
    raise ValueError(f"is not supported: {flag.why}")


def _same(word: str, value: str) -> bool:
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


def _read_sglang(option: SglangOption, words: Sequence[str], into: Settings) -> None:
    if why := known_tables()["sglang_set_here"].get(option.field):
        raise ValueError(f"cannot be given: {why}")
    if option.kind in SWITCHES:
        _expect(words, 0)
        into.sglang[option.field] = SWITCHES[option.kind]
        return
    kind, many = KINDS[option.kind.rstrip("+*?")], option.kind.endswith(("+", "*"))
    if not words and option.kind.endswith(("*", "?")):
        into.sglang[option.field] = [] if many else ""
        return
    into.sglang[option.field] = _read_words(kind, words, option.choices, many=many)


def _expect(words: Sequence[str], count: int | None) -> None:
    """Raise ValueError unless there are ``count`` words. -1: one or more, None: any number."""
    if count is None:
        return
    if count == 0 and words:
        raise ValueError(f"takes no value: remove {' '.join(words)!r}")
    if len(words) < abs(count):
        raise ValueError("needs a value" if abs(count) == 1 else f"needs {count} values")
    if 0 < count < len(words):
        what = "one value" if count == 1 else f"{count} values"
        raise ValueError(f"takes {what}, not {len(words)}: {' '.join(words)}")


def _read_words(kind: type, words: Sequence[str], choices: Collection[str], *, many: bool, own: str = "") -> object:
    """``words`` as one value of ``kind``, or with ``many`` as a list of such values. ``dict`` means any JSON value.
    ``own``: how a value that is not in ``choices`` becomes one."""
    _expect(words, -1 if many else 1)
    values = [_read_word(kind, word) for word in words]
    for value in values if choices else ():
        if str(value) not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {value!r}{own}")
    return values if many else values[0]


def _read_word(kind: type, word: str) -> object:
    if kind is str:
        return word
    if kind is dict:
        try:
            return json.loads(word)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"takes JSON, and {word!r:.200} is not: {error}") from None
    try:
        value = kind(word)
    except ValueError:
        raise ValueError(f"takes {'a whole number' if kind is int else 'a number'}, not {word!r}") from None
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"takes a number, not {word}")
    return value


# flags that name a file of arguments
FILES = ("--config", "--custom-config-path")
# most bytes of a YAML file, and most values in it after its aliases are replaced
YAML_BYTES, YAML_VALUES = 250_000, 100_000
# metavars in `--help` of the other flags that name files or folders
PATHS = ("PATH", "DIR", "TEMPLATE", "NAME PATH")


@dataclass(frozen=True)
class Preset:
    """A named set of ``flags``, written as on a command line. ``source``: an arXiv number or an address."""

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

    A word that begins with ``--`` is a flag, and the words up to the next flag are its values. To give a value that
    itself begins with ``--``, write ``--flag=value``. If a flag is given twice, the last one wins, so ``script.sh --lr
    1e-5`` overrides the script's value.
    """
    settings = Settings()
    calls, stray = split_words(argv)
    settings.problems += [f"{word} comes before the first flag; flags begin with --" for word in stray]
    for option, words in calls:
        vocabulary.read(option, words, settings)
    for option in FILES:
        if [option for option, _ in calls].count(option) > 1:
            settings.complain(
                option, "is given twice: give one file, and override its values by flags on the command line"
            )
    return settings


def read_config(path: str, option: str, vocabulary: Vocabulary, *, own_keys: bool = False) -> Settings:
    """The settings in the YAML mapping at ``path``. Keys may use - or _. ``option``: the flag that named the file.

    With ``own_keys``, a key that is not a flag is not an error: the user's plugins read it as ``args.key``.
    """
    settings = Settings()
    content = load_yaml(path, option, settings)
    if content is not None and not isinstance(content, dict):
        settings.complain(option, f"{path}: the whole file must be a mapping of arguments, as in `lr: 1e-5`")
    if not isinstance(content, dict):
        return settings
    before = len(settings.problems)
    keys = [str(key).replace("_", "-") for key in content]
    for name, value in zip(keys, content.values(), strict=True):
        if keys.count(name) > 1:
            settings.complain(f"--{name}", "is given twice, once with - and once with _")
        elif own_keys and not vocabulary.knows(name):
            try:
                json.dumps(value, default=str)  # the run writes the value into config.json
                settings.custom[name.replace("-", "_")] = value
            except (TypeError, ValueError, RecursionError) as error:
                settings.complain(f"--{name}", f"cannot be written as JSON: {error}")
        elif value is not None:  # null is "not given"
            _read_key(name, value, vocabulary, settings)
    settings.problems[before:] = [f"{path}: {problem}" for problem in settings.problems[before:]]
    return settings


def load_yaml(path: str, option: str, settings: Settings) -> object:
    """The content of a YAML file. If the file cannot be read, a problem of ``option`` is noted, and the result is
    None."""
    import yaml  # imported here, because --help needs only the standard library

    try:
        loader = yaml.SafeLoader(_short_text(path))
        node = loader.get_single_node()
        if _written_out(node, {}) > YAML_VALUES:
            raise ValueError(f"has more than {YAML_VALUES:,} values after its aliases are replaced")
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


def read_mixture(args: Any, settings: Settings) -> dict[str, list[Any]]:
    """The values of prompt_data and prompt_data_weights in the YAML file of --prompt-data. The file has lines ``path:
    weight``. The result is empty if --prompt-data is not such a file."""
    name = args.prompt_data[0] if len(args.prompt_data) == 1 else ""
    content = load_yaml(name, "--prompt-data", settings) if name.endswith((".yaml", ".yml")) else None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(
        isinstance(path, str) and type(weight) in (int, float) and weight > 0 for path, weight in content.items()
    ):
        settings.complain("--prompt-data", f"{name}: a mixture has lines `path: weight`, each weight a number above 0")
        return {}
    if args.prompt_data_weights:
        settings.complain("--prompt-data-weights", f"leave this flag out: the mixture {name} has the weights")
    return {"prompt_data": list(content), "prompt_data_weights": [float(weight) for weight in content.values()]}


def _short_text(path: str) -> str:
    """The text of a file. Pipes and devices are refused, because they may never end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # for a folder, the system's own error is clear
        raise ValueError("is a pipe or a device; give a regular file")
    with open(path, "rb") as file:
        text = file.read(YAML_BYTES + 1)
    if len(text) > YAML_BYTES:
        raise ValueError(
            f"has more than {YAML_BYTES:,} bytes, which is too large for a file of arguments: is it the right file?"
        )
    return text.decode()


def _written_out(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML node has after its aliases are replaced. An alias inside its own value does not
    count."""
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
    """The values of a mapping in a YAML file whose keys are the flags of ``group``. null means "not given".

    ``refused``: other keys -> the reason why they are not supported. Problems are recorded under ``option``, and their
    text names the place ``where``.
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
            hint = f"; did you mean {near[0]}?" if near else f"; known keys are {', '.join(flags)}"
            settings.complain(option, f"{where}: {key} is not a known key{hint}")
        elif value is not None:
            try:
                values[name] = read_yaml(flags[name], value)
            except (ValueError, RecursionError) as error:
                settings.complain(option, f"{where}: {key} {error}")
    return values


def _check_keys(root: Any) -> None:
    """Raise ValueError for a repeated key, because PyYAML would silently use the last one. ``<<`` may merge the same
    key."""
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
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is given a second time")
            keys.add(str(key.value))


def _read_key(name: str, value: object, vocabulary: Vocabulary, settings: Settings) -> None:
    if f"--{name}" in FILES:
        settings.complain(f"--{name}", "can only be given on the command line, not in a file of arguments")
        return
    if isinstance(value, dict) and not vocabulary.knows(name):
        settings.complain(
            f"--{name}", "is a section, not a flag; a file of arguments has no sections: move its keys to the top level"
        )
        return
    try:
        if name in vocabulary.switches_on:
            flag = vocabulary.switches_on[name]
            settings.values[flag.name] = read_yaml(flag, value)
        elif name in vocabulary.switches_off:
            flag = vocabulary.switches_off[name]
            settings.values[flag.name] = not read_yaml(flag, value)
        elif value is not False or not vocabulary.knows(name):  # otherwise false means "not given"
            vocabulary.read("--" + name, as_words(value), settings)
    except (ValueError, RecursionError) as error:
        settings.complain("--" + name, str(error))


def read_presets(
    names: Sequence[str], vocabulary: Vocabulary, explicit: Collection[str]
) -> tuple[Settings, dict[str, str]]:
    """The settings of all presets, and the name of the preset that set each field.

    Two presets must not give a field different values, unless the field is in ``explicit``: then another source
    overrides both presets.
    """
    settings, owner = Settings(), dict[str, str]()
    for name in names:
        try:
            preset = read_command_line(PRESETS[name].flags.split(), vocabulary)
        except ValueError as error:
            settings.problems.append(str(error))
            continue
        for key, value in preset.values.items():
            if key not in explicit and settings.values.setdefault(key, value) != value:
                option = "--" + key.replace("_", "-")
                settings.complain(
                    "--preset",
                    f"{owner[key]} and {name} give {option} different values: use one preset, or give the flag",
                )
            owner.setdefault(key, name)
        settings.problems += preset.problems
    return settings, owner


def drop_unusable_paths(settings: Settings, vocabulary: Vocabulary) -> None:
    """Remove each path that the system cannot look up, and report it as a problem. Later checks would fail on such a
    path."""
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
    """Why ``path`` cannot be used, or None. A path that does not exist yet can be used."""
    if not path:
        return "is empty: is it a shell variable that is not set?"
    try:
        os.stat(f"{path.partition('@[')[0]}/.")  # fails for a folder that we may not enter
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    except ValueError as error:
        return f"cannot be used: {error}"
    return None
