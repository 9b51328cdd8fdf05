"""Weight updates of SGLang servers.

Every way is a `slimelite.training.weights.WeightSink` over the same servers: `begin` ends what they are decoding,
`send` delivers a bucket, `end` flushes the KV cache, stamps the version and lets them decode again. An update that
fails raises `WeightSyncError` and leaves every server paused that does not have all of it, so that nothing is ever
sampled from half-new weights; a whole update later makes them good again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server, ServerError, each
from slimelite.engines.sglang.payload import pickled, update_request

Shapes = Mapping[str, tuple[int, ...]]


class WeightSyncError(RuntimeError):
    """A server did not take an update and stays paused: nothing can go on before a whole one."""


class ServerSink(ABC):
    """What the ways have in common.

    Args:
        servers: they get every bucket, all at once.
        shapes: what a whole update consists of, see `weight_shapes`. SGLang skips a name that it does not know and
            dies of a wrong shape, so both are caught here.
    """

    # whether all trainer ranks call it, not rank 0 alone
    every_rank = False

    def __init__(self, servers: Sequence[Server], shapes: Shapes) -> None:
        self.servers = list(servers)
        self.shapes = shapes
        # of the update that is going on, and of the last one that every server has
        self.version: int | None = None
        self.delivered: int | None = None
        self._received: set[str] = set()

    def begin(self, version: int) -> None:
        """Weights of this version follow; requests that are running end with what they have, new ones wait."""
        self.version, self.delivered = version, None
        self._received.clear()
        self._attempt(self._open)

    def send(self, bucket: WeightBucket) -> None:
        """Deliver a bucket.

        Raises:
            ValueError: there was no `begin`, or the model has no such weight, or another shape of it.
            WeightSyncError: a server did not take it.
        """
        if self.version is None:
            raise ValueError("a weight update starts with begin_weight_update")
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            if name not in self.shapes:
                raise ValueError(f"{name} is not a weight of the model that the engine was started with")
            if tuple(shape) != self.shapes[name]:
                raise ValueError(f"{name} came with shape {tuple(shape)}; the model has {self.shapes[name]}")
        self._attempt(lambda: self._transfer(bucket))
        self._received.update(bucket.names)

    def end(self) -> None:
        """All weights are there: decode with them.

        Raises:
            ValueError: a weight was not sent; the servers stay paused.
            WeightSyncError: a server did not finish.
        """
        if self.version is None:
            raise ValueError("a weight update starts with begin_weight_update")
        missing = self.shapes.keys() - self._received
        if missing:
            raise ValueError(f"the update lacks {len(missing)} weights, {min(missing)} among them")
        self._attempt(self._finish)
        self.version, self.delivered = None, self.version

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what is held for later updates."""

    def _open(self) -> None:
        each(self.servers, _open)

    @abstractmethod
    def _transfer(self, bucket: WeightBucket) -> None: ...

    def _finish(self) -> None:
        each(self.servers, lambda server: _finish(server, self.version))

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ServerError as error:
            raise self._failed(str(error)) from error

    def _failed(self, why: str) -> WeightSyncError:
        return WeightSyncError(
            f"weights {self.version} did not reach every engine: {why}. One that failed may have some new weights and "
            "some old ones: it stays paused, nothing is sampled from it. Go on from the last checkpoint with --load"
        )


class HttpSink(ServerSink):
    """Tensors in the body of ``update_weights_from_tensor``: needs nothing but a connection."""

    def _transfer(self, bucket: WeightBucket) -> None:
        host = WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu())
        blob = pickled(host)
        # every rank of a server reads a pickle of its own
        requests = {width: update_request([blob] * width) for width in {server.tp_size for server in self.servers}}
        each(self.servers, lambda server: server.post("/update_weights_from_tensor", requests[server.tp_size]))


def pause(server: Server) -> None:
    """End what a server is decoding; what is sent to it waits until `resume`.

    Pausing in mode "retract" or "in_place" would let a response go on with keys and values of the old weights: the
    cache can be flushed only while no request is there (SGLang 0.5.20). So whoever sent it sends the rest again.
    """
    server.post("/pause_generation", {"mode": "abort"})


def resume(server: Server, version: int | None) -> None:
    """Forget cached keys and values, stamp ``version`` on all that follows, decode."""
    # the wait is for requests that were aborted a moment ago
    server.post("/flush_cache?timeout=30")
    server.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
    server.post("/continue_generation")


def _open(server: Server) -> None:
    pause(server)
    if not server.brackets_updates:
        return
    try:
        server.post("/begin_weight_update")
    except ServerError:
        # an update that broke off left it open
        server.post("/end_weight_update")
        server.post("/begin_weight_update")


def _finish(server: Server, version: int | None) -> None:
    if server.brackets_updates:
        server.post("/end_weight_update")
    resume(server, version)
