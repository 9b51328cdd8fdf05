"""Registries: tables of records by name, such as one record for each advantage estimator.

::

    from slimelite.algorithms.estimators import ESTIMATORS, Estimator

    ESTIMATORS.add(Estimator("mine", ...))

in a file that ``--import-file`` names adds one. Choices, dispatch, checks, help and docs read the records, so that no
second list of names exists. Records need the standard library alone: a function that imports torch is given as
``"package.module:function"`` and looked up when it is first called (`function`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Generic, Protocol, TypeVar

# a function, or "package.module:function"
Function = Callable[..., Any] | str


class Record(Protocol):
    """What a registry holds: a frozen dataclass with a ``name``."""

    @property
    def name(self) -> str:
        """The value of the option that selects the record."""
        ...


R = TypeVar("R", bound=Record)


class Registry(dict[str, R], Generic[R]):
    """Records by name, in the order in which they were added."""

    def __init__(
        self, what: str, option: str, records: Iterable[R] = (), instead: str = "", closed: bool = False
    ) -> None:
        """``what``: name of an entry in messages, as "advantage estimator"; ``option``: the flag that takes the name;
        ``records``: the `initial` ones; ``closed``: there are no others;
        ``instead``: what a name that nothing resembles may have been meant to be.
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
            ValueError: another record has its name, or the registry is closed.
        """
        if self.closed:
            raise ValueError(f"{self.option} does not accept a new {self.what}; the known ones are {', '.join(self)}")
        if record.name in self:
            raise ValueError(f"another {self.what} is already called {record.name!r}; choose another name for yours")
        self[record.name] = record
        return record

    def __missing__(self, name: str) -> R:
        """Refuse a name that no record has.

        Raises:
            ValueError: always; the message has the nearest name.
        """
        near = get_close_matches(name, self, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(self)}{self.instead}"
        raise ValueError(f"{self.option} {name}: there is no such {self.what}; {hint}")


def function(reference: Function, option: str = "", name: str = "") -> Callable[..., Any]:
    """The function that a record names: ``reference`` itself, or what ``"package.module:function"`` says.

    An error that a user's function raises becomes a `plugins.PluginError` with ``option``, ``name`` and its line, if
    these are given.

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
                raise  # something that the module imports is missing
            target = None
        if target is None:
            raise ValueError(f"{reference!r} of a record is not a function; write package.module:function")
    else:
        target = reference
    ours = str(getattr(target, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
    if ours or not option:
        return target
    from slimelite.base.guard import guarded  # parsing the command line does without it

    return guarded(target, name, option)
