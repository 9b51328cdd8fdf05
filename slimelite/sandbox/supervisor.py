"""Runs one program in a sandbox, and ends all processes that the program started. After SIGINT, these processes end
immediately, and after SIGTERM, they end after a short time.

The module `boxes` starts this supervisor as ``python -I -S -c``. An environment variable has a `Plan`, serialised by
``marshal``. The supervisor is the parent of the processes in the sandbox, and of the orphans among them. The supervisor
imports few modules, because each episode waits for the start of a supervisor. For example, the supervisor does not
import json or the enums of ``signal`` and ``socket``. The supervisor imports the modules that relay connections only
when the first client connects.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time
from _thread import start_new_thread

from slimelite.sandbox import confine

TYPE_CHECKING = False  # as in `confine`
if TYPE_CHECKING:
    import signal
    import socket

    from slimelite.sandbox.registry import Plan
else:  # the C modules; importing the Python modules around them takes more processor time than all other steps
    import _signal as signal
    import _socket as socket

VARIABLE = "SLIMELITE_SANDBOX"
# the exit status if the sandbox ended the program, and if it could not start the program
ENDED, NO_START = 125, 126
# time before the first check of a program's usage, longest time between two checks, and time between SIGTERM and the
# end [s]
FIRST_LOOK, LOOK, GRACE = 0.02, 0.25, 1.5
OPEN_FILES = 1024
CONNECTIONS = 64
PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_CAP_AMBIENT = 8, 36, 47
READ_SEARCH = 2  # CAP_DAC_READ_SEARCH
NEW_USER, NEW_NET = 0x10000000, 0x40000000
# user ids from here on are not used by a system; each program gets the sum of this number and its process id
FIRST_USER = 1 << 30
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


class suppress:  # as in contextlib, but without the imports of contextlib
    """Ignore the ``errors`` that a ``with`` block raises."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._errors)


def main() -> None:
    """Run the program of the plan, and exit with its status."""
    plan: Plan = marshal.loads(bytes.fromhex(os.environ.pop(VARIABLE)))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = _Run(plan, libc)
    try:
        status = run.to_the_end(parent)
    finally:
        run.clean()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)  # there is no unwritten output, and a normal exit of Python takes a tenth of the start time


