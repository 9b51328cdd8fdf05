"""What every flag means: a field of a group, an option of SGLang, or a known flag without effect or refused."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

from slimelite.arguments.flags import Flag, all_flags
from slimelite.arguments.megatron import NO_EFFECT, ROUTER
from slimelite.arguments.refused import REFUSED, SGLANG_SET_HERE
from slimelite.arguments.secret import may_hold_secrets, without
from slimelite.arguments.values import read_flag, read_words

KINDS: dict[str, type] = {"int": int, "float": float, "str": str, "json": dict}
SWITCHES = {"bool": True, "switch": True, "off": False}
# how alike (difflib's ratio) an unknown name and a known one are when the one was meant to be the other
SIMILAR = 0.7


@dataclass
class Settings:
    """What one source of arguments says."""

    values: dict[str, Any] = field(default_factory=dict)
    sglang: dict[str, Any] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)
    # keys of --custom-config-path that are no flags: for the user's plugins
    custom: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    # options that a problem is about: a later check that trips over one of them says nothing new
    blamed: set[str] = field(default_factory=set)

    def complain(self, option: str, what: str, *also: str) -> None:
        """Add a problem of ``option``; ``also``: what the user may have meant."""
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
class SglangOption:
    """One option of SGLang's server."""

    field: str
    kind: str
    choices: tuple[str, ...]


class Vocabulary:
    """Every option that a command line for ``args_type`` may hold, without its dashes in front."""

    def __init__(self, args_type: type) -> None:
        self.flags = all_flags(args_type)
        self.switches_on = {o.removeprefix("--"): f for f in self.flags.values() for o in (f.option, *f.aliases)}
        self.switches_off = {f.off_option[2:]: f for f in self.flags.values() if f.off_option}

    @cached_property
    def sglang(self) -> dict[str, SglangOption]:
        """Options of SGLang's server, without their ``sglang-`` prefix."""
        options: dict[str, SglangOption] = {}
        for line in _recorded("sglang_fields.txt"):
            name, kind, spellings, choices = [*line.split("\t"), "", ""][:4]
            option = SglangOption(name, kind, tuple(choices.split(",")) if choices else ())
            for spelling in spellings.split(",") if spellings != "-" else [name.replace("_", "-")]:
                options[spelling] = option
                if kind == "switch":
                    options[f"no-{spelling}"] = SglangOption(name, "off", ())
        return options

    @cached_property
    def router(self) -> dict[str, str]:
        """Options of SGLang's router, without their ``router-`` prefix -> kind."""
        rows = [line.split("\t") for line in _recorded("router_fields.txt")]
        return {name: kind for kind, names in rows for name in names.split()}

    def knows(self, name: str) -> bool:
        """Whether ``name`` (no dashes in front) is a flag at all."""
        own = name in self.switches_on or name in self.switches_off or name in NO_EFFECT or name in REFUSED
        return own or name.removeprefix("sglang-") in self.sglang or name.removeprefix("router-") in self.router

    def read(self, option: str, words: Sequence[str], into: Settings) -> None:
        """What ``option`` with ``words`` behind it says; wrong ones become problems."""
        name = option.removeprefix("--")
        try:
            if name in self.switches_on:
                self._read_flag(self.switches_on[name], words, into)
            elif name in self.switches_off:
                _expect(words, 0)
                into.values[self.switches_off[name].name] = False
            elif name in NO_EFFECT:
                arity, reason = NO_EFFECT[name]
                _expect(words, arity)
                into.no_effect[option] = reason
            elif name in REFUSED:
                _read_refused(option, words, into)
            elif name.startswith("sglang-") and name[7:] in self.sglang:
                _read_sglang(self.sglang[name[7:]], words, into)
            elif name.startswith("router-") and name[7:] in self.router:
                into.no_effect[option] = ROUTER
            else:
                self._unknown(option, into)
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
        """The known option that is most like ``option``, or None where none is."""
        name = option[2:].replace("_", "-")
        known, prefix = [*self.switches_on, *self.switches_off, *NO_EFFECT, *REFUSED], ""
        if name.startswith("sglang-"):  # a prefix that they share does not make two names alike
            prefix = "sglang-"
            known = [*self.sglang, *(n.removeprefix(prefix) for n in self.switches_on if n.startswith(prefix))]
        elif name.startswith("router-"):
            known, prefix = list(self.router), "router-"
        near = difflib.get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=SIMILAR)
        return f"--{prefix}{near[0]}" if near else None

    def _unknown(self, option: str, into: Settings) -> None:
        near = self.nearest(option)
        hint = f"; did you mean {near}?" if near else "; --help lists them all"
        into.complain(option, "is not a known flag" + hint, *([near] if near else []))


def _read_sglang(sglang: SglangOption, words: Sequence[str], into: Settings) -> None:
    if sglang.field in SGLANG_SET_HERE:
        raise ValueError(f"is not taken: {SGLANG_SET_HERE[sglang.field]}")
    if sglang.kind in SWITCHES:
        _expect(words, 0)
        into.sglang[sglang.field] = SWITCHES[sglang.kind]
        return
    kind, many = KINDS[sglang.kind.rstrip("+*?")], sglang.kind.endswith(("+", "*"))
    if not words and sglang.kind.endswith(("*", "?")):
        into.sglang[sglang.field] = [] if many else ""
        return
    value = read_words(kind, words, many=many)
    for choice in value if many else [value]:
        if sglang.choices and str(choice) not in sglang.choices:
            raise ValueError(f"is one of {', '.join(sglang.choices)}, not {choice!r}")
    into.sglang[sglang.field] = value


def _read_refused(option: str, words: Sequence[str], into: Settings) -> None:
    refusal = REFUSED[option[2:]]
    _expect(words, refusal.arity)
    if len(words) == 1 and any(_same(words[0], value) for value in refusal.harmless):
        into.no_effect[option] = f"{words[0]} is how it is anyway"
        return
    raise ValueError(f"is not supported: {refusal.reason}")


def _same(word: str, value: str) -> bool:
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


def _expect(words: Sequence[str], count: int) -> None:
    """Raise ValueError unless there are ``count`` words; -1: one or more."""
    if count == 0 and words:
        raise ValueError(f"takes no value, not {' '.join(words)!r}")
    if len(words) < abs(count):
        raise ValueError("needs a value" if abs(count) == 1 else f"needs {count} values")
    if 0 < count < len(words):
        raise ValueError(f"takes {count} value{'s' * (count > 1)}, not {len(words)}: {' '.join(words)}")


def _recorded(name: str) -> list[str]:
    text = (files("slimelite.arguments") / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]
