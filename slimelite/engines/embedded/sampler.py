"""Samples the next tokens of whole batches. Each row has its own random stream. The module also computes log-probs of
given tokens, such as a teacher's log-probs of a student's responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from slimelite.engines.embedded.attention import ScorePlan
from slimelite.engines.embedded.model import Decoder
from slimelite.engines.protocol import Scores

NOT_FINITE = "the model's logits are not finite: its weights (or the last weights that were sent) contain inf or NaN"
# the most logits that scoring keeps in memory at the same time
SCORE_ELEMENTS = 2**24
GOLDEN = 0x9E3779B97F4A7C15
# the search for a token by cumulative probability first sums blocks of this many columns
BLOCK = 256
# top-p and top-k first search this number of likeliest tokens; a larger nucleus needs a sort of the whole vocabulary
CANDIDATES = 1024
BELOW_ONE = 1 - 2**-50
# the sampling parameters that change a row's distribution. "kept": whether the result has the ids that remain.
# "guided": whether a grammar also excludes tokens
SHAPE = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("min_p", np.float64),
        ("kept", np.bool_),
        ("guided", np.bool_),
    ]
)


def stream_of(seed: int) -> int:
    """The start of the random stream of ``seed``. The start is computed by one step of splitmix64, so that the streams
    of neighbouring seeds are unrelated."""
    return int(_mixed(np.array([(seed + GOLDEN) % 2**64], np.uint64))[0])


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Element ``positions[i]`` of stream ``streams[i]``.

    Args:
        streams: [n] uint64.
        positions: [n] int64.

    Returns:
        [n] float64 in (0, 1).
    """
    mixed = _mixed(streams + (positions + 1).astype(np.uint64) * np.uint64(GOLDEN))
    return (mixed >> np.uint64(12)) * 2.0**-52 + 2.0**-53