class _Run:
    """A run of one program, with its folder, its cgroups and its processes."""

    def __init__(self, plan: Plan, libc: ctypes.CDLL) -> None:
        self._plan, self._libc = plan, libc
        self._user = FIRST_USER + os.getpid() if os.geteuid() == 0 and plan["confined"] else None
        self._groups = _make_groups(plan["cgroups"])
        self.folder = ""
        if plan["confined"]:
            parent = os.environ.get("TMPDIR") or "/tmp"
            self.folder = os.path.join(parent, f"slimelite-{os.urandom(8).hex()}")
            os.mkdir(self.folder, 0o700)
            for name in ("home", "tmp"):
                os.mkdir(f"{self.folder}/{name}")
            plan["environment"].update(HOME=f"{self.folder}/home", TMPDIR=f"{self.folder}/tmp")
        ours, theirs = socket.socketpair()
        self._program = os.fork()
        if not self._program:
            try:
                ours.close()
                self._become_program(theirs)
            except BaseException as error:
                print(f"the sandbox does not start {plan['words'][0]}: {error}", file=sys.stderr, flush=True)
            os._exit(NO_START)
        theirs.close()
        listener = received(ours)
        if listener is not None and plan["endpoint"] is not None:
            start_new_thread(relay, (listener, plan["endpoint"]))

    def to_the_end(self, parent: int) -> int:
        """Wait for the program and for signals. Returns the program's exit status, which is negative if a signal ended
        the program."""
        look, over = FIRST_LOOK, float("inf")
        while True:
            received = signal.sigtimedwait(SIGNALS, min(look, max(over - time.monotonic(), 0.0)))
            ended, status = os.waitpid(self._program, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return (code and self._why()) or code
            number = 0 if received is None else received.si_signo
            if number == signal.SIGINT or os.getppid() != parent or time.monotonic() >= over:
                return -signal.SIGKILL
            if number == signal.SIGTERM:
                over = time.monotonic() + GRACE
                with suppress(ProcessLookupError):
                    os.killpg(self._program, signal.SIGTERM)
            begin = time.monotonic()
            if excess := self._excess():
                return say(excess)
            look = max(min(1.5 * look, LOOK), 10 * (time.monotonic() - begin))

    def _why(self) -> int:
        """Return `ENDED` if the kernel killed a process of the program because of its memory, else 0."""
        for folder in self._groups:
            for name in ("memory.oom_control", "memory.events"):
                with suppress(OSError), open(f"{folder}/{name}") as file:
                    if any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in file):
                        return say(f"it used more than {self._plan['memory'] >> 20} MiB of memory (--agent-memory-mb)")
        return 0

    def _excess(self) -> str:
        """A text on the limit that the program exceeds. Only limits that the kernel does not enforce are checked.
        Returns "" if the program exceeds no limit."""
        plan, pids = self._plan, []
        if self.folder or not self._groups:
            pids = self._processes()
        if not self._groups:
            if len(pids) > plan["processes"]:
                return f"it had more than {plan['processes']} processes (--agent-processes)"
            if sum(map(_resident, pids)) > plan["memory"]:
                return f"it used more than {plan['memory'] >> 20} MiB of memory (--agent-memory-mb)"
        if self.folder and _used(self.folder, plan["disk"]) + _unnamed(pids) > plan["disk"]:
            return f"its files held more than {plan['disk'] >> 20} MiB (--agent-disk-mb)"
        return ""

    def clean(self) -> None:
        """End all processes, and remove their files and cgroups."""
        while self._has_children():
            self._kill_all()
            time.sleep(0.001)
        for folder in self._groups:
            for _ in range(100):
                with suppress(OSError):
                    os.rmdir(folder)
                    break
                time.sleep(0.005)
        if self.folder:
            words = ["rm", "-rf", self.folder]
            os.waitpid(os.posix_spawnp("rm", words, os.environ), 0)

    def _has_children(self) -> bool:
        """Whether this process still has descendants. Descendants that have ended are reaped."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            return True
        return False

    def _kill_all(self) -> None:
        """Kill every process once. All processes are stopped before the first process is killed, because otherwise they
        could continue to fork."""
        if self._user is not None:
            killer = os.fork()
            if not killer:
                with suppress(OSError):
                    os.setresuid(self._user, self._user, self._user)
                    os.kill(-1, signal.SIGKILL)  # kills all processes of this user at the same time
                os._exit(0)
            os.waitpid(killer, 0)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self._processes():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def _processes(self) -> list[int]:
        """The ids of the program's processes. These processes are the descendants of this process."""
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
        descendants = list(children.get(os.getpid(), ()))
        for pid in descendants:
            descendants += children.get(pid, ())
        return descendants

    def _become_program(self, sender: socket.socket) -> None:
        """Restrict this process, and then become the program. This method runs in the child process."""
        plan = self._plan
        os.setsid()
        for folder in self._groups:
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write("0")
        own_network = "" if plan["network"] == "full" else self._own_network(sender)
        sender.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        disk, memory = plan["disk"], plan["memory"]
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: disk,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            # a limit of the address space would end programs that reserve much memory but use little
            **({} if self._groups else {resource.RLIMIT_DATA: memory}),
        }
        if self._user is not None or own_network == "user":  # otherwise all processes of the user would count
            limits[resource.RLIMIT_NPROC] = plan["processes"]
        words, environment = plan["words"], plan["environment"]
        if plan["confined"]:
            os.chdir(f"{self.folder}/home")
            self._confine(limits, own_network)
        else:
            _limit(limits)
            descriptor = os.memfd_create("filter", 0)
            os.write(descriptor, plan["filter"])
            os.lseek(descriptor, 0, os.SEEK_SET)
            words = [*plan["prefix"], "--seccomp", str(descriptor), "--", *words]
        os.execvpe(words[0], words, environment)

    def _confine(self, limits: dict[int, int], own_network: str) -> None:
        plan, libc = self._plan, self._libc
        if self._user is not None:
            for path in (self.folder, f"{self.folder}/home", f"{self.folder}/tmp"):
                os.chown(path, self._user, self._user)
            libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            _limit(limits)
            os.setresuid(self._user, self._user, self._user)
            _read_all_files(libc)
        else:
            _limit(limits)
            confine.drop_capabilities(libc, 0)
        libc.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(confine.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        ports = [plan["endpoint"][1]] if plan["network"] == "loopback" and plan["endpoint"] else []
        open_ports = own_network or plan["network"] == "full"
        if ports and not open_ports and confine.landlock_abi() < 4:
            raise OSError("this user cannot make a network namespace, and before Linux 6.7 Landlock cannot limit TCP")
        confine.restrict_files(plan["read"], [self.folder], None if open_ports else ports)
        confine.install(plan["filter"])

    def _own_network(self, sender: socket.socket) -> str:
        """Give this process its own loopback network. The supervisor gets a socket that listens in this network at the
        endpoint's port.

        Returns "root" or "user", depending on how the network was made. Returns "" if this user cannot make a network.
        Without its own network, only ``--agent-sandbox process`` works.
        """
        user, group, how = os.getuid(), os.getgid(), "root" if os.geteuid() == 0 else "user"
        if self._libc.unshare(NEW_NET if how == "root" else NEW_NET | NEW_USER):
            if self._plan["confined"]:
                return ""
            raise OSError(ctypes.get_errno(), "this user cannot make a network namespace")
        if how == "user":
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        any_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS: set the interface up
        any_socket.close()
        if self._plan["network"] == "loopback" and self._plan["endpoint"] is not None:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.bind(("127.0.0.1", self._plan["endpoint"][1]))
            listener.listen(CONNECTIONS)
            send_descriptor(sender, listener.fileno())
            listener.close()
        return how


def _read_all_files(libc: ctypes.CDLL) -> None:
    """Keep the right to read other users' files after exec. Landlock still limits the files."""
    confine.drop_capabilities(libc, 1 << READ_SEARCH)
    header = struct.pack("Ii", confine.CAPABILITY_VERSION, 0)
    word = 1 << READ_SEARCH
    libc.capset(header, struct.pack("6I", word, word, word, 0, 0, 0))
    libc.prctl(PR_CAP_AMBIENT, 2, READ_SEARCH, 0, 0)


def _limit(limits: dict[int, int]) -> None:
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def _make_groups(parents: dict[str, dict[str, str]]) -> list[str]:
    """Create a cgroup with the given limits in each of ``parents``. Returns the folders of the cgroups."""
    made = []
    for parent, files in parents.items():
        folder = f"{parent}/slimelite-{os.getpid()}"
        os.mkdir(folder)
        made.append(folder)
        for name, limit in files.items():
            with suppress(FileNotFoundError), open(f"{folder}/{name}", "w") as file:
                file.write(limit)
    return made


def send_descriptor(sender: socket.socket, descriptor: int) -> None:
    """Send an open file descriptor to the process that calls `received`."""
    sender.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))])


