"""Functions with which a process restricts itself before it runs an untrusted program (Linux).

There are three layers of restrictions. `gaps` lists the layers that this kernel does not have. The first layer is
limits and dropped capabilities. The second layer is seccomp, which blocks system calls. The third layer is Landlock,
which blocks access to files, signals and the memory of other processes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # importing typing and collections takes milliseconds, and each program would wait for this
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import ClassVar

# a system call that fails with EPERM for some arguments: machine -> its number, index of the argument, values, whether
# these values are allowed (True) or refused (False), and the mask of the bits that are compared
Arguments = tuple[dict[str, int], int, tuple[int, ...], bool, int]
ALL_BITS = 0xFFFFFFFF

# the machine types in `system_calls.toml`
MACHINES = ("x86_64", "aarch64")
# fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX and ioctl FIOSETOWN, SIOCSPGRP can make the kernel send a signal to any process;
# ioctl FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR can change attributes even of files that are opened only for reading
OWNERS: tuple[Arguments, ...] = (
    ({"x86_64": 72, "aarch64": 25}, 1, (8, 10, 15), False, ALL_BITS),
    ({"x86_64": 16, "aarch64": 29}, 1, (0x8901, 0x8902, 0x40086602, 0x401C5820), False, ALL_BITS),
)
# prctl PR_SET_PDEATHSIG could cancel the signal that kills the program when its grader ends; PR_SET_DUMPABLE could hide
# the program's open files from the grader, which counts them
PRCTL: Arguments = ({"x86_64": 157, "aarch64": 167}, 0, (1, 4), False, ALL_BITS)
# socketpair is allowed only for streams, which asyncio needs; other kinds can send to the address of any socket
STREAM_PAIRS: Arguments = ({"x86_64": 53, "aarch64": 199}, 1, (1,), True, 0xF)
# prlimit64 is allowed only for the calling process
PRLIMIT: Arguments = ({"x86_64": 302, "aarch64": 261}, 0, (0,), True, ALL_BITS)
SOCKET = {"x86_64": 41, "aarch64": 198}
# clone with a CLONE_NEW flag would make namespaces; a filter cannot see the flags of clone3, so clone3 fails as if it
# did not exist
CLONE: Arguments = ({"x86_64": 56, "aarch64": 220}, 0, (0,), True, 0x7E020000)
CLONE3 = 435
UNIX, INET, INET6 = 1, 2, 10
STREAM, DATAGRAM = 1, 2
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, AND, JUMP_EQUAL, JUMP_ABOVE, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # classic BPF
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X32_ABI = 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
FILTER = 2
EFAULT = 14
SIGKILL = 9

# root keeps these capabilities to read an interpreter that another user installed; Landlock still limits the files
KEPT_CAPABILITIES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
CAPABILITY_VERSION = 0x20080522

# Landlock's system calls have the same numbers on every machine type
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
# version of Landlock -> all rights on files that this version knows
RIGHTS = {0: 0, 1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
TCP, CONNECT = 1 << 0 | 1 << 1, 1 << 1  # TCP is bind and connect, CONNECT is only connect
FILE_RULE, PORT_RULE = 1, 2
SCOPES = 1 << 0 | 1 << 1  # abstract unix sockets, signals

# paths that the loader and the standard library read, in addition to the interpreter's own folders
READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/random", "/dev/urandom"),
)

OPEN_FILES = 64
FILE_BYTES = 16 << 20


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_: ClassVar = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def gaps() -> list[str]:
    """A sentence for each missing layer. The sentence tells what a program can do on this machine without the layer.
    Returns an empty list if no layer is missing."""
    missing = []
    if not has_seccomp():
        missing.append("there is no seccomp, so the code can start processes, send signals and open sockets")
    if landlock_abi() == 0:
        missing.append(
            "there is no Landlock, so the code can read and write all files of this user, and can read the memory and "
            "environment of every process except the one that grades"
        )
    return missing


def confine(folder: str, cpu_seconds: int, memory_bytes: int, *, alone: bool = True) -> None:
    """Limit this process permanently. After this call, the process is also killed when its parent ends.

    Processor time and address space are limited. A file, also one for output, may have 16 MiB. At most 64 files may be
    open. There are no core dumps, and no new processes or threads. The process may write only in ``folder``. The
    process may read only ``folder`` and the files that Python needs. ``memory_bytes`` must be below the caller's own
    limit. If ``alone`` is False, only the limits are set. This is for a program that sets up a sandbox itself and
    starts a process in it.

    Raises:
        OSError: the kernel has a layer, but the layer could not be set up.
    """
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
        **({resource.RLIMIT_NPROC: 0} if alone else {}),
        # last, because this process is still a copy of its parent, which may have more memory and open files
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_AS: memory_bytes,
    }
    program: bytes | None = None
    if sys.platform == "linux" and alone:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
        drop_capabilities(libc, KEPT_CAPABILITIES)
        _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
        program = answer_filter() if has_seccomp() else None  # read it now, because its file cannot be read afterwards
        if landlock_abi():
            restrict_files([*interpreter_paths(), *READABLE], [folder])
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    if program is not None:
        install(program)


def interpreter_paths() -> list[str]:
    """The folders and files of this interpreter and its packages."""
    return [sys.prefix, sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.executable), *package_folders()]


def package_folders() -> list[str]:
    """The folders of this interpreter's packages. A virtual environment may use packages of another environment."""
    # the other folders of sys.path belong to the user
    return [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]


