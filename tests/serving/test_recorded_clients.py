"""The requests that official clients sent (`scripts/test_clients.sh --record`), and the answers they understood."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.serving.clients.server import answered, ruled_front
from tests.serving.clients.table import RECORDED, recording, table, written


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_answers_have_the_form_that_the_client_understood(file: Path) -> None:
    async def scenario() -> None:
        front = ruled_front()
        url = await front.start()
        try:
            ids: dict[str, str] = {}
            async with aiohttp.ClientSession() as http:
                for recorded in recording(file)["requests"]:
                    found = await answered(http, url, recorded, ids)
                    assert found == {"status": recorded["status"], "answer": recorded["answer"]}, recorded["body"]
        finally:
            await front.stop()

    asyncio.run(scenario())


def test_every_client_is_recorded() -> None:
    clients = (Path(__file__).parent / "clients").glob("with_*")
    assert {file.stem for file in RECORDED} == {file.stem.removeprefix("with_").replace("_", "-") for file in clients}


def test_the_page_has_the_table_of_the_recordings() -> None:
    assert written() == table()
