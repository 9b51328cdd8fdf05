"""Do engines and trainer compute the same log-probs right after a weight sync (``--check-weight-update-equal``)?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimelite.engines.protocol import Engine, GenerateRequest, SamplingParams
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 16


async def probe(engines: Sequence[Engine], vocab_size: int, temperature: float) -> SampleTable:
    """``PROMPTS`` responses of each engine to fixed tokens, one row each; ``group_id`` is the engine's number."""
    prompts = [
        [(7919 * (p * PROMPT_TOKENS + i + 1)) % vocab_size for i in range(PROMPT_TOKENS)] for p in range(PROMPTS)
    ]
    params, groups = SamplingParams(NEW_TOKENS, temperature, ignore_eos=True), list[list[Sample]]()
    for number, engine in enumerate(engines):
        requests = [GenerateRequest(f"probe-{number}-{i}", tuple(p), params) for i, p in enumerate(prompts)]
        groups.append([])
        for i, result in enumerate(await engine.generate(requests)):
            row = Sample(group_index=number, index=number * PROMPTS + i, tokens=list(prompts[i]), reward=0.0)
            row.append_response_tokens(result.output_ids, result.log_probs, weight_versions=result.weight_versions)
            row.status = Status.COMPLETED
            groups[-1].append(row)
    return SampleTable.from_samples(groups)


def disagreement(table: SampleTable, log_probs: np.ndarray, version: int) -> np.ndarray:
    """[engines] mean |engine − trainer log-prob| over the rows of a `probe`, in nats; inf if a token has another weight
    version than ``version``.

    ``log_probs``: [response tokens of the table] the trainer's.
    """
    gap = np.where(table.weight_versions == version, np.abs(table.rollout_log_probs - log_probs), np.inf)
    engine_of_token = np.repeat(table.group_id, table.response_lengths)
    return np.array([gap[engine_of_token == number].mean() for number in np.unique(table.group_id)])
