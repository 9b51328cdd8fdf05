"""Decides which arguments are secret. Code that shows, saves or logs arguments calls these functions, and writes
``***`` instead of a secret."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
# flags whose value is a secret, and flags whose value is a JSON object that may contain secrets
WHOLE, HOLDERS = ("wandb_key",), ("train_env_vars",)
# the names of secret entries in a dict (environment variables, SGLang's options, a user's own settings): HF_TOKEN,
# api_key, AWS_SECRET_ACCESS_KEY, PGPASSWORD, but not MAX_TOKENS, TOKENIZERS_PARALLELISM or a column's name
_TELLING = re.compile(
    r"secret|password|passwd|passphrase|credential|webhook|(^|_)(key|apikey|token|auth|pat|pwd|dsn)(_id|_\d+)?$",
    re.IGNORECASE,
)
_COLUMN = re.compile(r"(^|_)(input|label|tool|metadata|reward|chosen|rejected)_key$")
_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def masked(name: str, value: object) -> Any:
    """``value`` of the argument ``name`` in a form that may be shown. In an address only user and password are
    hidden."""
    if name in WHOLE and value is not None:
        return HIDDEN
    if isinstance(value, dict):
        return {
            key: HIDDEN if _is_telling(str(key)) and item is not None else masked(str(key), item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(masked(name, item) for item in value)
    return _IN_URL.sub(HIDDEN, value) if isinstance(value, str) else value


def public_part(variables: dict[str, object]) -> tuple[dict[str, str], dict[str, str]]:
    """(environment variables that may be shown, secret ones), with values as text."""
    shown = masked("", variables)
    public = {name: str(value) for name, value in variables.items() if shown[name] == value}
    return public, {name: str(value) for name, value in variables.items() if name not in public}


def is_masked(value: object) -> bool:
    """Whether ``value`` contains the ``***`` of `masked`, and so is not the real value."""
    if isinstance(value, dict | list | tuple):
        return any(map(is_masked, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and (value == HIDDEN or f"://{HIDDEN}@" in value)


def masked_words(argv: Sequence[str]) -> list[str]:
    """A command line in a form that may be shown."""
    shown, hiding = [], False
    for word in argv:
        option, equals, _ = word.partition("=")
        if option.startswith("--"):
            hiding = may_hold_secrets(option)
            shown.append(f"{option}={HIDDEN}" if hiding and equals else word)
        else:
            shown.append(HIDDEN if hiding else word)
    return [_IN_URL.sub(HIDDEN, word) for word in shown]


def without(words: Sequence[str], message: str) -> str:
    """``message`` with ``***`` instead of each of ``words``."""
    for word in sorted(filter(None, words), key=len, reverse=True):
        message = message.replace(repr(word), HIDDEN).replace(word, HIDDEN)
    return message


def may_hold_secrets(option: str) -> bool:
    """Whether the value of ``--option`` may be a secret. No message may repeat a secret."""
    name = option.removeprefix("--").replace("-", "_")
    return name in (*WHOLE, *HOLDERS) or (name.startswith(("sglang_", "router_")) and _is_telling(name))


def _is_telling(name: str) -> bool:
    name = name.replace("-", "_")
    return bool(_TELLING.search(name)) and not _COLUMN.search(name)
