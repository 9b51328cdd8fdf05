"""Machines of a network of their own, for tests of several nodes: Linux namespaces that are joined by a bridge.

Each machine has an address, a host name, process ids, /dev/shm, /tmp/ray and, if wanted, folders of its own. Otherwise
it sees the files of this machine. A user namespace makes that possible without root. All of it ends with the test, even
if that is killed: the first process of each namespace reads from a pipe, and the kernel ends the others with it.

It needs iproute2 (``ip``), util-linux (``unshare``, ``nsenter``) and a kernel that allows user namespaces. Where one of
them is missing, tests fail with the reason; ``SLIMELITE_NO_NAMESPACES=1`` skips them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

ROOT = Path(__file__).parents[2]
NET = "10.77.0"
RAY_FOLDER = "/tmp/ray"
SKIP = "SLIMELITE_NO_NAMESPACES"
REMEDY = (
    "install iproute2 and util-linux, allow user namespaces (sysctl user.max_user_namespaces, and on Ubuntu "
    f"kernel.apparmor_restrict_unprivileged_userns=0), or leave these tests out with {SKIP}=1"
)
READY = "ready"
FAR_LINK = Path(__file__).with_name("far_link.py")
START_S = 600
OF_A_RUN = re.compile(r"train\.py|-m slimelite|slimelite/\w+/\w+\.py|ray::(?!IDLE|\w*Agent)")


@dataclass
class Machine:
    """A machine; commands run on it in its namespaces."""

    name: str
    address: str
    holder: subprocess.Popen[str]
    first: int  # process id, here, of its first process
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    cable: subprocess.Popen[str] | None = None

    def pull(self) -> tuple[int, int]:
        """Pull the long cable out; returns the frames that came, and those of them that were lost."""
        assert self.cable is not None
        assert self.cable.stdout
        out, err = self.cable.communicate(timeout=120)
        assert self.cable.returncode == 0, err
        came, lost = map(int, out.split())
        return came, lost

    def start(self, *command: str, env: dict[str, str] | None = None, log: Path | None = None) -> subprocess.Popen[str]:
        """Start a command on the machine; its output goes to pipes or to ``log``."""
        flags = ["--user", "--preserve-credentials", "--net", "--mount", "--uts", "--pid"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k == "RAY_AUTH_TOKEN"}
        output = subprocess.PIPE if log is None else log.open("a")
        process = subprocess.Popen(
            ["nsenter", "--target", str(self.first), *flags, "--", "env", "--chdir", str(ROOT), *command],
            env={**clean, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(
        self, *command: str, env: dict[str, str] | None = None, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine to its end."""
        process = self.start(*command, env=env)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = process.communicate()
            pytest.fail(f"{command[:4]} on {self.name} took longer than {timeout} s:\n{out[-2000:]}\n{err[-2000:]}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def left(self, seconds: float = 120.0) -> list[str]:
        """Command lines of the processes of a run that still live so many seconds after its end. Ray's own daemons and
        its idle workers are not of the run."""
        deadline = time.monotonic() + seconds
        while True:
            lines = self.run("ps", "-axww", "-o", "pid=,args=").stdout.splitlines()
            lines = [line.strip() for line in lines if OF_A_RUN.search(line)]
            if not lines or time.monotonic() > deadline:
                return lines
            time.sleep(0.2)

    def kill(self) -> None:
        """Switch the machine off: all of its processes end at once, and its address is gone."""
        if psutil.pid_exists(self.first):
            os.kill(self.first, 9)
        self.holder.wait(600)
        for process in self.started:
            process.wait(600)


@contextmanager
def machines(
    count: int, *, private: Sequence[Path] = (), delay_ms: float = 0.0, loss: float = 0.0
) -> Iterator[tuple[list[Machine], Machine]]:
    """``count`` machines of a cluster, and one more in the same network that is not part of it.

    ``private``: folders, which exist here, of which each of the ``count`` machines has an empty one of its own.
    ``delay_ms`` and ``loss``: of the cable of each machine but the first: how much later a frame comes, and the share
    of frames that never do.
    """
    if os.environ.get(SKIP) == "1":
        pytest.skip(f"{SKIP}=1")
    if missing := [each for each in ("ip", "unshare", "nsenter", "mount") if shutil.which(each) is None]:
        pytest.fail(f"no namespaces without {', '.join(missing)}: {REMEDY}", False)
    Path(RAY_FOLDER).mkdir(exist_ok=True)
    with ExitStack() as stack:
        hosts = stack.enter_context(_hosts_file(count))
        # a bridge is the network; this first namespace owns the others
        bridge = "ip link set lo up && ip link add br0 type bridge && ip link set br0 up"
        switch = stack.enter_context(_held(["unshare", "--user", "--map-root-user", "--net", "--mount"], bridge))
        made: list[Machine] = []
        for number in range(1, count + 2):
            name, folders = (f"node{number}", private) if number <= count else ("outside", ())
            into = ["nsenter", "--target", str(switch.pid), "--user", "--preserve-credentials", "--net", "--mount"]
            own = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            mounts = [f"mount -t tmpfs none '{folder}'" for folder in ("/dev/shm", RAY_FOLDER, *folders)]
            setup = [f"hostname {name}", f"mount --bind '{hosts}' /etc/hosts", *mounts, "ip link set lo up"]
            holder = stack.enter_context(_held([*into, *own], " && ".join(setup)))
            first = psutil.Process(holder.pid).children()[0].pid
            machine = Machine(name, f"{NET}.{number}", holder, first)
            if number > 1 and (delay_ms or loss):
                _plug_far(stack, switch.pid, machine, number, delay_ms, loss)
            else:
                _plug(switch.pid, machine, number)
            made.append(machine)
            stack.callback(machine.kill)
        yield made[:-1], made[-1]


def _plug(switch: int, machine: Machine, number: int) -> None:
    """Connect a machine with the bridge by a pair of virtual network cards."""
    cable = (
        f"ip link add v{number} type veth peer name eth0 netns {machine.first} && "
        f"ip link set v{number} master br0 up && "
        f"nsenter --target {machine.first} --net sh -c "
        f"'ip addr add {machine.address}/24 dev eth0 && ip link set eth0 up'"
    )
    command = ["nsenter", "--target", str(switch), "--user", "--preserve-credentials", "--net", "sh", "-c", cable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"no virtual network: {done.stderr.strip()}: {REMEDY}", False)


def _plug_far(stack: ExitStack, switch: int, machine: Machine, number: int, delay_ms: float, loss: float) -> None:
    """Connect a machine with the bridge by ``far_link.py``, which ends with ``stack``."""
    into = ["nsenter", "--target", str(switch), "--user", "--preserve-credentials"]
    words = [switch, machine.first, number, machine.address, delay_ms, loss]
    cable = stack.enter_context(_started([*into, "--", sys.executable, str(FAR_LINK), *map(str, words)]))
    assert cable.stdout
    assert cable.stderr
    if cable.stdout.readline().strip() != READY:
        pytest.fail(f"no long cable: {cable.stderr.read().strip()}: {REMEDY}", False)
    machine.cable = cable


@contextmanager
def _held(namespaces: list[str], setup: str) -> Iterator[subprocess.Popen[str]]:
    """A process in new namespaces, made ready by ``setup``, that lives until this process closes a pipe, or dies."""
    with _started([*namespaces, "sh", "-c", f"{setup} && echo {READY} && exec cat"]) as holder:
        assert holder.stdout
        assert holder.stderr
        if holder.stdout.readline().strip() != READY:
            pytest.fail(f"this machine makes no namespaces: {holder.stderr.read().strip()}: {REMEDY}", False)
        yield holder


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends when its stdin closes, which the end of the context does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True)
    try:
        yield process
    finally:
        assert process.stdin
        if not process.stdin.closed:
            process.stdin.close()
        process.wait(START_S)


