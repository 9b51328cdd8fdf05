"""Changes of logits before a token is drawn: penalties, biases, grammars, and stop ids that are not allowed yet."""

from __future__ import annotations

import numpy as np
import torch

from slimelite.engines.embedded.rows import RowTable
from slimelite.engines.params import SamplingParams


def changed(rows: RowTable, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(rows [m], the changed logits [m, vocab] of these rows); None if no row's logits change.

    If a row's grammar allows no further token, the row gets an error and ends with this step.
    """
    changing = rows.changing()
    if not len(changing):
        return None
    index = torch.from_numpy(changing).to(logits.device)
    own = logits[index]
    for n, row in enumerate(changing.tolist()):
        if (params := rows.sequences[row].request.params).shifts():
            _shift(own[n], params, *_so_far(rows, row))
    guided = [n for n, row in enumerate(changing) if (place := rows.sequences[row].guide) is not None and place.active]
    early = rows.state["length"][changing] < rows.state["min_length"][changing]
    if guided:
        # [m, vocab] bits, packed into words of 32 bits; the last word may have unused bits
        allowed = np.zeros((len(guided), -(-logits.shape[1] // 32)), np.int32)
        for place, n in enumerate(guided):
            _allow(rows, int(changing[n]), allowed[place], early=bool(early[n]))
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        forbidden = torch.from_numpy(bits == 0).to(logits.device)
        if len(guided) == len(changing):
            own.masked_fill_(forbidden, -torch.inf)
        else:
            at = torch.tensor(guided, device=logits.device)
            own[at] = own[at].masked_fill(forbidden, -torch.inf)
    free = np.setdiff1d(np.flatnonzero(early), guided)
    if len(free):
        known, columns = np.nonzero(rows.stop_ids[changing[free]] >= 0)
        tokens = rows.stop_ids[changing[free]][known, columns]
        own[torch.from_numpy(free[known]).to(own.device), torch.from_numpy(tokens).to(own.device)] = -torch.inf
    return index, own


def _allow(rows: RowTable, row: int, allowed: np.ndarray, *, early: bool) -> None:
    """Set the bits of the tokens that may come next in a row: the tokens that its grammar allows, and its stop ids if
    the response may end."""
    sequence = rows.sequences[row]
    assert sequence.guide is not None
    try:
        may_end = sequence.guide.fill(allowed)
    except ValueError as error:
        sequence.error = error
        allowed[:] = -1
        return
    bits = allowed.view(np.uint8)
    for token in sequence.guide.end_ids:
        bits[token // 8] &= 255 - (1 << (token % 8))
    # before min_new_tokens, a response may end only if its grammar allows no other token
    if may_end and (not early or not allowed.any()):
        for token in sequence.stop_ids:
            bits[token // 8] |= 1 << (token % 8)
    if not allowed.any():
        sequence.error = ValueError("the grammar allows no token of the model here")
        allowed[:] = -1


def _so_far(rows: RowTable, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the prompt and the response, and the tokens of the response alone."""
    request = rows.sequences[row].request
    tokens = rows.tokens[row, : int(rows.state["length"][row])]
    return tokens, tokens[len(request.input_ids) - request.position :]


def _shift(logits: torch.Tensor, params: SamplingParams, tokens: np.ndarray, response: np.ndarray) -> None:
    """Apply bias and penalties to ``logits`` [vocab] in vLLM's order. The first penalty is defined in
    arXiv:1909.05858."""
    if params.logit_bias:
        ids = torch.tensor([int(token) for token in params.logit_bias], device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(tokens)).to(logits.device)
        known = logits[seen]
        logits[seen] = torch.where(known > 0, known / params.repetition_penalty, known * params.repetition_penalty)
    if len(response) and (params.presence_penalty or params.frequency_penalty):
        unique, counts = np.unique(response, return_counts=True)
        lowered = torch.from_numpy(params.presence_penalty + params.frequency_penalty * counts).to(logits)
        logits[torch.from_numpy(unique).to(logits.device)] -= lowered


def follow(rows: RowTable, tokens: np.ndarray, stopped: np.ndarray) -> None:
    """Advance the grammars by the drawn ``tokens`` [rows]. Rows whose response ends at this point are marked in
    ``stopped``."""
    for row in np.flatnonzero(rows.state["changes"][: len(rows)]).tolist():
        sequence = rows.sequences[row]
        guide = sequence.guide
        sequence.constrained.append((guide is not None and guide.active) or bool(sequence.request.params.shifts()))
        if guide is None:
            continue
        if not stopped[row] and sequence.error is None:
            try:
                guide.advance([int(tokens[row])])
            except ValueError as error:
                sequence.error = error
        # if the request has no stop ids, the response ends when its grammar ends
        stopped[row] |= sequence.error is not None or (guide.ended and not sequence.stop_ids)
