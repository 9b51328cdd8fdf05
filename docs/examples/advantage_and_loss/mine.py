"""Later tokens get more of the advantage, and bad responses half of it."""

import torch


def advantages(args, table, columns):
    """Token t of a response of T tokens gets 2 (t + 1) / (T + 1) of its group's advantage. The mean factor is 1."""
    rows = columns.segments
    starts = torch.from_numpy(table.response_offsets[:-1])[rows]
    lengths = torch.from_numpy(table.response_lengths)[rows]
    position = torch.arange(len(rows)) - starts
    share = 2 * (position + 1) / (lengths + 1)
    columns.advantages = torch.from_numpy(table.advantage)[rows].float() * share


def loss(args, batch, log_probs, entropy):
    """REINFORCE. A metric is a sum and the weight that divides it, so packing does not change the metric."""
    weights = torch.where(batch.advantages > 0, batch.advantages, 0.5 * batch.advantages)
    bad = (batch.advantages < 0) & batch.mask
    return -weights * log_probs, {"bad_tokens": (bad.sum(), batch.mask.sum())}
