"""The requests that official clients sent (`scripts/test_clients.sh --record`), and the answers they understood."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from slimelite.serving.front import Front
from tests.serving.clients.server import answered, held_front, ruled_front
from tests.serving.clients.table import RECORDED, recording, table, written


async def repeated(front: Front, file: Path) -> None:
    """The front answers as when the client was recorded."""
    url = await front.start()
    try:
        ids: dict[str, str] = {}
        async with aiohttp.ClientSession() as http:
            for recorded in recording(file)["requests"]:
                found = await answered(http, url, recorded, ids)
                assert found == {"status": recorded["status"], "answer": recorded["answer"]}, recorded["body"]
    finally:
        await front.stop()


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_answers_have_the_form_that_the_client_understood(file: Path) -> None:
    asyncio.run(repeated(ruled_front(), file))


@pytest.mark.parametrize("client", ["anthropic", "instructor"])
def test_so_have_those_of_the_embedded_engine(client: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with held_front(tmp_path / "model") as front:
            (file,) = [file for file in RECORDED if file.stem == client]
            await repeated(front, file)

    asyncio.run(scenario())


def test_every_client_is_recorded() -> None:
    clients = (Path(__file__).parent / "clients").glob("with_*")
    assert {file.stem for file in RECORDED} == {file.stem.removeprefix("with_").replace("_", "-") for file in clients}


def test_the_page_has_the_table_of_the_recordings() -> None:
    assert written() == table()
