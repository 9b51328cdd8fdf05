"""Every way of weights into a real SGLang server: what it decodes with afterwards are those weights, stamped."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from slimelite.base.http_client import HttpError
from slimelite.engines.protocol import SyncSetup, WeightBucket, WeightSink, WeightSyncError
from slimelite.engines.sglang.server import Server
from slimelite.engines.sglang.sync import ServerSink, build_sink
from slimelite.training.weights import buckets
from tests.engines.tiny_models import build_model, greedy, log_probs

PROMPT = tuple(range(20, 50))
CPU = torch.device("cpu")

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(sglang_model: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model that the server started with has tied weights, and so has the other."""
    model, other = build_model(sglang_model), build_model(sglang_model.with_name("other"), seed=1)
    model.name_or_path = str(sglang_model)
    return model, other


def http_sink(model: PreTrainedModel, *servers: Server) -> ServerSink:
    return build_sink(SyncSetup(model.name_or_path, "http", CPU, "127.0.0.1")).to(servers)


@pytest.fixture
def server(sglang_url: str) -> Server:
    return Server(sglang_url)


def generate(server: Server, count: int, **changes: Any) -> dict[str, Any]:
    params = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True} | changes
    request = {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True}
    return server.post("/generate", request)


def streamed(server: Server, count: int, begun: threading.Event) -> dict[str, Any]:
    """The whole answer to a sampled request of ``count`` tokens; ``begun`` is set when its first tokens come."""
    params = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True}
    request = {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True, "stream": True}
    asked = urllib.request.Request(f"{server.url}/generate", json.dumps(request).encode())
    asked.add_header("Content-Type", "application/json")
    answer: dict[str, Any] = {}
    with urllib.request.urlopen(asked, timeout=600) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                answer = json.loads(line.removeprefix(b"data: "))
                begun.set()
    return answer


def push(sink: WeightSink, model: PreTrainedModel, version: int, max_bytes: int = 10_000) -> None:
    sink.begin(version)
    for bucket in buckets(((n, p.detach()) for n, p in model.named_parameters()), max_bytes):
        sink.send(bucket)
    sink.end()


def check(server: Server, model: PreTrainedModel, version: int) -> None:
    """The server has the weights of ``model``, all of them, and says so."""
    answer = generate(server, 16)
    assert answer["output_ids"] == greedy(model, PROMPT, 16)
    check_log_probs(answer, model)
    assert answer["meta_info"]["weight_version"] == str(version)
    assert answer["meta_info"]["weight_versions"] == [{"version": str(version), "start": 0, "end": 16}]


def check_log_probs(answer: dict[str, Any], model: PreTrainedModel) -> None:
    theirs = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert (theirs - log_probs(model, PROMPT, answer["output_ids"])).abs().max() < 1e-4


@pytest.mark.parametrize("transport", ["http", "nccl", "disk", "ipc"])
def test_the_server_decodes_with_what_was_sent(
    transport: Any, server: Server, models: tuple[PreTrainedModel, ...], one_rank: None, tmp_path: Path
) -> None:
    setup = SyncSetup(models[0].name_or_path, transport, CPU, "127.0.0.1", directory=str(tmp_path))
    sync = build_sink(setup).to([server])
    assert sync.every_rank == (transport == "ipc")
    try:
        # twice: the prompt's keys and values were cached under the first, and the group is there already
        for version, model in ((11, models[1]), (12, models[0]), (13, models[1])):
            push(sync, model, version)
            check(server, model, version)
        # as a server is that was restarted: not what was last sent, and in no group that it knows of
        server.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
        push(sync, models[0], 13)
        check(server, models[0], 13)
    finally:
        sync.close()
    assert [folder.name for folder in tmp_path.iterdir()] == (["weights_0000013"] if transport == "disk" else [])


