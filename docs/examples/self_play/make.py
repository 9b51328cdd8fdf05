"""Write games of Nim with random moves, for SFT:   python docs/examples/self_play/make.py FILE

A conversation is one player's view of a game. It teaches the model the format of a move, but not how to win.
"""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slimelite.environments.nim import MOST, PILES

ROWS = 12_000


def game(chance):
    """One player's side of a game."""
    pile, messages = chance.choice(PILES), []
    while pile > 0:
        move = chance.randint(1, min(MOST, pile))
        messages += [{"role": "user", "content": str(pile)}, {"role": "assistant", "content": str(move)}]
        pile -= move
        pile -= chance.randint(1, min(MOST, pile)) if pile else 0
    return messages


file, chance = Path(sys.argv[1]), random.Random(0)
file.parent.mkdir(parents=True, exist_ok=True)
pq.write_table(pa.Table.from_pylist([{"messages": game(chance)} for _ in range(ROWS)]), file)
