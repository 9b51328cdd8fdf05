"""Preference pairs for DPO from saved rollouts: a prompt's best response is preferred to its worst.

    slimelite make-pairs runs/gsm8k -o pairs.parquet
    python train.py --loss-type dpo_loss --prompt-data pairs.parquet --input-key prompt ...

Responses of one group are compared by their reward. A pair is left out if its rewards are equal or closer than
``--margin``, or if its texts are equal. These responses are left out: (1) responses that did not end by themselves
(truncated, aborted); (2) responses that a plugin removed, or that have no reward; (3) empty responses; (4) responses
with masked tokens, such as the tokens of a tool, because DPO would train on these tokens. The texts are exactly the
sampled texts: the prompt includes the chat template, and the response includes the end token. Training does not add a
second end token.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.apps.runs import Run
from slimelite.base.files import whole
from slimelite.samples.sample import Status
from slimelite.samples.table import SampleTable


def pairs_of(table: SampleTable, margin: float, most: int, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """Up to ``most`` preference pairs of each group of ``table``: the best and the worst response, then the second best
    and the second worst response, and so on.

    Args:
        margin: the smallest difference of rewards; 0 accepts every difference.
        left_out: reason -> number of responses or groups that give no pair. This function increases these numbers.
    """
    for group in dict.fromkeys(table.group_id.tolist()):
        usable = []
        for row in np.flatnonzero(table.group_id == group).tolist():
            if table.status[row] != Status.COMPLETED:
                left_out[f"responses that are {table.status[row]}"] += 1
            elif table.removed[row] or not np.isfinite(table.reward[row]):
                left_out["responses that were removed or have no reward"] += 1
            elif not table.response[row] or not table.row_slice("loss_mask", row).all():
                left_out["responses that are empty or have masked tokens, such as a tool's"] += 1
            else:
                usable.append(row)
        ranked = sorted(usable, key=lambda row: -table.reward[row])
        count = 0
        for best, worst in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            better = float(table.reward[best] - table.reward[worst])
            if count < most and better > 0 and better >= margin and table.response[best] != table.response[worst]:
                count += 1
                yield {
                    "prompt": table.prompt[best],
                    "chosen": table.response[best],
                    "rejected": table.response[worst],
                    "score_chosen": float(table.reward[best]),
                    "score_rejected": float(table.reward[worst]),
                }
        left_out["groups without two responses that differ by the margin"] += not count


def rollout_files(source: str) -> list[Path]:
    """The parquet files of ``source``, which is a run folder or one file."""
    if not Path(source).is_dir():
        return [Path(source)]
    files = list(Run.read(source).rollouts.values())
    if not files:
        raise ValueError(f"{source}: has no saved rollouts (--save-rollouts keeps them)")
    return files


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: a source cannot be read, or has no pairs.
        OSError: the file cannot be written.
    """
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="slimelite make-pairs", description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="RUN_OR_PARQUET", help="a run folder, or a saved rollout's file")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.parquet", help="the file to write")
    parser.add_argument(
        "--margin", type=float, default=0.0, help="rewards of the two replies of a pair differ by at least this value"
    )
    parser.add_argument(
        "--max-pairs-per-group", type=int, default=1, metavar="N", help="make at most this many pairs from one group"
    )
    args = parser.parse_args(argv)
    if args.out.suffix != ".parquet":
        parser.error(f"-o {args.out}: name a file that ends with .parquet")
    if args.max_pairs_per_group < 1 or not args.margin >= 0:
        parser.error("--max-pairs-per-group must be at least 1, and --margin at least 0")
    left_out: Counter[str] = Counter()
    pairs: list[dict[str, Any]] = []
    for file in [file for source in args.sources for file in rollout_files(source)]:
        pairs += pairs_of(SampleTable.from_parquet(file), args.margin, args.max_pairs_per_group, left_out)
    unique = {(row["prompt"], row["chosen"], row["rejected"]): row for row in pairs}
    left_out["pairs that already exist"] = len(pairs) - len(unique)
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    if not unique:
        raise ValueError(f"there are no pairs: {reasons}; lower --margin, or give other runs")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with whole(args.out) as partial:
            pq.write_table(pa.Table.from_pylist(list(unique.values())), partial, compression="zstd")
    except OSError as error:
        raise OSError(f"-o {args.out}: cannot be written: {error}") from error
    print(f"{args.out}: {len(unique)} pairs" + (f"; left out: {reasons}" if reasons else ""))
    print(f"train.py --loss-type dpo_loss --prompt-data {args.out} --input-key prompt   (no --apply-chat-template)")
    return 0
