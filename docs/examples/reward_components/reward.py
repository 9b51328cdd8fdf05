"""Reward the right number and a visible sum, in few words."""

import re


def reward(args, sample):
    """The run trains on ``score``; ``right``, ``shown`` and ``tokens`` are for inspection."""
    numbers = re.findall(r"-?\d+", sample.response)
    right = float(bool(numbers) and numbers[-1] == sample.label)
    shown = float("=" in sample.response)
    return {
        "score": right + 0.1 * shown - 0.005 * sample.response_length,
        "right": right,
        "shown": shown,
        "tokens": sample.response_length,
    }
