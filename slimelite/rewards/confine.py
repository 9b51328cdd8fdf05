"""What a process may no longer do, set by itself before it becomes the program that a model wrote (Linux).

Not a security boundary: the program runs as the same user, and reads and writes what that user may.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import struct
from typing import ClassVar

# system calls that fail with EPERM: new processes and threads, signals to others, sockets, ptrace, io_uring
DENIED = {
    # fork, vfork, clone, clone3, kill, tkill, socket, ptrace, io_uring_setup
    "x86_64": (57, 58, 56, 435, 62, 200, 41, 101, 425),
    # clone, clone3, kill, tkill, socket, ptrace, io_uring_setup
    "aarch64": (220, 435, 129, 130, 198, 117, 425),
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, JUMP_EQUAL, JUMP_ABOVE, RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
X32_ABI = 0x40000000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SIGKILL = 9

OPEN_FILES = 64
FILE_BYTES = 16 << 20


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_: ClassVar = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def confine(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process for good, and have it killed with its parent.

    Processor time, address space, 16 MiB a file (so too for output that goes to a file), 64 open files, no core dump,
    no further processes or threads: by RLIMIT_NPROC, which root is exempt from, and by seccomp where kernel and
    machine have it, which also denies sockets. The memory limit is the caller's to keep below its own.
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
    libc = ctypes.CDLL(None)
    if platform.system() == "Linux":
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        deny_calls(libc)


def deny_calls(libc: ctypes.CDLL) -> bool:
    """Deny the system calls of ``DENIED`` by seccomp; False where that cannot be had."""
    machine = platform.machine()
    if machine not in DENIED or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    calls = DENIED[machine]
    # jumps count the instructions to leave out; the three returns stand at the end
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 0, len(calls) + 4, AUDIT_ARCH[machine]), (LOAD, 0, 0, 0)]
    program.append((JUMP_ABOVE, len(calls) + 1, 0, X32_ABI))
    program += [(JUMP_EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, KILL)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    return libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(_Filter(len(program), packed)), 0, 0) == 0
