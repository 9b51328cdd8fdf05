"""The sandboxes ``process`` and ``bwrap``. Each program has a supervisor process, which sets up and ends the
sandbox."""

from __future__ import annotations

import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from slimelite.base.lifecycle import MARK
from slimelite.sandbox import confine
from slimelite.sandbox.registry import OPTION, Launch, Plan, SandboxSettings
from slimelite.sandbox.supervisor import VARIABLE

ROOT = str(Path(__file__).parents[2])
# with -I -S, Python imports no files of the user; the path is set here because -I and -S hide this package
RUN = f"import sys; sys.path.insert(0, {ROOT!r}); from slimelite.sandbox.supervisor import main; main()"
SUPERVISOR = ("-I", "-S", "-c", RUN)
# system files that programs and their libraries read; the list has no files with data of this machine's users
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/sys/devices/system/cpu"),
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone")),
    *(f"/etc/{name}" for name in ("alternatives", "ssl", "ca-certificates", "pki", "nsswitch.conf", "hosts")),
    *(f"/etc/{name}" for name in ("resolv.conf", "gai.conf", "passwd", "group", "os-release", "mime.types")),
    *(f"/etc/{name}" for name in ("protocols", "services", "locale.alias")),
)
DEVICES = ("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
KERNEL = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/filesystems")
# the variables of the run's environment that a program gets
KEPT_VARIABLES = ("LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROBE_SECONDS = 20.0
HOME = "/home/agent"


class ProcessSandbox:
    """The sandbox ``process``: Landlock, seccomp and limits. If the run belongs to root, each program runs as its own
    user. If possible, each program also has its own network."""

    name, confined = "process", True

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._groups = control_groups(settings)

    def check(self) -> list[str]:
        """See `Sandbox`."""
        if sys.platform != "linux":
            raise ValueError(f"{OPTION} {self.name} needs Linux; use docker, or use none inside your own container")
        if not confine.has_seccomp():
            raise ValueError(f"{OPTION} {self.name} needs a kernel with seccomp, on x86-64 or arm64")
        if missing := [path for path in self.settings.read if not os.path.exists(path)]:
            raise ValueError(f"--agent-sandbox-read: there is no {', '.join(missing)}")
        self._probe()
        return [*self._lacks(), *self._limits()]

    def _probe(self) -> None:
        if confine.landlock_abi() == 0:
            raise ValueError(
                f"{OPTION} process needs Landlock (Linux 5.13 or newer, and landlock in the kernel's lsm=); use bwrap"
            )
        self._try()

    def _try(self) -> None:
        """Start a program that does nothing, as a test.

        Raises:
            ValueError: the program does not start.
        """
        launch = self.launch(["true"], {}, "http://127.0.0.1:9")
        run = subprocess.run(
            launch.words, env=launch.environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        if run.returncode:
            reason = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
            raise ValueError(f"{OPTION} {self.name} cannot start a program on this machine: {reason}{self._remedy()}")

    def _remedy(self) -> str:
        return ""

    def _lacks(self) -> list[str]:
        if os.geteuid() != 0 and confine.landlock_abi() < 6:
            return ["with Linux before 6.12, a program can send signals to other processes of this user"]
        return []

    def _limits(self) -> list[str]:
        megabytes = self.settings.memory_mb
        if self._groups:
            return []
        return [
            f"the limit of {megabytes} MiB holds for each process, and the total is only checked from time to time, "
            "because no cgroup can be written here"
        ]

    def launch(self, words: Sequence[str], variables: Mapping[str, str], endpoint: str | None) -> Launch:
        """See `Sandbox`."""
        settings, url = self.settings, urlsplit(endpoint or "")
        words, readable = placed(words)
        limit = settings.disk_mb << 20
        readable += map(os.path.abspath, settings.read)
        places = [*SYSTEM, *readable]
        path = [folder for folder in os.get_exec_path() if is_within(folder, places)]
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        environment.update(PATH=os.pathsep.join(path), HOME=HOME, TMPDIR="/tmp", USER="agent", LOGNAME="agent")
        if MARK in os.environ:  # the watchdog finds the program by this variable; it is not a secret
            environment[MARK] = os.environ[MARK]
        plan = Plan(
            words=words,
            prefix=self._prefix(readable),
            environment={**environment, **variables},
            confined=self.confined,
            read=[*places, *KERNEL, *DEVICES],
            filter=self._filter(),
            network=settings.network,
            endpoint=(url.hostname or "", url.port or 80) if endpoint else None,
            memory=settings.memory_mb << 20,
            processes=settings.processes,
            disk=limit,
            cgroups=self._groups,
        )
        kept = {name: os.environ[name] for name in (MARK, "PATH", "TMPDIR") if name in os.environ}
        return Launch([sys.executable, *SUPERVISOR], {**kept, VARIABLE: marshal.dumps(dict(plan)).hex()})

    def _prefix(self, _readable: Sequence[str]) -> list[str]:
        return []

    def _filter(self) -> bytes:
        network = self.settings.network
        return confine.program_filter(
            () if network == "none" else (confine.INET, confine.INET6),
            datagrams=network == "full",
            own_files=os.geteuid() == 0,
            disk_counted=False,
            memory_counted=bool(self._groups),
        )


class BubblewrapSandbox(ProcessSandbox):
    """The sandbox ``bwrap``: namespaces that bubblewrap makes, with a filter of system calls and limits as in the
    sandbox ``process``. Files of the program are in memory."""

    name, confined = "bwrap", False

    def _probe(self) -> None:
        if shutil.which("bwrap") is None:
            raise ValueError(f"{OPTION} bwrap needs bubblewrap: apt-get install bubblewrap, or use process")
        self._try()

    def _remedy(self) -> str:
        return (
            "; allow user namespaces (kernel.unprivileged_userns_clone=1 and "
            "kernel.apparmor_restrict_unprivileged_userns=0; in docker --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined), or use process"
        )

    def _lacks(self) -> list[str]:
        if os.geteuid() == 0 and not self._groups:
            return [
                "the number of processes has no hard limit, because the user is root and no cgroup can be written here"
            ]
        return []

    def _prefix(self, readable: Sequence[str]) -> list[str]:
        return bubblewrap(readable, HOME, self.settings.disk_mb << 20, self.settings.folders)

    def _filter(self) -> bytes:
        full = self.settings.network == "full"
        return confine.program_filter(
            (confine.INET, confine.INET6) if full else (confine.UNIX, confine.INET, confine.INET6),
            datagrams=True,
            own_files=True,
            disk_counted=True,
            memory_counted=bool(self._groups),
        )


def bubblewrap(readable: Iterable[str], home: str, disk_bytes: int, folders: Iterable[str] = ()) -> list[str]:
    """The bwrap command line for a box that sees the system's files and ``readable``. ``home``, /tmp, /dev/shm and
    ``folders`` are in memory."""
    words = ["bwrap", "--die-with-parent", "--cap-drop", "ALL"]
    words += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    words += [*system_view(), "--proc", "/proc", "--dev", "/dev"]
    for name in (
        "sys",
        "sysrq-trigger",
        "irq",
        "bus",
        "acpi",
        "scsi",
        "fs",
    ):  # root could write these files even without capabilities
        words += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for place in ("/dev/shm", "/tmp", home, *folders):
        words += ["--size", str(disk_bytes), "--tmpfs", place]
    for path in readable:
        words += ["--ro-bind", path, path]
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", home]


@cache
def system_view() -> tuple[str, ...]:
    """The bwrap arguments that make `SYSTEM` visible. A link into /usr, such as /bin, stays a link. A link needs no
    mount, and each mount takes processor time at the start.
    """
    words: list[str] = []
    for path in SYSTEM:
        place = os.path.realpath(path)
        if place != path and is_within(place, ["/usr"]):
            words += ["--symlink", os.path.relpath(place, os.path.dirname(path)), path]
        else:
            words += ["--ro-bind-try", path, path]
    return tuple(words)


def bubblewrap_of_answer(folder: str, readable: Sequence[str], disk_bytes: int) -> list[str]:
    """See ``answers`` of `SandboxKind`. The program that a model wrote gets its own file system, processes and
    network."""
    return [*bubblewrap([path for path in readable if os.path.exists(path)], folder, disk_bytes), "--unshare-net"]


def placed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the program and the files in ``words`` by their full paths. Returns the new words, and the paths that
    must be readable. The readable paths are the program, the files in ``words``, and the program's installation, such
    as a virtual environment. If the program is this Python, the folders of its packages are readable too.
    """
    program = shutil.which(words[0]) or words[0]
    placed, readable = [os.path.abspath(program)], []
    for word in words[1:]:
        there = os.path.abspath(word)
        if not word.startswith("-") and os.path.exists(word) and there != "/":
            readable.append(there)
            word = there if os.sep in word or os.path.isfile(word) else word
        placed.append(word)
    for path in {os.path.abspath(program), os.path.realpath(program)}:
        readable += [path, *installation(path)]
    if sys.prefix in readable:
        readable += confine.package_folders()
    return placed, [path for path in dict.fromkeys(readable) if not is_within(path, SYSTEM)]


def installation(program: str) -> list[str]:
    """The folders of a program's installation: the parent folder of its ``bin``. A virtual environment also needs the
    folder of its base interpreter."""
    folder = Path(program).parent
    if folder.name != "bin" or str(folder.parent) in ("/", os.path.expanduser("~"), os.path.expanduser("~/.local")):
        return []
    folders, settings = [str(folder.parent)], folder.parent / "pyvenv.cfg"
    if settings.is_file():
        for line in settings.read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition("=")
            base = Path(value.strip())
            if name.strip() == "home" and base.name == "bin" and base.is_dir():
                folders.append(os.path.realpath(base.parent))
    return folders


def is_within(path: str, places: Iterable[str]) -> bool:
    """Whether ``path`` is one of ``places``, or inside one of them."""
    return any(path == place or path.startswith(f"{place}/") for place in places)


def control_groups(settings: SandboxSettings) -> dict[str, dict[str, str]]:
    """The folders in which each program can get a cgroup, with the limits to write into the cgroup. Returns an empty
    dict if cgroups cannot limit memory or processes on this machine.
    """
    memory, processes = str(settings.memory_mb << 20), str(settings.processes)
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return {}
    places = {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    if "memory" in places and "pids" in places:
        one = {f"/sys/fs/cgroup/memory{places['memory']}": {"memory.limit_in_bytes": memory}}
        two = {f"/sys/fs/cgroup/pids{places['pids']}": {"pids.max": processes}}
        return one | two if _can_make(*one) and _can_make(*two) else {}
    top = Path("/sys/fs/cgroup")
    own = top / places.get("", "").lstrip("/")
    for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
        try:
            has = (folder / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if {"memory", "pids"} <= {*has} and _can_make(str(folder)):
            limits = {"memory.max": memory, "memory.swap.max": "0", "pids.max": processes}
            return {str(folder): limits}
    return {}


def _can_make(parent: str) -> bool:
    """Whether a cgroup can be created in ``parent``, and a process can be moved into the cgroup."""
    probe = f"{parent}/slimelite-probe-{os.getpid()}"
    try:
        os.mkdir(probe)
        try:
            with subprocess.Popen(["sleep", "5"]) as sleeper:
                try:
                    Path(probe, "cgroup.procs").write_text(str(sleeper.pid))
                finally:
                    sleeper.kill()
        finally:
            os.rmdir(probe)
    except OSError:
        return False
    return True
