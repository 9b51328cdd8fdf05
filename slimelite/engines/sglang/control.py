"""The control side of a SGLang server: requests of a trainer that waits for each answer."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
ATTEMPTS = 3
TIMEOUT_S = 600.0


class ServerError(ConnectionError):
    """A server refused a request or cannot be reached; the message says which, and what it answered."""


@dataclass(frozen=True)
class Server:
    """One SGLang server at ``url`` (``http://host:port``), ``tp_size`` GPUs wide.

    ``first_gpu``: of those of all engines; None: the one behind the server before it.
    """

    url: str
    tp_size: int = 1
    first_gpu: int | None = None

    def post(
        self,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        attempts: int = ATTEMPTS,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """The answer to a POST of ``body`` as JSON (bytes are JSON already).

        A lost connection is tried again up to ``attempts`` times, so the request must be one that may come twice.

        Raises:
            ServerError: the server said no, or cannot be reached.
        """
        encoded = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return self._request("POST", path, encoded, attempts, timeout_s)

    def get(self, path: str) -> str:
        """The answer to a GET; raises as `post` does."""
        return self._request("GET", path, None, ATTEMPTS, TIMEOUT_S)

    @cached_property
    def paths(self) -> frozenset[str]:
        """The endpoints that this version of SGLang has."""
        return frozenset(json.loads(self.get("/openapi.json"))["paths"])

    @property
    def brackets_updates(self) -> bool:
        """Whether tensors go between ``begin_weight_update`` and ``end_weight_update`` (SGLang 0.5.23; not 0.5.20)."""
        return "/begin_weight_update" in self.paths

    def _request(self, method: str, path: str, body: bytes | None, attempts: int, timeout_s: float) -> str:
        address = urlsplit(self.url)
        for attempt in range(1, attempts + 1):
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
                status = response.status
                break
            except (OSError, http.client.HTTPException) as error:
                if attempt == attempts:
                    raise ServerError(
                        f"{self.url}{path}, {attempts} attempts: {error or type(error).__name__}"
                    ) from error
                time.sleep(0.5 * attempt)
            finally:
                connection.close()
        if status != 200:
            raise ServerError(f"{self.url}{path} answered {status}: {text[:500]}")
        return text


def each(servers: Sequence[Server], call: Callable[[Server], T]) -> list[T]:
    """``call`` on every server at once; the first error is raised when all are done."""
    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        return list(threads.map(call, servers))
