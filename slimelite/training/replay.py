"""Log-probs over the kept ids: the token ids that top-p, top-k and min-p did not exclude (`sample.Kept`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KeptIds:
    """The kept ids of R response tokens. Only the ids of one chunk of tokens at a time are padded to equal length.

    Args:
        ids: [sum of counts] int32, the kept ids of the first token, then of the second, and so on.
        counts: [R], the number of kept ids of each token; 0: its log-prob is over the whole vocabulary.
    """

    def __init__(self, ids: np.ndarray, counts: np.ndarray, device: torch.device | str) -> None:
        self._counts = counts
        self._ids = torch.from_numpy(ids.astype(np.int64)).to(device)
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._starts, self._sizes = (torch.from_numpy(a).to(device) for a in (ends[:-1], np.diff(ends)))

    def chunk(self, rows: slice) -> KeptChunk | None:
        """The kept ids of the tokens ``rows``; None if these tokens have no kept ids."""
        longest = int(self._counts[rows].max(initial=0))
        if not longest:
            return None
        position = torch.arange(longest, device=self._ids.device)
        there = position < self._sizes[rows, None]
        places = (self._starts[rows, None] + position).clamp(max=len(self._ids) - 1)
        return KeptChunk(self._ids[places], there)


class KeptChunk:
    """``ids``: [rows, longest] the kept ids, padded. ``there``: [rows, longest] bool, False for padding."""

    def __init__(self, ids: Tensor, there: Tensor) -> None:
        self.ids, self.there = ids, there
        self.some = there[:, 0]  # [rows] bool: tokens that have kept ids

    def replace(self, log_probs: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Replace ``log_probs`` [rows] of ``targets`` by log-probs over the kept ids. ``logits``: [rows, V]."""
        over = logits.gather(1, targets[:, None])[:, 0] - self._kept(logits).logsumexp(-1)
        torch.where(self.some, over, log_probs, out=log_probs)

    def gradient(self, logits: Tensor, grad: Tensor) -> Tensor:
        """[rows, longest] the gradient of the kept ids' logits, without the term [j = y] of the target.

        ``grad``: [rows], the gradient of the log-probs. d log p_y / d logit_j = [j = y] - p_j, with p over the kept
        ids.
        """
        shares = self._kept(logits).softmax(-1).where(self.there, 0.0)
        return shares * -grad[:, None]

    def _kept(self, logits: Tensor) -> Tensor:
        return logits.gather(1, self.ids).masked_fill(~self.there, -torch.inf)