def test_a_response_ends_where_the_weights_change_and_the_next_waits(
    server: Server, models: tuple[PreTrainedModel, ...]
) -> None:
    sink = http_sink(models[0], server)
    push(sink, models[0], 21)
    answers: list[dict[str, Any]] = []
    begun = threading.Event()
    running = threading.Thread(target=lambda: answers.append(streamed(server, 1500, begun)))
    running.start()
    begun.wait()
    sink.begin(22)
    running.join()
    (cut,) = answers
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(cut["output_ids"]) < 1500
    assert cut["meta_info"]["weight_versions"] == [{"version": "21", "start": 0, "end": len(cut["output_ids"])}]
    check_log_probs(cut, models[0])
    waiting = threading.Thread(target=lambda: answers.append(generate(server, 8)))
    waiting.start()
    for bucket in buckets(((n, p.detach()) for n, p in models[1].named_parameters()), 10**6):
        sink.send(bucket)
    time.sleep(0.3)
    assert len(answers) == 1, "it decoded during the update"
    sink.end()
    waiting.join()
    assert answers[1]["output_ids"] == greedy(models[1], PROMPT, 8)
    assert answers[1]["meta_info"]["weight_version"] == "22"


def test_an_unknown_name_and_a_wrong_shape_are_refused_before_they_are_sent(
    server: Server, models: tuple[PreTrainedModel, ...]
) -> None:
    sink = http_sink(models[0], server)
    whole = list(buckets(((n, p.detach()) for n, p in models[0].named_parameters()), 10_000))
    with pytest.raises(ValueError, match="begin_weight_update"):
        sink.send(whole[0])
    sink.begin(31)
    with pytest.raises(ValueError, match=r"no_such\.weight"):
        sink.send(WeightBucket(["no_such.weight"], [(2,)], torch.ones(2)))
    with pytest.raises(ValueError, match=rf"{whole[0].names[0]} was sent with shape \(2,\)"):
        sink.send(WeightBucket([whole[0].names[0]], [(2,)], torch.ones(2)))
    for bucket in whole[1:]:
        sink.send(bucket)
    with pytest.raises(ValueError, match=whole[0].names[0]):
        sink.end()
    sink.send(whole[0])
    sink.end()
    check(server, models[0], 31)


def test_a_server_of_another_model_is_refused(
    server: Server, models: tuple[PreTrainedModel, ...], tmp_path: Path
) -> None:
    build_model(tmp_path / "wider", intermediate_size=56)
    sync = build_sink(SyncSetup(str(tmp_path / "wider"), "nccl", CPU, "127.0.0.1")).to([server])
    with pytest.raises(ValueError, match="start the server with the model that is trained"):
        sync.begin(42)


def test_a_server_that_is_gone_or_says_no_stops_the_update(server: Server, models: tuple[PreTrainedModel, ...]) -> None:
    gone = Server("http://127.0.0.1:9")
    with pytest.raises(WeightSyncError, match=r"51 did not reach any engine: .*:9/model_info .* in 3 attempts"):
        http_sink(models[0], server, gone).begin(51)
    sink = http_sink(models[0], server)
    sink.begin(51)
    sink.own.append(gone)
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:9/update_weights_from_tensor .* in 3 attempts"):
        sink.send(next(buckets(((n, p.detach()) for n, p in models[0].named_parameters()), 10_000)))
    with pytest.raises(HttpError, match="answered 4"):
        server.post("/update_weights_from_disk", {"model_path": "/nowhere"})
    push(http_sink(models[0], server), models[0], 52)
    check(server, models[0], 52)


@pytest.mark.parametrize("transport", ["http", "disk"])
def test_an_update_that_broke_off_is_repaired_by_the_next(
    transport: Any, server: Server, models: tuple[PreTrainedModel, ...], tmp_path: Path
) -> None:
    setup = SyncSetup(models[0].name_or_path, transport, CPU, "127.0.0.1", directory=str(tmp_path))
    broken = build_sink(setup).to([server])
    broken.begin(61)
    broken.send(next(buckets(((n, p.detach()) for n, p in models[1].named_parameters()), 10_000)))
    sync = build_sink(setup).to([server])
    push(sync, models[1], 62)
    check(server, models[1], 62)


def test_a_server_that_loaded_a_folder_goes_on_when_another_failed(
    server: Server, models: tuple[PreTrainedModel, ...], tmp_path: Path
) -> None:
    setup = SyncSetup(models[0].name_or_path, "disk", CPU, "127.0.0.1", str(tmp_path), keep_folders=True)
    sink = build_sink(setup).to([server])
    sink.begin(71)
    for bucket in buckets(((n, p.detach()) for n, p in models[1].named_parameters()), 10_000):
        sink.send(bucket)
    sink.own.append(Server("http://127.0.0.1:9"))
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:9/pause.*A failed engine .*stays paused"):
        sink.end()
    check(server, models[1], 71)
