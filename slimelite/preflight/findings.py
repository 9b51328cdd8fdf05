"""The findings of the checks, and the report of ``--dry-run``: the arguments with their reasons, then the findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slimelite.arguments import Args
from slimelite.arguments.flags import Flag, group_flags, group_title, groups_of
from slimelite.arguments.secret import masked


@dataclass
class Findings:
    """The findings. ``problems`` stop the run. ``warnings`` and ``notes`` are shown, and in a dry run ``facts`` too.

    ``complete``: whether all checks ran. ``longest_prompt``: the longest prompt of training [tokens]. 0: it is unknown,
    or several replies may follow one prompt, as with agents.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    complete: bool = False
    longest_prompt: int = 0

    @contextmanager
    def blaming(self, where: str) -> Iterator[None]:
        """Turn an OSError or ValueError of the block into a problem of ``where``. The error's message may or may not
        begin with ``where``."""
        try:
            yield
        except (OSError, ValueError) as error:
            problem = f"{where}: {one_line(error).removeprefix(f'{where}: ')}"
            self.problems += [problem] if problem not in self.problems else []


def one_line(error: BaseException) -> str:
    """An error's message, as one line. The line begins with the name of the error's class, unless the error is a
    ValueError or OSError."""
    text = " ".join(str(error).partition("Traceback (most")[0].split()) or type(error).__name__
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def fill(option: str, template: str, rollout_id: int | str) -> Path:
    """The path for one rollout. ``template``: the value of ``option``.

    Raises:
        ValueError: ``template`` has a field other than ``{rollout_id}``.
    """
    try:
        return Path(template.format(rollout_id=rollout_id))
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{option} {template}: only {{rollout_id}} can be filled in, here with {rollout_id!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def format_report(args: Args, findings: Findings, plan: list[str]) -> str:
    """The text of the report: given values by group, derived values with reasons, notes, checks, warnings, ``plan`` and
    problems."""
    lines = ["given"]
    lines += [f"  {title}: {', '.join(words)}" for title, words in _set_flags(args)]
    lines += ["derived"]
    width = max((len(d.name) for d in args.derivations), default=0)
    lines += [f"  {d.name:<{width}}  {_plain(masked(d.name, d.value))}  ({d.reason})" for d in args.derivations]
    lines += _section("notes", args.notes)
    reasons = dict.fromkeys(why for _, why in args.no_effect)
    idle = {reason: ", ".join(option for option, why in args.no_effect if why == reason) for reason in reasons}
    lines += _section("no effect here", [f"{options}: {reason}" for reason, options in idle.items()])
    lines += _section("checked", findings.notes + findings.facts)
    lines += _section("warnings", findings.warnings)
    lines += plan
    lines += _section("problems", findings.problems)
    verdict = f"{len(findings.problems)} problem(s) found" if findings.problems else "ready to start"
    return "\n".join([*lines, verdict])


def _set_flags(args: Args) -> Iterator[tuple[str, list[str]]]:
    """The title of each group of flags, with the values of flags that are neither default nor derived."""
    derived = {d.name for d in args.derivations}
    for group in groups_of(type(args)):
        flags = [f for f in group_flags(group) if f.name not in derived and getattr(args, f.name) != f.default]
        if flags:
            yield group_title(group)[0], [_assignment(f, getattr(args, f.name)) for f in flags]
    if args.sglang_overrides:
        yield (
            "SGLang, passed on",
            [f"{name} {_plain(value)}" for name, value in masked("", args.sglang_overrides).items()],
        )


def _assignment(flag: Flag, value: object) -> str:
    if flag.kind is bool:
        return flag.name if value else f"no {flag.name}"
    return f"{flag.name} {_plain(masked(flag.name, value))}"


def _section(title: str, entries: Sequence[str]) -> list[str]:
    return [title, *(f"  {entry}" for entry in entries)] if entries else []


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
