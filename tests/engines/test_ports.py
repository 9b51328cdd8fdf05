"""Ports that are chosen early and bound late stay ours in between."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from slimelite.engines.sglang.server import SglangServer, reserve_port


def test_a_reserved_port_is_given_to_nobody_but_the_server() -> None:
    reserved = reserve_port("127.0.0.1")
    port = reserved.getsockname()[1]
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind(("127.0.0.1", port))
    with socket.socket() as visitor, pytest.raises(ConnectionRefusedError):
        visitor.connect(("127.0.0.1", port))

    async def serve() -> bytes:
        """As uvicorn does."""

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            text = await reader.read()
            writer.close()
            return text

    for _ in range(2):  # a restart too
        assert asyncio.run(serve()) == b"hello"
    reserved.close()


def test_a_server_keeps_its_port_until_it_is_closed(tmp_path: Path) -> None:
    server = SglangServer(lambda _host, _port: ["true"], "127.0.0.1", tmp_path / "log")
    with socket.socket() as stranger, pytest.raises(OSError, match="Address already in use"):
        stranger.bind(("127.0.0.1", server.port))
    server.close()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", server.port))
