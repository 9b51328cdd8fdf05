"""What counts as text."""

from __future__ import annotations


def is_text(value: object) -> bool:
    """Whether ``value`` is text that UTF-8 can encode; JSON may hold half a surrogate pair, which it cannot."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False