def hide() -> None:
    """If Landlock is missing, make this process not dumpable. Then programs that it starts cannot read its memory and
    environment variables in /proc."""
    if sys.platform == "linux" and landlock_abi() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def has_seccomp() -> bool:
    """Whether this kernel can filter system calls, and `system_calls.toml` has their numbers for this machine type."""
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, FILTER, None, 0, 0)  # if the kernel supports filters, the NULL filter gives EFAULT
    return ctypes.get_errno() == EFAULT


def landlock_abi() -> int:
    """The version of this kernel's Landlock. 0: the kernel has no Landlock."""
    if sys.platform != "linux":
        return 0
    return max(int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)), 0)


def drop_capabilities(libc: ctypes.CDLL, keep: int) -> None:
    """Drop all capabilities except ``keep``. Without the dropped capabilities, root cannot send signals to other users'
    processes, trace such processes, or raise its own limits."""
    for capability in range(64):
        if not keep >> capability & 1:
            # fails for other users than root, but these users have no capabilities
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, data = struct.pack("Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _check(libc.capget(header, data), "capget")
    kept = [word & keep for word in struct.unpack("6I", data.raw)[:2]]
    _check(libc.capset(header, struct.pack("6I", *kept, 0, 0, 0, 0)), "capset")


def restrict_files(readable: Iterable[str], writable: Iterable[str], ports: Sequence[int] | None = ()) -> None:
    """Restrict this process with Landlock. Landlock allows only these files and folders, and TCP only to ``ports``
    (None: to all ports). Landlock also blocks signals and abstract sockets to processes outside."""
    libc, abi = ctypes.CDLL(None, use_errno=True), landlock_abi()
    rights = RIGHTS[min(abi, 5)]
    attributes = struct.pack("3Q", rights, TCP if ports is not None else 0, SCOPES)
    attributes = attributes[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _check(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    allowed = {**dict.fromkeys(readable, READ), "/dev/null": rights, **dict.fromkeys(writable, rights)}
    for path, granted in allowed.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # some systems do not have all of these paths
        granted &= rights if os.path.isdir(path) else rights & OF_FILES
        rule = struct.pack("=Qi", granted, descriptor)
        _check(libc.syscall(ADD_RULE, ruleset, FILE_RULE, rule, 0), f"landlock_add_rule {path}")
        os.close(descriptor)
    for port in ports or () if abi >= 4 else ():
        rule = struct.pack("=QQ", CONNECT, port)
        _check(libc.syscall(ADD_RULE, ruleset, PORT_RULE, rule, 0), f"landlock_add_rule {port}")
    _check(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def install(program: bytes) -> None:
    """Filter this process's system calls from now on. The process must be root, or must have set
    PR_SET_NO_NEW_PRIVS."""
    packed = _Filter(len(program) // 8, program)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(packed), 0, 0), "PR_SET_SECCOMP")


def answer_filter() -> bytes:
    """The system call filter for the code of an answer. Under this filter, the code is one process without sockets."""
    denied = [number for numbers in _system_calls().values() for number in numbers]
    return _packed(denied, (*OWNERS, PRCTL, STREAM_PAIRS, PRLIMIT))


def program_filter(
    families: Sequence[int], *, datagrams: bool, own_files: bool, disk_counted: bool, memory_counted: bool
) -> bytes:
    """The system call filter for a program. The program may start other programs, and send signals to them.

    ``families``: the allowed families of sockets. ``datagrams``: whether datagram sockets are allowed too.
    ``own_files``: whether the sandbox contains every file that belongs to the program's user. If True, the program may
    change modes and times of files, because it reaches no file outside. ``disk_counted``: whether the kernel limits
    the total size of the program's files.
    ``memory_counted``: whether the kernel limits the total size of those files that are in memory.
    """
    groups = _system_calls()
    socket = SOCKET[os.uname().machine]
    allowed = {*groups["processes"], *groups["signals"], *groups["sending"], socket}
    if own_files:
        allowed |= {*groups["file_attributes"]}
    if disk_counted:
        allowed |= {*groups["disk"]}
    if memory_counted:
        allowed |= {*groups["files_in_memory"]}
    denied = [number for numbers in groups.values() for number in numbers if number not in allowed]
    kinds = (STREAM, DATAGRAM) if datagrams else (STREAM,)
    rules: list[Arguments] = [
        *OWNERS,
        PRLIMIT,
        CLONE,
        (SOCKET, 0, tuple(families), True, ALL_BITS),
        (SOCKET, 1, kinds, True, 0xF),
        *(() if UNIX in families else (STREAM_PAIRS,)),
    ]
    return _packed(denied, rules, missing=(CLONE3,))


_groups: dict[str, list[int]] = {}


def _system_calls() -> dict[str, list[int]]:
    """The numbers of the system calls on this machine, by group."""
    if not _groups:
        import tomllib  # the supervisor of a sandbox does not need this import

        with open(os.path.join(os.path.dirname(__file__), "system_calls.toml"), "rb") as file:
            _groups.update(tomllib.load(file)[os.uname().machine])
    return _groups


def _packed(denied: Iterable[int], rules: Iterable[Arguments], missing: Iterable[int] = ()) -> bytes:
    instructions = _instructions(os.uname().machine, denied, rules, missing)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def _instructions(
    machine: str, denied: Iterable[int], rules: Iterable[Arguments], missing: Iterable[int]
) -> Iterator[tuple[int, int, int, int]]:
    """The filter's instructions: (code, instructions to skip if true, instructions to skip if false, operand)."""
    deny = (RETURN, 0, 0, EPERM)
    yield (LOAD, 0, 0, 4)
    yield (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine])
    yield (RETURN, 0, 0, KILL)
    yield (LOAD, 0, 0, 0)
    yield (JUMP_ABOVE, 0, 1, X32_ABI)
    yield deny
    for call in missing:
        yield (JUMP_EQUAL, 0, 1, call)
        yield (RETURN, 0, 0, ENOSYS)
    for call in denied:
        yield (JUMP_EQUAL, 0, 1, call)
        yield deny
    for numbers, argument, values, allowed, mask in rules:
        count = len(values)
        yield (LOAD, 0, 0, 0)
        yield (JUMP_EQUAL, 0, 3 + count, numbers[machine])
        yield (LOAD, 0, 0, 16 + 8 * argument)
        yield (AND, 0, 0, mask)
        for place, value in enumerate(values, 1):
            # jump to the refusal, or past the refusal
            yield (JUMP_EQUAL, count - place + allowed, int(not allowed and place == count), value)
        yield deny
    yield (RETURN, 0, 0, ALLOW)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result
