"""The contract of engines, kept by a real SGLang server; and whole runs on a server that someone else runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from slimelite.engines.protocol import Codec, GenerateRequest, GenerateResult, SamplingParams, SyncSetup
from slimelite.engines.sglang import client
from slimelite.engines.sglang.client import SglangEngine, external_servers
from slimelite.engines.sglang.server import ON_CPU, Server, SglangServer, server_command
from slimelite.engines.sglang.sync import build_sink, check_model
from tests.conftest import sglang_variables
from tests.engines.contract import PROMPTS, EngineContract, as_buckets, push_weights
from tests.engines.tiny_models import build_model, greedy

pytestmark = pytest.mark.sglang


class TestSglang(EngineContract):
    bans_are_in_the_log_probs = True
    scores_at_any_temperature = False

    @classmethod
    def make_engine(cls, folder: Path, decode: Any, encode: Any, **limits: int) -> SglangEngine:
        fields = {**ON_CPU, "device": "cpu", "model_path": str(folder), "skip_server_warmup": True}
        fields |= {"max_running_requests": limits["max_running_requests"], "max_total_tokens": 4096}

        def command(host: str, port: int) -> list[str]:
            # SGLang ends a request 2 tokens below its context length
            return server_command(
                {**fields, "host": host, "port": port, "context_length": limits["max_context_len"] + 2}
            )

        cls.server = SglangServer(command, "127.0.0.1", folder / "server.log")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in sglang_variables().items():
                patch.setenv(name, value)
            cls.server.start()
        cls.group = cls.server.pid
        engine = SglangEngine(Server(cls.server.url), str(folder), Codec(decode, encode, ()))
        # imports, shapes of the weights, endpoints of the server: the first update asks for them, and takes long
        cls.loop.run_until_complete(push_weights(engine, cls.model, 0))
        return engine

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.server.close()
        with pytest.raises(ProcessLookupError):
            os.killpg(cls.group, 0)

    def test_it_runs_in_a_process_group_of_its_own(self) -> None:
        assert os.getpgid(self.group) == self.group != os.getpgrp()

    def test_its_processes_meet_at_a_port_that_it_was_given(self) -> None:
        """A port that SGLang looks for itself may be taken before it is used."""
        (port,) = re.findall(r"^python -m sglang.launch_server .*--nccl-port=(\d+)", self.server.log.read_text(), re.M)
        with socket.create_connection(("127.0.0.1", int(port))) as visitor:
            assert visitor.getpeername()[1] == int(port)

    def test_a_call_that_is_refused_leaves_its_ids_free(self) -> None:
        twice = [self.request((5, 6), name) for name in ("first", "again", "again")]
        with pytest.raises(ValueError, match="unique"):
            self.generate(*twice)
        assert [result.finish_reason for result in self.generate(*twice[:2])] == ["length", "length"]

    def test_two_servers_in_one_process_group(self, sglang_url: str) -> None:
        """The other one runs a model of the same shape."""
        servers = [Server(self.server.url), Server(sglang_url)]
        setup = SyncSetup(f"{self.temporary.name}/model", "nccl", torch.device("cpu"), "127.0.0.1")
        sink = build_sink(setup).to(servers)
        question = {"input_ids": list(PROMPTS[2]), "sampling_params": {"max_new_tokens": 12, "temperature": 0.0}}
        question["sampling_params"]["ignore_eos"] = True
        try:
            for version, model in ((901, self.other), (902, self.model)):
                sink.begin(version)
                for bucket in as_buckets(model):
                    sink.send(bucket)
                sink.end()
                for server in servers:
                    answer = server.post("/generate", question)
                    assert answer["output_ids"] == greedy(model, PROMPTS[2], 12)
                    assert answer["meta_info"]["weight_version"] == str(version)
        finally:
            sink.close()

    def test_an_id_that_begins_another_aborts_it_alone(self) -> None:
        """SGLang ends every request whose id begins with the one it is given."""

        async def scenario() -> list[str]:
            both = [self.request((5, 6), name, max_new_tokens=200) for name in ("long-1", "long-12")]
            running = asyncio.ensure_future(self.engine.generate(both))
            while not running.done():  # the first may come before the request is there
                await self.engine.abort(["long-1"])
                await asyncio.sleep(0.01)
            return [result.finish_reason for result in await running]

        assert self.run(scenario()) == ["abort", "length"]

    def test_memory_may_be_released_under_a_request_which_then_goes_on(self) -> None:
        """SGLang dies when it is not idle, and of resuming what is not released."""

        async def scenario() -> tuple[bool, int, str]:
            running = asyncio.ensure_future(self.engine.generate([self.request((5, 6), "long", max_new_tokens=200)]))
            await asyncio.sleep(0.1)
            await self.engine.resume_memory(["weights"])
            await self.engine.release_memory(["kv_cache", "weights"])
            scoring = asyncio.ensure_future(self.engine.score([5, 6, 7], 1))
            waits = not (await asyncio.wait([running, scoring], timeout=0.3))[0]
            await self.engine.resume_memory(["weights"])
            await self.engine.resume_memory(["kv_cache", "weights"])
            (result,) = await running
            assert len((await scoring).log_probs) == 2
            return waits, len(result.output_ids), result.finish_reason

        assert self.run(scenario()) == (True, 200, "length")


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    server = SglangServer(lambda host, port: command, "127.0.0.1", tmp_path / "server.log")
    with pytest.raises(ValueError, match=r"status 3(.|\n)*server.log(.|\n)*no such model"):
        server.start()


def test_a_server_that_is_never_healthy_is_given_up_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    log = tmp_path / "server.log"
    for seconds in (2, 20, 200):  # a busy machine may end it before it has written its number
        server = SglangServer(lambda host, port: command, "127.0.0.1", log, start_s=seconds)
        with pytest.raises(ValueError, match=f"not healthy after {seconds} s"):
            server.start()
        if log.read_text():
            break
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that ends."""
    script = (
        "import sys; from pathlib import Path; from slimelite.engines.sglang.server import SglangServer\n"
        "c = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)']\n"
        f"SglangServer(lambda h, p: c, '127.0.0.1', Path({str(tmp_path / 'log')!r})).start()"
    )

    async def scenario() -> int:
        starter = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        log = tmp_path / "log"
        for _ in range(2400):
            if log.exists() and log.read_text().strip():
                break
            await asyncio.sleep(0.05)
        starter.send_signal(signal.SIGKILL)
        await starter.wait()
        return int(log.read_text())

    pid = asyncio.run(scenario())
    for _ in range(2400):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError("it is still there")


