"""Argument groups. A group is a frozen dataclass, and each of its fields is a flag.

::

    @dataclass(frozen=True)
    class ShoutArgs:
        '''Shouting.

        What my reward function reads.
        '''

        shout_bonus: float = flag(0.5, "This is added to the reward for an exclamation mark.", at_least=0)

This group adds ``--shout-bonus 0.7`` to the command line, ``shout_bonus: 0.7`` to config files, a section "Shouting" to
``--help`` and a typed ``args.shout_bonus``. The annotation decides how a value is read: ``bool`` (a switch, which
``--no-`` turns off), ``int``, ``float``, ``str``, ``Literal`` (choices), ``list[...]``, ``dict`` (JSON), and ``X |
None``, where None means "not given". If a field's annotation excludes None but its default is None, `derive` fills
the field in.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

from slimelite.base.registry import Registry
from slimelite.engines.params import PREFIXED, SamplingParams, names_at


class ArgumentError(ValueError):
    """The arguments are wrong. The message has one line for every problem."""

    def __init__(self, problems: Iterable[str], args_so_far: object = None) -> None:
        """``args_so_far``: the arguments for further checks. Flags that could not be read have their defaults."""
        self.problems = list(problems)
        self.args_so_far = args_so_far
        super().__init__("\n".join(self.problems))


# a text, or a function that returns the text if it lists the names in a registry
Words = str | Callable[[], str]


def spoken(words: Words) -> str:
    """``words`` as text."""
    return words if isinstance(words, str) else words()


class Condition(NamedTuple):
    """One condition that a flag may need: a test of the arguments, and a description for messages ("needs ...").

    ``why_not``: the usual reason why the test fails; messages append it to the description. ``strict``: giving the flag
    while the test fails is an error. If ``strict`` is False, the flag is only listed under "no effect here".
    """

    description: Words
    holds: Callable[[Any], object]
    why_not: str = ""
    strict: bool = False

    @property
    def words(self) -> str:
        """The description of the condition, as text."""
        return spoken(self.description)


@dataclass(frozen=True)
class Needs:
    """The conditions under which a flag has an effect. All conditions must hold."""

    conditions: tuple[Condition, ...]
    # the parts of a union (`|`), of which one must hold; empty if this is no union
    alternatives: tuple[Needs, ...] = ()

    def __and__(self, other: Needs) -> Needs:
        return Needs(tuple(dict.fromkeys(self.conditions + other.conditions)))

    def __or__(self, other: Needs) -> Needs:
        alternatives = (*(self.alternatives or (self,)), *(other.alternatives or (other,)))

        def words() -> str:
            texts = [" and ".join(each.words for each in needs.conditions) for needs in alternatives]
            if any(map(is_compound, texts)):
                return "one of these: " + "; ".join(f"({chr(97 + i)}) {text}" for i, text in enumerate(texts))
            return f"{', '.join(texts[:-1])} or {texts[-1]}"

        return Needs((Condition(words, lambda args: not (self.missing(args) and other.missing(args))),), alternatives)

    def strictly(self) -> Needs:
        """These conditions, but all strict: see `Condition`."""
        return Needs(tuple(condition._replace(strict=True) for condition in self.conditions))

    def missing(self, args: object, *, strict: bool = False) -> str | None:
        """The words of the first condition that ``args`` do not meet, or None. ``strict`` decides which conditions
        are tested: the strict ones, or all others."""
        for condition in self.conditions:
            if condition.strict == strict and not condition.holds(args):
                return condition.words + condition.why_not
        return None


def is_compound(text: str) -> bool:
    """Whether ``text`` lists several things. In a list of such texts, each text needs a number or a letter."""
    return any(word in text for word in (" and ", " or ", ", "))


def listed(parts: Iterable[str]) -> str:
    """``a, b and c``."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


# for a flag that always has an effect
ALWAYS = Needs(())
# the seeds that every random generator takes
SEEDS = range(2**31)


