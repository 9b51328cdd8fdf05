"""Tokens of pretraining's loader per second of CPU time on one core: cold (the shards leave the page cache first) and
warm. It includes packing the window and making the tables.

    python scripts/lab/loader_speed.py --tokens 50_000_000 --seq-length 2048 --sequences 512
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from slimelite.arguments import Args
from slimelite.base.files import FORMAT
from slimelite.base.version import add_version
from slimelite.data import documents, shards
from slimelite.data.documents import Documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("--tokens", type=int, default=50_000_000, help="tokens of the documents")
    parser.add_argument("--mean", type=float, default=800.0, help="mean tokens of a document (log-normal, sigma 1)")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=512, help="of a rollout")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "key.tokens"
        lengths = np.maximum(2, rng.lognormal(np.log(given.mean) - 0.5, 1.0, int(given.tokens / given.mean))).astype(
            int
        )
        ends = np.cumsum(lengths)
        rng.integers(0, 2**16, ends[-1], np.uint16).tofile(file)
        facts = shards.ShardFacts(FORMAT, "made up", "", "", "uint16", len(ends), int(ends[-1]), int(ends[-1]), {}, {})
        for state in ("cold", "warm"):
            if state == "cold":
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            shard = shards.Shard(facts, np.memmap(file, np.uint16, "r"), ends)
            seconds = measure(shard, given.seq_length, given.sequences)
            print(json.dumps({"state": state, "tokens": int(ends[-1]), **seconds}))


def measure(shard: shards.Shard, length: int, sequences: int) -> dict[str, float]:
    """Processor and wall seconds for one epoch, from opening the shard on, and tokens per second."""
    source = Documents.__new__(Documents)  # without a tokenizer
    args = Args(loss_type="pretrain_loss", seq_length=length, rollout_shuffle=True)
    vars(source).update(_args=args, _weights=[1.0], _sequences=0, _rows=0, _coder=_NoText())
    began, wall = time.process_time(), time.perf_counter()
    source._streams = [documents.Stream([shard], args, 0)]
    while source._streams[0].tokens < source._streams[0].size:
        source.take(sequences)
    used, took = time.process_time() - began, time.perf_counter() - wall
    tokens = source._streams[0].tokens
    return {"cpu_seconds": used, "seconds": took, "tokens_per_cpu_second": tokens / used}


class _NoText:
    start = 0

    def decode(self, _ids: object) -> str:
        return ""


if __name__ == "__main__":
    main()
