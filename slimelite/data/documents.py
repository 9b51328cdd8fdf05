"""Provides the data of pretraining: packs documents, in random order, into sequences of ``--seq-length`` tokens.

Each epoch goes through all documents once, in a new order. The documents are packed one *window* at a time. A window
contains the documents for about ``WINDOW`` sequences. A document that is longer than a sequence is cut into pieces, and
each piece is put into the sequence where it fits best (arXiv:2404.10830). So no token is left out, and few sequences
have unused space. The order of the sequences depends only on the seed and the epoch. A position in this order is stored
as three numbers, so a run can resume after any training step. The order does not depend on the number of ranks, because
each batch of sequences is divided among the ranks.

A document consists of a start token, its tokens and an end-of-text token. If a document is cut, each piece except the
first begins with the last token of the previous piece, as context. So each token is predicted exactly once in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slimelite.arguments import Args
from slimelite.base.best_fit import best_fit
from slimelite.data.shards import Shard, TextCoder, tokenize
from slimelite.samples.sample import Status
from slimelite.samples.table import SampleTable

# sequences that are packed together; a larger number leaves less unused space, but takes longer to pack
WINDOW = 1024
# tokens of held-out text in one table
HELD_OUT = 2**20
# number of rows of a rollout whose text is logged
SHOWN = 2


class Documents:
    """Returns packed sequences for training. With ``--prompt-data-weights`` each path of ``--prompt-data`` is a
    separate stream, which starts its own next epoch when it ends. The weights set the share of each stream in the
    tokens. The next sequence comes from the stream that is furthest behind its share.
    """

    def __init__(self, args: Args, tokenizer: str) -> None:
        """Tokenise the texts that are not in the cache, including those of ``--eval-bpb``.

        Raises:
            ValueError: see `tokenize`.
            OSError: see `tokenize`.
        """
        self._args, self._coder = args, TextCoder(tokenizer)
        paths = args.prompt_data if args.job.documents else []
        every = tokenize(
            [*paths, *args.eval_bpb],
            self._coder,
            args.text_key,
            Path(args.token_cache).expanduser(),
            workers=args.tokenizer_workers,
            skip=args.skip_bad_rows,
        )
        parts, self._held_out = every[: len(paths)], [shard for part in every[len(paths) :] for shard in part]
        self._weights = args.prompt_data_weights or [1.0]
        if not args.prompt_data_weights:
            parts = [[shard for part in parts for shard in part]]
        self._streams = [Stream(shards, args, self._coder.start) for shards in parts]
        self._sequences = self._rows = 0  # numbers drawn so far

    def __len__(self) -> int:
        """The approximate number of sequences in an epoch."""
        return sum(-(-stream.size // self._args.seq_length) for stream in self._streams)

    def take(self, count: int) -> tuple[SampleTable, dict[str, float]]:
        """Return the next ``count`` sequences, and metrics of the data. All rows of a sequence have the same
        ``rollout_id`` and ``unit_id``, which no other sequence has.

        A row of the table is a piece of a document, or with ``--cross-document-attention`` a whole sequence.
        """
        sequences = [self._next_stream().next() for _ in range(count)]
        numbers = np.repeat(np.arange(count), list(map(len, sequences))) + self._sequences
        ids = [piece for pieces in sequences for piece in pieces]
        table = self._table(ids, numbers)
        self._sequences += count
        tokens, size = (sum(getattr(stream, name) for stream in self._streams) for name in ("tokens", "size"))
        metrics = {
            "rollout/tokens": float(tokens),
            "rollout/epoch": tokens / size,
            "rollout/packed_share": float(table.total_lengths.sum() / (count * self._args.seq_length)),
        }
        for stream, path in zip(self._streams, self._args.prompt_data if len(self._streams) > 1 else (), strict=False):
            metrics[f"rollout/epoch/{Path(path).stem}"] = stream.tokens / stream.size
        return table, metrics

    def _next_stream(self) -> Stream:
        total, weight = sum(stream.tokens for stream in self._streams), sum(self._weights)
        behind = [
            share / weight * (total + 1) - stream.tokens
            for share, stream in zip(self._weights, self._streams, strict=True)
        ]
        return self._streams[behind.index(max(behind))]

    def held_out(self) -> Iterator[tuple[SampleTable, int]]:
        """The documents of ``--eval-bpb`` in the order of the files, as pairs (table, bytes). In the last pair of a
        file, ``bytes`` is the size of all texts of the file. In the other pairs, ``bytes`` is 0.

        The documents are cut as in training, and each piece is a row of a table.
        """
        for shard in self._held_out:
            if not len(shard.ends):
                continue
            pieces = cut(np.append(0, shard.ends)[:-1], shard.ends, self._args.seq_length)
            parts = np.split(pieces, np.flatnonzero(np.diff(pieces[:, 1] // HELD_OUT)) + 1)
            for part in parts:
                ids = [_ids(shard, piece, self._coder.start) for piece in part.tolist()]
                yield self._table(ids, np.arange(len(ids))), shard.facts.bytes if part is parts[-1] else 0

    def _table(self, ids: Sequence[np.ndarray], numbers: np.ndarray) -> SampleTable:
        """A table of pieces [n] that belong to the sequences ``numbers`` [n]. The first token of a piece is only
        context, and is not trained on."""
        lengths = np.array(list(map(len, ids)))
        flat, begins = np.concatenate(ids), np.cumsum(lengths) - lengths
        context = np.zeros(len(flat), bool)
        trained = np.ones(len(flat), bool)
        trained[begins] = False
        joined = self._args.cross_document_attention
        heads = np.flatnonzero(np.diff(numbers, prepend=-1)) if joined else np.arange(len(ids))
        context[begins[heads]] = True
        rows, tokens = len(heads), len(flat) - len(heads)
        unknown = np.full(tokens, np.nan, np.float32)
        offsets = np.append(begins[heads], len(flat))
        texts = [self._coder.decode(flat[a:b].tolist()) for a, b in pairwise(offsets[: SHOWN + 1])]
        blank = [""] * rows
        first, self._rows = self._rows, self._rows + rows
        return SampleTable(
            sample_id=np.arange(first, first + rows),
            rollout_id=numbers[heads],
            group_id=numbers[heads],
            unit_id=numbers[heads],
            reward=np.zeros(rows),
            advantage=np.zeros(rows),
            removed=np.zeros(rows, bool),
            prompt_offsets=np.arange(rows + 1),
            response_offsets=offsets - np.arange(rows + 1),
            prompt_tokens=flat[context],
            response_tokens=flat[~context],
            loss_mask=trained[~context],
            rollout_log_probs=unknown,
            weight_versions=np.zeros(tokens, np.int32),
            teacher_log_probs=unknown,
            status=[str(Status.COMPLETED)] * rows,
            label=[None] * rows,
            prompt=blank,
            response=[*texts, *blank[len(texts) :]],
            metadata=["{}"] * rows,
            reward_components=["{}"] * rows,
        )

    def state_dict(self) -> dict[str, object]:
        """The current position as plain JSON values. Other values in the result identify the data and the settings that
        must be unchanged when `load_state_dict` restores the position."""
        streams = [stream.state() for stream in self._streams]
        return {"streams": streams, "drawn": [self._sequences, self._rows], "dataset": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position that `state_dict` saved.

        Raises:
            ValueError: the documents, their order or their weights differ from those of the run that saved the state.
        """
        saved, now = state["dataset"], self._identity()
        if changed := [key for key in now if saved.get(key) != now[key]]:
            raise ValueError(
                f"cannot resume, because the data differs from the data of the checkpoint's run: {', '.join(changed)} "
                "changed; use the same files and flags, or load only the weights with --finetune"
            )
        for stream, position in zip(self._streams, state["streams"], strict=True):
            stream.restore(position)
        self._sequences, self._rows = state["drawn"]

    def _identity(self) -> dict[str, object]:
        args = self._args
        return {
            **{
                f"the content of path {number} of --prompt-data": [shard.facts.checksum for shard in stream.shards]
                for number, stream in enumerate(self._streams)
            },
            "--rollout-seed": args.rollout_seed if args.rollout_shuffle else None,
            "--rollout-shuffle": args.rollout_shuffle,
            "--prompt-data-weights": args.prompt_data_weights,
            "--seq-length": args.seq_length,
        }


