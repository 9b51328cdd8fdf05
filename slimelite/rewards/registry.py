"""The reward rules by name."""

from __future__ import annotations

from slimelite.rewards import (
    code,
    dapo,
    deepscaler,
    f1,
    format,
    gpqa,
    gsm8k,
    ifbench,
    math,
    multiple_choice,
    random,
    zero,
)
from slimelite.rewards.rule import Rule

REMOTE = "remote_rm"
REWARD_MODEL = "reward_model"
BOXED = "boxed_"

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(math.RULE, gsm8k.RULE, deepscaler.RULE, dapo.RULE, f1.RULE, gpqa.RULE, multiple_choice.RULE),
        *(code.RULE, ifbench.RULE, ifbench.LOOSE_RULE, format.RULE, random.RULE, zero.RULE),
    )
}

REFUSED = {
    "opencua_click": "it scores clicks on screenshots, and images are not supported",
}


def find_rule(rm_type: str) -> Rule | None:
    """The rule called ``rm_type``, with or without ``boxed_``; None for ``remote_rm`` and ``reward_model``, processes.

    Raises:
        ValueError: no such rule, one that is not offered here, or one that ``boxed_`` would leave without its marker.
    """
    name = rm_type.removeprefix(BOXED)
    if name in REFUSED:
        raise ValueError(f"--rm-type {rm_type} is not offered: {REFUSED[name]}")
    if name == REMOTE or rm_type == REWARD_MODEL:
        return None
    if name not in RULES:
        raise ValueError(
            f"no --rm-type {rm_type!r}; there are {', '.join([*RULES, REMOTE, REWARD_MODEL])}, or write "
            "--custom-rm-path"
        )
    rule = RULES[name]
    if rm_type != name and not rule.boxable:
        fitting = ", ".join(BOXED + r.name for r in RULES.values() if r.boxable)
        raise ValueError(
            f"--rm-type {rm_type} would be wrong for every response: {name} looks for its own marker, which {BOXED} "
            f"cuts away; use {name} (with {BOXED}: {fitting}, {BOXED}{REMOTE})"
        )
    return rule
