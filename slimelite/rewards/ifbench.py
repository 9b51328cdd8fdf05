"""``ifbench`` and ``ifbench_loose``: the response follows every verifiable instruction of its row.

The row's metadata (or its label, as JSON) brings ``instruction_id_list`` and ``kwargs``, one dict for each, as the data
sets IFEval and IFBench have them. The checks are IFEval's 25 (`ifeval`) and IFBench's own 58 (`ifbench_checks`);
any other instruction is a reward error. The loose rule also tries the response without its asterisks, without its first
line, without its last line, and without several of these: one that follows the instruction is enough.
"""

from __future__ import annotations

import json
from typing import Any

from slimelite.rewards.ifbench_checks import IFBENCH_CHECKS
from slimelite.rewards.ifeval import CHECKS, Check
from slimelite.rewards.rule import Answer, Rule

INSTRUCTIONS: dict[str, Check] = {**CHECKS, **IFBENCH_CHECKS}


def strict(answer: Answer) -> float:
    """1 if the response follows all instructions, else 0.

    Raises:
        ValueError: there are no instructions, or unknown ones.
    """
    return float(all(followed(answer, [answer.response])))


def loose(answer: Answer) -> float:
    """As `strict`, for the most favourable of eight readings of the response."""
    return float(all(followed(answer, readings(answer.response))))


def readings(response: str) -> list[str]:
    """The response whole, without its first line, its last line, both; and each of these without stars."""
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for whole in (response, *cut) for text in (whole, whole.replace("*", ""))]


def followed(answer: Answer, texts: list[str]) -> list[bool]:
    """For each instruction of the row, whether one of ``texts`` follows it; an empty text follows none."""
    return [
        any(follows(instruction, text, arguments) for text in texts if text.strip())
        for instruction, arguments in instructions(answer)
    ]


def instructions(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """(id, arguments) of each instruction of the row.

    Raises:
        ValueError: there are none, they do not fit each other, or one is unknown.
    """
    row = answer.metadata
    if "instruction_id_list" not in row:
        try:
            row = json.loads(answer.label)
        except ValueError:
            row = {}
    ids = list(row.get("instruction_id_list") or []) if isinstance(row, dict) else []
    arguments = [dict(given or {}) for given in (row.get("kwargs") or [{}] * len(ids))] if ids else []
    if not ids or len(ids) != len(arguments):
        raise ValueError(
            "ifbench needs instruction_id_list and kwargs, one dict for each, in metadata (--metadata-key) or in the "
            f"label as JSON; there are {len(ids)} instructions and {len(arguments)} kwargs"
        )
    if unknown := [name for name in ids if name not in INSTRUCTIONS]:
        raise ValueError(f"no check for {', '.join(unknown)}; there are {', '.join(INSTRUCTIONS)}")
    return list(zip(ids, arguments, strict=True))


def follows(instruction: str, text: str, arguments: dict[str, Any]) -> bool:
    """Does ``text`` follow the instruction? ``arguments``: those that are None are left out.

    Raises:
        ValueError: the instruction has other arguments.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(INSTRUCTIONS[instruction](text, **given))
    except TypeError as error:
        raise ValueError(f"{instruction}: arguments {given} do not fit ({error})") from error


RULE = Rule("ifbench", strict, needs_label=False)
LOOSE_RULE = Rule("ifbench_loose", loose, needs_label=False)
