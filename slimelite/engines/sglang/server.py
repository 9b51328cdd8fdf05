"""One SGLang server: its address, its process, its settings, and the program that the process runs:

    python -m slimelite.engines.sglang.server '{"model_path": ..., ...}'

SGLang's fields change from version to version. If the installed SGLang does not have a field, the error names the field
with the most similar name. Valid fields become the command line of ``sglang.launch_server``, which is printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from slimelite.base.http_client import HttpError, Retry, ask
from slimelite.engines.protocol import EngineSetup
from slimelite.engines.registry import ServerAddress
from slimelite.engines.sglang.wire import TARGET

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRY, ONCE = Retry(attempts=3), Retry()
TIMEOUT_S = 600.0
# timeout of a request to a starting server; such a server answers at once or refuses the connection
ANSWER_S = 30.0
START_S = 1800.0
REPORT_S = 30.0
END_S = 10.0
LOG_LINES = 12
# on a CPU, these fields select SGLang's plain PyTorch code, because SGLang's kernels need a GPU
ON_CPU: dict[str, object] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}
# The server runs in its own process group. A shell in this group reads a pipe from slimelite's process. When that
# process ends for any reason, the pipe closes, and the shell kills the whole group.
ATTACHED = 'exec 3<&0; (cat <&3 >/dev/null; kill -KILL 0) & exec "$@" 3<&- </dev/null'


def server_command(fields: Mapping[str, object]) -> list[str]:
    """The command that starts the server with ``fields`` in this Python; see `slimelite.engines.sglang.server`."""
    return [sys.executable, "-m", "slimelite.engines.sglang.server", json.dumps(fields)]


class Server(ServerAddress):
    """The server at an address. The methods of this class block until the server answers."""

    @classmethod
    def at(cls, address: ServerAddress) -> Server:
        """The server at ``address``."""
        return cls(address.url, address.tp_size, address.first_gpu)

    def post(self, path: str, body: object = None, retry: Retry = RETRY, timeout_s: float = TIMEOUT_S) -> object:
        """Send ``body`` as JSON in a POST, and return the answer. If ``body`` is bytes, it is sent unchanged.

        The request is sent again after a lost connection. Use ``retry`` `ONCE` if the request must not arrive twice.

        Raises:
            HttpError: the server answers with an error, or cannot be reached.
        """
        return ask("POST", self.url + path, {} if body is None else body, retry, timeout_s)

    def get(self, path: str) -> Any:
        """The answer to a GET. Raises the same errors as `post`."""
        return ask("GET", self.url + path, None, RETRY, TIMEOUT_S)

    def pause(self) -> None:
        """End the running requests. The server holds new requests back until `resume`.

        SGLang 0.5.20 can flush the cache only while the server has no requests. In mode "retract" or "in_place", a
        response would therefore continue with keys and values of the old weights. So the mode is "abort": all requests
        end, and each client sends its requests again, with the tokens so far.
        """
        self.post("/pause_generation", {"mode": "abort"})

    def resume(self, version: int) -> None:
        """Flush the KV cache, set the weight version and resume decoding."""
        # with this timeout, requests that were aborted just before can still end
        self.post("/flush_cache?timeout=30")
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.post("/continue_generation")

    def load_adapter(self, name: str, config: Mapping[str, object], tensors: bytes) -> None:
        """Load an adapter, which replaces an earlier adapter with the same name. No request may be running.

        ``config``: the adapter's config in peft's form. ``tensors``: one pickle in base64 for each tensor-parallel
        rank, see `sync.pickled`.
        """
        if any(model["id"] == name for model in self.get("/v1/models")["data"]):
            self.post("/unload_lora_adapter", {"lora_name": name})
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": [tensors.decode()] * self.tp_size,
            "load_format": "flattened_bucket",
        }
        self.post("/load_lora_adapter_from_tensors", body, ONCE)

    def open_update(self) -> None:
        """Pause the server and begin an update. An unfinished earlier update is closed."""
        self.pause()
        if not self._brackets_updates:
            return
        try:
            self.post("/begin_weight_update", TARGET)
        except HttpError:
            # an earlier update failed and is still open
            self.post("/end_weight_update")
            self.post("/begin_weight_update", TARGET)

    def finish_update(self, version: int) -> None:
        """End the update after all its tensors have arrived, and `resume`."""
        if self._brackets_updates:
            self.post("/end_weight_update")
        self.resume(version)

    @cached_property
    def _brackets_updates(self) -> bool:
        """Whether the server has ``begin_weight_update`` and ``end_weight_update``. SGLang 0.5.23 has these endpoints,
        and 0.5.20 does not."""
        return "/begin_weight_update" in self.get("/openapi.json")["paths"]


def each(servers: Sequence[Server], call: Callable[[Server], T]) -> list[T]:
    """Make ``call`` on every server at the same time. If calls raise errors, the first error is raised after all calls
    have ended."""
    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        return list(threads.map(call, servers))


class SglangServer:
    """One server process at ``host:port``. The constructor reserves the port. So the port is still free when the server
    binds it half a minute later, or when the server is restarted.

    ``command``: (host, port) -> the command line. ``log``: the server's output is appended to this file.
    ``environment``: the environment variables of the server; None: the environment of this process, including
    ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(
        self,
        command: Callable[[str, int], list[str]],
        host: str,
        log: Path,
        start_s: float = START_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.host = host
        self._reserved = reserve_port(host)
        self.port = int(self._reserved.getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        self.log = log
        self._command = command(host, self.port)
        self._environment = environment
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> str:
        """Start the server, wait until it is healthy, and return its base URL.

        Raises:
            ValueError: the server ended, or was not healthy in time. The message has the last lines of the server's
                log.
        """
        with self._lock:
            self._start()
        return self.url

    def address(self) -> str:
        """The server's base URL, which is known before `start`."""
        return self.url

    def restart(self) -> None:
        """End the old process group, if there is one, and start the server again. Raises the same errors as
        `start`."""
        with self._lock:
            self._end()
            self._start()

    @property
    def pid(self) -> int:
        """Process id of the server's process group."""
        assert self._process is not None, "start comes first"
        return self._process.pid

    def close(self) -> None:
        """End only the process group that `start` made, and free the port."""
        with self._lock:
            self._end()
        self._reserved.close()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", ATTACHED, "sh", *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(self._process)
        except BaseException:
            self._end()
            raise

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        begin = reported = time.monotonic()
        while not self._healthy():
            now = time.monotonic()
            if process.poll() is not None:
                raise ValueError(
                    f"the SGLang server at {self.url} ended with status {process.returncode}: {self._tail()}"
                )
            if now - begin > self._start_s:
                raise ValueError(
                    f"the SGLang server at {self.url} is not healthy after {self._start_s:.0f} s: {self._tail()}"
                )
            if now - reported > REPORT_S:
                reported = now
                logger.warning(
                    "waiting for the SGLang server at %s, %.0f s so far; its log is %s", self.url, now - begin, self.log
                )
            time.sleep(0.5)
        # without a warm-up, SGLang does not freeze its Python objects, and garbage collection scans them in each cache
        # flush
        Server(self.url).post("/freeze_gc", retry=ONCE, timeout_s=ANSWER_S)

    def _healthy(self) -> bool:
        try:
            ask("GET", f"{self.url}/health", timeout_s=ANSWER_S)
            return True
        except HttpError:  # the status is 503 while the server starts
            return False

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"the end of its log {self.log} is", *lines])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # kill the whole group, because its leader may be dead already; the server has no state to save
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        # ports and GPU memory are free only after the last process of the group has ended
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        logger.warning("some processes of the server at %s are still alive %.0f s after SIGKILL", self.url, END_S)


