"""Whole runs on a server that someone else runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from slimelite.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from slimelite.engines.sglang.client import SglangEngine, external_servers
from slimelite.engines.sglang.sync import check_model
from tests.engines.tiny_models import build_model, greedy

PROMPT = tuple(range(20, 28))
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@pytest.mark.parametrize("transport", ["http", "nccl"])
def test_a_run_gives_a_server_its_weights_and_leaves_it_running(
    sglang_model: Path, sglang_url: str, tmp_path: Path, transport: str
) -> None:
    build_model(sglang_model)
    prompts = [{"prompt": " ".join(f"w{n + m:02}" for m in range(8)), "label": ""} for n in range(20, 60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    run = tmp_path / "run"
    status = train.main(
        [
            *("--launcher", "local", "--hf-checkpoint", str(sglang_model), "--run-dir", str(run)),
            *("--rollout-external-engine-addrs", sglang_url.removeprefix("http://")),
            *("--update-weight-transport", transport, "--check-weight-update-equal"),
            *("--prompt-data", str(tmp_path / "prompts.jsonl"), "--input-key", "prompt", "--label-key", "label"),
            *("--rm-type", "random", "--num-rollout", "3", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
            *("--rollout-max-response-len", "16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"),
            *("--lr", "1e-2", "--save-hf", str(tmp_path / "trained")),
        ]
    )
    assert status == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row[name] for row in rows if (name := "train/train_rollout_logprob_abs_diff") in row]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3

    # it answers, with the model that was trained
    answer = asyncio.run(greedy_answer(sglang_url, tmp_path / "trained"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    assert answer.output_ids == greedy(trained, PROMPT, 8)
    assert answer.weight_versions == [3] * 8
    # and is in no process group of a run that is over
    log = sglang_model.with_name("server.log").read_text()
    assert log.count("POST /init_weights_update_group") == log.count("POST /destroy_weights_update_group")


async def greedy_answer(url: str, model: Path) -> GenerateResult:
    engine = SglangEngine(url, model_path=str(model))
    try:
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        (answer,) = await engine.generate([GenerateRequest("after", PROMPT, params)])
        return answer
    finally:
        await engine.close()


def test_a_server_of_another_model_is_refused(sglang_url: str, tmp_path: Path) -> None:
    for changes in ({"intermediate_size": 56}, {"num_hidden_layers": 3}, {"model_type": "llama"}):
        folder = tmp_path / next(iter(changes))
        build_model(folder, **changes)
        with pytest.raises(ValueError, match="start it with the model that is trained"):
            external_servers([sglang_url], str(folder))


def test_a_server_of_a_model_that_cannot_be_read_here_is_refused(sglang_model: Path) -> None:
    build_model(sglang_model)
    info = {"model_path": "/elsewhere/model", "model_type": "qwen2"}
    with pytest.raises(ValueError, match="/elsewhere/model, which cannot be read here"):
        check_model("http://there:1", info, str(sglang_model))


def test_where_no_server_answers(sglang_model: Path) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9: no SGLang server answers"):
        external_servers(["127.0.0.1:9"], str(sglang_model))
