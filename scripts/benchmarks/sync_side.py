"""Seconds and bytes per second of a whole weight update, for each transport on a CPU machine, compared with the limits.

    python scripts/benchmarks/sync_side.py --model M --marks F

The weights are fp32. This starts one SGLang server and an embedded engine in a Ray actor. Without GPUs, the server uses
the replacements of tests/support/sglang_cpu on PYTHONPATH. An update is begin, all buckets, end. When the clock stops,
the engine decodes again. ``--engines embedded`` leaves SGLang out. It writes a line for each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import materials
import torch
from transformers import AutoModelForCausalLM

from slimelite.arguments import Args, parse_args
from slimelite.base.http_client import HttpError
from slimelite.engines.protocol import SyncSetup, WeightSink
from slimelite.engines.sglang.server import Server, reserve_port
from slimelite.engines.sglang.sync import build_sink
from slimelite.training.weights import buckets

SGLANG = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --dtype float32 "
    "--disable-overlap-schedule --disable-cuda-graph --max-running-requests 8 --max-total-tokens 4096 "
    "--skip-server-warmup --host 127.0.0.1"
)
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "1", "TORCHDYNAMO_DISABLE": "1"}


def seconds(work: Callable[[], object], rounds: int) -> list[float]:
    """Wall time of each call, after a first call that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times[1:]


def update(sink: WeightSink, model: torch.nn.Module, max_bytes: int, versions: Iterator[int]) -> None:
    """One whole update."""
    sink.begin(next(versions))
    for bucket in buckets(((name, weight.detach()) for name, weight in model.named_parameters()), max_bytes):
        sink.send(bucket)
    sink.end()


def over_loopback(data: memoryview) -> None:
    """Send ``data`` to a thread of this process through TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def receive() -> None:
            connection, _ = listener.accept()
            buffer = bytearray(1 << 20)
            with connection:
                while connection.recv_into(buffer):
                    pass

        receiver = threading.Thread(target=receive)
        receiver.start()
        with socket.create_connection(listener.getsockname()) as sender:
            sender.sendall(data)
        receiver.join()


def to_disk(data: memoryview, folder: Path) -> None:
    """Write ``data`` to a file. It goes into the system's cache, as in the update."""
    (folder / "limit").write_bytes(data)


@contextmanager
def sglang_server(model: Path) -> Iterator[Server]:
    """A server of ``model``. Its output goes to the parent folder of ``model``."""
    with reserve_port("127.0.0.1") as reserved, (model.parent / "server.log").open("w") as log:
        port = reserved.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        environment = {**os.environ, **CPU_ENVIRONMENT}
        process = subprocess.Popen([*command, *SGLANG.split()], env=environment, stdout=log, stderr=log)
        server = Server(f"http://127.0.0.1:{port}")
        try:
            while process.poll() is None:
                try:
                    server.get("/health")
                    break
                except HttpError:
                    time.sleep(1)
            else:
                sys.exit((model.parent / "server.log").read_text()[-3000:])
            yield server
        finally:
            process.terminate()
            process.wait()


@contextmanager
def ray_sink(args: Args, log: Path) -> Iterator[WeightSink]:
    """An embedded engine in an actor."""
    import ray

    from slimelite.cluster.ray_cluster import AsyncHost, RayRemote
    from slimelite.cluster.remote import RemoteSink
    from slimelite.cluster.workers import EngineFactory

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    engine = (
        ray.remote(AsyncHost)
        .options(num_cpus=1)
        .remote(os.getcwd(), str(log), "engine", None, {}, EngineFactory(args).engine, 0)
    )
    try:
        yield RemoteSink([RayRemote(engine, "engine", log, "127.0.0.1")])
    finally:
        ray.kill(engine)
        ray.shutdown()


def main() -> None:
    """Measure every way, and the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--engines", choices=["both", "embedded"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--buffer", type=int, default=512 * 1024**2, help="--update-weight-buffer-size")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    data = memoryview(bytearray(sum(p.nbytes for p in model.parameters())))
    versions = iter(range(1, 10**6))
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        folder = root / "model"
        shutil.copytree(given.model, folder)

        def run(name: str, sink: WeightSink) -> None:
            times[name] = seconds(lambda: update(sink, model, given.buffer, versions), given.rounds)

        prompts = materials.rows(root / "prompts.parquet", 4, (8, 8), (1, 1), model.config.vocab_size)
        flags = f"--hf-checkpoint {folder} --prompt-data {prompts} --input-key messages --apply-chat-template "
        flags += "--rm-type random --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 2 "
        flags += f"--global-batch-size 2 --rollout-max-response-len 8 --run-dir {root}/run"
        args = parse_args(flags.split())
        with ray_sink(args, root / "engine.log") as sink:
            run("embedded", sink)
        if given.engines == "both":
            with sglang_server(folder) as server:
                for way in ("http", "nccl", "disk"):  # nccl is gloo where there are no GPUs
                    setup = SyncSetup(str(folder), way, torch.device("cpu"), "127.0.0.1", directory=str(root / "disk"))
                    sync = build_sink(setup)
                    run(f"sglang_{way}", sync.to([server]))
                    sync.close()
        times["limit_copy"] = seconds(lambda: bytearray(data), given.rounds)
        times["limit_tcp"] = seconds(lambda: over_loopback(data), given.rounds)
        times["limit_file"] = seconds(lambda: to_disk(data, root), given.rounds)
    with given.marks.open("a") as file:
        for turn in range(given.rounds):
            line = {f"{name}_wall": measured[turn] for name, measured in times.items()}
            file.write(json.dumps({"kind": "round", **line}) + "\n")


if __name__ == "__main__":
    main()
