"""One SGLang server for all tests of a session: it takes half a minute to start."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimelite.base.http_client import HttpError
from slimelite.engines.sglang.server import Server, reserve_port
from tests.engines.tiny_models import build_model

COMMAND = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --dtype float32 "
    "--disable-overlap-schedule --disable-cuda-graph --max-running-requests 32 --max-total-tokens 16384 "
    "--sleep-on-idle --skip-server-warmup --host 127.0.0.1"
)
START_S = 600


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang") / "model"
    build_model(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_url(sglang_model: Path, sglang_environment: dict[str, str]) -> Iterator[str]:
    log = sglang_model.with_name("server.log")
    # the ports stay reserved: another test's program could take them in the half minute before the server uses them
    with reserve_port("127.0.0.1") as reserved, reserve_port("") as meeting, log.open("w") as output:
        port, ports = reserved.getsockname()[1], ["--nccl-port", str(meeting.getsockname()[1])]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(sglang_model), "--port", str(port)]
        process = subprocess.Popen(
            [*command, *ports, *COMMAND.split()],
            env=sglang_environment,
            stdout=output,
            stderr=output,
        )
        server = Server(f"http://127.0.0.1:{port}")
        begin = time.monotonic()
        while True:
            try:
                server.get("/health")
                break
            except HttpError:
                if time.monotonic() - begin > START_S or process.poll() is not None:
                    pytest.fail(f"no server:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
        yield server.url
        process.terminate()
        process.wait(120)
