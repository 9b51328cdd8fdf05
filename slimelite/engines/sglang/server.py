"""One SGLang server: its address, its process, and what the process runs,

    python -m slimelite.engines.sglang.server '{"model_path": ..., ...}'

SGLang's fields change from version to version. A field that the installed SGLang does not have is an error that names
the nearest one; the rest becomes the command line of ``sglang.launch_server``, which is printed.
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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from slimelite.http_client import HttpError, Retry, ask

T = TypeVar("T")

logger = logging.getLogger(__name__)

RETRY, ONCE = Retry(attempts=3), Retry()
TIMEOUT_S = 600.0
# for a server that starts, which answers at once or is not there
ANSWER_S = 30.0
START_S = 1800.0
REPORT_S = 30.0
END_S = 10.0
LOG_LINES = 12
# The server is a process group of its own. Its end of our pipe closes when we are gone, however we went; then all of it
# goes too.
ATTACHED = 'exec 3<&0; (cat <&3 >/dev/null; kill -KILL 0) & exec "$@" 3<&- </dev/null'
# SGLang's kernels are for GPUs: on a CPU these are its paths in plain PyTorch
ON_CPU: dict[str, object] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}


def server_command(fields: Mapping[str, object]) -> list[str]:
    """The command that starts the server with ``fields`` in this Python; see `slimelite.engines.sglang.server`."""
    return [sys.executable, "-m", "slimelite.engines.sglang.server", json.dumps(fields)]


@dataclass(frozen=True)
class Server:
    """The server at ``url`` (``http://host:port``), ``tp_size`` GPUs wide, for those who steer it and wait.

    ``first_gpu``: of those of all engines; None: the one behind the server before it.
    """

    url: str
    tp_size: int = 1
    first_gpu: int | None = None

    def post(self, path: str, body: object = None, retry: Retry = RETRY, timeout_s: float = TIMEOUT_S) -> Any:
        """The answer to a POST of ``body`` as JSON (bytes are JSON already).

        A lost connection is tried again, so the request must be one that may come twice, or have ``retry`` `ONCE`.

        Raises:
            HttpError: the server said no, or cannot be reached.
        """
        return ask("POST", self.url + path, {} if body is None else body, retry, timeout_s)

    def get(self, path: str) -> Any:
        """The answer to a GET; raises as `post` does."""
        return ask("GET", self.url + path, None, RETRY, TIMEOUT_S)

    def pause(self) -> None:
        """End what it is decoding; what is sent to it waits until `resume`.

        Pausing in mode "retract" or "in_place" would let a response go on with keys and values of the old weights: the
        cache can be flushed only while no request is there (SGLang 0.5.20). So whoever sent it sends the rest again.
        """
        self.post("/pause_generation", {"mode": "abort"})

    def resume(self, version: int) -> None:
        """Forget cached keys and values, stamp ``version`` on all that follows, decode."""
        # the wait is for requests that were aborted a moment ago
        self.post("/flush_cache?timeout=30")
        self.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.post("/continue_generation")

    def open_update(self) -> None:
        """Pause, and have it expect tensors; an update that broke off is forgotten."""
        self.pause()
        if not self._brackets_updates:
            return
        try:
            self.post("/begin_weight_update")
        except HttpError:
            # the one that broke off left it open
            self.post("/end_weight_update")
            self.post("/begin_weight_update")

    def finish_update(self, version: int) -> None:
        """All tensors are there; `resume`."""
        if self._brackets_updates:
            self.post("/end_weight_update")
        self.resume(version)

    @cached_property
    def _brackets_updates(self) -> bool:
        """Whether tensors go between ``begin_weight_update`` and ``end_weight_update`` (SGLang 0.5.23; not 0.5.20)."""
        return "/begin_weight_update" in self.get("/openapi.json")["paths"]


def each(servers: Sequence[Server], call: Callable[[Server], T]) -> list[T]:
    """``call`` on every server at once; the first error is raised when all are done."""
    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        return list(threads.map(call, servers))


class SglangServer:
    """One server at ``host:port``, the port chosen and taken at once, so that it is still free when the server gets
    there, half a minute later, and after a restart.

    ``command``: makes the command line from (host, port); ``log``: what the server prints is appended here. The
    environment is ours, ``CUDA_VISIBLE_DEVICES`` included.
    """

    def __init__(
        self, command: Callable[[str, int], list[str]], host: str, log: Path, start_s: float = START_S
    ) -> None:
        self.host = host
        self._reserved = reserve_port(host)
        self.port = int(self._reserved.getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        self.log = log
        self._command = command(host, self.port)
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> str:
        """Start it and return its base URL when it is healthy.

        Raises:
            ValueError: it ended, or was not healthy in time; the message has the end of its log.
        """
        with self._lock:
            self._start()
        return self.url

    def address(self) -> str:
        """Its base URL, also before it is started."""
        return self.url

    def restart(self) -> None:
        """End what is left of it and start it anew; raises as `start` does."""
        with self._lock:
            self._end()
            self._start()

    @property
    def pid(self) -> int:
        """Of the process group."""
        assert self._process is not None, "start comes first"
        return self._process.pid

    def close(self) -> None:
        """End the process group that `start` made, and nothing else; the port is free again."""
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
                    f"the SGLang server of {self.url} ended with status {process.returncode}: {self._tail()}"
                )
            if now - begin > self._start_s:
                raise ValueError(
                    f"the SGLang server of {self.url} is not healthy after {self._start_s:.0f} s: {self._tail()}"
                )
            if now - reported > REPORT_S:
                reported = now
                logger.warning(
                    "waiting for the SGLang server of %s, %.0f s so far; its log is %s", self.url, now - begin, self.log
                )
            time.sleep(0.5)
        # SGLang does it after a warm-up, which there is none of: every flush of its cache would search all it imported
        Server(self.url).post("/freeze_gc", retry=ONCE, timeout_s=ANSWER_S)

    def _healthy(self) -> bool:
        try:
            ask("GET", f"{self.url}/health", timeout_s=ANSWER_S)
            return True
        except HttpError:  # 503 while it starts
            return False

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"its log {self.log} ends with", *lines])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # the group, whose leader may be dead already; nothing in it needs saving
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        # its ports and GPU memory are free when the last of it is gone
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        logger.warning("some of the server of %s outlives SIGKILL by %.0f s", self.url, END_S)


def reserve_port(host: str) -> socket.socket:
    """A socket on a port of this machine that nobody has. It does not listen: a server may bind the same port with
    SO_REUSEADDR, as servers do, while the system gives the port to nobody who asks for a free one."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


def installed_options() -> dict[str, argparse.Action]:
    """The options of the installed SGLang's command line, by field. Importing them takes seconds."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}


def missing_for_kernels() -> Iterator[str]:
    """What SGLang's kernels need of this machine besides Python packages."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").partition(" ")
    if name != "glibc" or [int(part) for part in version.split(".")[:2]] < [2, 34]:
        yield f"SGLang's kernels need glibc 2.34 or newer, and this machine has {name} {version}: see docs/install.md"
    if shutil.which("nvcc") is None and not (Path(os.environ.get("CUDA_HOME", "")) / "bin" / "nvcc").is_file():
        yield (
            "no nvcc is found, with which SGLang compiles kernels when it first needs them: all of them on GPUs before "
            "Hopper (RTX 4090, L40S), top-k and top-p sampling (--eval-top-k 1) on any; install the CUDA toolkit, or "
            "set CUDA_HOME"
        )


def check_fields(fields: Collection[str], installed: Collection[str]) -> list[str]:
    """One problem for each of ``fields`` that SGLang does not have."""
    problems = []
    for name in fields:
        if name not in installed:
            near = difflib.get_close_matches(name, installed, n=1, cutoff=0.7)
            hint = f"; did you mean --sglang-{near[0].replace('_', '-')}?" if near else ""
            problems.append(f"--sglang-{name.replace('_', '-')} is not an option of the installed SGLang{hint}")
    return problems


def command_line(fields: Mapping[str, object], installed: Mapping[str, argparse.Action]) -> list[str]:
    """``fields`` as words for SGLang's parser."""
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
    """Check, print and start."""
    fields = json.loads(sys.argv[1])
    installed = installed_options()
    if problems := check_fields(fields, installed):
        sys.exit("\n".join(problems))
    sys.argv[1:] = command_line(fields, installed)
    print("python -m sglang.launch_server", shlex.join(sys.argv[1:]), flush=True)
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
