"""Keys and values in memory: taken when used, shared by what begins alike, and never mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.embedded.attention import causal_attention
from slimelite.engines.embedded.memory import KVMemory, Place, class_length
from slimelite.engines.embedded.model import Decoder, DecoderShape
from slimelite.engines.embedded.prefixes import Node, PrefixTree
from slimelite.engines.embedded.rows import Running
from slimelite.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from tests.engines.contract import push_weights
from tests.engines.tiny_models import VOCAB, build_model, log_probs

SMALL = DecoderShape(VOCAB, 8, 2, 2, 1, 4, 8, 1e-6, True, False, False, False, False)


def memory(tokens: int) -> KVMemory:
    return KVMemory(SMALL, tokens, torch.device("cpu"), torch.float32)


def sequence(length: int = 1, **params: Any) -> Running:
    request = GenerateRequest("r", (1,) * length, SamplingParams(8, **params))
    return Running(request, 0, (), np.ones(length, np.int64))


def test_classes_grow_by_half_at_most() -> None:
    lengths = [class_length(tokens) for tokens in range(1, 5000)]
    assert all(length >= tokens for tokens, length in enumerate(lengths, 1))
    distinct = sorted(set(lengths))
    assert distinct[0] == 64
    assert all(b <= 1.5 * a for a, b in pairwise(distinct))


def test_rows_keep_their_content_when_others_come_and_go() -> None:
    random, kv = np.random.default_rng(0), memory(100 * 64)
    slab = kv.slab(64)
    expected: dict[Place, float] = {}
    for turn in range(40):
        coming = [Place() for _ in range(random.integers(1, 9))]
        for row, place in zip(coming, range(*slab.extend(coming).indices(1000)), strict=True):
            expected[row] = float(turn * 100 + place)
            for layer in range(SMALL.num_layers):
                row.at(layer)[:] = expected[row] + layer
        leaving = random.choice(len(slab.rows), random.integers(0, len(slab.rows)), replace=False).tolist()
        for row in [slab.rows[slot] for slot in leaving]:
            del expected[row]
        slab.remove(leaving)
        assert set(slab.rows) == set(expected)
        for row, value in expected.items():
            assert all((row.at(layer) == value + layer).all() for layer in range(SMALL.num_layers))
        assert kv.slab_tokens == slab.capacity * 64 <= 2 * 64 * len(slab.rows)
    slab.remove(range(len(slab.rows)))
    assert (kv.slab_tokens, kv.slabs) == (0, {})


def test_the_tree_finds_the_longest_prefix_and_forgets_the_oldest() -> None:
    """Keys and values are the tokens and positions here, so that any mix-up shows."""
    random, kv = np.random.default_rng(0), memory(300)
    tree = PrefixTree(kv)
    known: list[np.ndarray] = []

    def content(leaf: Node) -> np.ndarray:
        parts = [node.at(0)[0, 0, :, 0] for node in leaf.path()]
        return torch.cat(parts).numpy() if parts else np.zeros(0)

    for _ in range(300):
        tokens = random.integers(0, 2, random.integers(1, 40))
        leaf = tree.match(tokens)
        assert (content(leaf) == tokens[: leaf.end] + 2.0 * np.arange(leaf.end)).all()
        common = [np.append(k[: len(tokens)] == tokens[: len(k)], False).argmin() for k in known]
        assert leaf.end <= max(common, default=0)
        tree.use(leaf)
        evicted = False
        while kv.free < len(tokens) - leaf.end:
            evicted = tree.evict()
            assert evicted
        segment = kv.segment(len(tokens) - leaf.end)
        segment[:] = torch.from_numpy(tokens + 2.0 * np.arange(len(tokens)))[leaf.end :, None]
        end = tree.add(tokens, segment, leaf.end, leaf)
        tree.leave(leaf)
        assert (content(end) == tokens + 2.0 * np.arange(len(tokens))).all()
        known.append(tokens)
        again = tree.match(tokens)
        assert again.end == len(tokens), "the newest is there"
        assert kv.segment_tokens == tree.idle_tokens <= 300
    while tree.evict():
        pass
    assert kv.segment_tokens == tree.idle_tokens == 0
    assert not tree.root.children


@pytest.mark.parametrize("tokens", [1, 64, 65, 200])
@pytest.mark.parametrize("groups", [1, 3])
def test_causal_attention_is_that_of_pytorch(tokens: int, groups: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, tokens, 16, dtype=torch.float64) for heads in (2 * groups, 2, 2))
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    # prefill hands views over, whose tokens are not next to each other
    apart = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    torch.testing.assert_close(causal_attention(*apart), plain, rtol=0, atol=1e-12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_model(tmp_path, max_position_embeddings=16384)
    return tmp_path


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(tokens, whether it was a prefill) of each forward pass."""
    calls: list[tuple[int, bool]] = []
    forward = Decoder.forward

    def counting(self: Decoder, tokens: torch.Tensor, *args: Any, cache_only: bool = False) -> torch.Tensor:
        calls.append((len(tokens), cache_only))
        return forward(self, tokens, *args, cache_only=cache_only)

    monkeypatch.setattr(Decoder, "forward", counting)
    return calls


