"""Flags and settings that are made from the sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar

from slimelite.arguments.flags import ALWAYS, Needs, flag
from slimelite.engines.params import PREFIXED, SamplingParams, names_at

T = TypeVar("T")
# types of settings and flags, where those of the parameters are others
LISTS = {"tuple[str, ...]": "list[str]", "tuple[int, ...]": "list[int]"}


def sampling_setting(name: str, needs: Needs = ALWAYS, *, optional: bool = False, **options: Any) -> Any:
    """The `flag` of a sampling parameter; one that is ``optional`` is None until it is given."""
    (known,) = (f for f in fields(SamplingParams) if f.name == name)
    default = None if optional or known.default is MISSING else known.default
    default = list(default) if isinstance(default, tuple) else default
    bounds = {} if optional else known.metadata["bounds"]
    return flag(default, options.pop("help", known.metadata["help"]), needs, **bounds, **options)


def with_sampling(place: Literal["rollout", "eval", "dataset"], needs: Needs = ALWAYS) -> Callable[[type[T]], type[T]]:
    """A decorator below `dataclass`: the class gets the sampling parameters of ``place``, after its temperature.

    Those that the class has by name stay as they are. ``--eval-*`` flags are None until they are given: their bounds
    are those of the datasets.
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
            if place == "rollout" and f.metadata["truncates"]:
                options["help"] = f"{f.metadata['help']}; {f.metadata['truncates']} needs --allow-truncated-sampling"
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
    """The sampling settings of every dataset: those of ``--eval-*``, else of ``--rollout-*``, else the defaults."""
    rollout, values = SamplingParams.of(args, "rollout"), {}
    for field, (name, *_) in names_at("dataset").items():
        own = getattr(args, f"eval_{name}") if field in names_at("eval") else None
        value = getattr(rollout, field) if own is None else own
        values[name] = list(value) if isinstance(value, tuple) else value
    return values
