"""The teacher server of on-policy distillation. Its /generate endpoint, as in SGLang, returns the log-probs of finished
responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slimelite.arguments import DistillationArgs
from slimelite.base.http_client import Client, HttpError, Refused, Retry, shown
from slimelite.samples.sample import Sample

CONNECTIONS = 64
ATTEMPTS = 5
REQUEST_SECONDS = 300.0


class Teacher:
    """Sets ``sample.teacher_log_probs`` to the teacher's log-probs. ``temperature`` is the temperature at which the
    student samples.

    SGLang ignores the sampling temperature for prompts, so its prompt log-probs are at temperature 1. If
    ``temperature`` is not 1, the request has the field ``input_logprob_temperature``. A server that supports this field
    returns it in its answer.

    Args:
        url: address of the server, with or without ``/generate``.
    """

    def __init__(self, url: str, temperature: float) -> None:
        self.url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/generate"
        self.temperature = temperature
        self._room = asyncio.Semaphore(CONNECTIONS)

    @classmethod
    def of(cls, args: DistillationArgs) -> Teacher | None:
        """The teacher at --rm-url if --opd-type is sglang, else None."""
        is_server = args.use_opd and args.opd_type == "sglang" and args.rm_url is not None
        return cls(str(args.rm_url), args.rollout_temperature) if is_server else None

    async def score(self, samples: Sequence[Sample]) -> None:
        """Compute the teacher log-probs of every response that does not have them yet.

        Raises:
            ValueError: the server does not answer, refuses the request, or returns log-probs of other tokens or at
                another temperature.
        """
        todo = [s for s in samples if s.response_length and s.teacher_log_probs is None]
        async with Client(Retry(ATTEMPTS, first_s=0.25, refused=True), REQUEST_SECONDS) as client:
            await asyncio.gather(*(self._score(client, s) for s in todo))

    def ask_once(self) -> None:
        """Test the server with the token ids 0 and 1, because they are in every vocabulary. A token id outside the
        vocabulary would crash SGLang.

        Raises:
            ValueError: see `score`.
        """
        asyncio.run(self.score([Sample(tokens=[0, 1], response_length=1)]))

    async def _score(self, client: Client, sample: Sample) -> None:
        if not sample.prompt_length:
            raise ValueError(f"sample {sample.index} has no prompt token, so its response cannot be scored")
        request: dict[str, object] = {
            "input_ids": sample.tokens,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            # the first entry has no log-prob
            "logprob_start_len": sample.prompt_length - 1,
        }
        if self.temperature != 1.0:
            request["input_logprob_temperature"] = self.temperature
        async with self._room:
            meta = (await self._post(client, request))["meta_info"]
        scored = meta["input_token_logprobs"][-sample.response_length :]
        # SGLang returns id 0 instead of the last id of its vocabulary, but with the right log-prob
        repeated = [got in (sent, 0) for (_, got, *_), sent in zip(scored, sample.tokens[-len(scored) :], strict=True)]
        if len(repeated) != sample.response_length or not all(repeated):
            raise ValueError(
                f"the teacher at {self.url} did not score the tokens of the request: is its context too short?"
            )
        if meta.get("input_logprob_temperature", 1.0) != self.temperature:
            raise ValueError(
                f"the teacher at {self.url} scores at temperature 1, not at --rollout-temperature {self.temperature} "
                "(SGLang always scores at temperature 1); set --rollout-temperature 1, serve the teacher with "
                "slimelite serve, or use --opd-type trainer"
            )
        sample.teacher_log_probs = [float(entry[0]) for entry in scored]

    async def _post(self, client: Client, request: dict[str, object]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await client.post(self.url, request)
        except HttpError as error:
            if isinstance(error, Refused) and not error.is_transient:
                raise ValueError(f"the teacher refused the request: {error}") from error
            raise ValueError(
                f"the teacher at --rm-url {shown(self.url)} did not answer in {ATTEMPTS} attempts: {error}"
            ) from error
        return answer
