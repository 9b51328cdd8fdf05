"""The interface of an inference engine. An engine takes tokens, sampling parameters and weights, and returns tokens and
log-probs.

An engine knows nothing about rewards, groups or prompt text. Every method is a coroutine, so that an engine can
be in this process, in a Ray actor or behind HTTP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from slimelite.engines.params import SamplingParams
from slimelite.engines.registry import KEEPS_ALL, Content, EngineMemory
from slimelite.samples.sample import Kept, Listed, PerToken

if TYPE_CHECKING:
    import torch

    from slimelite.engines.registry import ServerAddress

# converts tokens to text, with special tokens
Decode = Callable[[list[int]], str]
# callback for the next tokens of a response and their log-probs; it runs on the caller's event loop
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
FinishReason = Literal["stop", "length", "abort"]
# kinds of device memory that an engine can release and resume, under SGLang's names
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")


@dataclass(frozen=True)
class EngineSetup:
    """The settings of one engine of a run, see `slimelite.engines.registry`.

    ``host``: the address of this machine that the engine listens on. ``log``: the file for a server's output.
    ``kv_cache_tokens``: the largest number of tokens in the KV cache. ``repeatable``: the same requests in the same
    order give bit-identical results, whatever requests came before. ``memory_share``: share of the GPU's memory for
    weights and KV cache. ``releases_memory``: whether the run calls `Engine.release_memory`. ``memory``: the content
    that `Engine.release_memory` loses. ``width``: number of GPUs. ``options``: the other ``--sglang-*`` options, by
    field name. ``adapter``: the LoRA adapters that the run will send; None: the run sends weights. If any other field
    is None, the engine chooses its value.
    """

    model_path: str
    device: str
    seed: int
    host: str
    log: Path
    max_running_requests: int | None = None
    max_context_len: int | None = None
    kv_cache_tokens: int | None = None
    repeatable: bool = False
    memory_share: float | None = None
    releases_memory: bool = False
    memory: EngineMemory = KEEPS_ALL
    width: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: AdapterKind | None = None

    def backups(self) -> dict[str, bool]:
        """The ``--sglang-*`` options that keep copies in host memory during a release. They are needed for content that
        a release loses and that no weight sync restores."""
        if not self.releases_memory:
            return {}
        return self.memory.needed(self.options, adapter_alone=self.adapter is not None)

    def keeps_weights(self) -> bool:
        """Whether the weights of an earlier sync survive a release."""
        return self.memory.survives(Content.WEIGHTS, {**self.options, **self.backups()})


@dataclass(frozen=True)
class AdapterKind:
    """The LoRA adapters that an engine must accept: their rank, and the names of the modules that have an adapter."""

    rank: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class AdapterFormat:
    """The adapter that a trainer sends: its ``config`` in peft's form, and the shape of each tensor by its name in
    peft."""

    config: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Codec:
    """Converts tokens to text (with special tokens) and text to tokens. A codec also has the tokens that end a
    response.

    ``tokenizer``: the tokenizer of transformers, for grammars.
    """

    decode: Decode
    encode: Callable[[str], list[int]]
    eos_token_ids: Sequence[int]
    tokenizer: Any = None


@dataclass(frozen=True)
class SyncSetup:
    """How a trainer rank sends its weights to engines that are servers.

    ``transport``: "ipc", "nccl", "http" or "disk", see ``--update-weight-transport``. ``device``: where this rank's
    weights are. ``host``: a name of this machine that the servers can reach. ``directory``: folder for transport
    "disk". ``keep_folders``: whether earlier versions in ``directory`` are kept. ``timeout_s``: a broadcast that takes
    more than this number of seconds fails. ``adapter``: send only this adapter, with any transport; None: send weights.
    ``partial``: whether an update may leave out weights that an earlier update brought, because the servers still have
    these weights.
    """

    model_path: str
    transport: str
    device: torch.device
    host: str
    directory: str | None = None
    keep_folders: bool = False
    timeout_s: float = 600.0
    adapter: AdapterFormat | None = None
    partial: bool = True


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response to sample.

    ``input_ids``: the prompt. If a partial rollout is resumed, the existing response tokens follow the prompt.
    ``prefix_key``: requests with the same key share the prompt, so an engine may prefill the prompt once. ``position``:
    number of response tokens in ``input_ids``; the random stream continues at this position.
    """

    request_id: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    prefix_key: str | None = None
    position: int = 0