def _mixed(z: np.ndarray) -> np.ndarray:
    """The output of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) for its states [n] uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to sample each of n rows. A field is None when no row uses that option.

    ``temperature``: [n, 1]. ``greedy``: [n] bool. ``truncated``: indices [m] of rows with top-p, top-k or min-p.
    ``top_p``, ``top_k`` and ``min_p`` [m, 1] are the values of these rows. ``tells``: [n] bool, whether a row returns
    the ids that were not excluded.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool
    truncated: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    min_p: torch.Tensor | None
    tells: np.ndarray | None

    @classmethod
    def build(cls, shapes: np.ndarray, vocab: int, device: torch.device) -> SamplingBatch:
        """Build from `SHAPE` [n]; temperature 0 or top_k 1 means greedy, top_k below 1 means no limit."""
        temperature, top_p, top_k, min_p, kept, guided = (shapes[name] for name in SHAPE.names or ())
        greedy = (temperature == 0) | (top_k == 1)
        # if only a grammar excludes tokens, no ids are returned, unless `SamplingParams.telling` has set a limit
        limit = guided & kept & (top_k >= 1)
        scale = np.where(temperature == 0, 1, temperature)
        top_k = np.where(top_k < 1, vocab, top_k)
        limited = (top_p < 1) | (top_k < vocab) | (min_p > 0) | limit
        rows, tells = np.flatnonzero(limited & ~greedy), kept & limited

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[:, None]).to(device)

        return cls(
            temperature=column(scale.astype(np.float32)) if (scale != 1).any() else None,
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            truncated=torch.from_numpy(rows).to(device) if len(rows) else None,
            top_p=column(top_p[rows]) if len(rows) else None,
            top_k=column(top_k[rows]) if len(rows) else None,
            min_p=column(min_p[rows]) if (min_p[rows] > 0).any() else None,
            tells=tells if tells.any() else None,
        )


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    uniform: torch.Tensor,
    changed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[int, np.ndarray]]:
    """Draw one token per row by inverting the cumulative distribution at ``uniform``.

    Args:
        logits: [n, vocab] fp32; overwritten.
        uniform: [n] float64 in (0, 1).
        changed: (rows [m], changed logits [m, vocab]). The tokens of these rows are drawn from the changed logits;
            forbidden tokens have -inf. Overwritten.

    Returns:
        (tokens [n] int64, log-probs [n] fp32, ids). Log-probs are under softmax(logits / temperature), before changes
        and truncation. ``ids`` is a dict for the rows that return ids: row -> the int32 ids that its token was drawn
        from. The log-prob of such a row is renormalised over these ids.
    """
    if batch.temperature is not None:
        logits.div_(batch.temperature)
    probs = weights = logits.softmax(-1)
    if changed is not None:
        rows, drawn_by = changed
        if batch.temperature is not None:
            drawn_by.div_(batch.temperature[rows])
        weights = probs.index_copy(0, rows, drawn_by.softmax(-1))
    left: tuple[torch.Tensor, torch.Tensor] | None = None
    if batch.all_greedy:
        tokens = weights.argmax(-1, keepdim=True)
    else:
        tokens = _invert(weights, uniform[:, None])
        if (cut := batch.truncated) is not None:
            left = _truncated(weights[cut], batch)
            tokens[cut] = left[1].gather(-1, _search(left[0], uniform[cut, None])[0])
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy[:, None], weights.argmax(-1, keepdim=True), tokens)
    # a drawn token can have probability 0 only if the changes excluded all likelier tokens; the lower bound keeps its
    # log finite
    log_probs = probs.gather(-1, tokens).clamp_min(torch.finfo(torch.float32).tiny).log().squeeze(-1)
    return tokens.squeeze(-1), log_probs, {} if batch.tells is None else _tell(batch, tokens, weights, log_probs, left)


def _tell(
    batch: SamplingBatch,
    tokens: torch.Tensor,
    weights: torch.Tensor,
    log_probs: torch.Tensor,
    left: tuple[torch.Tensor, torch.Tensor] | None,
) -> dict[int, np.ndarray]:
    """The kept ids of the rows that return them. The ``log_probs`` [n] of these rows are renormalised over the kept
    ids."""
    assert batch.tells is not None
    kept: dict[int, np.ndarray] = {}
    if left is not None and batch.truncated is not None:
        rows, (mass, ids) = batch.truncated, left
        over = (weights[rows].gather(-1, tokens[rows])[:, 0] / mass.sum(-1)).log()
        tells = torch.from_numpy(batch.tells).to(rows.device)[rows]
        log_probs[rows] = torch.where(tells, over.float(), log_probs[rows])
        counts = (mass > 0).sum(-1).cpu().numpy()  # the likeliest tokens come first
        listed = ids[:, : int(counts.max())].to(torch.int32).cpu().numpy()
        kept = {row: listed[i, : counts[i]].copy() for i, row in enumerate(rows.tolist()) if batch.tells[row]}
    if batch.greedy is not None:
        drawn = tokens[:, 0].cpu().numpy().astype(np.int32)
        greedy = torch.from_numpy(batch.tells).to(log_probs.device) & batch.greedy
        log_probs[greedy] *= 0.0  # values that are not finite stay not finite
        kept |= {row: drawn[row : row + 1] for row in greedy.nonzero()[:, 0].tolist()}
    return kept


def _search(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the column where the cumulative mass reaches the fraction ``uniform`` of a row's total, and the position
    inside the column.

    ``weights``: [n, columns], at least 0. ``uniform``: [n, 1] in [0, 1). The found column has a positive weight.
    """
    mass = weights.cumsum(-1, dtype=torch.float64)
    target = torch.minimum(uniform * mass[:, -1:], mass[:, -1:] * BELOW_ONE)
    # only NaN weights need the clamp: they would give an index out of range (`_invert` clamps for the same reason)
    index = torch.searchsorted(mass, target, right=True).clamp_(max=weights.shape[-1] - 1)
    inside = (target - mass.gather(-1, index)) / weights.gather(-1, index) + 1
    return index, inside.clamp_(0, BELOW_ONE)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[n, vocab], [n, 1] -> tokens [n, 1]. The search finds the block first and then the token, so that most columns
    are only summed."""
    vocab = weights.shape[-1]
    if vocab <= BLOCK:
        return _search(weights, uniform)[0]
    whole = vocab // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < vocab:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=-1)
    block, inside = _search(sums, uniform)
    columns = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    members = weights.gather(-1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0)
    return (block * BLOCK + _search(members, inside)[0]).clamp_(max=vocab - 1)


def _truncated(weights: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, in descending order, and their masses, which are 0 for excluded tokens. Both are [m,
    width].

    A token is kept if three conditions are true. It is one of the top_k likeliest tokens. It is in the smallest set
    with a mass of at least top_p. Its probability is at least min_p times the highest probability. All limits are
    applied to the full distribution, as SGLang does.
    """
    assert batch.top_p is not None
    assert batch.top_k is not None
    vocab = weights.shape[-1]
    width = min(CANDIDATES, vocab)
    while True:
        mass, tokens = weights.topk(width)
        rank = torch.arange(width, device=weights.device)
        keep = (rank < batch.top_k) & (mass.cumsum(-1, dtype=torch.float64) - mass < batch.top_p)
        if batch.min_p is not None:
            keep &= mass >= batch.min_p * mass[:, :1]
        if width == vocab or not bool((keep[:, -1:] & (batch.top_k > width)).any()):
            break
        width = vocab
    return mass.masked_fill(~keep, 0), tokens