def reserve_port(host: str) -> socket.socket:
    """A socket bound to a free port of this machine. The socket does not listen, so a server can bind the same port
    with SO_REUSEADDR. The system does not give this port to programs that ask for any free port."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def installed_options() -> dict[str, argparse.Action]:
    """The command-line option of each field of the installed SGLang's ``ServerArgs``. The import of ServerArgs takes
    seconds."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}


def missing_for_kernels() -> Iterator[str]:
    """One sentence for each requirement of SGLang's kernels that this machine does not meet. Python packages are not
    checked."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").partition(" ")
    if name != "glibc" or [int(part) for part in version.split(".")[:2]] < [2, 34]:
        yield f"SGLang's kernels need glibc 2.34 or newer, and this machine has {name} {version}: see docs/install.md"
    if shutil.which("nvcc") is None and not (Path(os.environ.get("CUDA_HOME", "")) / "bin" / "nvcc").is_file():
        yield (
            "nvcc is not found. SGLang needs nvcc to compile kernels at their first use: all kernels on GPUs before "
            "Hopper (RTX 4090, L40S), and the kernels of top-k and top-p sampling (--eval-top-k 1) on any GPU. "
            "Install the CUDA toolkit, or set CUDA_HOME"
        )


def check_fields(fields: Collection[str], installed: Collection[str]) -> list[str]:
    """One message for each of ``fields`` that the ``installed`` SGLang does not have."""
    problems = []
    for name in fields:
        if name not in installed:
            near = difflib.get_close_matches(name, installed, n=1, cutoff=0.7)
            hint = f"; did you mean --sglang-{near[0].replace('_', '-')}?" if near else ""
            problems.append(f"--sglang-{name.replace('_', '-')} is not an option of the installed SGLang{hint}")
    return problems


def command_line(fields: Mapping[str, object], installed: Mapping[str, argparse.Action]) -> list[str]:
    """``fields`` as arguments for SGLang's command line."""
    words = []
    for name, value in fields.items():
        action = installed[name]
        if isinstance(value, bool):
            words += [option for option in action.option_strings if option.startswith("--no-") is not value][:1]
        elif isinstance(value, list) and action.nargs is not None:
            words += [action.option_strings[0], *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, list | dict) else str(value)
            words.append(f"{action.option_strings[0]}={text}")
    return words


