"""The contract of engines, kept by the embedded one, and what only it promises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel, T5Config

from slimelite.arguments.parse import import_files
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.embedded.model import Decoder, not_fast
from slimelite.engines.embedded.sampler import Scoring
from slimelite.engines.protocol import GenerateRequest, GenerateResult, SamplingParams, WeightBucket
from slimelite.models.families import FAMILIES
from tests.engines.contract import EngineContract, as_buckets
from tests.engines.tiny_models import EOS, VOCAB, build_model, greedy, log_probs

EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class EmbeddedContract(EngineContract):
    releases_memory = True

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> EmbeddedEngine:
        return EmbeddedEngine(str(folder), decode=decode, encode=encode, **limits)


class TestQwen2(EmbeddedContract):
    family = "qwen2"


class TestLlama(EmbeddedContract):
    family = "llama"


@pytest.mark.newest
class TestQwen3MoE(EmbeddedContract):
    """A layer of experts, and one of Qwen3."""

    family = "qwen3_moe"
    shape: ClassVar[dict[str, Any]] = {**EXPERTS, "mlp_only_layers": [1]}


class TestSmallCache(EmbeddedContract):
    """Room for two whole contexts: rows wait for positions, and their length changes under way."""

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> EmbeddedEngine:
        return EmbeddedEngine(str(folder), decode=decode, encode=encode, kv_cache_tokens=528, **limits)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_model(tmp_path)
    return tmp_path


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 600))


def serve(folder: Path, requests: list[GenerateRequest], **options: Any) -> list[GenerateResult]:
    """Generate with an engine that lives for this call."""

    async def scenario() -> list[GenerateResult]:
        engine = EmbeddedEngine(str(folder), **options)
        try:
            return await engine.generate(requests)
        finally:
            await engine.close()

    return run(scenario())


def group(prompt: tuple[int, ...], samples: int, **params: Any) -> list[GenerateRequest]:
    params = {"max_new_tokens": 10, "ignore_eos": True, **params}
    name = f"{prompt[:3]}-{len(prompt)}"
    return [
        GenerateRequest(f"{name}-{i}", prompt, SamplingParams(seed=i, **params), prefix_key=name)
        for i in range(samples)
    ]


def check(model: PreTrainedModel, requests: list[GenerateRequest], results: list[GenerateResult], tol: float) -> None:
    for request, result in zip(requests, results, strict=True):
        expected = log_probs(model, request.input_ids, result.output_ids)
        assert (torch.tensor(result.log_probs) - expected).abs().max() < tol


@pytest.mark.newest
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
        ("qwen3", {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 16}),
        ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "num_experts_per_tok": 4}),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)
def test_variants_of_the_architectures(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = build_model(tmp_path, family, **changes)
    requests = group(tuple(range(2, 40)), 3)
    results = serve(tmp_path, requests)
    check(model, requests, results, 1e-4)
    assert len(model.state_dict()) > len(dict(model.named_parameters())) or not model.config.tie_word_embeddings


@pytest.mark.newest
def test_a_family_of_a_users_own_file_has_the_fast_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tmp_path / "right", "mistral", sliding_window=None, tie_word_embeddings=False)
    windows = build_model(tmp_path / "windows", "mistral", sliding_window=8)
    monkeypatch.setitem(FAMILIES, "mistral", None)  # it is gone after the test
    del FAMILIES["mistral"]
    file = tmp_path / "mine.py"
    file.write_text(
        "from slimelite.models.families import FAMILIES, Family\n"
        "FAMILIES.add(Family('mistral', 'MistralForCausalLM', embedded=True))\n"
    )
    requests = group(tuple(range(2, 40)), 3)
    check(model, requests, serve(tmp_path / "right", requests), 1e-4)
    assert not_fast(model.config) == "model_type 'mistral'"
    import_files([str(file)])
    check(model, requests, serve(tmp_path / "right", requests), 1e-4)
    assert not_fast(model.config) == ""
    check(windows, requests, serve(tmp_path / "windows", requests), 1e-4)
    assert not_fast(windows.config) == "sliding-window attention"


@pytest.mark.newest
def test_bf16_uses_fused_attention_and_stays_close(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    requests = group((4, 5, 6, 7), 8, max_new_tokens=30)
    results = serve(folder, requests, dtype=torch.bfloat16)
    differences = [
        (torch.tensor(result.log_probs) - log_probs(model.float(), request.input_ids, result.output_ids)).abs().mean()
        for request, result in zip(requests, results, strict=True)
    ]
    assert max(differences) < 0.1


def test_prompts_longer_than_one_prefill_call(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    long = tuple(2 + i * i % 90 for i in range(1200))
    requests = [*group(long, 2), *group(long[:1030], 1), *group((3, 4), 2), *group(long[:300], 2), *group((9,), 2)]
    check(model, requests, serve(folder, requests), 2e-4)


def test_a_groups_prompt_is_prefilled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled: list[int] = []
    forward = Decoder.forward

    def counting(self: Decoder, tokens: torch.Tensor, *args: Any, cache_only: bool = False) -> torch.Tensor:
        if cache_only:
            prefilled.append(len(tokens))
        return forward(self, tokens, *args, cache_only=cache_only)

    monkeypatch.setattr(Decoder, "forward", counting)
    requests = [*group(tuple(range(10, 40)), 8), *group((3, 4, 5), 8, max_new_tokens=30)]
    # the groups do not fit together: the second's later members find their prompt in a row that runs
    results = serve(folder, requests, max_running_requests=12)
    assert sum(prefilled) == 29 + 2
    assert [r.cached_tokens for r in results] == [0, *[29] * 7, 0, *[2] * 7]
    prefilled.clear()
    serve(folder, [GenerateRequest(str(i), (7, 8, 9), SamplingParams(4)) for i in range(5)])
    assert sum(prefilled) == 2, "equal prompts are prefilled once, with or without a key"


def test_the_same_call_on_an_idle_engine_is_bit_identical(folder: Path) -> None:
    requests = [
        r for p in range(6) for r in group(tuple(range(p, 4 * p + 3)), 5, max_new_tokens=5 + p, temperature=0.8)
    ]

    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_running_requests=7, repeatable=True)
        first = await engine.generate(requests)
        # what is cached now ends the prompts of `requests` at other places and was computed in other batches
        longer = [replace(r, request_id=f"w{i}", input_ids=(*r.input_ids, 90 + i % 5)) for i, r in enumerate(requests)]
        await asyncio.gather(*(engine.generate([r]) for r in (*group((40, 41), 9), *longer)))
        assert await engine.generate(requests) == first
        await engine.close()

    run(scenario())


def test_a_request_without_a_seed_is_not_repeated(folder: Path) -> None:
    requests = [GenerateRequest(str(i), (5, 6), SamplingParams(8)) for i in range(12)]
    results = serve(folder, requests, seed=3)
    assert len({tuple(r.output_ids) for r in results}) == 12
    assert serve(folder, requests, seed=3) == results


def test_not_finite_logits_reach_every_caller_and_leave_nothing_behind(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    broken = [
        WeightBucket(bucket.names, bucket.shapes, torch.full_like(bucket.flat, torch.nan))
        for bucket in as_buckets(model)
    ]

    async def update(engine: EmbeddedEngine, buckets: list[WeightBucket], version: int) -> None:
        await engine.begin_weight_update(version)
        for bucket in buckets:
            await engine.load_weights(bucket)
        await engine.end_weight_update()

    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_running_requests=2)
        await update(engine, broken, 1)
        calls = [engine.generate(group((p, p + 1), 2)) for p in range(4)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, RuntimeError)
            assert "not finite" in str(outcome)
        await update(engine, as_buckets(model), 2)
        requests = group((4, 5, 6), 2)
        check(model, requests, await engine.generate(requests), 1e-4)
        await engine.close()

    run(scenario())


def test_cancelling_a_call_frees_its_rows(folder: Path) -> None:
    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_running_requests=2, max_context_len=1000)
        call = asyncio.ensure_future(engine.generate(group((4, 5), 6, max_new_tokens=900)))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        (result,) = await engine.generate(group((4, 5), 1, max_new_tokens=3))
        assert len(result.output_ids) == 3
        assert engine._scheduler.request_ids() <= {r.request_id for r in group((4, 5), 1)}
        await engine.close()

    run(scenario())


def test_memory_released_under_running_requests_is_recomputed(folder: Path) -> None:
    requests = group((4, 5, 6), 6, max_new_tokens=600)
    expected = serve(folder, requests, max_running_requests=3)

    async def scenario() -> list[GenerateResult]:
        engine = EmbeddedEngine(str(folder), max_running_requests=3)
        call = asyncio.ensure_future(engine.generate(requests))
        while not engine._scheduler.rows.sequences:
            await asyncio.sleep(0)
        await engine.release_memory(["kv_cache"])
        await engine.abort([requests[1].request_id])
        await engine.resume_memory(["kv_cache"])
        results = await call
        await engine.close()
        return results

    for index, (result, whole) in enumerate(zip(run(scenario()), expected, strict=True)):
        assert result.finish_reason == ("abort" if index == 1 else "length")
        assert result.output_ids == whole.output_ids[: len(result.output_ids)]


def test_ids_must_be_unique_and_a_closed_engine_says_so(folder: Path) -> None:
    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_context_len=1000)
        with pytest.raises(ValueError, match="unique"):
            await engine.generate([*group((4, 5), 2), *group((4, 5), 1)])
        assert await engine.generate([]) == []
        running = asyncio.ensure_future(engine.generate(group((4, 5), 2, max_new_tokens=900)))
        while not engine._scheduler.request_ids():
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="unique"):
            await engine.generate(group((4, 5), 1))
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await running
        with pytest.raises(RuntimeError, match="closed"):
            await engine.generate(group((4, 5), 1))
        await engine.close()

    run(scenario())


@pytest.mark.newest
def test_a_config_without_weights_gives_seeded_random_ones(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "slimelite")
    (folder / "model.safetensors").unlink()
    requests = group((4, 5, 6), 2)
    first, again, other = (serve(folder, requests, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert "the weights are random (seed 2) until a trainer sends some" in caplog.text
    ours = [r for r in caplog.records if r.name.startswith("slimelite")]
    assert not [r for r in ours if r.levelno > logging.INFO], "the trainer's weights take their place in a run"


@pytest.mark.newest
def test_eos_comes_from_the_generation_config_too(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    stop = greedy(model, (4, 5, 6), 4)[3]
    requests = group((4, 5, 6), 1, temperature=0.0, ignore_eos=False, max_new_tokens=50)
    model.generation_config.eos_token_id = [EOS, stop]
    model.generation_config.save_pretrained(folder)
    (result,) = serve(folder, requests)
    assert (result.finish_reason, result.output_ids[-1]) == ("stop", stop)
    (result,) = serve(folder, requests, eos_token_ids=[])
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma", {}, "model_type 'gemma'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
            "sliding-window attention",
        ),
    ],
)
def test_what_the_fast_path_does_not_compute_the_generic_one_does(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    model = build_model(tmp_path, family, **changes)
    assert not_fast(model.config).startswith(reason)
    requests = group(tuple(range(2, 40)), 3)
    check(model, requests, serve(tmp_path, requests), 1e-4)


@pytest.mark.newest
def test_encoders_and_impossible_limits_are_refused(tmp_path: Path, folder: Path) -> None:
    BertConfig(vocab_size=VOCAB).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="bert: its tokens attend to later tokens; use --rollout-b"):
        EmbeddedEngine(str(tmp_path / "bert"))
    T5Config(vocab_size=VOCAB).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="t5: it is an encoder–decoder"):
        EmbeddedEngine(str(tmp_path / "t5"))
    with pytest.raises(ValueError, match="512 tokens does not fit a KV cache of 100"):
        EmbeddedEngine(str(folder), max_context_len=512, kv_cache_tokens=100)


def test_stop_strings_need_a_decode_function(folder: Path) -> None:
    with pytest.raises(ValueError, match="decode function"):
        serve(folder, group((4, 5), 1, stop=("x",)))


def test_a_score_that_fails_fails_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[float]:
        raise MemoryError("logits")

    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_running_requests=2)
        monkeypatch.setattr(Scoring, "read", fails)
        beside = asyncio.ensure_future(engine.generate(group((4, 5), 2, max_new_tokens=40)))
        with pytest.raises(MemoryError, match="logits"):
            await engine.score((4, 5), 1)
        assert all(result.output_ids for result in await beside)
        await engine.close()

    run(scenario())


def test_scores_of_one_moment_share_what_they_begin_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question's choices cost its tokens once, and are scored as one by one."""
    question, choices = list(range(4, 40)), [[7], [8, 9, 10, 11], [12, 13], [8, 9]]
    asked = [([*question, *choice], len(question)) for choice in choices] + [(question, 5), ([4, 5, 6], 1)]
    passes: list[int] = []

    async def scenario() -> None:
        engine, forward = EmbeddedEngine(str(folder)), Decoder.forward
        counted = lambda self, tokens, *a, **k: (passes.append(len(tokens)), forward(self, tokens, *a, **k))[1]  # noqa: E731
        monkeypatch.setattr(Decoder, "forward", counted)
        together = await asyncio.gather(*(engine.score(ids, start, top=2) for ids, start in asked))
        assert sorted(passes) == sorted([36 + 1 + 4 + 2 + 2, 36, 3])
        for scores, (ids, start) in zip(together, asked, strict=True):
            alone = await engine.score(ids, start, top=2)
            assert scores.log_probs == pytest.approx(alone.log_probs, abs=1e-5)
            assert [[token for token, _ in row] for row in scores.top] == [
                [token for token, _ in row] for row in alone.top
            ]
        await engine.close()

    run(scenario())


