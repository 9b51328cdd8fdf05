"""Preference pairs: where a row keeps its replies, and the loss that compares them; formulas in docs/algorithms.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag


@dataclass(frozen=True)
class PreferenceArgs:
    """Preference pairs.

    What --loss-type dpo_loss reads: the prompt is in --input-key, and batch sizes count pairs.
    """

    chosen_key: str = flag("chosen", "column of the preferred reply: text, messages, or the whole conversation")
    rejected_key: str = flag("rejected", "column of the other reply")
    dpo_loss: Literal["sigmoid", "ipo"] = flag("sigmoid", "loss of a pair; ipo averages over a reply's tokens")
    dpo_beta: float = flag(0.1, "strength of the pull to the reference model")
    dpo_label_smoothing: float = flag(0.0, "share of pairs whose preference is assumed to be the wrong way round")
