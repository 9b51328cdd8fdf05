"""What the trainer says of each response token of a rollout, its log-prob and entropy: a file of the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.files import whole


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Log-probs and entropies of a rollout of n samples under the trainer's weights before its first optimizer step.

    ``sample_id``: [n] int64; ``offsets``: [n + 1] int64, where the tokens of each sample begin and end; ``log_probs``,
    ``entropy``: [response tokens] float32, in nats, all NaN in a row that the trainer did not compute.
    """

    sample_id: np.ndarray
    offsets: np.ndarray
    log_probs: np.ndarray
    entropy: np.ndarray

    def to_parquet(self, path: Path) -> None:
        """Write a row for each sample, with null lists where it was not computed; the file appears whole or not at
        all.
        """
        lengths = np.diff(self.offsets)
        seen = np.bincount(np.repeat(np.arange(len(lengths)), lengths), ~np.isnan(self.log_probs), len(lengths))
        absent = pa.array((lengths > 0) & (seen == 0))
        columns = {"sample_id": pa.array(self.sample_id)}
        for name, values in (("log_probs", self.log_probs), ("entropy", self.entropy)):
            columns[name] = pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(values), mask=absent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as partial:
            pq.write_table(pa.table(columns), partial, compression="zstd")
