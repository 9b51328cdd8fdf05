"""The requests that official clients sent (`scripts/test_clients.sh --record`), and the answers they understood."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from tests.serving.clients.server import answered, ruled_front

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_answers_have_the_form_that_the_client_understood(file: Path) -> None:
    async def scenario() -> None:
        front = ruled_front()
        url = await front.start()
        try:
            ids: dict[str, str] = {}
            async with aiohttp.ClientSession() as http:
                for recorded in json.loads(file.read_text()):
                    found = await answered(http, url, recorded, ids)
                    assert found == {"status": recorded["status"], "answer": recorded["answer"]}, recorded["body"]
        finally:
            await front.stop()

    asyncio.run(scenario())


def test_every_client_is_recorded() -> None:
    programs = {"ai-sdk", "claude-code", "codex", "inspect", "openai-agents", "pydantic-ai"}
    assert {file.stem for file in RECORDED} == {"anthropic", "openai", *programs}