class Stream:
    """The packed sequences of one stream, epoch after epoch without an end. ``size``: the number of tokens in an epoch.
    ``tokens``: the number of tokens returned so far."""

    def __init__(self, shards: list[Shard], args: Args, start: int) -> None:
        self.shards, self.tokens = shards, 0
        self._args, self._start = args, start
        counts = [len(shard.ends) for shard in shards]
        self._shard = np.repeat(np.arange(len(shards)), counts)
        self._ends = np.concatenate([np.zeros(0, np.int64), *(shard.ends for shard in shards)])
        self._begins = np.concatenate([np.zeros(0, np.int64), *(np.append(0, s.ends)[:-1] for s in shards)])
        self.size = int((self._ends - self._begins).sum())
        # the epoch, the index of the window's first document, and the number of the window's sequences drawn so far
        self._position = (0, 0, 0)
        self._order: tuple[int, np.ndarray] = (-1, self._ends)
        self._open(0, 0)

    def next(self) -> list[np.ndarray]:
        """The next sequence, as a list with the token ids of each of its pieces."""
        epoch, first, taken = self._position
        if taken == len(self._bins):
            epoch, first = (epoch, self._last) if self._last < len(self._ends) else (epoch + 1, 0)
            taken = 0
            self._open(epoch, first)
        self._position = (epoch, first, taken + 1)
        pieces = self._pieces[self._bins[taken]].tolist()
        self.tokens += sum(end - begin for _, begin, end, _ in pieces)
        return [_ids(self.shards[self._shard[piece[0]]], piece, self._start) for piece in pieces]

    def state(self) -> list[int]:
        """The current position as a list of numbers, for `restore`."""
        return [*self._position, self.tokens]

    def restore(self, state: Sequence[int]) -> None:
        """Continue from ``state``, a position that the method `state` returned."""
        epoch, first, taken, self.tokens = state
        self._position = (epoch, first, taken)
        self._open(epoch, first)

    def _open(self, epoch: int, first: int) -> None:
        """Pack the window that begins with document ``first`` in the order of ``epoch``."""
        length, shuffle = self._args.seq_length, self._args.rollout_shuffle
        if self._order[0] != epoch:
            order = np.arange(len(self._ends))
            if shuffle:
                np.random.default_rng([self._args.rollout_seed, epoch]).shuffle(order)
            self._order = (epoch, order)
        order = self._order[1][first : first + WINDOW * length]  # a document has at least one token
        tokens = np.cumsum(self._ends[order] - self._begins[order] + 1)
        documents = order[: 1 + int(np.searchsorted(tokens, WINDOW * length))]
        self._last = first + len(documents)
        self._pieces = cut(self._begins[documents], self._ends[documents], length)
        self._pieces[:, 0] = documents[self._pieces[:, 0]]
        sizes = self._pieces[:, 2] - self._pieces[:, 1] + 1
        by_size = np.argsort(-sizes, kind="stable")
        bins = [np.sort(by_size[numbers]) for numbers in best_fit(sizes[by_size].tolist(), length)]
        if shuffle:  # otherwise the order of the files, as far as packing allows
            np.random.default_rng([self._args.rollout_seed, epoch, first]).shuffle(bins)
        else:
            bins.sort(key=lambda numbers: int(numbers[0]))
        self._bins = bins


def cut(begins: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """Cut documents into pieces. Document i is the tokens ``begins[i]`` to ``ends[i]`` of a shard. Returns [n, 4]
    int64, with one row for each piece, in the order of the documents. The four columns: the number of the document; the
    position where the piece begins; the position where the piece ends; 1 for the first piece of a document, else 0.

    Together with the one token before it, a piece has at most ``length`` tokens.
    """
    counts = -(-(ends - begins) // (length - 1))
    whose = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = begins[whose] + number * (length - 1)
    return np.stack([whose, first, np.minimum(first + length - 1, ends[whose]), number == 0], axis=1).astype(np.int64)


def _ids(shard: Shard, piece: Sequence[int], start: int) -> np.ndarray:
    """The ids of a piece (see `cut`). The first id is ``start`` if the document begins with this piece. If the document
    began earlier, the first id is the token before the piece."""
    _, begin, end, begins = piece
    ids = np.empty(end - begin + 1, np.int32)
    ids[0] = start if begins else shard.tokens[begin - 1]
    ids[1:] = shard.tokens[begin:end]
    return ids
