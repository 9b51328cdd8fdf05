"""What an inference engine is: tokens and sampling parameters in, tokens and log-probs out, weights in.

An engine knows nothing of prompts, rewards or groups. Every method is a coroutine, so that an engine may
live in this process, in a Ray actor or behind HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

# tokens to text, special tokens included
Decode = Callable[[list[int]], str]
FinishReason = Literal["stop", "length", "abort"]
# device memory that an engine can give back and take again, by SGLang's names
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


@dataclass(frozen=True)
class EngineSetup:
    """What one engine of a run is built with; see `slimelite.engines.registry`.

    ``host``: the address of this machine that it listens on. ``log``: where a server prints.
    ``memory_share``: of the GPU's memory, for weights and KV cache. ``releases_memory``: whether it will have to give
    its memory back. ``width``: its GPUs. ``options``: the other ``--sglang-*`` options, by their fields.
    None leaves the choice to the engine.
    """

    model_path: str
    device: str
    seed: int
    host: str
    log: Path
    max_running_requests: int | None = None
    max_context_len: int | None = None
    memory_share: float | None = None
    releases_memory: bool = False
    width: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Codec:
    """Tokens to text (special tokens included) and back, and the tokens that end a response."""

    decode: Decode
    encode: Callable[[str], list[int]]
    eos_token_ids: Sequence[int]


@dataclass(frozen=True)
class SyncSetup:
    """How the trainer's weights get into engines that are servers.

    ``transport``: "ipc", "nccl", "http" or "disk", see ``--update-weight-transport``. ``device``: where this rank's
    weights are. ``host``: a name of this machine that the servers can reach. ``directory``: of the way by disk, which
    keeps the folders of earlier versions with ``keep_folders``. ``timeout_s``: of a broadcast that does not end [s].
    """

    model_path: str
    transport: str
    device: torch.device
    host: str
    directory: str | None = None
    keep_folders: bool = False
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response; temperature 0 or top_k 1 is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    # the stop string stays in the output (slime's no_stop_trim); the token that completes it is the last one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = False
    # key of this request's random stream: token t depends on (seed, t) alone; None: not repeatable
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to sample.

    ``input_ids``: the prompt, and the part of the response that exists already when a partial rollout goes on.
    ``prefix_key``: requests with the same key share the prompt; an engine may prefill it once.
    ``position``: how many response tokens are already in ``input_ids`` (the random stream goes on from there).
    """

    request_id: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    prefix_key: str | None = None
    position: int = 0


@dataclass(slots=True)
class GenerateResult:
    """The tokens of one response.

    ``log_probs``: one a token, of softmax(logits / temperature) before any top-p or top-k renormalisation;
    greedy requests (temperature 0 or top_k 1) report the same quantity, with temperature 0 read as 1.
    ``weight_versions``: one a token, the version of the weights that produced it.
    ``cached_tokens``: prompt tokens whose keys and values were already there.
    """

    request_id: str
    output_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: FinishReason
    cached_tokens: int = 0


@dataclass(slots=True)
class WeightBucket:
    """Several tensors of one dtype, flattened into one.

    ``flat``: 1-D, the tensors' elements in the order of ``names``; names are Hugging Face's.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    flat: torch.Tensor

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name, view into ``flat``) for each tensor."""
        sizes = [int(torch.Size(shape).numel()) for shape in self.shapes]
        parts = self.flat.split(sizes)
        return [(n, p.view(s)) for n, p, s in zip(self.names, parts, self.shapes, strict=True)]

    def __reduce__(self) -> tuple[Callable[..., WeightBucket], tuple[Any, ...]]:
        # numpy bytes travel out of band between processes, a torch tensor would be copied through pickle
        dtype = str(self.flat.dtype).removeprefix("torch.")
        return _received, (self.names, self.shapes, dtype, self.flat.cpu().view(torch.uint8).numpy())


def _received(names: list[str], shapes: list[tuple[int, ...]], dtype: str, raw: Any) -> WeightBucket:
    # a copy: what comes out of shared memory is read-only
    return WeightBucket(names, shapes, torch.tensor(raw).view(getattr(torch, dtype)))


@dataclass(slots=True)
class EngineInfo:
    """What an engine says of itself; ``weight_version`` -1: the weights it was started with.

    ``seeds``: whether `SamplingParams.seed` decides the tokens. ``scores``: whether `Engine.score` works.
    ``url``: of an HTTP front that speaks SGLang's /generate, when there is one.
    """

    name: str
    weight_version: int
    max_context_len: int
    max_running_requests: int
    seeds: bool
    scores: bool = False
    url: str | None = None
    extra: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Token-in, token-out inference."""

    async def info(self) -> EngineInfo:
        """Name, limits, what it can, and the current weight version."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Sample a response to each request; results come in the order of the requests.

        Raises:
            ValueError: a request cannot fit the context, or asks for what the engine cannot do.
            ConnectionError: the engine is gone.
        """
        ...

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
        """Log-probs of ``input_ids[start:]``, each after what stands before it, under softmax(logits / temperature).

        Only of engines whose `EngineInfo` claims it.

        Raises:
            ValueError: no tokens before ``start`` or after it, more than the context holds, or a temperature of 0.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all, if None) now: they return what they have, with finish reason "abort"."""
        ...

    async def begin_weight_update(self, version: int) -> None:
        """Stop decoding until `end_weight_update`; the weights in between are nobody's to use."""
        ...

    async def load_weights(self, bucket: WeightBucket) -> None:
        """Copy the bucket's tensors into the model.

        Raises:
            ValueError: an unknown name or a wrong shape.
        """
        ...

    async def end_weight_update(self) -> None:
        """Every weight is in: forget cached keys and values, stamp the version, decode again.

        Raises:
            ValueError: a weight of the model was not sent; the engine keeps refusing to decode.
        """
        ...

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give back the device memory of ``tags``, of `MEMORY_TAGS`; what an engine does not have is nothing to it."""
        ...

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take that memory again."""
        ...

    async def start_http(self) -> str:
        """Serve SGLang's ``/generate`` and ``/abort_request`` JSON on loopback and return the base URL."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


def check_memory_tags(tags: Sequence[str]) -> None:
    """Raise ValueError unless every one of ``tags`` is of `MEMORY_TAGS`."""
    if unknown := set(tags) - set(MEMORY_TAGS):
        raise ValueError(f"no memory is called {sorted(unknown)}; known are {MEMORY_TAGS}")


class ServerProcess(Protocol):
    """An engine that is a server of its own; requests and weights do not pass through here."""

    def address(self) -> str:
        """Its URL, also before it is started."""
        ...

    def start(self) -> str:
        """Returns its URL when it answers."""
        ...

    def restart(self) -> None:
        """Returns when it answers again, with the weights that it was first started with."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """An engine in a process that can be started anew after it died."""

    async def restart(self) -> None:
        """Returns when it answers again, with the weights it was first started with and version -1."""
        ...


class WeightSink(Protocol):
    """Where weights go; `begin`, then every bucket, then `end`.

    ``every_rank``: whether each trainer rank calls a sink of its own, with the same buckets; else rank 0 alone does.
    """

    every_rank: bool

    def begin(self, version: int) -> None:
        """Weights of this version follow."""
        ...

    def send(self, bucket: WeightBucket) -> None:
        """Some of them; the bucket is not used afterwards."""
        ...

    def end(self) -> None:
        """That was all of them."""
        ...


class WeightSyncError(RuntimeError):
    """An engine did not take an update and stays paused: nothing can go on before a whole one."""
