"""The reward rules by name."""

from __future__ import annotations

from slimelite.rewards import dapo, deepscaler, f1, gpqa, gsm8k, math, multiple_choice, random, zero
from slimelite.rewards.rule import Rule

REMOTE = "remote_rm"
BOXED = "boxed_"

RULES: dict[str, Rule] = {
    module.RULE.name: module.RULE for module in (math, gsm8k, deepscaler, dapo, f1, gpqa, multiple_choice, random, zero)
}

REFUSED = {
    "ifbench": "slime clones a repository and installs packages for it; write it as --custom-rm-path",
    "opencua_click": "it scores clicks on screenshots, and images are not supported",
}


def find_rule(rm_type: str) -> Rule | None:
    """The rule called ``rm_type``, with or without ``boxed_``; None for ``remote_rm``, which is a server.

    Raises:
        ValueError: no such rule, one that is not offered here, or one that ``boxed_`` would leave without its marker.
    """
    name = rm_type.removeprefix(BOXED)
    if name in REFUSED:
        raise ValueError(f"--rm-type {rm_type} is not offered: {REFUSED[name]}")
    if name == REMOTE:
        return None
    if name not in RULES:
        raise ValueError(
            f"no --rm-type {rm_type!r}; there are {', '.join([*RULES, REMOTE])}, or write --custom-rm-path"
        )
    rule = RULES[name]
    if rm_type != name and not rule.boxable:
        fitting = ", ".join(BOXED + r.name for r in RULES.values() if r.boxable)
        raise ValueError(
            f"--rm-type {rm_type} would be wrong for every response: {name} looks for its own marker, which {BOXED} "
            f"cuts away; use {name} (with {BOXED}: {fitting}, {BOXED}{REMOTE})"
        )
    return rule
