"""Attacks on what grades: each is a program that runs in the real sandbox, and must be refused.

None would do harm where it is not refused: what it attacks is the process that started it for that.
As root and without root's capabilities; with all layers, and with one of them alone, as on kernels that lack the other.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

from slimelite.arguments import RewardArgs
from slimelite.rewards.grader import Grader
from slimelite.sandbox import confine

ROOT = Path(__file__).parents[2]

HEAD = """
import ctypes, errno, fcntl, json, os, platform, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
results = {}
def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def call(number, *arguments):
    return check(libc.syscall(number, *arguments))
info = struct.pack("iiii", 10, 0, -1, 0) + bytes(112)  # siginfo of SIGUSR1 by sigqueue
def async_pipe(own):
    read, write = os.pipe()
    own(read)
    fcntl.fcntl(read, 10, signal.SIGUSR1)  # F_SETSIG
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    os.write(write, b"x")
"""
# one attack: "refused" where the kernel says so, and not where it says that there is no such file
FRAME = """
try:
{code}
except OSError as error:
    refused = isinstance(error, PermissionError) or error.errno in (errno.EXDEV, errno.EISCONN)
    results[{name!r}] = "refused" if refused else repr(error)
else:
    results[{name!r}] = "through"
"""

SIGNALS = {
    "kill": "os.kill(HOST, signal.SIGUSR1)",
    "kill its group": "os.killpg(os.getpgid(HOST), signal.SIGUSR1)",
    "kill everybody": "os.kill(-1, 0)",
    "tkill": "call(130 if ARM else 200, HOST, 10)",
    "tgkill": "call(131 if ARM else 234, HOST, HOST, 10)",
    "sigqueue": "check(libc.sigqueue(HOST, 10, None))",
    "rt_sigqueueinfo": "call(138 if ARM else 129, HOST, 10, info)",
    "rt_tgsigqueueinfo": "call(240 if ARM else 297, HOST, HOST, 10, info)",
    "pidfd_send_signal": "signal.pidfd_send_signal(os.pidfd_open(HOST), signal.SIGUSR1)",
    "SIGIO by F_SETOWN": "async_pipe(lambda fd: fcntl.fcntl(fd, 8, HOST))",
    "SIGIO by F_SETOWN_EX": "async_pipe(lambda fd: fcntl.fcntl(fd, 15, struct.pack('ii', 1, HOST)))",
}
PROCESSES = {
    "environ of the grader": "open(f'/proc/{HOST}/environ').read()",
    "environ of the parent": "open(f'/proc/{os.getppid()}/environ').read()",
    "memory of the grader": "open(f'/proc/{HOST}/mem', 'r+b')",
    "maps of the grader": "open(f'/proc/{HOST}/maps').read()",
    "ptrace": "check(libc.ptrace(16, HOST, None, None))",
    "ptrace seize": "check(libc.ptrace(0x4206, HOST, None, None))",
    "process_vm_readv": "here = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(here), 8); "
    "check(libc.process_vm_readv(HOST, v, 1, v, 1, 0))",
    "process_vm_writev": "here = ctypes.create_string_buffer(8); v = struct.pack('QQ', ctypes.addressof(here), 8); "
    "check(libc.process_vm_writev(HOST, v, 1, v, 1, 0))",
}
FILES = {
    "read a file": "open('OUTSIDE/secret').read()",
    "list a folder": "os.listdir('OUTSIDE')",
    "list the root": "os.listdir('/')",
    "read passwd": "open('/etc/passwd').read()",
    "open files of the grader": "os.listdir(f'/proc/{HOST}/fd')",
    "its own proc": "open('/proc/self/environ').read()",
    "write a file": "open('OUTSIDE/secret', 'a').write('x')",
    "make a file": "open('OUTSIDE/new', 'w').write('x')",
    "make a folder": "os.mkdir('OUTSIDE/folder')",
    "make a link": "os.symlink('/', 'OUTSIDE/link')",
    "remove a file": "os.remove('OUTSIDE/secret')",
    "rename a file": "os.rename('OUTSIDE/secret', 'OUTSIDE/other')",
    "take a file": "os.rename('OUTSIDE/secret', 'mine')",
    "link a file here": "os.link('OUTSIDE/secret', 'mine'); open('mine').read()",
    "follow a link": "os.symlink('OUTSIDE/secret', 'mine'); open('mine').read()",
    "empty a file": "os.truncate('OUTSIDE/secret', 0)",
    "shared memory": "os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR)",
    "write into the package": "os.open(sys.prefix, os.O_TMPFILE | os.O_RDWR)",
}
WITH_SECCOMP = {
    "limits of the grader": "resource.prlimit(HOST, resource.RLIMIT_CORE, (0, 0))",
    "priority of the grader": "os.setpriority(os.PRIO_PROCESS, HOST, 19)",
    "processors of the grader": "os.sched_setaffinity(HOST, {0})",
    "outlive the grader": "check(libc.prctl(1, 0, 0, 0, 0))",
    "descriptor of the grader": "call(438, os.pidfd_open(HOST), 0, 0)",
    "chmod": "os.chmod('OUTSIDE/secret', 0)",
    "chown": "os.chown('OUTSIDE/secret', os.getuid(), os.getgid())",
    "times": "os.utime('OUTSIDE/secret', (0, 0))",
    "attributes": "os.setxattr('OUTSIDE/secret', 'user.x', b'x')",
    "inode flags": "fcntl.ioctl(0, 0x40086602, bytes(8))",
    "tcp": "socket.socket()",
    "unix socket": "socket.socket(socket.AF_UNIX)",
    "namespace": "check(libc.unshare(0x10000000))",
    "mount": "check(libc.mount(b'none', b'OUTSIDE', b'tmpfs', 0, None))",
    "chroot": "os.chroot('.')",
    "System V memory": "check(libc.shmget(0, 4096, 0o1600))",
    "io_uring": "call(425, 1, ctypes.create_string_buffer(256))",
    "keys": "call(219 if ARM else 250, 0, -3, 1)",
    "fork": "os.fork() or os._exit(0)",
    "memfd": "os.memfd_create('x')",
    "fallocate": "fd = os.open('mine', os.O_RDWR | os.O_CREAT); os.posix_fallocate(fd, 0, 1 << 20)",
    "datagrams": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "packets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
    "raw pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW | socket.SOCK_NONBLOCK)",
    "stream to an address": "socket.socketpair()[0].sendto(b'x', 'OUTSIDE/socket')",
    "send a descriptor": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "large buffers": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    "hide open files": "check(libc.prctl(4, 0, 0, 0, 0))",
    "x32 fork": "call(220 if ARM else 0x40000000 + 57) or os._exit(0)",
}
ATTACKS = {**SIGNALS, **PROCESSES, **FILES, **WITH_SECCOMP}
# without Landlock files are open, and the processes of the user that do not grade; `gaps` says so
ALONE = {"all": ATTACKS, "seccomp": SIGNALS | PROCESSES | WITH_SECCOMP, "landlock": SIGNALS | PROCESSES | FILES}
# Landlock drops these signals without a word; the grader, which they would end, goes on
SILENT = {"kill everybody", "SIGIO by F_SETOWN", "SIGIO by F_SETOWN_EX"}
# continuous integration has such a kernel: there a test that did not run would hide something
NEEDS_KERNEL = pytest.mark.skipif(
    bool(confine.gaps()) and not os.environ.get("CI"), reason="this kernel lacks seccomp or Landlock"
)
USERS = ("root", "plain") if os.geteuid() == 0 else ("plain",)
CASES = [(user, layers, name) for user in USERS for layers, names in ALONE.items() for name in names]


def in_sandbox(
    user: str, layers: str, program: str, python: Path | str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, str(ROOT / "tests/sandbox/answers_host.py"), user, layers],
        input=program,
        env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": "a-secret"},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


@functools.cache
def outputs(user: str, layers: str, outside: Path) -> dict[str, str]:
    """What each attack printed; the process that it attacked came through."""
    outside.mkdir()
    (outside / "secret").write_text("secret")
    attacks = {
        name: textwrap.indent(code.replace("OUTSIDE", str(outside)), "    ") for name, code in ALONE[layers].items()
    }
    framed = [FRAME.format(name=name, code=code) for name, code in attacks.items()]
    run = in_sandbox(user, layers, "".join([HEAD, *framed, "print(json.dumps(results))"]))
    assert run.returncode == 0, run.stderr
    assert (outside / "secret").read_text() == "secret"
    assert os.listdir(outside) == ["secret"]
    found: dict[str, str] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outside")


@NEEDS_KERNEL
@pytest.mark.parametrize(("user", "layers", "name"), CASES)
def test_an_attack_is_refused(outside: Path, user: str, layers: str, name: str) -> None:
    printed = outputs(user, layers, outside / f"{user}-{layers}")[name]
    assert printed == "refused" or (layers == "landlock" and name in SILENT)


@NEEDS_KERNEL
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("layers", ["all", "seccomp", "landlock"])
def test_a_program_has_what_it_needs(user: str, layers: str) -> None:
    program = """
        import asyncio, datetime, json, numpy, os, pathlib, random, sys, tempfile, zoneinfo
        pathlib.Path("note").write_text("x")
        pathlib.Path("note").touch()
        assert pathlib.Path("note").read_text() == "x" and os.listdir() == ["note"]
        os.rename("note", "other")
        os.mkdir("folder")
        assert os.path.exists(tempfile.mkdtemp())
        open(os.devnull, "w").write("x")
        asyncio.run(asyncio.sleep(0))
        os.urandom(8), numpy.linalg.inv(numpy.eye(3)), zoneinfo.ZoneInfo("UTC")
        harmless = {"HOME", "LANG", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"}
        assert set(os.environ) == harmless
        print("fine")
    """
    run = in_sandbox(user, layers, textwrap.dedent(program))
    assert run.stdout.strip() == "fine", run.stderr


@NEEDS_KERNEL
def test_a_program_reads_the_packages_of_an_environment_behind_its_own(tmp_path: Path) -> None:
    """And no other folder that happens to be on the path."""
    venv.create(tmp_path / "venv")
    (own,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    behind, mine = tmp_path / "other" / "site-packages", tmp_path / "mine"
    for folder, name in ((behind, "behind"), (mine, "secret_of_mine")):
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text("found = True\n")
    (own / "path.pth").write_text(f"{behind}\n{sysconfig.get_path('purelib')}\n{mine}\n")
    program = "import behind\ntry:\n    import secret_of_mine\nexcept ImportError:\n    print('fine')\n"
    run = in_sandbox("plain", "all", program, tmp_path / "venv" / "bin" / "python")
    assert run.stdout.strip() == "fine", run.stderr


def test_folders_in_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = in_sandbox("root", "all", "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\nprint('made')")
    assert run.stdout.strip() == "made", run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["has_seccomp", "landlock_abi"])
def test_the_code_reward_says_what_a_kernel_lacks(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(confine, missing, lambda: 0)
    with caplog.at_level(logging.WARNING):
        Grader(RewardArgs(rm_type="code"), workers=1).close()
        assert "--rm-type code runs code that the model writes" in caplog.text
        caplog.clear()
        Grader(RewardArgs(rm_type="math"), workers=1).close()
        assert caplog.text == ""
