"""What every option means and how its words are read. An option is a flag of a group, an option of SGLang's server, or
a flag of slime or Megatron that has no effect here or is refused (``known_flags.toml``)."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from slimelite.arguments.flags import Flag, all_flags
from slimelite.arguments.secret import may_hold_secrets, without

KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "json": dict}
SWITCHES = {"bool": True, "switch": True, "off": False}
# difflib's ratio from which an unknown name is taken for a misspelling of a known one
SIMILAR = 0.7


@dataclass
class Settings:
    """The arguments that one source gives."""

    values: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, object] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)
    # keys of --custom-config-path that are no flags: for the user's plugins
    custom: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # options that have a problem already: later problems that name one of them are left out
    blamed: set[str] = field(default_factory=set)

    def complain(self, option: str, what: str, *also: str) -> None:
        """Add a problem of ``option``; ``also``: options that the user may have meant."""
        self.problems.append(f"{option} {what}")
        self.blamed.update((option, *also))

    def over(self, below: Settings) -> Settings:
        """These settings on top of ``below``."""
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
    """A flag of slime, miles or Megatron that has no field here. It takes ``arity`` values (-1: one or more, None: any
    number); a refused flag is accepted with the value ``harmless``."""

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
    """The text of one of the tables beside this module."""
    return (files("slimelite.arguments") / file).read_text(encoding="utf-8")


@cache
def known_tables() -> dict[str, dict[str, str]]:
    """``known_flags.toml``, by name instead of by reason: table -> name -> why."""
    tables = tomllib.loads(recorded("known_flags.toml"))
    return {table: {name: why for why, names in rows.items() for name in names} for table, rows in tables.items()}


@cache
def known_flags(refused: bool | None = None) -> dict[str, KnownFlag]:
    """Flags that have no field here, by name without dashes; ``refused``: None for all, else only those that match."""
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
    """The flag of ``known_flags`` that ``name`` (no dashes in front) is; ``eval-sglang-*`` stands for many."""
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
    """The key and the value with which a file of arguments gives SGLang's option ``field``."""
    spelled = {o.kind: name for name, o in sglang_options().items() if o.field == field}
    if value is False:
        return f"sglang-{spelled['off']}", True
    kind = next(kind for kind in spelled if kind != "off")
    return f"sglang-{spelled[kind]}", json.dumps(value) if kind == "json" else value


class Vocabulary:
    """Every option that a command line for ``args_type`` may hold, without its leading dashes."""

    def __init__(self, args_type: type) -> None:
        self.flags = all_flags(args_type)
        self.switches_on = {o.removeprefix("--"): f for f in self.flags.values() for o in (f.option, *f.aliases)}
        self.switches_off = {f.off_option[2:]: f for f in self.flags.values() if f.off_option}

    def knows(self, name: str) -> bool:
        """Whether ``name`` (no dashes in front) is an option at all."""
        return (
            name in self.switches_on
            or name in self.switches_off
            or known_flag(name) is not None
            or (name.startswith("sglang-") and name[7:] in sglang_options())
        )

    def read(self, option: str, words: Sequence[str], into: Settings) -> None:
        """Read one option of a command line, such as ``--lr`` with ``words`` ["1e-6"], and note its value in ``into``.

        What cannot be read becomes one of the problems of ``into``.
        """
        name = option.removeprefix("--")
        try:
            if name in self.switches_on:
                self._read_flag(self.switches_on[name], words, into)
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

    def _read_flag(self, flag: Flag, words: Sequence[str], into: Settings) -> None:
        if flag.kind is bool:
            _expect(words, 0)
            into.values[flag.name] = True
            return
        value = read_flag(flag, words)
        if flag.repeat:
            value = [*into.values.get(flag.name, []), *value]
        into.values[flag.name] = value

    def nearest(self, option: str) -> str | None:
        """The known option that is most like ``option``, or None where none is, or where that one is refused."""
        name = option[2:].replace("_", "-")
        # a prefix that they share does not make two names alike
        prefix = next((prefix for prefix in ("sglang-", "router-") if name.startswith(prefix)), "")
        sglang = [f"sglang-{name}" for name in sglang_options()]
        names = [*self.switches_on, *self.switches_off, *known_flags(), *sglang]
        known = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        near = difflib.get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=SIMILAR)
        nearest = f"{prefix}{near[0]}" if near else ""
        return f"--{nearest}" if nearest and not self._is_refused(nearest) else None

    def _is_refused(self, name: str) -> bool:
        """Whether an option is answered with what to write instead."""
        option = sglang_options().get(name.removeprefix("sglang-"))
        set_here = option is not None and option.field in known_tables()["sglang_set_here"]
        return name in known_flags(refused=True) or (set_here and name not in self.switches_on)


def read_flag(flag: Flag, words: Sequence[str]) -> Any:
    """The value that ``words`` give to a flag other than a switch.

    Raises:
        ValueError: they do not fit the flag; the message does not repeat its name.
    """
    values = _read_words(flag.kind, words, flag.choices, many=flag.many)
    if flag.kind is dict and not isinstance(values, dict):
        raise ValueError(f"takes a JSON object, not {words[0]!r}")
    return values


def read_yaml(flag: Flag, value: object) -> object:
    """The value that a YAML file gives to a flag.

    Raises:
        ValueError: it does not fit the flag; the message does not repeat its name.
    """
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"is true or false, not {value!r}")
        return value
    return [] if flag.many and value == [] else read_flag(flag, as_words(value))


def as_words(value: object) -> list[str]:
    """The command-line words for a value of a YAML file; there are none for true, since a switch takes none."""
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
        return f"{value} is how it is anyway"
    raise ValueError(f"is not supported: {flag.why}")


def _same(word: str, value: str) -> bool:
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


def _read_sglang(option: SglangOption, words: Sequence[str], into: Settings) -> None:
    if why := known_tables()["sglang_set_here"].get(option.field):
        raise ValueError(f"is not taken: {why}")
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
    """Raise ValueError unless there are ``count`` words; -1: one or more, None: any number."""
    if count is None:
        return
    if count == 0 and words:
        raise ValueError(f"takes no value, not {' '.join(words)!r}")
    if len(words) < abs(count):
        raise ValueError("needs a value" if abs(count) == 1 else f"needs {count} values")
    if 0 < count < len(words):
        what = "one value" if count == 1 else f"{count} values"
        raise ValueError(f"takes {what}, not {len(words)}: {' '.join(words)}")


def _read_words(kind: type, words: Sequence[str], choices: Collection[str], *, many: bool) -> object:
    """``words`` as one value of ``kind``, or as a list of them; ``dict`` stands for any JSON."""
    _expect(words, -1 if many else 1)
    values = [_read_word(kind, word) for word in words]
    for value in values if choices else ():
        if str(value) not in choices:
            raise ValueError(f"is one of {', '.join(choices)}, not {value!r}")
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