@dataclass(slots=True)
class Scoring:
    """A waiting `Engine.score` call. The call requests the log-probs of ``tokens[start:]`` and of the ``top`` likeliest
    tokens."""

    tokens: list[int]
    start: int
    temperature: float
    top: int = 0
    future: Future[Scores] = field(default_factory=Future)

    def read(self, logits: Callable[[torch.Tensor], torch.Tensor], vocab: int, hidden: torch.Tensor) -> Scores:
        """The scores of ``tokens[start:]``. ``hidden``: for each of these tokens, the state of the token before it.

        ``logits``: states [n, hidden] -> [n, ``vocab``] fp32.
        """
        rows = max(1, SCORE_ELEMENTS // vocab)
        scores, wanted = Scores([], []), torch.tensor(self.tokens[self.start :], device=hidden.device)
        for states, targets in zip(hidden.split(rows), wanted.split(rows), strict=True):
            log_probs = (logits(states) / self.temperature).log_softmax(-1)
            scores.log_probs.extend(log_probs.gather(-1, targets[:, None])[:, 0].tolist())
            best, ids = log_probs.topk(min(self.top, log_probs.shape[-1]))
            scores.top.extend(list(zip(*row, strict=True)) for row in zip(ids.tolist(), best.tolist(), strict=True))
        if not np.isfinite(scores.log_probs).all():
            raise RuntimeError(NOT_FINITE)
        return scores


def together(scorings: Iterable[Scoring]) -> list[list[Scoring]]:
    """Group the calls that continue the same tokens, such as the choices of a question."""
    by_start: dict[tuple[int, ...], list[Scoring]] = {}
    for scoring in scorings:
        by_start.setdefault(tuple(scoring.tokens[: scoring.start]), []).append(scoring)
    return list(by_start.values())


def compute(group: Sequence[Scoring], decoder: Decoder) -> list[Scores]:
    """Score the calls of one ``group``, which `together` made, in one pass. The calls have the same tokens before
    ``start``, so the pass computes these tokens only once."""
    first, device = group[0], decoder.weights.embed.device
    head = decoder.logits, len(decoder.weights.head.weight)
    if len(group) == 1:
        tokens = torch.tensor(first.tokens, device=device)
        hidden = decoder.forward(tokens, ScorePlan([len(tokens)], device))
        return [first.read(*head, hidden[first.start - 1 : -1])]
    branches = [scoring.tokens[scoring.start :] for scoring in group]
    counts = [first.start, *map(len, branches)]
    tokens = torch.tensor([*first.tokens[: first.start], *chain.from_iterable(branches)], device=device)
    before, *after = decoder.forward(tokens, ScorePlan(counts, device)).split(counts)
    states = [torch.cat((before[-1:], own[:-1])) for own in after]
    return [scoring.read(*head, own) for scoring, own in zip(group, states, strict=True)]