@contextmanager
def _hosts_file(count: int) -> Iterator[Path]:
    """What each machine has as /etc/hosts."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lines = [f"{NET}.{number} node{number}" for number in range(1, count + 1)]
        file = Path(folder) / "hosts"
        file.write_text("\n".join(["127.0.0.1 localhost", *lines, f"{NET}.{count + 1} outside", ""]))
        yield file


# what every node, and who uses the cluster, has in its environment
CLUSTER = {"RAY_AUTH_MODE": "token"}


def clock_ahead(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of programs whose clock is so many seconds ahead; compiles ``other_clock.c`` into ``folder``."""
    library, source = folder / "other_clock.so", Path(__file__).with_name("other_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "AHEAD_S": str(seconds)}


def start_ray(
    nodes: Sequence[Machine],
    logs: Path,
    *,
    cpus: int,
    dashboard: bool = False,
    more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    head: str | None = None,
) -> str:
    """A Ray cluster of ``nodes``, the first of which is its head, with ``cpus`` each; returns the head's address.

    ``more``: variables of the Ray of some nodes, by the node's name. ``head``: a cluster that all of them join.
    """
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", str(cpus)]
    store = ["--object-store-memory", str(100 << 20), "--disable-usage-stats"]
    first, starting = head or f"{nodes[0].address}:6379", []
    for number, node in enumerate(nodes):
        page = ["--dashboard-host", node.address] if dashboard else ["--include-dashboard", "false"]
        role = ["--head", "--port", "6379", *page] if number == 0 and not head else ["--address", first]
        log, env = logs / f"{node.name}.log", {**CLUSTER, **more.get(node.name, {})}
        starting.append((log, node.start(*ray, *store, "--node-ip-address", node.address, *role, env=env, log=log)))
    end = time.monotonic() + START_S
    while not all("Ray runtime started" in log.read_text() for log, _ in starting):
        if time.monotonic() > end or any(process.poll() is not None for _, process in starting):
            said = "\n".join(log.read_text()[-1000:] for log, _ in starting)
            pytest.fail(f"the cluster of {len(nodes)} nodes does not come up:\n{said}", False)
        time.sleep(0.1)
    return first
