"""Whole runs whose requests carry a grammar, with a generate function that asks the run's own server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import train
from slimelite.samples.sample import CONSTRAINED_TOKENS
from slimelite.samples.table import SampleTable
from tests.serving.chat import build

from .conftest import metrics

pytestmark = pytest.mark.e2e
# a turn without a grammar, and one that is held to a schema
OWN = """
import aiohttp

SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}, "count": {"type": "integer", "minimum": 3, "maximum": 70}},
    "required": ["right", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}


async def generate(args, sample, sampling_params):
    context = args.rollout_context
    session = context.sessions().open(sample.session_id)
    url = f"{await context.front()}/sessions/{session.id}/v1/chat/completions"
    messages = [{"role": "user", "content": sample.prompt}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for body in ({"max_tokens": 6}, {"max_tokens": 150, "response_format": FORMAT}):
            async with http.post(url, json={"messages": messages, **body}) as answer:
                message = (await answer.json())["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "Is it right?"}]
    made = session.samples(sample)
    context.sessions().close(session.id)
    return made
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar_runs")
    build(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=?"}) + "\n" for n in range(4)))
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.mark.parametrize("trains", [False, True])
def test_tokens_under_a_grammar_are_counted_and_left_out_or_trained(folder: Path, tmp_path: Path, trains: bool) -> None:
    flags = ["--launcher", "local", "--hf-checkpoint", str(folder / "model"), "--run-dir", str(tmp_path / "run")]
    flags += ["--prompt-data", str(folder / "rows.jsonl"), "--input-key", "prompt", "--rm-type", "random"]
    flags += ["--custom-generate-function-path", f"{folder / 'own.py'}:generate", "--token-stats", "all"]
    flags += ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "600"]
    flags += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--num-rollout", "1", "--colocate"]
    assert train.main([*flags, *(["--train-constrained"] if trains else [])]) == 0
    table = SampleTable.from_parquet(tmp_path / "run" / "rollouts" / "0000000.parquet")
    stats = pq.read_table(tmp_path / "run" / "token_stats" / "0000000.parquet").to_pydict()
    assert stats["sample_id"] == table.sample_id.tolist()
    ends = np.cumsum(table.response_lengths)
    counts = [json.loads(metadata)[CONSTRAINED_TOKENS] for metadata in table.metadata]
    for number, (held, end) in enumerate(zip(counts, ends, strict=True)):
        # the constrained tokens are the last ones: a JSON value, and the end of the reply
        assert re.search(r'\{\s*"right".*\}\s*<\|im_end\|>$', table.response[number], re.DOTALL)
        first = end - held
        mask = table.loss_mask[end - table.response_lengths[number] : end]
        assert table.loss_mask[first:end].all() == trains
        assert table.loss_mask[first:end].any() == trains
        assert mask.sum() == 6 + (held if trains else 0)
        if trains:
            assert table.kept_counts is not None
            assert (table.kept_counts[first:end] > 0).all()
    assert metrics(tmp_path / "run", "rollout/constrained_token_ratio") == [sum(counts) / table.response_lengths.sum()]
    assert min(counts) > 0
    # of what is trained, the trainer's log-probs are the engine's
    gap = np.abs(np.concatenate(stats["log_probs"]) - table.rollout_log_probs)
    assert gap[table.loss_mask].max() < 1e-5
