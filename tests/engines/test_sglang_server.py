"""What an SGLang server is started with, checked against the SGLang that is installed; and its port."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from torch.distributed import TCPStore

from slimelite.arguments import make_args
from slimelite.arguments.sources import sglang_options
from slimelite.cluster.workers import EngineFactory
from slimelite.engines.sglang.client import external_servers
from slimelite.engines.sglang.server import (
    SglangServer,
    check_fields,
    command_line,
    rendezvous,
    reserve_port,
    server_command,
    server_environment,
    server_fields,
)
from slimelite.plan.devices import Machine
from tests.engines.tiny_models import build_model

RUN = (
    "--hf-checkpoint owner/model --prompt-data p.jsonl --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--rollout-max-response-len 16 --rollout-seed 7 "
)


def fields(words: str, index: int = 0, gpus: int = 0, **placement: object) -> dict[str, object]:
    args = make_args((RUN + words).split(), machine=Machine(gpus=gpus, sglang=True))
    return server_fields(EngineFactory(args).setup(index), **{"host": "h", "port": 1, **placement})


def test_users_options_win_over_what_a_cpu_implies_and_lose_to_the_placement() -> None:
    found = fields("--sglang-dtype bfloat16 --sglang-max-running-requests 8 --sglang-log-level warning", 2, port=5)
    assert (found["dtype"], found["attention_backend"]) == ("bfloat16", "torch_native")
    assert (found["max_running_requests"], found["log_level"], found["port"]) == (8, "warning", 5)
    assert (found["random_seed"], found["tp_size"], found["model_path"]) == (9, 1, "owner/model")
    assert "context_length" not in found


def test_the_server_computes_in_what_the_trainer_computes_in() -> None:
    assert fields("")["dtype"] == "float32"
    assert fields("--colocate", gpus=1)["dtype"] == "bfloat16"
    assert fields("--colocate --sglang-dtype float16", gpus=1)["dtype"] == "float16"


def test_what_no_sync_brings_again_has_a_copy_in_host_memory() -> None:
    copies = ("enable_weights_cpu_backup", "enable_draft_weights_cpu_backup")

    def copied(words: str) -> list[bool]:
        found = fields(words, gpus=2)
        return [found.get(name, False) for name in copies]

    draft = "--sglang-speculative-algorithm EAGLE3"
    assert copied("--colocate") == [False, False]
    assert copied(f"--colocate {draft}") == [False, True]
    assert copied("--colocate --lora-rank 4") == [True, False]
    assert copied("--colocate --lora-rank 4 --lora-sync merged") == [False, False]
    assert copied("--colocate --lora-rank 4 --no-offload-rollout") == [False, False]
    assert copied(f"--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lora-rank 4 {draft}") == [False, False]


def test_the_environment_of_a_server_that_releases_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    graphs = ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "NCCL_GRAPH_REGISTER")
    for name in (*allocator, *graphs):
        monkeypatch.delenv(name, raising=False)
    for name in allocator:
        monkeypatch.setenv(name, "expandable_segments:True")

    def found(words: str) -> dict[str, str]:
        setup = EngineFactory(make_args((RUN + words).split(), machine=Machine(gpus=2, sglang=True))).setup(0)
        environment = server_environment(server_fields(setup), setup.memory.unset)
        assert environment["PATH"] == os.environ["PATH"]
        return {name: environment[name] for name in (*allocator, *graphs) if name in environment}

    apart = found("--actor-num-gpus-per-node 1 --rollout-num-gpus 1")
    assert apart == dict.fromkeys(allocator, "expandable_segments:True")
    assert found("--colocate") == {graphs[0]: "true", graphs[1]: "0"}
    # SGLang's default graphs of the prefill cannot be released, and end the server if they are to be
    assert fields("--colocate", gpus=2)["cuda_graph_backend_prefill"] == "disabled"
    for kept in ("--sglang-cuda-graph-backend-prefill breakable", "--sglang-debug-cuda-graph"):
        assert found(f"--colocate {kept}") == {}
    monkeypatch.setenv(graphs[0], "false")
    assert found("--colocate")[graphs[0]] == "false"


def test_a_process_has_the_environment_that_it_is_given(tmp_path: Path) -> None:
    command = ["sh", "-c", 'echo "it is $GIVEN"; exit 3']
    server = SglangServer(
        lambda *_: command, "127.0.0.1", tmp_path / "log", environment={**os.environ, "GIVEN": "here"}
    )
    with pytest.raises(ValueError, match="it is here"):
        server.start()
    server.close()


def test_a_field_that_is_not_installed_names_the_nearest() -> None:
    installed = ["max_total_tokens", "page_size"]
    assert check_fields(["page_size"], installed) == []
    assert check_fields(["page_size", "max_total_tokenz"], installed) == [
        "--sglang-max-total-tokenz is not an option of the installed SGLang; did you mean --sglang-max-total-tokens?"
    ]


def test_fields_become_the_words_that_a_parser_reads_back() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", dest="model_path")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--config", type=json.loads)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--offset", type=int)
    installed = {action.dest: action for action in parser._actions}
    given = {
        "model_path": "--m",
        "sizes": [1, 2],
        "config": {"a": [1]},
        "metrics": True,
        "overlap": False,
        "offset": -1,
    }
    assert vars(parser.parse_args(command_line(given, installed))) == given
    assert command_line({"metrics": False}, installed) == []


def test_options_with_an_off_switch_and_options_without_values() -> None:
    words = "--sglang-no-dllm-fdfo --sglang-enable-metrics --sglang-model-checksum "
    found = make_args((RUN + words + "--sglang-lora-target-modules q_proj v_proj").split()).sglang_overrides
    assert found == {
        "dllm_fdfo": False,
        "enable_metrics": True,
        "model_checksum": "",
        "lora_target_modules": ["q_proj", "v_proj"],
    }


@pytest.mark.sglang
def test_the_record_and_the_installed_sglang_agree(sglang_environment: dict[str, str]) -> None:
    """Every installed option parses as --sglang-*, and SGLang knows every field of a run."""
    program = (
        "from slimelite.engines.sglang.server import *; from sglang.srt.environ import envs; o = installed_options()\n"
        "graphs = o['cuda_graph_backend_prefill'].choices, hasattr(envs, 'SGLANG_MEMORY_SAVER_CUDA_GRAPH')\n"
        "print(json.dumps([list(o), *graphs]))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=sglang_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    installed, kinds, known = json.loads(done.stdout.splitlines()[-1])
    assert not set(installed) - {option.field for option in sglang_options().values()}
    everything = fields(
        "--colocate --lora-rank 4 --sglang-speculative-algorithm EAGLE3 --sglang-enable-metrics", gpus=1
    )
    assert check_fields([*fields(""), *everything], installed) == []
    assert everything["cuda_graph_backend_prefill"] in kinds
    assert known


@pytest.mark.sglang
def test_a_server_refuses_an_unknown_field(sglang_environment: dict[str, str], tmp_path: Path) -> None:
    command = server_command({**fields(""), "max_total_tokenz": 3})
    done = subprocess.run(command, cwd=tmp_path, env=sglang_environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("did you mean --sglang-max-total-tokens?")


def test_a_reserved_port_is_given_to_nobody_but_the_server() -> None:
    reserved = reserve_port("127.0.0.1")
    port = reserved.getsockname()[1]
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind(("127.0.0.1", port))
    with socket.socket() as visitor, pytest.raises(ConnectionRefusedError):
        visitor.connect(("127.0.0.1", port))

    async def serve() -> bytes:
        """As uvicorn does."""

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            text = await reader.read()
            writer.close()
            return text

    for _ in range(2):  # a restart too
        assert asyncio.run(serve()) == b"hello"
    reserved.close()


def test_the_processes_of_a_server_meet_at_a_reserved_port() -> None:
    with reserve_port("") as reserved:
        port: int = reserved.getsockname()[1]
        assert rendezvous({}, reserved) == {"nccl_port": port}
        assert rendezvous({"dp_size": 2}, reserved) == {}
        # in the same way, the first process of a server listens
        assert TCPStore("127.0.0.1", port, world_size=1, is_master=True, wait_for_workers=False).port == port
        with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
            stranger.bind(("127.0.0.1", port))


def test_a_server_keeps_its_port_until_it_is_closed(tmp_path: Path) -> None:
    server = SglangServer(lambda _host, _port: ["true"], "127.0.0.1", tmp_path / "log")
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind(("127.0.0.1", server.port))
    server.close()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", server.port))


def test_a_server_with_a_draft_model_is_refused_for_weights_by_disk(tmp_path: Path) -> None:
    build_model(tmp_path)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server = {"tp_size": 1, "speculative_algorithm": "EAGLE3"}
            model = {"model_path": str(tmp_path), "model_type": "qwen2"}
            body = json.dumps(server if self.path == "/server_info" else model).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
        Thread(target=listening.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{listening.server_port}"
        with pytest.raises(ValueError, match="EAGLE3: with --update-weight-transport disk"):
            external_servers([address], str(tmp_path), "disk")
        assert [server.url for server in external_servers([address], str(tmp_path), "http")] == [f"http://{address}"]
        listening.shutdown()