def flag(
    default: object,
    help: Words,  # the word argparse uses; nothing here needs the builtin
    needs: Needs | None = None,
    *,
    required: bool = False,
    choices: Collection[str | Collection[str]] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    except_for: float | None = None,
    infinite: bool = False,
    negative: str | None = None,
    metavar: str | None = None,
    repeat: bool = False,
    auto: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: value if no source sets the flag; lists and dicts are copied.
        help: a sentence or two, with units in brackets; or a function that returns this text, if the text lists the
            names in a registry.
        needs: the conditions under which the flag has an effect; `ALWAYS` if there are none. If the flag is given while
            a condition does not hold, the start of the run lists the flag under "no effect here".
        required: the flag must be given if the last condition of ``needs`` holds.
        choices: the allowed values. A `Registry` stands for all its names, also among other values:
            ``("auto", REGISTRY)``. A ``Literal`` annotation sets the allowed values too.
        at_least: lower bound of a number; None means that there is none.
        at_most: upper bound of a number; None means that there is none.
        above: lower bound; the bound itself is not allowed.
        below: upper bound; the bound itself is not allowed.
        except_for: a number outside these bounds with a special meaning, such as -1 for "all".
        infinite: the number may be ``inf``, which means "no bound".
        negative: name of the switch that turns off a field whose default is True (``--disable-...``).
        metavar: what the value is called in ``--help``.
        repeat: the flag may be given several times, and each time adds to a list. If False, the last value wins.
        auto: text for ``--help`` about the value that the flag gets if none is given.
        aliases: other spellings of the option, such as slime's ``--tis-level`` for ``--mis-level``.
    """
    return _field(**locals())


def plugin(help: str, needs: Needs | None = None, **options: Any) -> Any:
    """A `flag` whose value is the path of a user's function or class."""
    return flag(None, f"this plugin {help}", needs, metavar="PLUGIN", **options)


def resolved(default: object) -> Any:
    """A field without a flag. `derive` sets it."""
    return _field(default)


def _field(default: object, **metadata: object) -> object:
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """One flag: the name and type of its dataclass field, and the settings of the field's `flag(...)`."""

    name: str
    kind: type  # of one value: bool, int, float, str or dict
    many: bool
    optional: bool
    default: object
    text: Words
    known: Collection[str | Collection[str]]
    needs: Needs | None
    required: bool
    at_least: float | None
    at_most: float | None
    above: float | None
    below: float | None
    except_for: float | None
    infinite: bool
    negative: str | None
    metavar: str | None
    repeat: bool
    auto: str | None
    aliases: tuple[str, ...]

    @property
    def help(self) -> str:
        """The help text."""
        return spoken(self.text)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, including the names registered so far. An empty tuple means that any value is allowed."""
        names: list[str] = []
        for part in self.known:
            names += [part] if isinstance(part, str) else part
        return tuple(names)

    @property
    def open(self) -> bool:
        """Whether a file of ``--import-file`` can add a choice."""
        return any(isinstance(part, Registry) and not part.closed for part in (self.known, *self.known))

    @property
    def option(self) -> str:
        """``--name``."""
        return "--" + self.name.replace("_", "-")

    @property
    def off_option(self) -> str | None:
        """The switch that sets a bool to False."""
        if self.kind is not bool:
            return None
        return self.negative or "--no-" + self.name.replace("_", "-")

    @property
    def bounds(self) -> str:
        """The bounds of a number in words: "at least 1", "between 0 and 1"; "" if every number is allowed."""
        if self.at_least is not None and self.at_most is not None:
            words = f"between {self.at_least} and {self.at_most}"
        else:
            ends = ("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below)
            words = " and ".join(f"{word} {end}" for word, end in ends if end is not None)
        return words if self.except_for is None else f"{self.except_for} or {words}"

    def wrong_number(self, value: Any) -> str | None:
        """The complaint about a number out of bounds, such as ``must be at least 1``; None if ``value`` is within
        bounds."""
        wrong = None
        for number in value if isinstance(value, list) else [value]:
            if type(number) not in (int, float) or number == self.except_for:
                continue
            if math.isinf(number) and not self.infinite:
                return "must be finite"
            fits = (
                (self.at_least is None or number >= self.at_least)
                and (self.at_most is None or number <= self.at_most)
                and (self.above is None or number > self.above)
                and (self.below is None or number < self.below)
            )
            wrong = wrong if fits else f"must be {self.bounds}"
        return wrong


@cache
def group_flags(group: type) -> tuple[Flag, ...]:
    """The flags that ``group`` itself declares, in order. Inherited flags are not included."""
    hints = typing.get_type_hints(group)
    own = vars(group).get("__annotations__", {})
    flags = []
    for f in dataclasses.fields(group):
        if f.name in own and "help" in f.metadata:
            flags.append(_read_field(f, hints[f.name]))
    return tuple(flags)


def groups_of(args_type: type) -> list[type]:
    """The groups that ``args_type`` is composed of. Base classes come first, and each group is listed once."""
    return [c for c in reversed(args_type.__mro__) if dataclasses.is_dataclass(c) and group_flags(c)]


def all_flags(args_type: type) -> dict[str, Flag]:
    """Field name -> flag, for every group of ``args_type``."""
    return {f.name: f for group in groups_of(args_type) for f in group_flags(group)}


def group_title(group: type) -> tuple[str, str]:
    """(title, description) of a group: the first line of its docstring, and the rest."""
    title, _, rest = (group.__doc__ or group.__name__).strip().partition("\n")
    return title.rstrip("."), " ".join(rest.split())


def _read_field(f: dataclasses.Field[object], hint: object) -> Flag:
    """The flag of a dataclass field with type ``hint``."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    optional = type(None) in members
    kinds = [m for m in members if m is not type(None)]
    assert len(kinds) == 1, f"{f.name}: a flag has one type (and None), not {hint}"
    options = dict(f.metadata)
    kind, many, known = kinds[0], False, options.pop("choices")
    if typing.get_origin(kind) is list:
        many, kind = True, typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        kind, known = str, typing.get_args(kind)
    kind = typing.get_origin(kind) or kind
    assert kind in (bool, int, float, str, dict), f"{f.name}: no flag can be read as {hint}"
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return Flag(f.name, kind, many, optional, default, options.pop("help"), known, **options)


T = TypeVar("T")
# types of settings and flags, if they differ from the types of the sampling parameters
LISTS = {"tuple[str, ...]": "list[str]", "tuple[int, ...]": "list[int]"}


def sampling_setting(name: str, needs: Needs = ALWAYS, *, optional: bool = False, **options: Any) -> Any:
    """The `flag` of a sampling parameter. An ``optional`` flag is None unless it is given."""
    (known,) = (f for f in fields(SamplingParams) if f.name == name)
    default = None if optional or known.default is MISSING else known.default
    default = list(default) if isinstance(default, tuple) else default
    bounds = {} if optional else known.metadata["bounds"]
    return flag(default, options.pop("help", known.metadata["help"]), needs, **bounds, **options)


def with_sampling(place: Literal["rollout", "eval", "dataset"], needs: Needs = ALWAYS) -> Callable[[type[T]], type[T]]:
    """A class decorator. Write it below `dataclass`. It adds fields for the sampling parameters of ``place`` to the
    class, after the field of the temperature.

    Parameters that the class declares itself stay unchanged. ``--eval-*`` flags are None unless they are given, and
    have no bounds here: `EvalDataset` checks its own values.
    """
    prefix = f"{place}_" if place in PREFIXED else ""

    def decorated(group: type[T]) -> type[T]:
        own: dict[str, Any] = {}
        for f in fields(SamplingParams):
            (name,) = names_at(place).get(f.name, ("",))
            if not name or prefix + name in group.__annotations__:
                continue
            options: dict[str, Any] = {}
            if place == "eval" and f.name in names_at("rollout"):
                options["auto"] = f"--rollout-{name.replace('_', '-')}"
            setattr(group, prefix + name, sampling_setting(f.name, needs, optional=place == "eval", **options))
            kind = LISTS.get(str(f.type), str(f.type))
            own[prefix + name] = f"{kind} | None" if place == "eval" else kind
        known: dict[str, Any] = {}
        for name, kind in group.__annotations__.items():
            known |= {name: kind, **(own if name == f"{prefix}temperature" else {})}
        group.__annotations__ = known
        return group

    return decorated


def sampling_values(args: object) -> dict[str, Any]:
    """The sampling settings of every dataset: from ``--eval-*``, else from ``--rollout-*``, else the defaults."""
    rollout, values = SamplingParams.of(args, "rollout"), {}
    for parameter, (name, *_) in names_at("dataset").items():
        own = getattr(args, f"eval_{name}") if parameter in names_at("eval") else None
        value = getattr(rollout, parameter) if own is None else own
        values[name] = list(value) if isinstance(value, tuple) else value
    return values
