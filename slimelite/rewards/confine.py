"""Restrictions that a process puts on itself before it runs the program that a model wrote (Linux).

There are three layers, where the kernel has them (`gaps` says what is missing): limits and dropped capabilities;
seccomp, which refuses system calls; Landlock, which refuses files, signals and the memory of other processes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import ClassVar

# machine -> the numbers of the system calls that fail with EPERM
DENIED: dict[str, list[int]] = {
    machine: [number for numbers in groups.values() for number in numbers]
    for machine, groups in tomllib.loads(
        files("slimelite.rewards").joinpath("system_calls.toml").read_text("utf-8")
    ).items()
}
# calls that fail with EPERM for some values of an argument: number by machine, argument, values
DENIED_VALUES = (
    # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX and ioctl FIOSETOWN, SIOCSPGRP make the kernel send a signal to any process
    ({"x86_64": 72, "aarch64": 25}, 1, (8, 10, 15)),
    # ioctl FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR change attributes even of files that are opened only for reading
    ({"x86_64": 16, "aarch64": 29}, 1, (0x8901, 0x8902, 0x40086602, 0x401C5820)),
    # prctl PR_SET_PDEATHSIG would cancel the signal that kills the program with the process that grades it, and
    # PR_SET_DUMPABLE hide its open files from that process, which counts them
    ({"x86_64": 157, "aarch64": 167}, 0, (1, 4)),
    # socketpair of any kind but a stream, which asyncio needs: the others send to the address of any socket
    (
        {"x86_64": 53, "aarch64": 199},
        1,
        tuple(kind | flags for kind in (2, 3, 4, 5) for flags in (0, 0x800, 0x80000, 0x80800)),
    ),
)
# prlimit64 is allowed only for this process: its first argument must be 0
PRLIMIT = {"x86_64": 302, "aarch64": 261}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, JUMP_EQUAL, JUMP_ABOVE, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
X32_ABI = 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
FILTER = 2
EFAULT = 14
SIGKILL = 9

# root keeps these, to read an interpreter that another user installed; Landlock still limits which files
KEPT_CAPABILITIES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
CAPABILITY_VERSION = 0x20080522

# Landlock, the same numbers on every machine
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
# all rights on files that a version of Landlock knows
RIGHTS = {0: 0, 1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
TCP = 1 << 0 | 1 << 1  # bind, connect
SCOPES = 1 << 0 | 1 << 1  # abstract unix sockets, signals

# paths beside the interpreter's own folders that the loader and the standard library read
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
    """A sentence for each missing layer: what a program can then do on this machine. Empty if all layers are there."""
    missing = []
    if not has_seccomp():
        missing.append("there is no seccomp: it can start processes, send signals and open sockets")
    if landlock_abi() == 0:
        missing.append(
            "there is no Landlock: it can read and write what this user may, in /proc too, but for its grader's"
        )
    return missing


def confine(folder: str, cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process permanently, and have it killed with its parent.

    Limits are processor time, address space, 16 MiB a file (also for output that goes to a file), 64 open files, no
    core dump, no more processes or threads. It may write only in ``folder``, and read there and what Python needs.
    ``memory_bytes`` must be below the caller's own limit.

    Raises:
        OSError: the kernel has a layer, but setting it up failed.
    """
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    if platform.system() == "Linux":
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
        _drop_capabilities(libc)
        _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
        if abi := landlock_abi():
            _restrict_files(libc, abi, folder)
        if has_seccomp():
            program = list(_instructions(platform.machine()))
            packed = _Filter(len(program), b"".join(struct.pack("HBBI", *instruction) for instruction in program))
            _check(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(packed), 0, 0), "PR_SET_SECCOMP")


def hide() -> None:
    """Where Landlock is missing, mark this process as not dumpable, so that the programs it runs cannot read its memory
    and environment in /proc."""
    if platform.system() == "Linux" and landlock_abi() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def has_seccomp() -> bool:
    """Whether this kernel can filter system calls, and ``DENIED`` has their numbers for this machine."""
    if platform.system() != "Linux" or platform.machine() not in DENIED:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, FILTER, None, 0, 0)  # the NULL filter gives EFAULT where filters exist
    return ctypes.get_errno() == EFAULT


def landlock_abi() -> int:
    """The version of Landlock that this kernel has; 0: none."""
    if platform.system() != "Linux":
        return 0
    return max(int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)), 0)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Root without capabilities cannot signal or trace other users' processes, nor raise its limits."""
    for capability in range(64):
        if not KEPT_CAPABILITIES >> capability & 1:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for users other than root, who have none
    header, data = struct.pack("Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _check(libc.capget(header, data), "capget")
    kept = [word & KEPT_CAPABILITIES for word in struct.unpack("6I", data.raw)[:2]]
    _check(libc.capset(header, struct.pack("6I", *kept, 0, 0, 0, 0)), "capset")


def _restrict_files(libc: ctypes.CDLL, abi: int, folder: str) -> None:
    """Landlock: only the files described in `confine`, no TCP, no signals or abstract sockets to processes outside."""
    rights = RIGHTS[min(abi, 5)]
    attributes = struct.pack("3Q", rights, TCP, SCOPES)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _check(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    # an environment may take packages from another one; other folders of sys.path are the user's own
    packages = {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    interpreter = {sys.prefix, sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.executable)}
    readable = {*interpreter, *packages, *READABLE}
    allowed = {**dict.fromkeys(readable, READ), "/dev/null": rights, folder: rights}
    for path, granted in allowed.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not every system has all of these paths
        granted &= rights if os.path.isdir(path) else rights & OF_FILES
        rule = struct.pack("=Qi", granted, descriptor)
        _check(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(descriptor)
    _check(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _instructions(machine: str) -> Iterator[tuple[int, int, int, int]]:
    """The filter's instructions: (code, instructions to skip if true, instructions to skip if false, operand).

    It refuses the system calls in ``DENIED``, and those in ``DENIED_VALUES`` for the listed argument values.
    """
    deny = (RETURN, 0, 0, EPERM)
    yield (LOAD, 0, 0, 4)
    yield (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine])
    yield (RETURN, 0, 0, KILL)
    yield (LOAD, 0, 0, 0)
    yield (JUMP_ABOVE, 0, 1, X32_ABI)
    yield deny
    for call in DENIED[machine]:
        yield (JUMP_EQUAL, 0, 1, call)
        yield deny
    for numbers, argument, values in DENIED_VALUES:
        yield (JUMP_EQUAL, 0, 2 + 2 * len(values), numbers[machine])
        yield (LOAD, 0, 0, 16 + 8 * argument)
        for value in values:
            yield (JUMP_EQUAL, 0, 1, value)
            yield deny
        yield (RETURN, 0, 0, ALLOW)
    yield (JUMP_EQUAL, 0, 3, PRLIMIT[machine])
    yield (LOAD, 0, 0, 16)
    yield (JUMP_EQUAL, 1, 0, 0)
    yield deny
    yield (RETURN, 0, 0, ALLOW)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result
