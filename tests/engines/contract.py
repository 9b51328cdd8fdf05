"""What every engine must do. Subclass `EngineContract`, say how your engine is made, and run it with pytest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from slimelite.engines.protocol import (
    Engine,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    Scores,
    Streaming,
    WeightBucket,
)
from slimelite.models.files import as_filed, saved_buffers
from tests.engines.tiny_models import EOS, VOCAB, build_model, greedy, log_probs, next_token_probs

T = TypeVar("T")
MAX_CONTEXT = 256
MAX_RUNNING = 8
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 50)), (3, 3, 60, 61), (11, 12), (70, 2, 8, 90, 33)]


def as_buckets(model: PreTrainedModel, size: int = 4) -> list[WeightBucket]:
    """What the model's files hold, tied weights once, ``size`` tensors a bucket."""
    named = list(as_filed(model, {**dict(model.named_parameters()), **saved_buffers(model)}).items())
    buckets = []
    for start in range(0, len(named), size):
        names, tensors = zip(*named[start : start + size], strict=True)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        buckets.append(WeightBucket(list(names), shapes, torch.cat([t.detach().flatten() for t in tensors])))
    return buckets


async def push_weights(engine: Engine, model: PreTrainedModel, version: int) -> None:
    """A whole weight update."""
    await engine.begin_weight_update(version)
    for bucket in as_buckets(model):
        await engine.load_weights(bucket)
    await engine.end_weight_update()


