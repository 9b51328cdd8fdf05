"""Starts or joins the Ray of a run. The Ray of a run is either a new Ray on this machine that no other user can access,
or the cluster of ``RAY_ADDRESS``. This file also converts an error of Ray to one sentence with a remedy."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.node import Node
from ray.exceptions import (
    ActorUnavailableError,
    AuthenticationError,
    NodeDiedError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
)

from slimelite.base.lifecycle import Watchdog, end_session
from slimelite.base.processes import RECENT_S
from slimelite.cluster.remote import ClusterError, MemoryShortage, not_there

logger = logging.getLogger(__name__)

TRIES = 2
# Ray's raylet ends if one of its two agents does not begin within 15 s (a constant in WaitForPersistedPort of Ray 2.60;
# ray issue 65983). On a busy machine, or when Python's modules come from a slow disk, a later attempt can succeed.
SLOW_TRIES, SLOW = 8, "Timed out waiting for file"
# free disk space that a start needs [bytes]; with less space, Ray starts, and then fails with errors that do not name
# the disk
ROOM = 100 << 20
ANSWER_S = 10.0
LOCAL = "--launcher local needs no Ray (one rank, one engine)"
NO_MEMORY = (
    "lower --max-tokens-per-gpu, --rollout-batch-size or --sglang-max-running-requests, use fewer ranks and engines, "
    "or end other jobs on the machine"
)
NO_ROOM = "free space in /tmp and /dev/shm, or export RAY_TMPDIR=<a folder with a short name on another disk>"
ENDED = "Worker unexpectedly exits"
# Ray's methods that start processes which a run does not need. The log monitor forwards the output of workers, but our
# workers write their output to files in the run folder. The monitor adds machines. The API server belongs to the
# dashboard, and Ray starts it even if the dashboard is off.
NEEDLESS = ("start_log_monitor", "start_monitor", "start_api_server")
# Without these settings, Ray would start an idle worker for each core, but our workers are started on demand. Also,
# every process would collect metrics and report them each second, for the dashboard and Prometheus.
SETTINGS = {
    "prestart_worker_first_driver": False,
    "enable_metrics_collection": False,
    "event_stats": False,
    "task_events_report_interval_ms": 0,
}


@contextmanager
def connected(bundles: int, patience: float = 0.0) -> Iterator[bool]:
    """Connect to the Ray of ``RAY_ADDRESS`` (a `ray job` sets this variable). If this variable is not set, start a new
    Ray for ``bundles`` devices.

    ``patience``: the time to wait for a cluster that does not answer [s].

    Yields:
        whether the Ray cluster continues after the run. If the cluster continues, the run must release its reserved
        devices.

    Raises:
        ClusterError: there is no cluster at the address, the cluster refuses the token, or Ray does not start.
    """
    if ray.is_initialized():
        yield True
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _join(address, patience)
        else:
            _start(bundles)
        yield bool(address)
    finally:
        own = ray.is_initialized() and not address
        session = _session() if own else None
        ray.shutdown()
        if session is not None:
            end_session(session)


def _session() -> Path:
    """The folder of this process's Ray."""
    return Path(ray._private.worker._global_node.get_session_dir_path())


