"""A teacher behind HTTP: a real engine scores what another one generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import make_args as parse
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.rollout import teacher as teacher_module
from slimelite.rollout.teacher import Teacher
from slimelite.samples.sample import Sample
from slimelite.slime.plugins import load_function

from .conftest import MakeArgs, MakeManager

SLIME = "slime.rollout.on_policy_distillation"


@pytest.fixture(scope="module")
def teacher_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Another model of the student's architecture, with a folder of its own."""
    torch.manual_seed(7)
    hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder)).eval()
    for weight in hf.parameters():
        weight.data.add_(0.1 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("teacher")
    hf.save_pretrained(folder)
    return hf, str(folder)


@pytest.fixture(scope="module")
def url(teacher_model: Any) -> Iterator[str]:
    engine = EmbeddedEngine(teacher_model[1], max_context_len=200)
    yield asyncio.run(engine.start_http())
    asyncio.run(engine.close())


def expected(hf: Any, sample: Sample, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = hf(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1]
    targets = torch.tensor(sample.tokens[sample.prompt_length :])
    return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_sample_of_a_rollout_is_scored_at_its_temperature(
    make_args: MakeArgs, make_manager: MakeManager, teacher_model: Any, url: str, temperature: float
) -> None:
    args = make_args(use_opd=True, opd_type="sglang", rm_url=url, rollout_temperature=temperature)
    table = make_manager(args).generate(0).table
    assert table.reward.std() > 0, "the task's reward is there as well"
    for sample in (s for group in table.to_samples() for s in group):
        assert sample.teacher_log_probs == pytest.approx(expected(teacher_model[0], sample, temperature), abs=1e-4)


def test_slimes_paths_make_pure_distillation(make_args: MakeArgs, make_manager: MakeManager, url: str) -> None:
    common = {"use_opd": True, "opd_type": "sglang", "rm_url": f"{url}/generate"}
    pure = make_manager(make_args(**common, custom_rm_path=f"{SLIME}.reward_func")).generate(0).table
    assert (pure.reward == 0).all()
    assert (pure.advantage == 0).all()
    silenced = make_args(**common, custom_reward_post_process_path=f"{SLIME}.post_process_rewards")
    table = make_manager(silenced).generate(0).table
    assert table.reward.std() > 0
    assert (table.advantage == 0).all()
    assert load_function(f"{SLIME}.reward_func").__name__ == "reward_func"


def test_evaluations_are_not_scored(make_args: MakeArgs, make_manager: MakeManager, prompt_file: str) -> None:
    words = (
        f"--hf-checkpoint {make_args().hf_checkpoint} --prompt-data {prompt_file}@[:4] --eval-prompt-data p "
        f"{prompt_file}@[:4] --input-key messages --label-key label --apply-chat-template --num-rollout 1 "
        "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4 --eval-interval 1 "
        "--use-opd --opd-type sglang --rm-url http://127.0.0.1:9"
    )
    args = parse(words.split())
    assert len(make_manager(args).evaluate(0).tables["p"]) == 4


def serve(answer: dict[str, Any] | int, work: Any) -> None:
    """Run ``work(url)`` beside a server that always answers this."""

    async def scenario() -> None:
        async def handle(_: web.Request) -> web.Response:
            return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

        app = web.Application()
        app.add_routes([web.post("/generate", handle)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            await asyncio.to_thread(work, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    asyncio.run(scenario())


def test_a_server_that_knows_no_temperature_is_refused_where_it_matters() -> None:
    """What SGLang answers: prompt log-probs of temperature 1, and no word about it."""
    answer = {"meta_info": {"input_token_logprobs": [[None, 0, None], [-1.5, 1, None]]}}

    def work(url: str) -> None:
        Teacher(url, 1.0).ask_once()
        with pytest.raises(ValueError, match=r"scores at temperature 1, not at --rollout-temperature 0\.7"):
            Teacher(url, 0.7).ask_once()
        with pytest.raises(ValueError, match="did not score the tokens of the request"):
            asyncio.run(Teacher(url, 1.0).score([Sample(tokens=[0, 6], response_length=1)]))

    serve(answer, work)


def test_sglangs_word_for_the_last_token_of_the_vocabulary_is_taken() -> None:
    sample = Sample(tokens=[3, 112, 4], response_length=2)
    answer = {"meta_info": {"input_token_logprobs": [[None, 3, None], [-18.2, 0, None], [-0.5, 4, None]]}}
    serve(answer, lambda url: asyncio.run(Teacher(url, 1.0).score([sample])))
    assert sample.teacher_log_probs == [-18.2, -0.5]


def test_a_server_that_fails_or_refuses_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_module, "ATTEMPTS", 2)
    with pytest.raises(ValueError, match=r"--rm-url http://127.0.0.1:9/generate did not answer in 2 attempts"):
        Teacher("http://127.0.0.1:9", 1.0).ask_once()

    def work(broken: str) -> None:
        with pytest.raises(ValueError, match=r"did not answer in 2 attempts.*500"):
            Teacher(broken, 1.0).ask_once()

    serve(500, work)
    with pytest.raises(ValueError, match=r"refused the request: .*ids from 0 to"):
        asyncio.run(Teacher(url, 1.0).score([Sample(tokens=[0, 10**6], response_length=1)]))
