"""The sampling parameters of a request's body, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from slimelite.base.http_body import Body, FirstError, Ids, Text, with_fields
from slimelite.engines.params import Place, SamplingParams, names_at

TEXTS = Text | FirstError[list[Text]]
# type of a parameter -> of its field in a body
TYPES: dict[str, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "bool": bool,
    "tuple[str, ...]": TEXTS,
    "tuple[int, ...]": Ids,
}
BOUNDS = {"at_least": "ge", "at_most": "le", "above": "gt"}


class SampledBody(Body):
    """A body with sampling parameters: see `sampled`."""

    dialects: ClassVar[tuple[Place, ...]] = ()

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """``defaults`` with the parameters that were sent."""
        values: dict[str, Any] = {}
        for dialect in self.dialects:
            for field, names in names_at(dialect).items():
                for name in names:
                    if (value := getattr(self, name)) is not None:
                        value = [value] if field == "stop" and isinstance(value, str) else value
                        values[field] = tuple(value) if isinstance(value, list) else value
        return replace(defaults, **values)


S = TypeVar("S", bound=SampledBody)


def sampled(*dialects: Place) -> Callable[[type[S]], type[S]]:
    """A decorator: the body has the sampling parameters of these dialects, under the names that they have there."""
    added: dict[str, tuple[Any, Any]] = {}
    for dialect in dialects:
        for f in fields(SamplingParams):
            bounds = f.metadata["bounds"] if "except_for" not in f.metadata["bounds"] else {}
            for name in names_at(dialect).get(f.name, ()):
                limits = {BOUNDS[bound]: value for bound, value in bounds.items()}
                added[name] = TYPES[str(f.type)], Field(None, description=f.metadata["help"] or None, **limits)

    def decorated(body: type[S]) -> type[S]:
        made = with_fields(added)(body)
        made.dialects = dialects
        return made

    return decorated
