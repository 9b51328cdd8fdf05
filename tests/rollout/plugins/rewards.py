"""Rewards that need no model to be interesting."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np

from slimelite.samples.sample import Sample


async def parity(args: Any, sample: Any) -> Any:
    """1 where the sum of the response's tokens is odd; the siblings of a fan-out come together."""
    if isinstance(sample, list):
        return [await parity(args, one) for one in sample]
    return float(sum(sample.tokens[sample.prompt_length :]) % 2)


async def constant(args: Any, sample: Sample) -> float:
    return 0.5


async def fails_on_odd_index(args: Any, sample: Sample) -> float:
    if sample.index is not None and sample.index % 2:
        raise RuntimeError("odd")
    return float(sample.index or 0)


async def of_one(args: Any, samples: list[Sample]) -> list[float]:
    """Forgets all samples but one."""
    return [1.0]


async def two_parts(args: Any, sample: Sample) -> dict[str, Any]:
    return {"score": float(sample.response_length), "kind": "even" if sample.response_length % 2 == 0 else "odd"}


async def correctness_and_brevity(args: Any, sample: Sample) -> dict[str, Any]:
    """Numbers of several kinds; only the even samples are polite."""
    odd = sample.index is not None and sample.index % 2
    return {
        "total": float(sample.response_length),
        "correct": not odd,
        "brevity": np.float32(0.25),
        **({} if odd else {"polite": 2}),
        "comment": "fine",
    }


async def numpy_and_dates(args: Any, sample: Sample) -> dict[str, Any]:
    """Scores 0.5 and leaves what JSON does not know."""
    sample.metadata |= {
        "array": np.arange(4).reshape(2, 2),
        "date": datetime.datetime(2026, 1, 2),
        "bytes": b"x",
        "nested": {3: (np.bool_(True), "text")},
    }
    return {"score": np.float32(0.5)}


async def label_in_response(args: Any, sample: Any, **kwargs: Any) -> Any:
    """1 if the label is in the response; a whole group at once under --group-rm."""
    if isinstance(sample, list):
        return [await label_in_response(args, one) for one in sample]
    return float(str(sample.label) in sample.response)
