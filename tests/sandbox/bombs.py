"""``python bombs.py NAME``: uses one resource without end, and prints after each piece how much it has by then."""

import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

MB = 1 << 20
kept: list[object] = []
MARK = "98765.4321"


def say(number: int) -> None:
    os.write(1, b"%d\n" % number)


def touched(memory: mmap.mmap) -> None:
    for place in range(0, len(memory), 4096):
        memory[place] = 1
    kept.append(memory)


def pieces(piece: Callable[[int], object], size: int = 1, most: int = 4096) -> Callable[[], None]:
    """Keep one piece after the other, ``size`` each; if nothing stops it, the machine has room for ``most``."""

    def bomb() -> None:
        for count in range(1, most):
            kept.append(piece(count))
            say(count * size)

    return bomb


def written(path: str, size: int, *, keep: bool = False, remove: bool = False) -> object:
    file = open(path, "ab")  # noqa: SIM115  it may stay open
    file.write(os.urandom(1 << 16) * (size >> 16))
    file.flush()
    if remove:
        os.remove(path)
    if keep:
        return file
    file.close()
    return None


def child_with_memory(count: int) -> None:
    if not os.fork():
        touched(mmap.mmap(-1, 16 * MB))
        time.sleep(600)
    time.sleep(0.02)


def child(count: int, *, session: bool = False) -> None:
    if not os.fork():
        if session:
            os.setsid()
        time.sleep(600)


def tree() -> None:
    for count in range(1, 100):
        say(count)
        os.fork()
    time.sleep(600)


def deep(count: int) -> None:
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    written("f", MB)


def memory_file(count: int) -> int:
    descriptor = os.memfd_create("x")
    os.write(descriptor, os.urandom(MB))
    return descriptor


def fallocated(count: int) -> None:
    with open(f"a{count}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4 * MB)


def thread(count: int) -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


# what each piece is of: memory and disk in MiB, processes and descriptors as they are
BOMBS: dict[str, tuple[str, Callable[[], object]]] = {
    "a list": ("memory", pieces(lambda _: os.urandom(MB))),
    "one large buffer": ("memory", lambda: (touched(mmap.mmap(-1, 2048 * MB)), say(2048))),
    "private memory": ("memory", pieces(lambda _: touched(mmap.mmap(-1, MB, mmap.MAP_PRIVATE)))),
    "shared memory": ("memory", pieces(lambda _: touched(mmap.mmap(-1, MB)))),
    "a file in memory": ("memory", pieces(memory_file)),
    "children with memory": ("levels", pieces(child_with_memory, 16)),
    "sums": ("memory", lambda: say(len(str(7 ** (1 << 29))) >> 20)),
    "texts that double": ("memory", lambda: [say(len("x" * (1 << n)) >> 20) for n in range(20, 40)]),
    "memory by name": ("shared", pieces(lambda n: written(f"/dev/shm/slimelite-{os.getpid()}-{n}", MB))),
    "children": ("processes", pieces(child)),
    "children in sessions": ("processes", pieces(lambda n: child(n, session=True))),
    "a tree of children": ("levels", tree),
    "threads": ("processes", pieces(thread)),
    "programs": ("processes", pieces(lambda _: subprocess.Popen(["sleep", MARK], start_new_session=True))),
    "one file": ("disk", pieces(lambda _: written("one", MB))),
    "many files": ("disk", pieces(lambda n: written(f"f{n}", MB))),
    "deleted files": ("disk", pieces(lambda n: written(f"g{n}", MB, keep=True, remove=True))),
    "temporary files": ("disk", pieces(lambda n: written(f"{os.environ['TMPDIR']}/t{n}", MB))),
    "deep folders": ("disk", pieces(deep, most=256)),
    "allocated files": ("disk", pieces(fallocated, 4)),
    "open files": ("descriptors", pieces(lambda _: os.dup(1))),
    "sockets": ("descriptors", pieces(lambda _: socket.socketpair())),
    "time": ("seconds", lambda: all(_ == 0 for _ in iter(int, 1))),
    "sleep": ("seconds", lambda: time.sleep(600)),
    "output": ("seconds", lambda: [print("x" * 10_000) for _ in iter(int, 1)]),
}

if __name__ == "__main__":
    BOMBS[sys.argv[1].replace("_", " ")][1]()
    time.sleep(600)