def test_calls_of_one_moment_are_admitted_together_and_answered_by_one_wake_up_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with the rows of the first call alone costs as much as one with all of them."""
    events: list[str] = []

    async def scenario() -> list[list[GenerateResult]]:
        engine, loop = EmbeddedEngine(str(folder)), asyncio.get_running_loop()
        submit, step, wake = engine._submit, engine._step, loop.call_soon_threadsafe
        monkeypatch.setattr(engine, "_submit", lambda requests: (events.append("submit"), submit(requests))[1])
        monkeypatch.setattr(engine, "_step", lambda: (events.append("step"), step())[1])
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a, **k: (events.append("wake"), wake(*a, **k))[1])
        try:
            groups = [group((5, 6, number), 4) for number in range(8)]
            return list(await asyncio.gather(*map(engine.generate, groups)))
        finally:
            monkeypatch.undo()
            await engine.close()

    results = run(scenario())
    assert events[:9] == ["submit"] * 8 + ["step"]
    assert events.count("wake") == 8
    apart = [result for number in range(8) for result in serve(folder, group((5, 6, number), 4))]
    assert [r.output_ids for r in apart] == [r.output_ids for answers in results for r in answers]


def test_a_call_that_the_engine_refuses_leaves_the_others_of_its_moment_alone(folder: Path) -> None:
    async def scenario() -> list[list[GenerateResult] | BaseException]:
        engine = EmbeddedEngine(str(folder))
        try:
            return await asyncio.gather(
                *(engine.generate(group((5, 6), 2)) for _ in range(2)), engine.generate([]), return_exceptions=True
            )
        finally:
            await engine.close()

    served, refused, empty = run(scenario())
    assert [len(r.output_ids) for r in served] == [10, 10]
    assert isinstance(refused, ValueError), "both calls have the same request ids"
    assert empty == []
