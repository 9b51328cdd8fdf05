"""Registries: tables of records by name, such as one record for each advantage estimator.

::

    from slimelite.algorithms.estimators import ESTIMATORS, Estimator

    ESTIMATORS.add(Estimator("mine", ...))

in a file of ``--import-file`` adds a record. Choices, dispatch, checks, help and docs all read the records, so there is
no second list of names. Records need only the standard library. If a function imports torch, its record names the
function as ``"package.module:function"``. Such a function is imported when it is first called (see `function`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Generic, Protocol, TypeVar

# a function, or "package.module:function"
Function = Callable[..., Any] | str


class Record(Protocol):
    """An entry of a registry: a frozen dataclass with a ``name``."""

    @property
    def name(self) -> str:
        """The value of the option that selects the record."""
        ...


R = TypeVar("R", bound=Record)


class Registry(dict[str, R], Generic[R]):
    """Records by name, in the order of registration."""

    def __init__(
        self, what: str, option: str, records: Iterable[R] = (), instead: str = "", closed: bool = False
    ) -> None:
        """``what``: the name of an entry in messages, such as "advantage estimator". ``option``: the flag whose value
        selects an entry. ``records``: the `initial` records. ``closed``: no other records may be added. ``instead``: a
        hint for a name that is not similar to any known name.
        """
        super().__init__()
        self.what = what
        self.option = option
        self.instead = instead
        self.closed = False
        for record in records:
            self.add(record)
        self.initial, self.closed = frozenset(self), closed

    def add(self, record: R) -> R:
        """Register ``record``.

        Raises:
            ValueError: the name is taken, or the registry is closed.
        """
        if self.closed:
            raise ValueError(f"{self.option} does not accept a new {self.what}; choose a known one: {', '.join(self)}")
        if record.name in self:
            raise ValueError(f"another {self.what} is already called {record.name!r}; choose another name for yours")
        self[record.name] = record
        return record

    def __missing__(self, name: str) -> R:
        """Refuse a name that no record has.

        Raises:
            ValueError: always. The message has the nearest name.
        """
        near = get_close_matches(name, self, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the known names are {', '.join(self)}{self.instead}"
        raise ValueError(f"{self.option} {name}: there is no such {self.what}; {hint}")


def function(reference: Function, option: str = "", name: str = "") -> Callable[..., Any]:
    """The function that a record names: ``reference`` itself, or the function at ``"package.module:function"``.

    If ``option`` and ``name`` are given, an error of a user's function becomes a `plugins.PluginError`. The message of
    this error names the option, the record and the line of the error.

    Raises:
        ValueError: there is no such module or function.
    """
    target: Callable[..., Any] | None
    if isinstance(reference, str):
        module, _, attribute = reference.partition(":")
        try:
            target = getattr(importlib.import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or ":"):
                raise  # the module exists, but one of its imports is missing
            target = None
        if target is None:
            raise ValueError(f"{reference!r} of a record is not a function; write package.module:function")
    else:
        target = reference
    ours = str(getattr(target, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
    if ours or not option:
        return target
    from slimelite.base.guard import guarded  # not needed to parse the command line

    return guarded(target, name, option)