def test_a_server_of_someone_else_is_waited_for_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(tmp_path)
    monkeypatch.setattr(client, "REPORT_S", 1.0)

    async def scenario() -> None:
        engine = SglangEngine(Server("http://127.0.0.1:1"), str(tmp_path), wait_s=1.5)
        try:
            with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 has not answered for 2 s"):
                await engine.restart()
        finally:
            await engine.close()

    asyncio.run(scenario())
    assert "waiting for SGLang at http://127.0.0.1:1, 1 s so far" in caplog.text


def test_a_server_that_is_gone_is_a_connection_error(tmp_path: Path) -> None:
    build_model(tmp_path)

    async def scenario() -> None:
        engine = SglangEngine(Server("http://127.0.0.1:1"), str(tmp_path))
        try:
            with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1"):
                await engine.generate([GenerateRequest("r", (5,), SamplingParams(max_new_tokens=1))])
        finally:
            await engine.close()

    asyncio.run(scenario())


PROMPT = tuple(range(20, 28))
pytestmark = pytest.mark.sglang


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
    engine = SglangEngine(Server(url), str(model))
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
        with pytest.raises(ValueError, match="start the server with the model that is trained"):
            external_servers([sglang_url], str(folder), "http")


def test_a_server_of_a_model_that_cannot_be_read_here_is_refused(sglang_model: Path) -> None:
    build_model(sglang_model)
    info = {"model_path": "/elsewhere/model", "model_type": "qwen2"}
    with pytest.raises(ValueError, match="/elsewhere/model, but this machine cannot read"):
        check_model("http://there:1", info, str(sglang_model))


def test_where_no_server_answers(sglang_model: Path) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9: no SGLang server answers"):
        external_servers(["127.0.0.1:9"], str(sglang_model), "http")
