"""What is added to the rewards of a training batch, whatever scored it: for format and against overlong responses."""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), 0 to −``factor``; lengths in tokens.

    0 up to ``max_length − buffer``, then a line that falls to −factor at ``max_length``, and −factor beyond.
    """
    over = length - (max_length - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)