def received(ours: socket.socket) -> int | None:
    """The descriptor of the listening socket that the child sent. Returns None if the child has no such socket."""
    sent = ours.recvmsg(1, socket.CMSG_LEN(4))[1]
    ours.close()
    return int(struct.unpack("i", sent[0][2])[0]) if sent else None


def relay(listener: int, endpoint: tuple[str, int]) -> None:
    """Connect every client of the socket ``listener`` to the endpoint."""
    select.select([listener], (), ())
    import socket  # do not import threading here, because at the exit it would wait for this thread

    comers, joined = socket.socket(fileno=listener), list[None]()
    while True:
        theirs = comers.accept()[0]
        while len(joined) >= CONNECTIONS:
            time.sleep(0.01)
        joined.append(None)
        start_new_thread(_join, (theirs, endpoint, joined))


def _join(theirs: socket.socket, endpoint: tuple[str, int], joined: list[None]) -> None:
    from socket import SHUT_WR, create_connection

    with suppress(OSError), theirs, create_connection(endpoint, 30.0) as model:
        model.settimeout(None)
        other = {theirs: model, model: theirs}
        open_sides = list(other)
        while open_sides:
            for side in select.select(open_sides, (), ())[0]:
                data = side.recv(1 << 16)
                if data:
                    other[side].sendall(data)
                else:
                    open_sides.remove(side)
                    other[side].shutdown(SHUT_WR)
    joined.pop()


def say(what: str) -> int:
    print(f"the sandbox ended the program: {what}", file=sys.stderr, flush=True)
    return ENDED


def _resident(pid: int) -> int:
    """The size of a process's resident memory [bytes]."""
    with suppress(OSError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def _used(folder: str, most: int) -> int:
    """The total size of all files in ``folder`` [bytes]. Counting stops above ``most``. If folders are nested too deep,
    the result is more than ``most``."""
    used, places = 0, [folder]
    while places and used <= most:
        try:
            entries = list(os.scandir(places.pop()))
        except FileNotFoundError:
            continue
        except OSError:
            return most + 1
        used += 1024 * len(entries)
        for entry in entries:
            try:
                used += 512 * entry.stat(follow_symlinks=False).st_blocks
                if entry.is_dir(follow_symlinks=False):
                    places.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                return most + 1
    return used


def _unnamed(pids: list[int]) -> int:
    """The total size of deleted files that these processes still have open [bytes]."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{number}")
                    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                        sizes[info.st_dev, info.st_ino] = 512 * info.st_blocks
    return sum(sizes.values())