def total(calls: list[tuple[int, bool]]) -> int:
    return sum(tokens for tokens, prefill in calls if prefill)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 600))


def ask(name: str, prompt: list[int], count: int, **params: Any) -> GenerateRequest:
    params = {"seed": sum(map(ord, name)), "ignore_eos": True, **params}
    return GenerateRequest(name, tuple(prompt), SamplingParams(count, **params))


def check(model: PreTrainedModel, requests: list[GenerateRequest], results: list[GenerateResult]) -> None:
    for request, result in zip(requests, results, strict=True):
        assert len(result.output_ids) == request.params.max_new_tokens
        expected = log_probs(model, request.input_ids, result.output_ids)
        assert (torch.tensor(result.log_probs) - expected).abs().max() < 2e-4


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, count).tolist()


@pytest.mark.parametrize("tokens", [None, 1500])
def test_rows_of_every_length_with_every_kind_of_prefix(tmp_path: Path, tokens: int | None) -> None:
    """Groups whose prompt is read by reference or copied, a header of different prompts, a long tail, rows that grow.

    With 1,500 tokens of cache rows give their memory back and are computed again.
    """
    model = build_model(tmp_path)
    header = words(0, 150)
    requests = [
        *(ask(f"a{i}", [*words(1, 200)], 5 + i) for i in range(4)),
        *(ask(f"b{i}", words(2, 30), 80 - i) for i in range(3)),
        *(ask(f"c{i}", [*header, *words(10 + i, 20)], 40) for i in range(3)),
        *(ask(f"d{i}", [*header, *words(20, 140)], 30) for i in range(3)),
        ask("e", words(3, 1100), 20),
        ask("f", [7], 140),
    ]

    async def scenario() -> None:
        engine = EmbeddedEngine(str(tmp_path), max_context_len=1200, kv_cache_tokens=tokens)
        check(model, requests, results := await engine.generate(requests))
        # the cache is warm now: the same tokens again, and each alone
        assert [r.output_ids for r in await engine.generate(requests)] == [r.output_ids for r in results]
        for request, result in zip(requests[:12:4], results[:12:4], strict=True):
            (alone,) = await engine.generate([request])
            assert alone.output_ids == result.output_ids
        await engine.close()

    run(scenario())


def test_short_answers_with_a_large_limit_take_little_memory(folder: Path) -> None:
    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_running_requests=256, max_context_len=8232)
        held = [0]
        step = engine._scheduler.step

        def counting() -> None:
            step()
            kv = engine._scheduler._memory
            held.append(kv.slab_tokens + kv.segment_tokens)

        engine._scheduler.step = counting  # type: ignore[method-assign]
        stops = tuple(range(2, 40))
        requests = [ask(f"{i}", words(i, 40), 8192, stop_token_ids=stops) for i in range(256)]
        results = await engine.generate(requests)
        used = sum(40 + len(result.output_ids) for result in results)
        assert 256 * 40 < used < max(held) < 2 * used, "8,192 tokens a row would be 200 times as much"
        assert len(engine._scheduler.rows.tokens[0]) < 1024
        await engine.close()

    run(scenario())


def test_ten_turns_of_eight_conversations_prefill_each_token_once(
    folder: Path, prefilled: list[tuple[int, bool]]
) -> None:
    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_context_len=4096)
        talks = [words(i, 200) for i in range(8)]
        for turn in range(10):
            requests = [ask(f"{turn}-{i}", talk, 66) for i, talk in enumerate(talks)]
            results = await engine.generate(requests)
            if turn:
                # all but the last token of the response, which was sampled but never fed, and what the user adds
                assert [r.cached_tokens for r in results] == [len(talk) - 21 for talk in talks]
            talks = [
                [*talk, *result.output_ids, *words(100 * turn + i, 20)]
                for i, (talk, result) in enumerate(zip(talks, results, strict=True))
            ]
        await engine.close()
        assert total(prefilled) <= sum(len(talk) for talk in talks) - 8 * 10 * 65

    run(scenario())


def test_a_header_of_many_prompts_is_prefilled_once(folder: Path, prefilled: list[tuple[int, bool]]) -> None:
    header = words(0, 300)

    async def scenario() -> list[GenerateResult]:
        engine = EmbeddedEngine(str(folder))
        requests = [ask(f"{p}-{i}", [*header, p, *words(p, 30)], 4) for p in range(5) for i in range(4)]
        results: list[GenerateResult] = await engine.generate(requests)
        await push_weights(engine, build_model(folder / "other", max_position_embeddings=16384), 1)
        # a new weight version begins with an empty cache
        (fresh,) = await engine.generate([ask("fresh", header, 1)])
        assert fresh.cached_tokens == 0
        await engine.close()
        return results

    results = run(scenario())
    assert total(prefilled) == 300 + 5 * 30 + 299
    assert sum(r.cached_tokens for r in results) == 20 * 330 - 300 - 5 * 30


