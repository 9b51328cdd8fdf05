"""A cable between a machine of ``machines.py`` and its bridge that is long and loses frames: a relay between two taps.

python far_link.py SWITCH MACHINE NUMBER ADDRESS DELAY_MS LOSS

It runs inside their user namespace, and ends when its stdin closes.

Each frame comes DELAY_MS later, and a share LOSS of them never. Kernels that lack netem can do this too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, TAP_WITHOUT_HEADER, CLONE_NEWNET = 0x400454CA, 0x1002, 0x40000000
FRAME = 65536


def tap(process: int, name: str, setup: str) -> int:
    """A network card in the network namespace of ``process``, made ready by ``setup``."""
    namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, TUNSETIFF, struct.pack("16sH", name.encode(), TAP_WITHOUT_HEADER))
    subprocess.run(["sh", "-c", setup], check=True)
    return card


def relay(one: int, other: int, delay_s: float, loss: float) -> None:
    """Carry frames both ways until stdin closes; then print how many came, and how many of them were lost."""
    came = lost = 0
    chance, across = random.Random(0), {one: other, other: one}
    under_way = deque[tuple[float, int, bytes]]()  # due, to, frame; in the order of their times
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([*across, sys.stdin], [], [], wait)
        if sys.stdin in readable:
            print(came, lost)
            return
        for card in readable:
            with suppress(BlockingIOError):
                frame = os.read(card, FRAME)
                came += 1
                if chance.random() < loss:
                    lost += 1
                    continue
                under_way.append((time.monotonic() + delay_s, across[card], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, card, frame = under_way.popleft()
            with suppress(OSError):  # the card's queue is full, or it is down: this frame is lost, too
                os.write(card, frame)


def main() -> None:
    """The command line."""
    switch, machine, number, address, delay_ms, loss = sys.argv[1:]
    near = tap(int(switch), f"v{number}", f"ip link set v{number} master br0 up")
    far = tap(int(machine), "eth0", f"ip addr add {address}/24 dev eth0 && ip link set eth0 up")
    print("ready", flush=True)
    relay(near, far, float(delay_ms) / 1000, float(loss))


if __name__ == "__main__":
    main()