@dataclass
class GenerateResult:
    """The tokens of one response. The per-token fields may be set to lists or arrays, and are always read as lists.
    `columns` returns these fields as they are stored.

    ``log_probs``: one per token, under softmax(logits / temperature) over the whole vocabulary, before top-p, top-k and
    min-p. If the request's temperature is 0, the temperature in this formula is 1. ``kept``: for a request with
    `SamplingParams.kept`, the ids that each token was drawn from, if some ids were excluded. The token's log-prob is
    then renormalised over these ids. For a greedy request (temperature 0 or top_k 1), ``kept`` has only the token
    itself. ``constrained``: for a request with a grammar, penalties or biases, one value per token: True if the grammar
    restricted this token, or if the request has penalties or biases. ``weight_versions``: one per token, the version of
    the weights that produced it. ``cached_tokens``: number of prompt tokens whose keys and values came from the cache.
    """

    request_id: str
    output_ids: Listed[list[int]] = Listed(())
    log_probs: Listed[list[float]] = Listed(())
    weight_versions: Listed[list[int]] = Listed(())
    finish_reason: FinishReason = ""  # type: ignore[assignment]  # only a result with no tokens may omit it: "abort"
    cached_tokens: int = 0
    kept: Kept | None = None
    constrained: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.finish_reason:
            if self.length:
                raise TypeError(f"the result of request {self.request_id} has tokens but no finish_reason")
            self.finish_reason = "abort"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(vars(self)["output_ids"])

    @property
    def columns(self) -> tuple[PerToken, PerToken, PerToken]:
        """Tokens, log-probs and weight versions as they are stored. An array becomes a list when its field is read."""
        values = vars(self)
        return values["output_ids"], values["log_probs"], values["weight_versions"]

    def packed(self) -> GenerateResult:
        """Replace the lists of this result by arrays (int32 tokens and versions, fp32 log-probs), and return the
        result."""
        columns = zip(self.columns, RESULT_TOKENS.values(), strict=True)
        self.output_ids, self.log_probs, self.weight_versions = (np.array(column, dtype) for column, dtype in columns)
        return self

    def __reduce__(self) -> tuple[Callable[..., GenerateResult], tuple[object, ...]]:
        # Ray would send each array as a separate buffer (768 buffers for 256 responses), which took twice the time
        kept = () if self.kept is None else (self.kept.ids, self.kept.counts)
        columns = [(c.tobytes(), c.dtype.char) if isinstance(c, np.ndarray) else c for c in (*self.columns, *kept)]
        return _unpickled, (self.request_id, self.finish_reason, self.cached_tokens, self.constrained, *columns)


def _unpickled(
    request_id: str, finish_reason: FinishReason, cached_tokens: int, constrained: np.ndarray | None, *columns: object
) -> GenerateResult:
    fields: list[Any] = [np.frombuffer(*value) if isinstance(value, tuple) else value for value in columns]
    ids, log_probs, versions, *kept = fields
    kept_ids = Kept(*kept) if kept else None
    return GenerateResult(request_id, ids, log_probs, versions, finish_reason, cached_tokens, kept_ids, constrained)


# the per-token columns of a result, and the dtypes of their arrays
RESULT_TOKENS = {"output_ids": np.int32, "log_probs": np.float32, "weight_versions": np.int32}


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of given tokens. ``top``: for each position the likeliest tokens, as (token, log-prob), in descending
    order."""

    log_probs: list[float]
    top: list[list[tuple[int, float]]]


@dataclass(slots=True)
class WeightBucket:
    """Several tensors of one dtype, flattened into one tensor.

    ``flat``: a 1-D tensor with the elements of all tensors, in the order of ``names``. ``names``: the tensors' Hugging
    Face names.
    """

    names: list[str]
    shapes: list[tuple[int, ...]]
    flat: torch.Tensor

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """(name, view into ``flat``) for each tensor."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = self.flat.split(sizes)
        return [(n, p.view(s)) for n, p, s in zip(self.names, parts, self.shapes, strict=True)]

    def __reduce__(self) -> tuple[Callable[..., WeightBucket], tuple[object, ...]]:
        # pickle 5 sends the bytes of numpy arrays to other processes out of band; it would copy a torch tensor into the
        # pickle
        import torch

        dtype = str(self.flat.dtype).removeprefix("torch.")
        return _received, (self.names, self.shapes, dtype, self.flat.cpu().view(torch.uint8).numpy())


def _received(names: list[str], shapes: list[tuple[int, ...]], dtype: str, raw: object) -> WeightBucket:
    import torch

    # torch.tensor copies, because an array from shared memory is read-only
    return WeightBucket(names, shapes, torch.tensor(raw).view(getattr(torch, dtype)))


