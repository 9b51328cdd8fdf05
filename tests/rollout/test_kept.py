"""What top-p, top-k and min-p kept: asked for where tokens are trained on, and there alone."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest

from slimelite.arguments import EvalDataset
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.params import MOST_KEPT
from slimelite.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from slimelite.rollout.manager import RolloutManager
from slimelite.slime.plugins import install_finder
from tests.rollout.conftest import MakeArgs, MakeManager
from tests.rollout.scripted import ScriptedEngine

POSTS, TALK, ADAPTER = (
    "slime.rollout.sglang_rollout.generate",
    "tests.rollout.plugins.agents.talk",
    "tests.rollout.plugins.slime_agent.generate",
)


@pytest.fixture
def seen(http_engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters that reach an engine which refuses what SGLang's scheduler refuses."""
    reached: list[SamplingParams] = []
    answer = http_engine.generate

    async def generate(requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        for request in requests:
            reached.append(request.params)
            if request.params.kept and not 1 <= request.params.top_k <= 4096:
                raise ValueError(f"return_sampling_mask requires finite 1 < top_k <= 4096; got {request.params.top_k}")
        return await answer(requests)

    monkeypatch.setattr(http_engine, "generate", generate)
    install_finder()
    return reached


@pytest.mark.parametrize("insists", [False, True])
@pytest.mark.parametrize("path", [POSTS, TALK, ADAPTER])
def test_an_evaluation_asks_for_nothing_that_training_needs(
    make_args: MakeArgs,
    make_manager: MakeManager,
    http_engine: EmbeddedEngine,
    seen: list[SamplingParams],
    prompt_file: str,
    path: str,
    insists: bool,
) -> None:
    args = make_args(
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_top_p=0.9,
        custom_generate_function_path=path,
        allow_truncated_sampling=insists,
        eval_datasets=(
            EvalDataset(
                name="e",
                path=prompt_file,
                input_key="messages",
                label_key="label",
                apply_chat_template=True,
                max_response_len=4,
                top_p=0.9,
                custom_generate_function_path=path,
            ),
        ),
    )
    manager: RolloutManager = make_manager(args, [http_engine])
    try:
        table = manager.generate(0).table
        trained = len(seen)
        assert {(params.tells, params.top_k) for params in seen} == {(not insists, -1 if insists else MOST_KEPT)}
        assert (table.kept_ids is None) == insists
        assert manager.evaluate(0).metrics
        assert {(params.kept, params.top_k) for params in seen[trained:]} == {(False, -1)}
    finally:
        if path == ADAPTER:
            importlib.import_module("tests.rollout.plugins.slime_agent").end()


def test_an_agent_that_truncates_is_refused_where_nobody_tells_what_was_kept(
    make_args: MakeArgs, make_manager: MakeManager
) -> None:
    question, params = [{"role": "user", "content": "2+3=?"}], SamplingParams(4, top_p=0.9)

    def reply(**settings: bool) -> list[int]:
        manager = make_manager(make_args(rollout_backend="vllm", **settings), [ScriptedEngine()])
        session = manager._context.sessions().open("agent")
        return manager._thread.run(session.chat(question, params=params)).output_ids

    with pytest.raises(ValueError, match=r"top_p: this engine does not report .*--allow-truncated-sampling"):
        reply()
    assert len(reply(allow_truncated_sampling=True)) == 4