def test_a_long_prompt_does_not_stop_the_others(folder: Path, prefilled: list[tuple[int, bool]]) -> None:
    async def scenario() -> list[str]:
        engine = EmbeddedEngine(str(folder))
        ended: list[str] = []

        async def one(request: GenerateRequest) -> None:
            await engine.generate([request])
            ended.append(request.request_id)

        long, short = ask("long", words(0, 12000), 1), ask("short", words(1, 40), 4)
        await asyncio.gather(one(long), one(short))
        await engine.close()
        return ended

    assert run(scenario()) == ["short", "long"]
    chunks = [tokens for tokens, prefill in prefilled if prefill and tokens > 40]
    assert max(chunks) <= 1024
    assert sum(chunks) >= 11999
    first, last = (index for index, call in enumerate(prefilled) if call == (1, False)), len(prefilled)
    assert next(first) < last / 2, "the short one decodes before the long prompt is half done"


def test_the_cache_stays_within_its_size(folder: Path) -> None:
    model = build_model(folder, max_position_embeddings=16384)

    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_context_len=500, kv_cache_tokens=1200)
        kv, most = engine._scheduler._memory, [0]
        step = engine._scheduler.step

        def counting() -> None:
            step()
            most.append(kv.slab_tokens + kv.segment_tokens)

        engine._scheduler.step = counting  # type: ignore[method-assign]
        for turn in range(3):
            requests = [ask(f"{turn}-{i}", words(10 * turn + i, 180), 70) for i in range(6)]
            check(model, requests, await engine.generate(requests))
        assert 800 < max(most) <= 1200
        await engine.close()

    run(scenario())


def test_an_aborted_prefill_leaves_its_followers_to_others(folder: Path) -> None:
    model = build_model(folder, max_position_embeddings=16384)

    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder))
        requests = [ask(f"{i}", words(0, 9000), 3) for i in range(3)]
        calls = [asyncio.ensure_future(engine.generate([request])) for request in requests]
        while not engine._scheduler._fills:
            await asyncio.sleep(0)
        await engine.abort(["0"])
        ((first,), *others) = await asyncio.gather(*calls)
        assert (first.finish_reason, first.output_ids) == ("abort", [])
        check(model, requests[1:], [result for (result,) in others])
        await engine.abort()
        assert not engine._scheduler.has_work
        await engine.close()

    run(scenario())


async def parted(folder: Path, coming: list[GenerateRequest]) -> None:
    """Three rows read a prompt of 300 tokens by reference while ``coming`` arrive."""
    model = build_model(folder, max_position_embeddings=16384)
    engine = EmbeddedEngine(str(folder))
    group, arrived = [ask(f"g{i}", words(0, 300), 60) for i in range(3)], asyncio.Event()
    loop, step = asyncio.get_running_loop(), engine._scheduler.step

    def noting() -> None:
        step()
        if len(engine._scheduler.rows) == 3:
            engine._scheduler.step = step  # type: ignore[method-assign]
            asyncio.run_coroutine_threadsafe(come(), loop).result()

    async def come() -> None:
        others.append(asyncio.ensure_future(engine.generate(coming)))
        loop.call_later(0.01, arrived.set)

    others: list[asyncio.Future[list[GenerateResult]]] = []
    engine._scheduler.step = noting  # type: ignore[method-assign]
    results = await engine.generate(group)
    await arrived.wait()
    check(model, [*group, *coming], [*results, *await others[0]])
    await engine.close()


def test_a_prefix_that_rows_read_is_split_by_a_prompt_that_takes_several_steps(folder: Path) -> None:
    run(parted(folder, [ask("long", [*words(0, 150), *words(5, 6000)], 3)]))


def test_a_prefix_is_split_by_a_request_that_is_prefilled_together(folder: Path) -> None:
    """The second request parts from the group earlier than the first, whose prefill has been picked by then."""
    run(parted(folder, [ask("late", [*words(0, 280), *words(6, 30)], 5), ask("soon", [*words(0, 90), 2, 3], 5)]))


def test_a_row_moves_into_the_place_that_its_preemption_has_emptied(folder: Path) -> None:
    """The last row is the only one of the next class, whose slab is dropped with it, and row b moves there."""
    model = build_model(folder, max_position_embeddings=16384)

    async def scenario() -> None:
        engine = EmbeddedEngine(str(folder), max_context_len=300, kv_cache_tokens=300)
        kv = engine._scheduler._memory
        requests = [ask("a", words(0, 20), 42), ask("b", words(1, 40), 50), ask("c", words(2, 70), 60)]
        check(model, requests, await engine.generate(requests))
        await engine.abort([])  # a job of the worker: it runs when the step that gave the results is over
        while engine._scheduler.prefixes.evict():
            pass
        assert (kv.slab_tokens, kv.segment_tokens) == (0, 0)
        await engine.close()

    run(scenario())


def test_what_the_config_says_is_what_the_memory_holds(folder: Path) -> None:
    shape = DecoderShape.from_config(AutoConfig.from_pretrained(folder))
    kv = KVMemory(shape, 100, torch.device("cpu"), torch.float32)
    assert kv.segment(7).shape == (shape.num_layers, 2, shape.num_kv_heads, 7, shape.head_dim)
    assert kv.free == 93
