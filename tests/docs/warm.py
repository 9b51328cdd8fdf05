"""A Python that has imported torch, transformers and the package, and forks for each ``train.py`` that it is asked for.

The pages start ``train.py`` some thirty times, and the imports are most of what a run of two rollouts costs.

    python warm.py SOCKET                    # the server
    python warm.py SOCKET train.py --lr 1    # a client: the command's output and exit status
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback


def serve(address: str) -> None:
    """Wait for clients; ``address``: where the socket is made once everything is imported."""
    import slimelite.cluster.workers
    import slimelite.engines.embedded.engine
    import slimelite.preflight.inputs
    import slimelite.training.loading
    import slimelite.training.trainer  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a child tells the client how it ended
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".partial")
    listener.listen()
    os.rename(address + ".partial", address)
    while True:
        connection, _ = listener.accept()
        assert threading.active_count() == 1, "a process whose Python has threads cannot be forked"
        if os.fork() == 0:
            listener.close()
            _run(connection)
        connection.close()


def _run(connection: socket.socket) -> None:
    """Become the command of a client, and end with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    command = json.loads(connection.makefile().readline())
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.argv, sys.path[0] = command["words"], command["folder"]
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(str(status).encode())
    os._exit(status)


def ask(address: str, words: list[str]) -> int:
    """Run a command; returns its exit status, 1 if it ended without one."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        command = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        connection.sendall(json.dumps(command).encode() + b"\n")
        return int(connection.recv(16) or b"1")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
