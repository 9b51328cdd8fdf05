"""What a program tries in a sandbox, one line of code each, as ``python escapes.py < facts``; prints what came of each.

An attack got through where its code ran to the end: each ends in an effect or in an assertion of one. None does harm
where it is not refused: it acts on a process, files and sockets that the test made for it.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

# what the attacks use
MODULES = (fcntl, resource, subprocess, time)
FACTS: dict[str, Any] = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
VICTIM, OUTSIDE, TCP, UDP = FACTS["victim"], FACTS["outside"], FACTS["tcp"], FACTS["udp"]
SECRET = f"{OUTSIDE}/secret"
IPC_PRIVATE, NEW_USER, NEW_NET = 0, 0x10000000, 0x40000000


def check(result: int) -> int:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def call(number: int, *arguments: object) -> int:
    return check(libc.syscall(number, *arguments))


def vector() -> tuple[Any, Any]:
    here = ctypes.create_string_buffer(8)
    return here, struct.pack("QQ", ctypes.addressof(here), 8)


def connect(family: int, kind: int, address: Any) -> socket.socket:
    made = socket.socket(family, kind)
    made.settimeout(2)
    made.connect(address)
    return made


def asked(made: socket.socket) -> None:
    with made:
        made.send(b"x")
        assert made.recv(1)


ATTACKS = {
    # files
    "read a file": "open(SECRET).read()",
    "read it by dots": "open('../' * 12 + SECRET).read()",
    "follow a link": "os.symlink(SECRET, 'mine'); open('mine').read()",
    "link it here": "os.link(SECRET, 'copy'); open('copy').read()",
    "list a folder": "assert 'secret' in os.listdir(OUTSIDE)",
    "write a file": "open(SECRET, 'a').write('')",
    "make a file": "open(f'{OUTSIDE}/new', 'w').close(); os.remove(f'{OUTSIDE}/new')",
    "make a folder": "os.mkdir(f'{OUTSIDE}/folder'); os.rmdir(f'{OUTSIDE}/folder')",
    "rename a file": "os.rename(SECRET, f'{OUTSIDE}/other'); os.rename(f'{OUTSIDE}/other', SECRET)",
    "empty a file": "os.truncate(SECRET, 6)",
    "change a mode": "os.chmod(SECRET, 0o600)",
    "change an owner": "os.chown(SECRET, -1, os.getgid())",
    "change times": "os.utime(SECRET, (1, 1))",
    "shadow": "open('/etc/shadow').read()",
    "the repository": "open(f'{FACTS[\"repository\"]}/train.py').read()",
    "the program itself": "open(__file__, 'a').write('')",
    "the system": "open('/usr/lib/slimelite-test', 'w').close(); os.remove('/usr/lib/slimelite-test')",
    "a device": "os.mknod('disk', 0o60600, os.makedev(7, 0)); open('disk', 'rb').close()",
    "the kernel's settings": "open('/proc/sys/vm/swappiness', 'r+').close()",
    "the kernel's keys": "open('/proc/sysrq-trigger', 'w').close()",
    "the kernel's other settings": "open('/sys/kernel/mm/transparent_hugepage/enabled', 'r+').close()",
    "control groups": "os.mkdir('/sys/fs/cgroup/pids/x'); os.rmdir('/sys/fs/cgroup/pids/x')",
    # the environment, and other processes
    "the run's variables": "assert 'SECRET_OF_THE_RUN' in os.environ",
    "variables of a parent": "assert b'SECRET_OF_THE_RUN' in open(f'/proc/{FACTS[\"parent\"]}/environ', 'rb').read()",
    "variables of a process": "assert b'SECRET' in open(f'/proc/{VICTIM}/environ', 'rb').read()",
    "words of a process": "assert b'sleep' in open(f'/proc/{VICTIM}/cmdline', 'rb').read()",
    "memory of a process": "open(f'/proc/{VICTIM}/mem', 'r+b').close()",
    "files of a process": "os.listdir(f'/proc/{VICTIM}/root/')",
    "the root of the first process": "open(f'/proc/1/root/{SECRET}').read()",
    "signal": "os.kill(VICTIM, 0)",
    "signal by pidfd": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 0)",
    "signal by thread": "call(131 if ARM else 234, VICTIM, VICTIM, 0)",
    "signal by input": "r, w = os.pipe(); fcntl.fcntl(r, 15, struct.pack('ii', 1, VICTIM))",
    "trace": "check(libc.ptrace(0x4206, VICTIM, None, None)); check(libc.ptrace(17, VICTIM, None, None))",
    "read memory": "h, v = vector(); check(libc.process_vm_readv(VICTIM, v, 1, v, 1, 0))",
    "limits of a process": "resource.prlimit(VICTIM, resource.RLIMIT_CORE)",
    "processors of a process": "os.sched_setaffinity(VICTIM, os.sched_getaffinity(0))",
    "priority of a process": "os.setpriority(os.PRIO_PROCESS, VICTIM, 1)",
    # the kernel
    "a namespace of users": "os.fork() or os._exit(libc.unshare(NEW_USER) and 1); assert os.wait()[1] == 0",
    "a namespace of users by clone": "call(220 if ARM else 56, NEW_USER | 17, 0, 0, 0, 0) or os._exit(0); os.wait()",
    "the network of a process": "check(libc.setns(os.open(f'/proc/{VICTIM}/ns/net', os.O_RDONLY), NEW_NET))",
    "mount": "os.mkdir('m'); check(libc.mount(b'none', b'm', b'tmpfs', 0, None)); check(libc.umount2(b'm', 2))",
    "bind": "os.mkdir('b'); check(libc.mount(OUTSIDE.encode(), b'b', None, 4096, None)); check(libc.umount2(b'b', 2))",
    "chroot": "os.mkdir('c'); os.fork() or os._exit(libc.chroot(b'c') and 1); assert os.wait()[1] == 0",
    "io_uring": "call(425, 1, ctypes.create_string_buffer(256))",
    "bpf": "call(280 if ARM else 321, 0, struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(100), 120)",
    "keys": "call(219 if ARM else 250, 0, -3, 1)",
    "counters": "call(241 if ARM else 298, struct.pack('II', 1, 112) + bytes(104), 0, -1, -1, 0)",
    "root": "os.setuid(0); open('/etc/shadow').read()",
    "capabilities": "assert int(next(x for x in open('/proc/thread-self/status') if 'CapEff' in x)[8:], 16) & 1 << 21",
    # what processes share
    "memory by name": "assert open(f'/dev/shm/{FACTS[\"shared\"]}').read() == 'secret'",
    "memory of System V": "check(libc.shmget(FACTS['key'], 0, 0))",
    "semaphores of System V": "libc.semctl(check(libc.semget(IPC_PRIVATE, 1, 0o600)), 0, 0)",
    # the network
    "another port": "asked(connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', TCP)))",
    "another address": "asked(connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.2', TCP)))",
    "the port by IPv6": "asked(connect(socket.AF_INET6, socket.SOCK_STREAM, ('::ffff:127.0.0.1', TCP)))",
    "datagrams": "asked(connect(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', UDP)))",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()",
    "a socket of virtual machines": "socket.socket(40, 1).close()",
    "a socket of ciphers": "socket.socket(38, 5).close()",
    "a socket of network settings": "socket.socket(16, 3).close()",
    "a unix socket": "asked(connect(socket.AF_UNIX, socket.SOCK_STREAM, f'{OUTSIDE}/socket'))",
    "an abstract socket": "asked(connect(socket.AF_UNIX, socket.SOCK_STREAM, FACTS['abstract']))",
    "a pair of datagrams": "s = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0];"
    "s.sendto(b'x', f'{OUTSIDE}/datagrams')",
    "a server for others": "s = socket.create_server(('0.0.0.0', FACTS['free'])); s.settimeout(1); s.accept()",
}
# what a program needs, and must do
NEEDS = {
    "the model": "asked(connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', FACTS['endpoint'])))",
    "much from the model": "c = connect(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', FACTS['endpoint']));"
    "c.sendall(b'9' * 9); assert len(b''.join(iter(lambda: c.recv(1 << 16), b''))) == 9_000_000",
    "files of its own": "open('note', 'w').write('x'); os.chmod('note', 0o600); os.rename('note', 'other')",
    "a temporary folder": "import tempfile; tempfile.mkdtemp()",
    "a home": "assert os.path.expanduser('~') == os.getcwd()",
    "children": "assert subprocess.run(['sh', '-c', 'echo x | cat'], capture_output=True).stdout == b'x\\n'",
    "signals to children": "p = subprocess.Popen(['sleep', '60'], start_new_session=True); p.terminate(); p.wait(9)",
    "threads": "import threading; threading.Thread(target=time.sleep, args=(0.01,)).start()",
    "an event loop": "import asyncio; asyncio.run(asyncio.sleep(0))",
    "a database": "import sqlite3; sqlite3.connect('x.db').execute('create table t (x)')",
    "certificates": "import ssl; ssl.create_default_context()",
    "the address": "assert os.environ['OPENAI_API_KEY'] == 'key'",
}


def main() -> None:
    results = {}
    signal.alarm(30)
    for name, code in {**ATTACKS, **NEEDS}.items():
        ctypes.set_errno(0)
        try:
            exec(code, globals())
            results[name] = "through"
        except (OSError, AssertionError) as error:
            known = errno.errorcode.get(getattr(error, "errno", 0) or 0, "")
            results[name] = f"refused {type(error).__name__} {known}"
        except BaseException as error:
            results[name] = repr(error)
        with contextlib.suppress(FileNotFoundError):
            os.remove("mine")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
