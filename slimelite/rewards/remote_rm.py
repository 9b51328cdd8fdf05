"""``remote_rm``: a server's reward: POST ``{"prompt", "response", "label"}`` to --rm-url, and take its JSON answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

CONNECTIONS = 64
ATTEMPTS = 10
BACKOFF_SECONDS = 30.0
REQUEST_SECONDS = 120.0
# answers that may be better next time
TRANSIENT = (408, 425, 429)


async def remote_rewards(
    url: str, payloads: Sequence[dict[str, Any]], *, attempts: int = ATTEMPTS, backoff: float = BACKOFF_SECONDS
) -> list[Any]:
    """The server's answer to each payload, or the exception that the last of ``attempts`` ended with.

    Waits 1, 2, 4, ... seconds, at most ``backoff``, between attempts; a client error (4xx) is not tried again.
    """
    import aiohttp

    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_SECONDS), aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        tasks = (_reward(session, url, payload, attempts, backoff) for payload in payloads)
        return await asyncio.gather(*tasks, return_exceptions=True)


async def _reward(
    session: aiohttp.ClientSession, url: str, payload: dict[str, Any], attempts: int, backoff: float
) -> Any:
    import aiohttp

    attempt = 1
    while True:
        try:
            async with session.post(url, json=payload) as response:
                response.raise_for_status()
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            status = error.status if isinstance(error, aiohttp.ClientResponseError) else 500
            if attempt == attempts or (status < 500 and status not in TRANSIENT):
                raise
            wait = min(2.0 ** (attempt - 1), backoff) * random.uniform(1.0, 1.5)
            logger.info("remote_rm attempt %d of %d: %r; again in %.1f s", attempt, attempts, error, wait)
        await asyncio.sleep(wait)
        attempt += 1
