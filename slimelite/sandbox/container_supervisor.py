"""Runs one program in a container, and ends the container. After SIGINT, the container ends immediately, and after
SIGTERM, it ends after a short time.

The module `containers` starts this supervisor as ``python -I -S -c``. An environment variable has a `ContainerPlan`,
serialised by ``marshal``. The program in the container waits for a line on stdin. The supervisor first opens a
socket in the container's network, through which the program reaches its model. Then the supervisor sends the line.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from slimelite.sandbox.supervisor import (
    CONNECTIONS,
    GRACE,
    LOOK,
    NEW_NET,
    NEW_USER,
    NO_START,
    SIGNALS,
    received,
    relay,
    say,
    send_descriptor,
)

TYPE_CHECKING = False  # as in `confine`
if TYPE_CHECKING:
    from slimelite.sandbox.registry import ContainerPlan

VARIABLE = "SLIMELITE_CONTAINER"
# time between two checks whether the container has started, and the time limit for its start [s]
ASK, START = 0.05, 60.0
KILLED = 128 + signal.SIGKILL


def main() -> None:
    """Run the program of the plan, and exit with its status."""
    plan: ContainerPlan = marshal.loads(bytes.fromhex(os.environ.pop(VARIABLE)))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        container = _Container(plan)
    except OSError as error:
        print(f"the sandbox does not start: {error}", file=sys.stderr, flush=True)
        sys.exit(NO_START)
    try:
        status = container.to_the_end()
    finally:
        container.remove()
    sys.exit(status)


class _Container:
    """The container, and the client process of podman or docker that is attached to it."""

    def __init__(self, plan: ContainerPlan) -> None:
        self._plan, self._parent = plan, os.getppid()
        self._engine, verb, *rest = plan["words"]
        self._name = plan["name"]
        # a separate folder, because podman's monitor leaves a file in its working directory when a container exceeds
        # its memory
        self._folder = os.path.join(os.environ.get("TMPDIR") or "/tmp", self._name)
        os.mkdir(self._folder, 0o700)
        # only this user can read this file; podman or docker has read it before the container begins
        self._file = os.path.join(self._folder, "variables")
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{name}={value}\n" for name, value in plan["variables"].items())
        try:
            self._client = subprocess.Popen(
                [self._engine, verb, "--name", self._name, "--env-file", self._file, *rest],
                cwd=self._folder,
                stdin=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
            )
        except OSError:
            shutil.rmtree(self._folder)
            raise

    def to_the_end(self) -> int:
        """Wait for the program and for signals. Returns the exit status."""
        over = float("inf")
        try:
            if self._plan["endpoint"] is not None and not self._connect(self._plan["endpoint"]):
                return self._status()
        except OSError as error:
            print(f"the sandbox does not start: {error}", file=sys.stderr, flush=True)
            return NO_START
        threading.Thread(target=self._tell, daemon=True).start()
        while self._client.poll() is None:
            signalled = signal.sigtimedwait(SIGNALS, max(min(LOOK, over - time.monotonic()), 0.0))
            number = 0 if signalled is None else signalled.si_signo
            if self._must_end(number) or time.monotonic() >= over:
                return KILLED
            if number == signal.SIGTERM:
                over = time.monotonic() + GRACE
                self._command("kill", "--signal", "TERM", self._name)
        return self._status()

    def _must_end(self, number: int) -> bool:
        return number == signal.SIGINT or os.getppid() != self._parent

    def _status(self) -> int:
        status = self._client.wait()
        if status == KILLED:
            megabytes = self._plan["memory_mb"]
            return say(
                f"it was killed, probably because it used more than {megabytes} MiB of memory (--agent-memory-mb)"
            )
        return status if status >= 0 else 128 - status

    def _connect(self, endpoint: tuple[str, int]) -> bool:
        """Listen in the container's network, and connect each client to ``endpoint``. Returns False if the container
        ended before.

        Raises:
            OSError: this process cannot enter the network.
        """
        end = time.monotonic() + START
        while (pid := self._pid()) is None:
            signalled = signal.sigtimedwait((signal.SIGINT, signal.SIGTERM), ASK)
            if self._client.poll() is not None:
                return False
            if signalled is not None or self._must_end(0) or time.monotonic() > end:
                raise OSError("it was stopped before the container began")
        listener = _listener_in(pid, endpoint[1])
        threading.Thread(target=relay, args=(listener, endpoint), daemon=True).start()
        return True

    def _pid(self) -> int | None:
        """The id of the container's first process. Returns None while there is no process.

        Raises:
            OSError: the process is not on this machine.
        """
        words = [self._engine, "container", "inspect", "--format", "{{.Id}} {{.State.Pid}}", self._name]
        answer = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
        identity, _, pid = answer.stdout.strip().partition(" ")
        if answer.returncode or not pid.isdigit() or pid == "0":
            return None
        try:
            with open(f"/proc/{pid}/cgroup") as file:
                ours = identity in file.read()
        except FileNotFoundError:
            ours = False
        if not ours:
            raise OSError(
                f"{self._engine} runs on another machine, or its processes are not visible; use --agent-network full"
            )
        return int(pid)

    def _tell(self) -> None:
        """Let the program begin, and forward the input from stdin."""
        assert self._client.stdin is not None
        with suppress(OSError), self._client.stdin as pipe:
            pipe.write(b"\n")
            pipe.flush()
            while data := os.read(0, 1 << 16):
                pipe.write(data)
                pipe.flush()

    def remove(self) -> None:
        """Remove the container and its folder. The remove command has its own session, so it continues if this process
        is killed."""
        if self._client.poll() is None:
            self._command("kill", self._name)
            self._client.kill()
            self._client.wait()
        if self._client.returncode:  # a client that failed may leave its container too
            self._command("rm", "--force", self._name)
        shutil.rmtree(self._folder, ignore_errors=True)  # the engine's monitor may still write there

    def _command(self, *words: str) -> None:
        none = subprocess.DEVNULL
        line = [self._engine, *words]
        subprocess.run(line, start_new_session=True, check=False, stdin=none, stdout=none, stderr=none)


def _listener_in(pid: int, port: int) -> int:
    """Open a socket that listens at ``port`` on the loopback of another process's network. Returns the socket's
    descriptor.


    Raises:
        OSError: this user cannot enter the network.
    """
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            if os.geteuid() != 0:  # a container of a user other than root has its own user namespace
                libc.setns(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY), NEW_USER)
            if libc.setns(network, NEW_NET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen(CONNECTIONS)
                send_descriptor(theirs, listener.fileno())
        finally:
            os._exit(0)
    theirs.close()
    made = received(ours)
    os.waitpid(child, 0)
    if made is None:
        raise OSError("this user cannot enter the container's network: use podman, or --agent-network full")
    return made
