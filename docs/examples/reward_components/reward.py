"""The right number, a visible sum, and no words for nothing."""

import re


def reward(args, sample):
    """``score`` trains; ``right``, ``shown`` and ``tokens`` are there to be looked at."""
    numbers = re.findall(r"-?\d+", sample.response)
    right = float(bool(numbers) and numbers[-1] == sample.label)
    shown = float("=" in sample.response)
    return {
        "score": right + 0.1 * shown - 0.005 * sample.response_length,
        "right": right,
        "shown": shown,
        "tokens": sample.response_length,
    }
