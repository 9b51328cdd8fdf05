"""SGLang's HTTP interface over a real engine, spoken to by a real client."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.http_front import parse_sampling_params
from slimelite.engines.in_process import HttpFront
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from tests.engines.contract import as_buckets
from tests.engines.tiny_models import build_model, greedy, log_probs

Post = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]
PROMPT = [5, 6, 7]
# what slime's rollout sends
SLIME_PARAMS = {
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 12,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def served(folder: Path, scenario: Callable[[EmbeddedEngine, str, Post], Awaitable[None]]) -> None:
    """Run ``scenario`` against an engine and its HTTP front."""

    async def work() -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        engine = EmbeddedEngine(
            str(folder), decode=tokenizer.decode, encode=tokenizer.encode, max_running_requests=4, max_context_len=2000
        )
        url = await engine.start_http()
        assert url.startswith("http://127.0.0.1:")
        assert await engine.start_http() == url == (await engine.info()).url
        async with aiohttp.ClientSession() as session:

            async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
                async with session.post(url + path, json=body) as reply:
                    return reply.status, await reply.json() if reply.content_type == "application/json" else None

            await scenario(engine, url, post)
        await engine.close()
        assert (await engine.info()).url is None

    asyncio.run(work())  # pytest has a limit of time


def test_generate_answers_as_sglang_does(folder: Path, model: PreTrainedModel) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        params = {**SLIME_PARAMS, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "rid": "mine"}
        status, reply = await post("/generate", body)
        assert status == 200
        meta, ids = reply["meta_info"], reply["output_ids"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 12, 0)
        assert meta["weight_version"] == "0"
        assert meta["weight_versions"] == [{"version": "0", "start": 0}]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
        expected = log_probs(model, PROMPT, ids, 0.8).tolist()
        assert [lp for lp, _, _ in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-4)
        assert reply["text"] == " ".join(f"w{token:02}" for token in ids)

    served(folder, scenario)


def test_prompt_scoring_answers_as_sglang_does(folder: Path, model: PreTrainedModel) -> None:
    ids = [5, 6, 7, 30, 31, 32]

    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        # sglang's prompt log-probs know nothing of the sampling temperature
        params = {"max_new_tokens": 0, "temperature": 0.5}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 2}
        for temperature, extra in ((1.0, {}), *((t, {"input_logprob_temperature": t}) for t in (0.7, 10**20))):
            status, reply = await post("/generate", {**body, **extra})
            assert status == 200
            first, *scored = reply["meta_info"]["input_token_logprobs"]
            assert first == [None, 7, None]
            assert [token for _, token, _ in scored] == ids[3:]
            expected = log_probs(model, ids[:3], ids[3:], float(temperature)).tolist()
            assert [lp for lp, _, _ in scored] == pytest.approx(expected, abs=1e-4)
            assert reply["meta_info"]["input_logprob_temperature"] == temperature
            assert (reply["output_ids"], reply["meta_info"]["completion_tokens"]) == ([], 0)

    served(folder, scenario)


def test_an_answer_across_a_weight_update_says_which_token_is_whose(folder: Path, model: PreTrainedModel) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        params = {"max_new_tokens": 1500, "ignore_eos": True}
        call = asyncio.ensure_future(post("/generate", {"input_ids": PROMPT, "sampling_params": params}))
        while not engine._scheduler.rows.sequences or engine._scheduler.rows.state["length"][0] < 10:
            await asyncio.sleep(0.01)
        await engine.begin_weight_update(7)
        for bucket in as_buckets(model):
            await engine.load_weights(bucket)
        await engine.end_weight_update()
        (first, second) = (await call)[1]["meta_info"]["weight_versions"]
        assert first == {"version": "0", "start": 0}
        assert second["version"] == "7"
        assert 7 <= second["start"] < 1500

    served(folder, scenario)


def test_text_seeds_stop_strings_and_defaults(folder: Path, model: PreTrainedModel) -> None:
    expected = greedy(model, PROMPT, 12)
    stop = f"w{expected[3]:02} w{expected[4]:02}"
    last = next(i for i in range(12) if expected[i - 1 : i + 1] == expected[3:5])

    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        params = {"temperature": 0, "stop": stop, "max_new_tokens": 12, "n": 1, "min_p": 0.0}
        _, reply = await post("/generate", {"text": "w05 w06 w07", "sampling_params": params})
        assert reply["output_ids"] == expected[: last + 1]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop"}
        assert "output_token_logprobs" not in reply["meta_info"]
        seeded = {"input_ids": PROMPT, "sampling_params": {"sampling_seed": 4, "ignore_eos": True}}
        _, reply = await post("/generate", seeded)
        params = SamplingParams(128, seed=4, ignore_eos=True)
        (own,) = await engine.generate([GenerateRequest("own", tuple(PROMPT), params)])
        assert reply["output_ids"] == own.output_ids

    served(folder, scenario)


def test_concurrent_posts_of_a_prompt_share_it(folder: Path) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        body = {"input_ids": PROMPT * 9, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        replies = await asyncio.gather(*(post("/generate", body) for _ in range(4)))
        assert sum(reply["meta_info"]["cached_tokens"] for _, reply in replies) >= 26

    served(folder, scenario)


def test_abort_by_id_by_all_and_by_hanging_up(folder: Path) -> None:
    long = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}

    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        calls = [asyncio.ensure_future(post("/generate", {**long, "rid": f"r{i}"})) for i in range(3)]
        while len(engine._scheduler.rows) < 3 or engine._scheduler.rows.state["length"][:3].min() <= 3:
            await asyncio.sleep(0.01)
        assert (await post("/abort_request", {"rid": "r1"}))[0] == 200
        _, reply = await calls[1]
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(reply["output_ids"]) < 1900
        assert not calls[0].done()
        assert (await post("/abort_request", {"abort_all": True}))[0] == 200
        assert {(await call)[1]["meta_info"]["finish_reason"]["type"] for call in calls} == {"abort"}
        assert (await post("/abort_request", {}))[0] == 400
        hanging = asyncio.ensure_future(post("/generate", {**long, "rid": "gone"}))
        while "gone" not in engine._scheduler.request_ids():
            await asyncio.sleep(0.01)
        hanging.cancel()
        while "gone" in engine._scheduler.request_ids():
            await asyncio.sleep(0.01)

    served(folder, scenario)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 5}}, "frequency_penalty: Input should be less"),
        ({"input_ids": PROMPT, "sampling_params": {"n": 4}}, "n: Input should be 1"),
        ({"input_ids": PROMPT, "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"input_ids": [PROMPT, PROMPT]}, "input_ids[0]: Input should be a valid integer"),
        ({}, "input_ids"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}}, "logprob_start_len"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5000}}, "2000"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_says_why(folder: Path, body: dict[str, Any], said: str) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        status, reply = await post("/generate", body)
        assert status == 400
        assert said in reply["error"]["message"]

    served(folder, scenario)


IDS = {"input_ids": PROMPT}
SCORED = {"return_logprob": True, "logprob_start_len": 0}
# as JSON, for half of it no client would write
MALFORMED = [
    *("", "[", "[1, 2]", "null", '"text"', "\xff", "[" * 100_000, '{"input_ids": ' + "9" * 5000 + "}"),
    *(
        json.dumps({"input_ids": value})
        for value in ([], 5, "5 6", [5, "6"], [[5]], [5.0], [True], [96], [-1], {}, [float("inf")], [10**20])
    ),
    *('{"text": 5}', '{"text": "\\ud800"}'),
    *(json.dumps({**IDS, name: 5}) for name in ("sampling_params", "rid", "stream", "return_logprob")),
    *(json.dumps({**IDS, "rid": value}) for value in (["a"], {}, "\ud800")),
    *(json.dumps({**IDS, "sampling_params": value}) for value in ("x", [1], [["n", 1]])),
    *(
        json.dumps({**IDS, "sampling_params": {name: value}})
        for name, values in {
            "temperature": (float("nan"), float("inf"), -1, 1e-300, 10**400, "x", [1], True, {}),
            "top_p": (float("nan"), 0, -0.1, 1.5, 10**400, "x", [0.5], True),
            "top_k": ("x", 1.5, -7, 2**70, [1], True, float("nan")),
            "max_new_tokens": (-1, "x", 1.5, 2**70, float("inf"), [4], True),
            "min_new_tokens": (-1, "x", 1.5, 500, True),
            "sampling_seed": ("x", 1.5, [1], float("nan"), True),
            "stop": (5, {"a": 1}, [5], [""], ["\ud800"], ["x"] * 5000, [["x"]]),
            "stop_token_ids": (5, "x", ["x"], [1.5], [2**70], list(range(5000))),
            "ignore_eos": ("x", 1),
            "skip_special_tokens": ("x", 0.5),
        }.items()
        for value in values
    ),
    *(
        json.dumps({**IDS, **SCORED, "sampling_params": {"max_new_tokens": 0}, name: value})
        for name, values in {
            "input_logprob_temperature": (float("nan"), 0, -1, 1e-300, "x", [1], True),
            "logprob_start_len": ("x", 1.5, -2, 99, True),
            "input_ids": ([5], [5, 96], [5, "x"]),
        }.items()
        for value in values
    ),
]


def test_a_bad_request_is_a_400_and_hurts_no_other(folder: Path) -> None:
    """Eight good ones are running all the while, and get the tokens that they would have got alone."""
    params = {"max_new_tokens": 1200, "ignore_eos": True}
    good = [{**IDS, "sampling_params": {**params, "sampling_seed": i}, "return_logprob": True} for i in range(8)]

    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        calls = [asyncio.ensure_future(post("/generate", body)) for body in good]
        while len(engine._scheduler.request_ids()) < 8:
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as session:
            for body in MALFORMED:
                async with session.post(f"{url}/generate", data=body.encode("latin-1")) as reply:
                    said = await reply.json()
                    assert (reply.status, bool(said["error"]["message"])) == (400, True), body[:200]
            for body in ('{"rid": ["a"]}', '{"rid": 5}', "[]", '{"abort_all": "no"}'):
                async with session.post(f"{url}/abort_request", data=body) as reply:
                    assert reply.status == 400, body
        assert not all(call.done() for call in calls), "four of them waited for the others"
        for seed, (status, reply) in enumerate(await asyncio.gather(*calls)):
            assert status == 200
            assert len(reply["output_ids"]) == 1200
            alone = GenerateRequest("alone", tuple(PROMPT), SamplingParams(20, seed=seed, ignore_eos=True))
            assert reply["output_ids"][:20] == (await engine.generate([alone]))[0].output_ids

    served(folder, scenario)


def test_a_body_beyond_the_context_is_refused_unread(folder: Path) -> None:
    """40 MB, for a context of 2,000 tokens; read, they would be no JSON."""

    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        body = b"5, " * ((40 << 20) // 3)
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", data=body) as reply:
            assert reply.status == 413
            assert "larger than the context of the engine can require" in (await reply.json())["error"]["message"]
        # the longest prompt that fits passes
        most = {"input_ids": [95] * 1999, "sampling_params": {"max_new_tokens": 1}}
        assert (await post("/generate", most))[0] == 200

    served(folder, scenario)


def test_closing_the_engine_does_not_wait_for_its_clients(folder: Path) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
        call = asyncio.ensure_future(post("/generate", body))
        while not engine._scheduler.has_work:
            await asyncio.sleep(0.01)
        await engine.close()
        assert (await call)[0] == 500

    served(folder, scenario)


def test_health_and_model_info(folder: Path) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        async with aiohttp.ClientSession() as session:
            for path in ("/health", "/health_generate"):
                async with session.get(url + path) as reply:
                    assert reply.status == 200
            for path in ("/get_model_info", "/model_info"):
                async with session.get(url + path) as reply:
                    info = await reply.json()
                    assert (info["model_path"], info["weight_version"]) == (str(folder), "0")

    served(folder, scenario)


def test_the_front_outlives_the_loop_that_started_it(folder: Path) -> None:
    engine = EmbeddedEngine(str(folder), max_running_requests=4, max_context_len=2000, http_host="127.0.0.2")
    url = asyncio.run(engine.start_http())
    assert url.startswith("http://127.0.0.2:")
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert len(json.load(reply)["output_ids"]) == 3
    asyncio.run(engine.close())
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(request, timeout=5)


def test_a_port_that_is_taken_says_so_each_time(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:

        async def work() -> None:
            engine = EmbeddedEngine(str(folder), max_running_requests=4, max_context_len=2000)
            front = HttpFront(engine, None, None, port=taken.getsockname()[1])
            for _ in range(2):
                with pytest.raises(OSError, match="address already in use"):
                    await front.start()
            await front.stop()
            await engine.close()

        asyncio.run(work())


def test_pages_of_other_sites_cannot_use_it(folder: Path) -> None:
    async def scenario(engine: EmbeddedEngine, url: str, post: Post) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        async with aiohttp.ClientSession() as http:
            for headers, status in (
                ({"Origin": "https://example.org"}, 403),
                ({"Host": "example.org"}, 403),
                ({}, 200),
            ):
                async with http.post(f"{url}/generate", json=body, headers=headers) as answer:
                    assert answer.status == status

    served(folder, scenario)


def test_other_machines_need_the_key_that_plugins_find_in_the_address(folder: Path) -> None:
    async def work() -> None:
        engine = EmbeddedEngine(str(folder), max_running_requests=4, max_context_len=2000, http_host="0.0.0.0")
        url = await engine.start_http()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        key, _, address = url.removeprefix("http://:").partition("@")
        assert len(key) > 20
        async with aiohttp.ClientSession() as http:
            for place, status in ((url, 200), (f"http://{address}", 401), (f"http://:wrong@{address}", 401)):
                async with http.post(f"{place}/generate", json=body) as answer:
                    assert answer.status == status
        await engine.close()

    asyncio.run(work())


def test_parameters_of_a_plugin_may_be_tuples_and_numbers_of_numpy() -> None:
    plugin = {
        "max_new_tokens": np.int64(4),
        "stop": ("a", "b"),
        "stop_token_ids": np.array([7, 8]),
        "top_k": np.int32(3),
    }
    params = parse_sampling_params(plugin)
    assert (params.max_new_tokens, params.stop, params.stop_token_ids, params.top_k) == (4, ("a", "b"), (7, 8), 3)
    assert type(params.max_new_tokens) is int
    with pytest.raises(ValueError, match="max_new_tokens: Input should be a valid integer"):
        parse_sampling_params({"max_new_tokens": "x"})
    with pytest.raises(ValueError, match=r"^best_guess: unknown parameter: leave it out$"):  # no word of an address
        parse_sampling_params({"best_guess": 1})