def _join(address: str, patience: float) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + patience
    try:
        while host and port.isdigit():  # Ray itself would wait for minutes, and print a line every second
            try:
                socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)
        _init()
    except AuthenticationError as error:
        raise ClusterError(
            f"the Ray cluster of RAY_ADDRESS={address} requires a valid token: export RAY_AUTH_MODE=token, and give "
            "the cluster's token as RAY_AUTH_TOKEN or in ~/.ray/auth_token (docs/install.md)"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        problem = (
            f"cannot join a Ray cluster at RAY_ADDRESS={address} ({_first_line(error)}): name the head node's address, "
            "such as 10.0.0.1:6379; unset RAY_ADDRESS to let the run start its own Ray"
        )
        raise not_there(problem, patience) from error


def _start(bundles: int) -> None:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    # a CPU "device" is one of our processes; more processes than cores are slow, but they work
    cpus = max(os.cpu_count() or 1, bundles)
    # if a user's file has already imported Ray, the variable that `_close_ray_to_others` sets has no effect, because
    # Ray reads it at the import and stores its value here
    ray_constants.ENABLE_RAY_CLUSTER = False
    if not ipaddress.ip_address(here := services.get_node_ip_address()).is_loopback:
        raise ClusterError(
            f"Ray {ray.__version__} would be open to other machines, because it listens at {here}; {LOCAL}"
        )
    for attempt in itertools.count(1):
        try:
            if (free := shutil.disk_usage(folder).free) < ROOM:
                raise OSError(f"{folder} has {free >> 20} MB of free space, but Ray needs at least {ROOM >> 20} MB")
            with _without_needless(), _sessions_of_their_own():
                _init(address="local", num_cpus=cpus, include_dashboard=False, _system_config=dict(SETTINGS))
            Watchdog.note_session(_session())
            return
        except OSError as error:
            raise ClusterError(
                f"Ray cannot write its files in {folder}: {error}. Free space there, or export RAY_TMPDIR=<a folder "
                f"with a short name on another disk>; {LOCAL}"
            ) from error
        except Exception as error:
            ray.shutdown()
            slow = _slow(folder)
            cause = "one of its processes did not begin within 15 s" if slow else _first_line(error)
            if attempt < (tries := SLOW_TRIES if slow else TRIES):
                logger.warning("Ray did not start (%s); trying again (attempt %s of %s)", cause, attempt + 1, tries)
                continue
            raise ClusterError(
                f"Ray did not start in {attempt} attempts: {cause}. Ray's logs are in "
                f"{folder}/ray/session_latest/logs. Most often the machine is too busy, or has no memory or processes "
                f"left (free -g, ulimit -u): end other jobs and start again; {LOCAL}"
            ) from error


def _slow(folder: str) -> bool:
    """Whether this process's last Ray gave up because one of Ray's own processes began too late."""
    sessions = sorted(Path(folder, "ray").glob(f"session_*_{os.getpid()}"))  # a name begins with the time of its start
    errors = sessions[-1] / "logs" / "raylet.err" if sessions else None
    return errors is not None and errors.exists() and SLOW in errors.read_text(errors="replace")


@contextmanager
def _without_needless() -> Iterator[None]:
    """Inside this block, Ray does not start the processes of `NEEDLESS`. These processes would cost 2 CPU-seconds at
    the start of a run.

    The replaced methods are private. If a version of Ray has no method of this name, it starts the process as usual.
    """
    kept = {name: getattr(Node, name) for name in NEEDLESS if hasattr(Node, name)}
    for name in kept:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


@contextmanager
def _sessions_of_their_own() -> Iterator[None]:
    """Inside this block, each process of Ray begins its own session. So these processes do not get a signal for the
    run's process group (from ``timeout``, a shell or a scheduler).

    If the signal ended Ray's daemons first, Ray's threads in this process would end this process within a second. The
    exit status would be 1, and there would be no message. If a version of Ray lacks the name that is replaced here, its
    processes start in the run's process group.
    """
    name = "ConsolePopen"
    if (kept := getattr(services, name, None)) is None:
        yield
        return
    setattr(services, name, partial(kept, start_new_session=True))
    try:
        yield
    finally:
        setattr(services, name, kept)


def _start_nothing(node: Any, **_options: Any) -> None:
    node._webui_url = ""  # `Node.start_api_server` sets it, and `Node.start_raylet` reads it


def _init(**options: object) -> None:
    """Call `ray.init`. `ray.init` replaces the SIGTERM handler, so our handler is set again afterwards."""
    # otherwise Ray would print its own message about a dead worker in addition to ours
    ray._private.worker._worker_logs_enabled = False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    except SystemExit:  # raised by Ray's SIGTERM handler
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _first_line(error: BaseException) -> str:
    lines = [line.strip(" .") for line in str(error).splitlines() if line.strip(" .")]
    return lines[0] if lines else type(error).__name__


def explained(
    error: RayError,
    worker: str,
    log: Path | None = None,
    kills: int | None = None,
    verdict: str | None = None,
    host: str | None = None,
) -> ClusterError:
    """Convert ``error`` to an error with one message. The text of ``error`` is added as a note, which log.txt shows.

    ``host``: the address of the worker's machine, for errors of Ray that do not name it.
    ``kills``: the number of processes on the worker's machine that the kernel has just killed because memory was full.
    None: unknown. ``verdict``: why the `Monitor` ended the worker, if it did.
    """
    last = last_line(error)
    worker += _place(error) or (f" on {_host_name(host)}" if host else "")
    died = isinstance(error, RayActorError) and ENDED in last
    shortage = isinstance(error, OutOfMemoryError) or (died and kills != 0)
    if what := _lost_raylet(log):
        one = ClusterError(what)
        one.add_note(str(error))
        return one
    if verdict is not None and isinstance(error, RayActorError):
        return ClusterError(f"{verdict}; its log is {log}")
    if isinstance(error, OutOfMemoryError):
        what = f"{worker} was ended by Ray because the machine's memory was nearly full: {NO_MEMORY}"
    elif isinstance(error, OutOfDiskError | ObjectStoreFullError):
        what = f"{worker}: Ray has no space left for the data that the workers exchange: {NO_ROOM}"
    elif isinstance(error, RuntimeEnvSetupError):
        what = f"{worker}: Ray could not set its environment variables (--train-env-vars): {last}"
    elif isinstance(error, NodeDiedError):
        what = f"{worker}: its machine died or lost its connection: {last}"
    elif died:
        what = f"{worker} {_death(kills)}"
    elif isinstance(error, ActorUnavailableError):
        what = f"{worker} cannot be reached: its process or its machine died, or the network failed ({last})"
    elif isinstance(error, RayActorError):
        what = f"{worker} died: {last}"
    else:
        what = f"{worker}: Ray failed: {type(error).__name__}: {last}"
    one = (MemoryShortage if shortage else ClusterError)(what if log is None else f"{what}; its log is {log}")
    one.add_note(str(error))
    return one


def _death(kills: int | None) -> str:
    """A text on how a worker died without a message. The text depends on ``kills``, the kernel's count."""
    if kills:
        number = "a process" if kills == 1 else f"{kills} processes"
        return (
            f"was killed: in the last {RECENT_S:.0f} s the kernel has killed {number} on this machine because memory "
            f"was full. Remedy: {NO_MEMORY}"
        )
    if kills == 0:
        return (
            "died without an error message: it crashed, or somebody sent it SIGKILL. Full memory was not the "
            f"reason: in the last {RECENT_S:.0f} s, the kernel of this machine has killed no process for lack of memory"
        )
    return (
        "died without an error message: it crashed, or it was killed by SIGKILL (`dmesg` shows whether the machine ran "
        f"out of memory; if so, {NO_MEMORY})"
    )


def _lost_raylet(log: Path | None) -> str:
    """A text on how the raylet of this process ended. The text is empty if the raylet is alive. The raylet's log is
    copied to the folder of ``log``, because Ray's own folder will be removed."""
    node = ray._private.worker._global_node
    started = node.all_processes.get(ray_constants.PROCESS_TYPE_RAYLET, []) if node else []
    for process in (each.process for each in started):
        if (code := process.poll()) is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            what = f"Ray's raylet (process {process.pid} on {socket.gethostname()}) {how}, and all workers need it"
            if log is not None:
                with suppress(OSError):
                    kept = shutil.copy(_session() / "logs" / "raylet.out", log.parent)
                    what += f"; its log is {kept}"
            return what
    return ""


def _place(error: BaseException) -> str:
    """The process and the host of a dead actor, if Ray's message names them. Returns an empty text if it does not."""
    pid, host = (re.search(rf"^\s*{name}: (\S+)$", str(error), re.M) for name in ("pid", "ip"))
    if not (pid and host):
        return ""
    return f" (process {pid[1]} on {_host_name(host[1])})"


def _host_name(address: str) -> str:
    """The name of this machine if ``address`` is its address, else ``address``."""
    with suppress(ValueError):
        return socket.gethostname() if ipaddress.ip_address(address).is_loopback else address
    return address


def last_line(error: BaseException) -> str:
    """The last line of Ray's message. If an actor failed in its constructor, the last line contains the actor's
    error."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