def main() -> None:
    """Check the fields, print the command line and start the server."""
    fields = json.loads(sys.argv[1])
    installed = installed_options()
    if problems := check_fields(fields, installed):
        sys.exit("\n".join(problems))
    with reserve_port("") as reserved:  # for as long as this process lives, because it is the server
        sys.argv[1:] = command_line({**rendezvous(fields, reserved), **fields}, installed)
        print("python -m sglang.launch_server", shlex.join(sys.argv[1:]), flush=True)
        runpy.run_module("sglang.launch_server", run_name="__main__")


def rendezvous(fields: Mapping[str, object], reserved: socket.socket) -> dict[str, object]:
    """The field with the port at which the processes of a server with ``fields`` find each other: the port of
    ``reserved``.

    Without this field, SGLang takes a port that is free at the start, and uses it seconds later, when another program
    may have taken it. The result is empty for a server with data parallelism, whose replicas need a port each.
    """
    return {} if fields.get("dp_size", 1) != 1 else {"nccl_port": reserved.getsockname()[1]}


def server_fields(setup: EngineSetup, **placement: object) -> dict[str, object]:
    """SGLang's ServerArgs fields for one engine. Later sources override earlier ones: slimelite's flags, --sglang-*,
    fixed values, ``placement``.

    ``placement``: ``host``, ``port`` and other fields that depend on where the engine is (``base_gpu_id``, ``nnodes``,
    ``node_rank``, ``dist_init_addr``, ``load_format``, ...). Fields that are None are left out.
    """
    implied: dict[str, object] = {
        "mem_fraction_static": setup.memory_share,
        "max_running_requests": setup.max_running_requests,
        "context_length": setup.max_context_len,
        # on a GPU, the trainer always computes in bf16; SGLang would choose fp16 for a model with fp32 in its config
        **(ON_CPU if setup.device == "cpu" else {"dtype": "bfloat16"}),
    }
    if setup.releases_memory and setup.device == "cuda":
        implied["cuda_graph_backend_prefill"] = "disabled"  # the graphs of SGLang's default backend cannot be released
    if setup.adapter is not None:
        # the value is 2, because a batch may have requests with the policy's adapter and requests to the frozen model
        # without an adapter
        implied |= {"enable_lora": True, "max_lora_rank": setup.adapter.rank, "max_loras_per_batch": 2}
        implied["lora_target_modules"] = list(setup.adapter.modules)
        implied |= {"lora_backend": "torch_native"} if setup.device == "cpu" else {}
    decided = {
        "model_path": setup.model_path,
        "device": setup.device,
        "tp_size": setup.width // setup.options.get("pp_size", 1),
        "random_seed": setup.seed,
        "enable_memory_saver": setup.releases_memory,
        **setup.backups(),
        "skip_server_warmup": True,
    }
    fields = {**implied, **setup.options, **decided, **placement}
    return {name: value for name, value in fields.items() if value is not None}


def server_environment(fields: Mapping[str, object], unset: Collection[str] = ()) -> dict[str, str]:
    """The environment of a server with ``fields``. The result is a copy of the environment of this process. If the
    server releases its memory, the variables in ``unset`` are removed from the copy. Such a server also releases its
    CUDA graphs, except graphs of the "breakable" kind, which cannot be released.
    """
    environment = dict(os.environ)
    if not fields.get("enable_memory_saver"):
        return environment
    for name in unset:
        environment.pop(name, None)
    chosen = [fields.get(f"cuda_graph_{name}") for name in ("backend_decode", "backend_prefill", "config")]
    if "breakable" not in json.dumps(chosen) and not fields.get("debug_cuda_graph"):
        environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
        # NCCL would register the buffers of a graph at their addresses before a release, and these addresses are
        # invalid afterwards
        environment.setdefault("NCCL_GRAPH_REGISTER", "0")
    return environment


if __name__ == "__main__":
    main()
