"""When the verbs of the handle run: in whose turn, beside what, and after an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.cluster import Cluster
from slimelite.rollout.manager import RolloutOutput
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from tests.cluster.workers import Worker

TABLE = SampleTable.from_samples([[Sample(0, 0, tokens=[1, 2], response_length=1, reward=0.0)]])


class Side(Worker):
    """Trainer and rollout's side in one; what is ``held`` waits until it is let go."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.threads: dict[str, str] = {}
        self.gates = {name: threading.Event() for name in held}
        self.errors: dict[str, Exception] = {}

    def start(self, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        if method == "memory_used":
            return super().start(method)
        name = " ".join([method, *(str(a) for a in args if isinstance(a, int))])
        self.begun.append(name)
        self.threads[name] = threading.current_thread().name
        if name in self.gates:
            assert self.gates[name].wait(120)
        future: Future[Any] = Future()
        if name in self.errors:
            future.set_exception(self.errors[name])
        else:
            answers = {"generate": RolloutOutput(TABLE, {}), "outcome": ([], {}, None)}
            future.set_result(answers.get(method, {}))
        return future

    def memory_used(self) -> float:
        return 0.0

    def let(self, name: str) -> None:
        self.gates[name].set()

    def has_begun(self, name: str) -> bool:
        """Within two minutes; what should not begin is given a tenth of one."""
        deadline = time.monotonic() + 120
        while name not in self.begun and time.monotonic() < deadline:
            time.sleep(0.002)
        return name in self.begun

    def has_not_begun(self, name: str) -> bool:
        time.sleep(0.1)
        return name not in self.begun


@pytest.fixture
def side() -> Iterator[Side]:
    yield (side := Side("generate 1", "train 0", "push_weights 1", "train 1"))
    for gate in side.gates.values():
        gate.set()


def handle(side: Side, **changes: Any) -> Cluster:
    return Cluster(Args(launcher="ray", rollout_backend="embedded", **changes), side, [side], ["an engine"])


def test_generation_runs_beside_training_and_never_beside_a_sync(side: Side) -> None:
    with handle(side) as cluster:
        trained = cluster.train(0, TABLE)
        ahead = cluster.generate(1)  # after train was asked for: it does not wait for it
        assert side.has_begun("train 0")
        assert side.has_begun("generate 1")
        synced = cluster.sync(1)
        fresh = cluster.generate(2)  # asked for after the sync: it has its weights
        assert not trained.done()
        side.let("train 0")
        assert trained.result().metrics == {}
        assert side.has_not_begun("push_weights 1"), "engines change no weights under a rollout"
        side.let("generate 1")
        assert ahead.result().table is TABLE
        assert side.has_begun("push_weights 1")
        assert side.has_not_begun("generate 2")
        later = cluster.train(1, TABLE)
        side.let("push_weights 1")
        fresh.result()
        assert synced.done()
        assert not later.done()
        side.let("train 1")
    assert later.done(), "leaving waits for what was asked for"
    trainers = [name for name in side.begun if name.split()[0] in ("train", "push_weights")]
    assert trainers == ["train 0", "push_weights 1", "train 1"]


def test_engines_without_memory_are_asked_for_nothing(side: Side) -> None:
    """They would wait for it for ever."""
    with handle(side) as cluster:
        cluster.release_engines()
        with pytest.raises(ValueError, match=r"^generate: .* resume_engines\('kv_cache', 'weights', 'cuda_graph'\)"):
            cluster.generate(0)
        cluster.resume_engines("weights", "cuda_graph")
        with pytest.raises(ValueError, match=r"^evaluate: .* call resume_engines\('kv_cache'\) first"):
            cluster.evaluate(0)
        cluster.resume_engines("kv_cache")
        assert cluster.generate(0).result().table is TABLE


def test_what_a_verb_cannot_use_is_said_before_it_runs(side: Side) -> None:
    with handle(side) as cluster:
        rollout = cluster.generate(0)
        verbs = (cluster.generate, cluster.evaluate, cluster.sync, cluster.save, cluster.save_hf)
        for verb in (*verbs, lambda number: cluster.train(number, TABLE)):
            for wrong in ("1", None, -2, 1.0, True):
                with pytest.raises(ValueError, match=rf"(rollout_id|version) must be a whole .* 0, not {wrong!r}"):
                    verb(wrong)
        for wrong, says in (
            (rollout, r"must be a SampleTable, not a Pending: take the \.table of its result\(\)"),
            (rollout.result(), r"must be a SampleTable, not a RolloutOutput: take its \.table"),
            ([1, 2], r"must be a SampleTable, not a list$"),
        ):
            for verb in (cluster.forward_backward, lambda table: cluster.train(0, table)):
                with pytest.raises(ValueError, match=says):
                    verb(wrong)
        with pytest.raises(TimeoutError):
            cluster.generate(1).result(0.05)
        side.let("generate 1")
    assert side.begun.count("train 0") == 0


def test_a_rollout_that_has_begun_is_not_begun_again_before_somebody_has_it(side: Side) -> None:
    with handle(side) as cluster:
        ahead = cluster.generate(1)
        assert cluster.generate(1) is ahead
        side.let("generate 1")
        ahead.result()
        assert cluster.generate(1) is not ahead
        cluster.generate(1).result()
    assert side.begun.count("generate 1") == 2


def test_after_an_error_nothing_is_done_until_somebody_was_told(side: Side) -> None:
    side.errors["train 0"] = FloatingPointError("the gradient is not finite")
    wrong = pytest.raises(FloatingPointError, match="not finite")
    with wrong, handle(side) as cluster:
        failed, queued = cluster.train(0, TABLE), cluster.sync(1)
        side.let("train 0")
        assert isinstance(queued.exception(timeout=120), FloatingPointError)
        with pytest.raises(FloatingPointError):
            cluster.generate(1)
        with pytest.raises(FloatingPointError):
            failed.result()
        side.let("generate 1")
        cluster.generate(1).result()  # whoever was told may go on
        side.errors["generate 2"] = side.errors["train 0"]
        cluster.generate(2)  # nobody waits for it, and leaving says so
    assert "push_weights 1" not in side.begun


def test_a_verb_that_nobody_waits_for_ends_the_block_with_its_error(side: Side) -> None:
    side.let("train 0")
    side.errors["train 0"] = ValueError("a row cannot be trained on")
    with pytest.raises(ValueError, match="a row cannot"), handle(side) as cluster:
        cluster.train(0, TABLE)


def test_who_was_told_of_an_error_cannot_overtake_what_was_queued_before_it(side: Side) -> None:
    side.errors["train 0"] = ValueError("a row cannot be trained on")
    with handle(side) as cluster:
        failed = cluster.train(0, TABLE)
        queued = cluster.sync(1)
        # told at once, before the thread of the verbs looks for the next one
        failed.add_done_callback(lambda _: told(failed))
        side.let("train 0")
        assert queued.exception(timeout=120) is side.errors["train 0"]
        cluster.release_engines().result()  # the error is told already: it is not new
    assert "push_weights 1" not in side.begun


def told(failed: Future[Any]) -> None:
    with suppress(ValueError):
        failed.result()


def test_a_checkpoint_holds_what_was_ahead_when_it_was_asked_for(side: Side, tmp_path: Path) -> None:
    """A rollout that begins after it waits for it, so it must not wait for that rollout."""
    side.let("generate 1")
    with suppress(Exception), handle(side, save=str(tmp_path)) as cluster:
        cluster.train(0, TABLE)
        saved = cluster.save(0)
        later = cluster.generate(1)
        side.let("train 0")
        saved.exception(timeout=120)  # this side has no trainer's files: what matters is that it ends
        later.exception(timeout=120)
    assert saved.done()
    assert later.done()


def test_a_rollout_that_failed_is_in_no_checkpoint(side: Side, tmp_path: Path) -> None:
    side.let("generate 1")
    side.errors["generate 1"] = ValueError("no prompt fits")
    with suppress(Exception), handle(side, save=str(tmp_path)) as cluster:
        with pytest.raises(ValueError, match="no prompt fits"):
            cluster.generate(1).result()
        error = cluster.save(0).exception(timeout=120)  # this side has no trainer's files
    assert "no prompt fits" not in str(error)


def test_an_interrupted_verb_of_one_process_keeps_nothing_waiting(side: Side) -> None:
    class Interrupted(Side):
        def start(self, method: str, /, *args: Any, **named: Any) -> Future[Any]:
            if method == "push_weights" and "push_weights 0" not in self.begun:
                self.begun.append("push_weights 0")
                raise KeyboardInterrupt
            return super().start(method, *args, **named)

    own = Interrupted()
    with Cluster(Args(launcher="local", rollout_backend="embedded"), own, [own], ["an engine"]) as cluster:
        with pytest.raises(KeyboardInterrupt):
            cluster.sync(0)
        assert isinstance(Future.result(cluster.generate(1), timeout=120), RolloutOutput)


def test_after_the_block_no_verb_begins(side: Side) -> None:
    for launcher in ("ray", "local"):
        with Cluster(Args(launcher=launcher), side, [side], ["an engine"]) as cluster:
            pass
        for verb in (cluster.generate, cluster.save_hf, cluster.sync):
            with pytest.raises(ValueError, match="inside the block"):
                verb(1)
    assert not side.begun


def test_a_rollout_that_nobody_waits_for_is_cancelled_after_an_error_too(side: Side) -> None:
    side.errors["train 0"] = ValueError("a row cannot be trained on")
    side.let("train 0")
    cancelled = side.start

    def start(method: str, /, *args: Any, **named: Any) -> Future[Any]:
        if method == "cancel":
            side.let("generate 1")
        return cancelled(method, *args, **named)

    side.start = start  # type: ignore[method-assign]
    wrong = pytest.raises(ValueError, match="a row cannot")
    with wrong, Cluster(Args(launcher="local"), side, [side], []) as cluster:
        cluster.generate(1)
        cluster.train(0, TABLE)
    assert "cancel" in side.begun


def test_an_error_in_the_block_leaves_out_what_has_not_begun(side: Side) -> None:
    with suppress(KeyboardInterrupt), handle(side) as cluster:
        cluster.train(0, TABLE)
        queued = cluster.train(1, TABLE)
        assert side.has_begun("train 0")
        raise KeyboardInterrupt
    side.let("train 0")
    assert queued.cancelled() or side.has_not_begun("train 1")


def test_one_process_trains_in_the_callers_thread_and_generates_in_another(side: Side) -> None:
    with Cluster(Args(launcher="local"), side, [side], ["an engine"]) as cluster:
        side.let("train 0")
        ahead = cluster.generate(1)
        assert cluster.train(0, TABLE).done()
        assert not ahead.done()
        side.let("generate 1")
        ahead.result()
    assert side.threads["train 0"] == threading.current_thread().name
    assert side.threads["generate 1"] != side.threads["train 0"]


def test_progress_is_shown_to_who_waits(side: Side) -> None:
    side.start, seen = lambda method, *args, **_: started(side, method), []  # type: ignore[method-assign]
    with handle(side) as cluster:
        rollout = cluster.generate(1)
        rollout.result(progress=lambda *now: (seen.append(now), side.let("generate 1")))  # type: ignore[func-returns-value]
    assert seen
    assert seen[0] == (3, 8, "groups")


def started(side: Side, method: str) -> Future[Any]:
    future: Future[Any] = Future()
    if method == "generate":
        side.gates["generate 1"].wait(120)
    future.set_result((3, 8, "groups") if method == "progress" else 0.0)
    return future


def test_what_a_verb_lacks_is_named(side: Side, tmp_path: Path) -> None:
    with handle(side) as cluster:
        for verb, flag in ((cluster.save, "--save"), (cluster.save_hf, "--save-hf")):
            with pytest.raises(ValueError, match=f"with {flag}"):
                verb(0).result()
        with pytest.raises(ValueError, match="does not contain a checkpoint yet"):
            cluster.load(tmp_path / "nothing").result()
    with Cluster(Args(), side, [], ["an engine"]) as alone, pytest.raises(ValueError, match="--debug-rollout-only"):
        alone.train(0, TABLE).result()
