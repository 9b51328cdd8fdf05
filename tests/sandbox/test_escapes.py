"""Attacks of `escapes` from each sandbox, and what a program needs there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimelite.sandbox.registry import open_sandbox
from tests.sandbox.sandboxes import ROOT, SANDBOXES_HERE, python, settings

ESCAPES = Path(__file__).with_name("escapes.py")


def names(table: str) -> list[str]:
    """The names of `escapes.ATTACKS` or ``NEEDS``; it reads its facts when it is imported, so this reads the file."""
    source = ESCAPES.read_text().partition(f"\n{table} = ")[2].partition("\n}\n")[0]
    return list(eval(source + "\n}"))  # a literal of texts


ATTACKS, NEEDS = names("ATTACKS"), names("NEEDS")


def answers(server: socket.socket) -> None:
    """Answer each connection: to nine bytes with nine million."""
    while True:
        try:
            made = server.accept()[0]
        except OSError:
            return
        with made, contextlib.suppress(OSError):
            made.sendall(bytes(9_000_000) if len(made.recv(9)) == 9 else b"x")


def echoes(server: socket.socket) -> None:
    while True:
        try:
            data, sender = server.recvfrom(9)
        except OSError:
            return
        if sender:
            server.sendto(data, sender)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What there is to attack; the endpoint is a server like the one that is out of bounds."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("secret")
    libc, key, mark = ctypes.CDLL(None), secrets.randbelow(1 << 30), secrets.token_hex(8)
    segment = libc.shmget(key, 4096, 0o1666)
    shared = Path("/dev/shm", f"slimelite-{mark}")
    shared.write_text("secret")
    tcp, endpoint = socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0))
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    udp, datagrams = socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    unix.bind(str(outside / "socket"))
    abstract.bind(f"\0{mark}")
    udp.bind(("127.0.0.1", 0))
    datagrams.bind(str(outside / "datagrams"))
    for server in (unix, abstract):
        server.listen()
    for target, server in ((answers, tcp), (answers, endpoint), (answers, unix), (answers, abstract), (echoes, udp)):
        threading.Thread(target=target, args=(server,), daemon=True).start()
    with socket.create_server(("", 0)) as unused:
        free = unused.getsockname()[1]
    victim = subprocess.Popen(["sleep", "600"], env={"SECRET": "x"})
    yield {
        "victim": victim.pid,
        "parent": os.getpid(),
        "outside": str(outside),
        "tcp": tcp.getsockname()[1],
        "udp": udp.getsockname()[1],
        "endpoint": endpoint.getsockname()[1],
        "free": free,
        "abstract": f"\0{mark}",
        "shared": shared.name,
        "key": key,
        "repository": str(ROOT),
    }
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    for server in (tcp, endpoint, unix, abstract, udp, datagrams):
        server.close()
    libc.shmctl(segment, 0, None)
    shared.unlink()


@functools.cache
def results(sandbox: str, text: str) -> dict[str, str]:
    """What came of each attack and each need."""
    port = json.loads(text)["endpoint"]
    box = open_sandbox(settings(sandbox, memory_mb=512))
    assert box is not None
    box.check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_RUN", "x")
        words = [python(sandbox), str(ESCAPES)]
        launch = box.launch(words, {"OPENAI_API_KEY": "key"}, f"http://127.0.0.1:{port}/sessions/s")
    environment = launch.environment | {"SECRET_OF_THE_RUN": "x"}
    run = subprocess.run(launch.words, env=environment, input=text, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("sandbox", SANDBOXES_HERE)
def test_an_attack_is_refused(sandbox: str, name: str, facts: dict[str, Any]) -> None:
    assert results(sandbox, json.dumps(facts))[name].startswith("refused")
    assert os.listdir(facts["outside"]).count("secret") == 1


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize("sandbox", SANDBOXES_HERE)
def test_a_program_has_what_it_needs(sandbox: str, name: str, facts: dict[str, Any]) -> None:
    assert results(sandbox, json.dumps(facts))[name] == "through"