class EngineContract:
    """Subclasses set ``family`` and implement `make_engine`; one engine serves all tests of a class.

    ``bans_are_in_the_log_probs``: stop ids that min_new_tokens forbids have probability 0 in the reported log-probs.
    ``scores_at_any_temperature``: not at 1 alone. ``tells_kept``: see `SamplingParams.kept`.
    ``releases_memory``: it gives its memory back, on this device.
    """

    family = "qwen2"
    shape: ClassVar[dict[str, int]] = {}
    tolerance = 1e-4
    bans_are_in_the_log_probs = False
    scores_at_any_temperature = True
    tells_kept = True
    releases_memory = False

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> Engine:
        """An engine over ``folder``; ``limits``: max_running_requests and max_context_len."""
        raise AssertionError("implement make_engine")

    @classmethod
    def setup_class(cls) -> None:
        cls.temporary = TemporaryDirectory()
        folder = Path(cls.temporary.name)
        cls.model = build_model(folder / "model", cls.family, **cls.shape)
        # of the same shape, to update the engine to
        cls.other = build_model(folder / "other", cls.family, seed=1, **cls.shape)
        cls.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
        cls.loop = asyncio.new_event_loop()
        limits = {"max_running_requests": MAX_RUNNING, "max_context_len": MAX_CONTEXT}
        cls.engine = cls.make_engine(folder / "model", cls.tokenizer.decode, cls.tokenizer.encode, **limits)
        cls.info = cls.loop.run_until_complete(cls.engine.info())

    @classmethod
    def teardown_class(cls) -> None:
        cls.loop.run_until_complete(cls.engine.close())
        cls.loop.close()
        cls.temporary.cleanup()

    def run(self, work: Awaitable[T]) -> T:
        """Wait for ``work`` in the engine's event loop."""
        return self.loop.run_until_complete(asyncio.wait_for(work, 600))

    def request(self, prompt: Sequence[int], name: str = "r", key: str | None = None, position: int = 0, **params: Any):
        """A request; without max_new_tokens it is 12, and without ignore_eos it runs to that."""
        params = {"max_new_tokens": 12, "ignore_eos": True, **params}
        return GenerateRequest(name, tuple(prompt), SamplingParams(**params), key, position)

    def generate(self, *requests: GenerateRequest) -> list[GenerateResult]:
        return self.run(self.engine.generate(requests))

    def check_log_probs(self, request: GenerateRequest, result: GenerateResult, model: PreTrainedModel) -> None:
        temperature = request.params.temperature or 1.0
        expected = log_probs(model, request.input_ids, result.output_ids, temperature)
        assert len(result.log_probs) == len(result.output_ids) == len(result.weight_versions)
        assert (torch.tensor(result.log_probs) - expected).abs().max() < self.tolerance

    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1, "temperature": 0.7}])
    def test_greedy_is_the_argmax_of_the_model(self, params: dict[str, Any]) -> None:
        requests = [self.request(prompt, f"g{i}", **params) for i, prompt in enumerate(PROMPTS)]
        for request, result in zip(requests, self.generate(*requests), strict=True):
            assert result.request_id == request.request_id
            assert result.output_ids == greedy(self.model, request.input_ids, 12)
            assert result.finish_reason == "length"
            self.check_log_probs(request, result, self.model)

    def test_log_probs_are_of_the_tempered_distribution(self) -> None:
        requests = [
            self.request(prompt, f"t{i}", temperature=0.5 + 0.3 * i, max_new_tokens=5 + i, top_p=1.0 if i % 2 else 0.7)
            for i, prompt in enumerate(PROMPTS)
        ]
        for request, result in zip(requests, self.generate(*requests), strict=True):
            self.check_log_probs(request, result, self.model)

    @pytest.mark.parametrize("params", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 9}])
    def test_what_truncation_kept_is_told_and_log_probs_are_over_it(self, params: dict[str, Any]) -> None:
        if not self.tells_kept:
            pytest.skip("the engine does not claim it")
        told = SamplingParams(9, temperature=0.8, ignore_eos=True, **params).telling()
        requests = [GenerateRequest(f"k{i}", prompt, told) for i, prompt in enumerate(PROMPTS)]
        for request, result in zip(requests, self.generate(*requests), strict=True):
            assert result.kept is not None
            assert len(result.kept.counts) == 9
            with torch.no_grad():
                logits = self.model(torch.tensor([[*request.input_ids, *result.output_ids]])).logits[0, -10:-1]
            each = zip((logits / 0.8).softmax(-1), result.output_ids, result.kept.rows(), result.log_probs, strict=True)
            for probs, token, ids, said in each:
                ordered, ranked = probs.sort(descending=True)
                keep = (ordered.cumsum(0) - ordered < params.get("top_p", 1)) & (
                    torch.arange(len(ordered)) < params.get("top_k", len(ordered))
                )
                keep &= ordered >= params.get("min_p", 0) * ordered[0]
                assert set(ids) == set(ranked[keep].tolist())
                assert abs(said - (probs[token] / probs[ids].sum()).log()) < self.tolerance

    def test_many_more_requests_than_rows_of_every_length(self) -> None:
        requests = [
            self.request(PROMPTS[i % 6], f"m{i}", temperature=0.0, max_new_tokens=1 + i * 7 % 23, key=f"k{i % 6}")
            for i in range(5 * MAX_RUNNING)
        ]
        expected = {prompt: greedy(self.model, prompt, 23) for prompt in PROMPTS}
        for request, result in zip(requests, self.generate(*requests), strict=True):
            assert result.output_ids == expected[request.input_ids][: request.params.max_new_tokens]

    def test_every_request_keeps_its_own_stops_while_others_come_and_go(self) -> None:
        expected = {prompt: greedy(self.model, prompt, 20) for prompt in PROMPTS}
        requests = []
        for i in range(4 * MAX_RUNNING):
            output = expected[PROMPTS[i % 6]]
            stop = {"stop_token_ids": (output[i * 5 % 20],)} if i % 2 else {"stop": (f"w{output[i * 5 % 20]:02}",)}
            requests.append(self.request(PROMPTS[i % 6], f"s{i}", temperature=0.0, max_new_tokens=20, **stop))
        for i, (request, result) in enumerate(zip(requests, self.generate(*requests), strict=True)):
            output = expected[request.input_ids]
            assert result.output_ids == output[: output.index(output[i * 5 % 20]) + 1]
            assert result.finish_reason == "stop"

    def test_a_prefix_key_never_lends_another_prompt(self) -> None:
        requests = [self.request(prompt, f"o{i}", key="same", temperature=0.0) for i, prompt in enumerate(PROMPTS)]
        for request, result in zip(requests, self.generate(*requests), strict=True):
            assert result.output_ids == greedy(self.model, request.input_ids, 12)

    def test_a_group_shares_its_prompt_without_a_trace(self) -> None:
        prompt = PROMPTS[2]
        group = [self.request(prompt, f"p{i}", key="group", seed=i) for i in range(6)]
        shared = self.generate(*group)
        for request, result in zip(group, shared, strict=True):
            self.check_log_probs(request, result, self.model)
        if self.info.seeds:
            alone = self.generate(*[self.request(prompt, f"q{i}", seed=i) for i in range(6)])
            assert [r.output_ids for r in alone] == [r.output_ids for r in shared]
        assert len({tuple(r.output_ids) for r in shared}) > 1

    def test_a_seed_decides_its_tokens_whatever_runs_beside_it(self) -> None:
        if not self.info.seeds:
            pytest.skip("the engine does not claim seeds")
        (alone,) = self.generate(self.request(PROMPTS[0], "alone", seed=7))
        crowd = [self.request(PROMPTS[i % 6], f"c{i}", seed=100 + i, max_new_tokens=3 + i) for i in range(12)]
        among = self.generate(*crowd[:5], self.request(PROMPTS[0], "among", seed=7), *crowd[5:])[5]
        (other,) = self.generate(self.request(PROMPTS[0], "other", seed=8))
        assert alone.output_ids == among.output_ids
        assert alone.output_ids != other.output_ids

    def test_a_continued_response_goes_on_in_its_random_stream(self) -> None:
        if not self.info.seeds:
            pytest.skip("the engine does not claim seeds")
        prompt = PROMPTS[4]
        whole = self.generate(*[self.request(prompt, f"w{i}", seed=i, max_new_tokens=16) for i in range(4)])
        continued = self.generate(
            *[
                self.request(
                    (*prompt, *result.output_ids[: 3 * i]),
                    f"x{i}",
                    key="shared",
                    position=3 * i,
                    seed=i,
                    max_new_tokens=16 - 3 * i,
                )
                for i, result in enumerate(whole)
            ]
        )
        for i, (first, second) in enumerate(zip(whole, continued, strict=True)):
            assert second.output_ids == first.output_ids[3 * i :]
            assert np.allclose(second.log_probs, first.log_probs[3 * i :], atol=self.tolerance)

    def test_stop_ids_and_eos_end_a_response_and_stay_in_it(self) -> None:
        expected = greedy(self.model, PROMPTS[0], 12)
        stop_ids = (expected[6], 95)
        (result,) = self.generate(self.request(PROMPTS[0], temperature=0.0, stop_token_ids=stop_ids))
        assert result.finish_reason == "stop"
        end = next(i for i, token in enumerate(expected) if token in stop_ids)
        assert result.output_ids == expected[: end + 1]
        prompts = [(token, token + 1) for token in range(10, 40)]
        sampled = self.generate(
            *[
                self.request(p, f"e{i}", ignore_eos=False, temperature=2.0, max_new_tokens=60)
                for i, p in enumerate(prompts)
            ]
        )
        stopped = [r for r in sampled if r.finish_reason == "stop"]
        assert stopped
        assert all(r.output_ids[-1] == EOS and EOS not in r.output_ids[:-1] for r in stopped)
        assert all(EOS not in r.output_ids and len(r.output_ids) == 60 for r in sampled if r.finish_reason == "length")

    def test_the_token_that_completes_a_stop_string_is_the_last(self) -> None:
        expected = greedy(self.model, PROMPTS[5], 12)
        stop = self.tokenizer.decode(expected[4:6])
        end = next(i for i in range(12) if stop in self.tokenizer.decode(expected[: i + 1]))
        (result,) = self.generate(self.request(PROMPTS[5], temperature=0.0, stop=("never", stop)))
        assert result.finish_reason == "stop"
        assert result.output_ids == expected[: end + 1]

    def test_a_stop_string_may_begin_in_the_continued_part_but_not_in_the_prompt(self) -> None:
        expected = greedy(self.model, PROMPTS[5], 12)
        stop = self.tokenizer.decode(expected[4:6])
        ids = (*PROMPTS[5], *expected[:5])
        (continued,) = self.generate(self.request(ids, position=5, temperature=0.0, stop=(stop,), max_new_tokens=3))
        assert (continued.output_ids, continued.finish_reason) == (expected[5:6], "stop")
        (fresh,) = self.generate(self.request(ids, temperature=0.0, stop=(stop,), max_new_tokens=3))
        assert len(fresh.output_ids) > 1, "expected[4] is of the prompt here"
        assert fresh.output_ids == expected[5 : 5 + len(fresh.output_ids)]

    def test_stop_ids_are_not_drawn_before_min_new_tokens(self) -> None:
        free = greedy(self.model, PROMPTS[3], 12)
        stop = free[0]
        banned = greedy(self.model, PROMPTS[3], 4, banned=[stop])
        rest = greedy(self.model, (*PROMPTS[3], *banned), 8)
        expected = (banned + rest)[: 4 + rest.index(stop) + 1] if stop in rest else banned + rest
        request = self.request(PROMPTS[3], temperature=0.0, stop_token_ids=(stop,), min_new_tokens=4)
        (result, free_running) = self.generate(request, self.request(PROMPTS[3], "free", temperature=0.0))
        assert result.output_ids == expected
        assert free_running.output_ids == free
        if not self.bans_are_in_the_log_probs:
            self.check_log_probs(request, result, self.model)

    def test_a_request_too_long_for_the_context_is_refused_with_the_numbers(self) -> None:
        with pytest.raises(ValueError, match=rf"250.*{MAX_CONTEXT}"):
            self.generate(self.request([4] * 10, max_new_tokens=250))
        (result,) = self.generate(self.request([4] * 10, max_new_tokens=MAX_CONTEXT - 10, temperature=0.0))
        assert len(result.output_ids) == MAX_CONTEXT - 10
        self.check_log_probs(self.request([4] * 10), result, self.model)

    @pytest.mark.parametrize(
        "changes",
        [
            *(
                {"max_new_tokens": 0},
                {"max_new_tokens": 1.5},
                {"min_new_tokens": -1},
                {"position": 3},
                {"position": "1"},
            ),
            *({"temperature": t} for t in (-1.0, float("nan"), float("inf"), 1e-300, "hot", True)),
            *({"top_p": 0.0}, {"top_p": float("nan")}, {"top_k": "x"}, {"top_k": 2**70}, {"seed": "x"}, {"seed": 0.5}),
            *({"stop": ("",)}, {"stop": (5,)}, {"stop": ("\ud800",)}, {"stop_token_ids": ("x",)}, {"ignore_eos": "no"}),
        ],
        ids=str,
    )
    def test_nonsense_is_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="request r"):
            self.generate(self.request(PROMPTS[0], **changes))
        for ids in ((), (VOCAB,), (-1,), (4, "5"), (4.0,), ((4,), (4, 5)), (2**70,)):
            with pytest.raises(ValueError, match="request r"):
                self.generate(self.request(ids))

    def test_top_k_and_top_p_draw_from_their_support_in_proportion(self) -> None:
        draws = 600
        probs = next_token_probs(self.model, PROMPTS[1])
        ordered, ranked = probs.sort(descending=True)
        nucleus = int((ordered.cumsum(0) < 0.6).sum()) + 1
        for params, support in (
            ({"top_k": 3}, 3),
            ({"top_p": 0.6}, nucleus),
            ({"top_k": nucleus + 5, "top_p": 0.6}, nucleus),
            ({}, VOCAB),
        ):
            name = f"{params}"
            requests = [
                self.request(PROMPTS[1], f"{name}{i}", "one", seed=i, max_new_tokens=1, **params) for i in range(draws)
            ]
            drawn = torch.tensor([r.output_ids[0] for r in self.generate(*requests)]).bincount(minlength=VOCAB)
            expected = torch.zeros(VOCAB)
            expected[ranked[:support]] = ordered[:support] / ordered[:support].sum()
            assert drawn[expected == 0].sum() == 0, params
            # 4.5 standard deviations of each count
            limit = 4.5 * (draws * expected * (1 - expected)).sqrt() + 1
            assert ((drawn - draws * expected).abs() <= limit).all(), params

    def test_prompts_are_scored_at_a_temperature(self) -> None:
        if not self.info.scores:
            pytest.skip("the engine does not claim score")
        asked = [(1, 1.0), (12, 0.7), (29, 2.0)] if self.scores_at_any_temperature else [(1, 1.0), (12, 1.0)]

        async def scenario() -> list[Scores]:
            beside = asyncio.ensure_future(self.engine.generate([self.request(PROMPTS[0], "beside")]))
            tasks = [self.engine.score(PROMPTS[2], start, t, top=3) for start, t in asked]
            found = await asyncio.gather(*tasks)
            await beside
            return found

        for (start, t), scores in zip(asked, self.run(scenario()), strict=True):
            expected = log_probs(self.model, PROMPTS[2][:start], PROMPTS[2][start:], t)
            assert len(scores.log_probs) == len(scores.top) == 30 - start
            assert (torch.tensor(scores.log_probs) - expected).abs().max() < self.tolerance
            for position, likeliest in enumerate(scores.top, start):
                ids, found = zip(*likeliest, strict=True)
                alternatives = [log_probs(self.model, PROMPTS[2][:position], [token], t) for token in ids]
                assert (torch.tensor(found) - torch.cat(alternatives)).abs().max() < self.tolerance
                assert (len(ids), ids[0]) == (3, greedy(self.model, PROMPTS[2][:position], 1)[0])
                assert list(found) == sorted(found, reverse=True)
        wrong: list[tuple[Any, Any, Any]] = [(PROMPTS[2], 0, 1.0), (PROMPTS[2], 30, 1.0), ((VOCAB, 1), 1, 1.0)]
        wrong += [(PROMPTS[2], 1, t) for t in (0.0, float("nan"), 1e-300, "x")] + [(PROMPTS[2], "x", 1.0)]
        for ids, start, t in wrong:
            with pytest.raises(ValueError, match="score"):
                self.run(self.engine.score(ids, start, t))
        with pytest.raises(ValueError, match=f"{MAX_CONTEXT + 1}.*{MAX_CONTEXT}"):
            self.run(self.engine.score([4] * (MAX_CONTEXT + 1), 1))

    def test_a_stream_tells_of_the_tokens_while_others_are_to_come(self) -> None:
        if not isinstance(self.engine, Streaming):
            pytest.skip("the engine gives its results whole")
        expected = greedy(self.model, PROMPTS[5], 60)
        # a random model may say one token for ever, on one machine and not on another: then nothing stops it early
        last, text = max(expected, key=expected.index), self.tokenizer.decode(expected)
        if expected.index(last) < 10:
            last = min(set(range(VOCAB)) - set(expected))
        stop = self.tokenizer.decode(expected[38:40])
        if text.index(stop) < len(text) / 4:
            stop = "this does not come"

        async def scenario(**params: Any) -> tuple[list[tuple[list[int], list[float]]], GenerateResult]:
            told: list[tuple[list[int], list[float]]] = []
            request = self.request(PROMPTS[5], "told", temperature=0.0, max_new_tokens=60, **params)
            beside = asyncio.ensure_future(self.engine.generate([self.request(PROMPTS[0], "beside")]))
            try:
                result = await self.engine.stream(request, lambda *new: told.append(new))
            finally:
                await beside  # the next test may use the name, too
            return told, result

        for params in ({}, {"stop": (stop,)}, {"stop_token_ids": (last,)}):
            for _ in range(20):  # on a busy machine the listener may first hear when all tokens are there: tried again
                told, result = self.run(scenario(**params))
                assert result.output_ids == expected[: len(result.output_ids)]
                assert [token for ids, _ in told for token in ids] == result.output_ids
                assert np.allclose([one for _, found in told for one in found], result.log_probs)
                if len(told) > 1:
                    break
            assert len(told) > 1, "no try told of a token before the last was there"
        with pytest.raises(ValueError, match="request told"):
            self.run(scenario(stop=("",)))

    def test_abort_returns_what_there_is(self) -> None:
        async def scenario() -> tuple[list[GenerateResult], list[GenerateResult]]:
            first = asyncio.ensure_future(self.engine.generate([self.request(PROMPTS[0], "first", max_new_tokens=5)]))
            long = [self.request(PROMPTS[0], f"l{i}", max_new_tokens=240) for i in range(2 * MAX_RUNNING)]
            running = asyncio.ensure_future(self.engine.generate(long))
            last = [self.request(PROMPTS[2], "last", max_new_tokens=30, temperature=0.0)]
            keeping = asyncio.ensure_future(self.engine.generate(last))
            await first
            await self.engine.abort([request.request_id for request in long])
            return await running, await keeping

        # on a busy machine the first of the long ones may end, or not begin, before the abort: then it is tried again
        for _ in range(20):
            aborted, kept = self.run(scenario())
            assert kept[0].output_ids == greedy(self.model, PROMPTS[2], 30)
            if 0 < len(aborted[0].output_ids) < 240 and not aborted[-1].output_ids:
                break
        assert {result.finish_reason for result in aborted} == {"abort"}
        assert not aborted[-1].output_ids, "this one never ran"
        assert 0 < len(aborted[0].output_ids) < 240
        self.check_log_probs(self.request(PROMPTS[0]), aborted[0], self.model)
        self.run(self.engine.abort())

    def test_an_update_in_the_middle_of_a_response(self) -> None:
        for _ in range(5):  # on a busy machine, the update may come before the response or after it
            before = self.run(self.engine.info()).weight_version
            result = self.updated(before)
            old = result.weight_versions.count(before)
            if 0 < old < 240:
                break
        assert 0 < old < 240, "decoding went on during the update"
        assert result.weight_versions == [before] * old + [before + 1] * (240 - old)
        expected = torch.cat(
            (
                log_probs(self.model, PROMPTS[0], result.output_ids, 0.9)[:old],
                log_probs(self.other, PROMPTS[0], result.output_ids, 0.9)[old:],
            )
        )
        assert (torch.tensor(result.log_probs) - expected).abs().max() < self.tolerance
        (back,) = self.generate(self.request(PROMPTS[3], temperature=0.0))
        assert back.output_ids == greedy(self.model, PROMPTS[3], 12)

    def updated(self, before: int) -> GenerateResult:
        """The response to a request during which the weights were updated, for long enough to decode it to its end.
        Afterwards the engine has the model's weights again."""
        request = self.request(PROMPTS[0], max_new_tokens=240, key="k", temperature=0.9)

        async def scenario() -> GenerateResult:
            first = asyncio.ensure_future(self.engine.generate([self.request(PROMPTS[0], "first", max_new_tokens=5)]))
            running = asyncio.ensure_future(self.engine.generate([request]))
            await first
            await self.engine.begin_weight_update(before + 1)
            await asyncio.wait([running], timeout=0.3)
            for bucket in as_buckets(self.other):
                await self.engine.load_weights(bucket)
            await self.engine.end_weight_update()
            return (await running)[0]

        try:
            result = self.run(scenario())
            (fresh,) = self.generate(self.request(PROMPTS[3], temperature=0.0))
            assert fresh.output_ids == greedy(self.other, PROMPTS[3], 12)
            assert set(fresh.weight_versions) == {before + 1}
            return result
        finally:
            self.run(push_weights(self.engine, self.model, before + 2))

    def test_an_incomplete_or_wrong_update_is_refused(self) -> None:
        version = self.run(self.engine.info()).weight_version
        buckets = as_buckets(self.model)
        with pytest.raises(ValueError, match="begin_weight_update"):
            self.run(self.engine.load_weights(buckets[0]))
        self.run(self.engine.begin_weight_update(version + 1))
        for bucket in buckets[1:]:
            self.run(self.engine.load_weights(bucket))
        with pytest.raises(ValueError, match=buckets[0].names[0]):
            self.run(self.engine.end_weight_update())
        assert self.run(self.engine.info()).weight_version == version
        with pytest.raises(ValueError, match="no_such"):
            self.run(self.engine.load_weights(WeightBucket(["no_such.weight"], [(2,)], torch.ones(2))))
        with pytest.raises(ValueError, match=r"\(2,\)"):
            self.run(self.engine.load_weights(WeightBucket([buckets[0].names[0]], [(2,)], torch.ones(2))))
        self.run(self.engine.load_weights(buckets[0]))
        self.run(self.engine.end_weight_update())
        (result,) = self.generate(self.request(PROMPTS[3], temperature=0.0))
        assert result.output_ids == greedy(self.model, PROMPTS[3], 12)
        assert set(result.weight_versions) == {version + 1}

    def test_released_memory_comes_back(self) -> None:
        if not self.releases_memory:
            pytest.skip("the engine keeps its memory, or has none to give")

        async def scenario() -> list[GenerateResult]:
            await self.engine.release_memory(["kv_cache", "weights"])
            waiting = asyncio.ensure_future(self.engine.generate([self.request(PROMPTS[3], temperature=0.0)]))
            done, _ = await asyncio.wait([waiting], timeout=0.1)
            assert not done
            await self.engine.resume_memory(["weights"])
            await push_weights(self.engine, self.model, 50)
            await self.engine.resume_memory(["kv_cache"])
            return await waiting

        assert self.run(scenario())[0].output_ids == greedy(self.model, PROMPTS[3], 12)
        with pytest.raises(ValueError, match="unknown memory tags"):
            self.run(self.engine.release_memory(["everything"]))