@dataclass(slots=True)
class EngineInfo:
    """What an engine reports about itself. ``weight_version`` is -1 for a server that has received no weight sync yet.

    ``seeds``: whether `SamplingParams.seed` is used. ``scores``: whether `Engine.score` is supported, at least at
    temperature 1. ``schemas``: whether `SamplingParams.grammar` is supported. ``url``: base URL of the engine's HTTP
    server (SGLang's /generate), if this server is running.
    """

    name: str
    weight_version: int
    max_context_len: int
    max_running_requests: int
    seeds: bool
    scores: bool = False
    schemas: bool = False
    url: str | None = None
    extra: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Token-in, token-out inference."""

    async def info(self) -> EngineInfo:
        """Name, limits, supported features and the current weight version."""
        ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Sample a response to each request. Results are in the order of the requests.

        Raises:
            ValueError: a request does not fit the context, or uses a parameter that the engine does not support.
            ConnectionError: the engine cannot be reached.
        """
        ...

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:
        """Log-probs of ``input_ids[start:]``, each given all tokens before it, under softmax(logits / temperature).

        Only engines with a true `EngineInfo.scores` support this method.

        Args:
            top: how many of the likeliest tokens are reported for each position.

        Raises:
            ValueError: there is no token before ``start``, or none from ``start`` on; there are more tokens than the
                context allows; or the temperature is 0.
        """
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests with these ids now; None: all requests. Each of these requests returns its tokens so far and
        the finish reason "abort"."""
        ...

    async def begin_weight_update(self, version: int, changed: Collection[str] | None = None) -> bool:
        """Stop decoding until `end_weight_update`, because the weights are a mix of two versions until then.

        ``changed``: names of the weights that may differ from earlier updates; None: all weights may differ.

        Returns:
            whether the update may leave out the weights that are not in ``changed``. This is allowed only after an
            earlier update has brought all weights.
        """
        ...

    async def load_weights(self, bucket: WeightBucket) -> None:
        """Copy the bucket's tensors into the model.

        Raises:
            ValueError: the model has no weight of a given name, or the shape differs.
        """
        ...

    async def end_weight_update(self) -> None:
        """Finish the update: discard the cached keys and values, set the weight version and resume decoding.

        Raises:
            ValueError: a weight of the model was not sent. Decoding stays stopped.
        """
        ...

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the device memory of ``tags`` (see `MEMORY_TAGS`). Tags that the engine does not use are ignored."""
        ...

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of ``tags`` again and restore the weights, if they were released."""
        ...

    async def start_http(self) -> str:
        """Serve SGLang's ``/generate`` and ``/abort_request`` over HTTP and return the base URL."""
        ...

    async def close(self) -> None:
        """Free the engine's resources."""
        ...


def check_memory_tags(tags: Sequence[str]) -> None:
    """Raise ValueError unless all ``tags`` are in `MEMORY_TAGS`."""
    if unknown := set(tags) - set(MEMORY_TAGS):
        raise ValueError(f"unknown memory tags {sorted(unknown)}; the known tags are {MEMORY_TAGS}")


class ServerProcess(Protocol):
    """The process of an engine that is a server. Requests and weights do not pass through this interface."""

    def address(self) -> str:
        """The server's URL, which is known before `start`."""
        ...

    def start(self) -> str:
        """Start the server, wait until it answers and return its URL."""
        ...

    def restart(self) -> None:
        """Start the server again and wait until it answers. After this restart, the server has the weights of its first
        start."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@runtime_checkable
class Restartable(Protocol):
    """An engine whose process can be started again after it has died."""

    async def restart(self) -> None:
        """Start the engine again and wait until it answers. After this restart, the engine has the weights of its first
        start, and version -1."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """An engine that reports tokens while it decodes. An engine behind Ray is not a `Streaming` engine, because its
    results arrive complete."""

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """Like `Engine.generate` for one request. When this call returns, ``on_tokens`` has received all tokens."""
        ...


class WeightSink(Protocol):
    """Receives a weight update: call `begin`, then `send` for every bucket, then `end`.

    ``every_rank``: whether every trainer rank has a sink and sends the same buckets to it. If False, only rank 0 sends.
    """

    every_rank: bool

    def begin(self, version: int, changed: Collection[str] | None = None) -> bool:
        """Start the update to ``version``; see `Engine.begin_weight_update`."""
        ...

    def send(self, bucket: WeightBucket) -> None:
        """Deliver a bucket of weights. The sink does not use the bucket after this call returns."""
        ...

    def end(self) -> None:
        """Finish the update after all weights were sent."""
        ...


class Transport(WeightSink, Protocol):
    """A `WeightSink` for engines that are servers. The transport keeps its connections between updates."""

    def to(self, servers: Sequence[ServerAddress]) -> WeightSink:
        """Send the next updates to ``servers``."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class EngineLostError(ValueError):
    """An engine is dead, and this run cannot start it again. Starting the run again may help."""


class WeightSyncError(RuntimeError):
    """An engine did not receive a complete update. The engine stays paused until an update is complete."""


def stream_seed(*names: object) -> int:
    """A 31-bit seed of a random stream: a hash of the stream's names, such as a run's seed and a number."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
