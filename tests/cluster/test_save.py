"""Checkpoint folders through crashes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.base.files import write_text
from slimelite.cluster.cluster import Cluster
from slimelite.loop import Saves
from slimelite.models.checkpoints import STATE_FILE, Checksums, find_checkpoint, folder_of, mark_best, part_file
from slimelite.samples.table import SampleTable
from tests.cluster.workers import Worker


class Rollout(Worker):
    def state_dict(self) -> dict[str, Any]:
        return {}


class Trainer(Worker):
    """Writes two files, and may die between them."""

    def __init__(self, weights: str, *extra: str, dies: type[BaseException] | None = None) -> None:
        super().__init__()
        self.weights, self.extra, self.dies = weights, extra, dies

    def checkpoint_size(self) -> int:
        return len(self.weights)

    def save(self, directory: str, rollout_id: int) -> Checksums:
        (Path(directory) / STATE_FILE).write_text('{"steps": 1}')
        (Path(directory) / "first").write_text(self.weights)
        if self.dies:
            raise self.dies("killed")
        for name in ("second", *self.extra):
            (Path(directory) / name).write_text(self.weights)
        return {}


def save(root: Path, trainer: Trainer, rollout_id: int = 3, retain: int | None = None) -> Path:
    args = Args(launcher="local", save=str(root), save_retain_interval=retain)
    return Cluster(args, Rollout(), [trainer], []).save(rollout_id).result()


def contents(root: Path) -> dict[str, str]:
    """Of the checkpoint that a resumed run would take."""
    found, _ = find_checkpoint(root)
    assert found is not None
    return {path.name: path.read_text() for path in found.iterdir() if path.suffix != ".json"}


def test_a_save_over_an_older_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    old = {"first": "old", "second": "old", "third": "old"}
    assert save(tmp_path, Trainer("old", "third")) == tmp_path / "iter_0000003"
    assert contents(tmp_path) == old
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            save(tmp_path, Trainer("new", dies=RuntimeError))
        assert contents(tmp_path) == old
    save(tmp_path, Trainer("new"))
    assert contents(tmp_path) == {"first": "new", "second": "new"}, "nothing of the older one is left"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_between_the_two_names_the_older_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, Trainer("old"))
    rename = Path.rename

    def dies(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise RuntimeError("killed")
        return rename(path, target)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dies)
            with pytest.raises(RuntimeError, match="killed"):
                save(tmp_path, Trainer("new"))
        assert not (tmp_path / "iter_0000003").exists()
        assert contents(tmp_path) == {"first": "old", "second": "old"}
    with pytest.raises(RuntimeError, match="killed"):
        save(tmp_path, Trainer("new", dies=RuntimeError))
    assert contents(tmp_path) == {"first": "old", "second": "old"}
    save(tmp_path, Trainer("new"))
    assert contents(tmp_path) == {"first": "new", "second": "new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001.partial").mkdir(parents=True)
    (tmp_path / "iter_0000001.partial" / "large").write_text("x")
    save(tmp_path, Trainer("new"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_first_save_that_is_cut_short_is_no_checkpoint(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error, match="killed"):
        save(tmp_path, Trainer("new", dies=error))
    assert not list(tmp_path.iterdir()), "it would fill the disk"
    assert find_checkpoint(tmp_path)[0] is None


def test_only_checkpoints_of_the_retained_rollouts_stay(tmp_path: Path) -> None:
    """Every second rollout is saved, every fourth is kept; the newest and the best, 5, are always there."""
    kept = []
    for rollout_id in range(1, 12, 2):
        save(tmp_path, Trainer("w"), rollout_id, retain=4)
        kept.append(sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")))
        if rollout_id == 5:
            mark_best(folder_of(tmp_path, 5), 2, 4)
    assert kept == [[1], [3], [3, 5], [3, 5, 7], [3, 5, 7, 9], [3, 5, 7, 11]]
    mark_best(folder_of(tmp_path, 11), 2, 4)
    with pytest.raises(RuntimeError, match="killed"):
        save(tmp_path, Trainer("w", dies=RuntimeError), 13, retain=5)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == [3, 7, 11], (
        "the last whole one outlives a save that fails"
    )


class Writer(Trainer):
    """Copies its weights, and writes when the test says so."""

    def begin_save(self, directory: str, rollout_id: int) -> None:
        self.copied = self.weights, Path(directory)

    def write(self, error: str | None = None) -> None:
        weights, directory = self.copied
        (directory / STATE_FILE).write_text('{"steps": 1}')
        (directory / "first").write_text(weights)
        result = {"error": error, "errno": 28} if error else {"checksums": {}}
        write_text(part_file(directory, 0), json.dumps(result))  # whole at once, as the trainer writes it

    def train(self, *_: object) -> dict[str, float]:
        return {}

    def outcome(self) -> tuple[list[dict[str, float]], dict[str, Any], None]:
        return [], {}, None


@contextmanager
def asynchronous(root: Path, trainer: Writer) -> Iterator[Cluster]:
    args = Args(launcher="local", save=str(root), async_save=True)
    with Cluster(args, Rollout(), [trainer], []) as cluster:
        yield cluster


def test_a_run_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    with asynchronous(tmp_path, writer := Writer("old")) as cluster:
        first = cluster.save(0).result()
        assert cluster.last_saved == 0
        assert find_checkpoint(tmp_path)[0] is None, "it is not whole yet"
        writer.weights = "new"  # training goes on
        writer.write()
        cluster.save(1).result()  # waits for the first
        assert contents(tmp_path) == {"first": "old"}
        assert find_checkpoint(tmp_path)[0] == first
        writer.write()
        cluster.finish_saving().result()
        assert contents(tmp_path) == {"first": "new"}
        cluster.save(2).result()
        writer.write()
    assert find_checkpoint(tmp_path)[0] == folder_of(tmp_path, 2), "the end of the run waits for it"
    assert not list(tmp_path.rglob("part-*"))


def test_a_run_that_fails_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    def run() -> None:
        with asynchronous(tmp_path, writer := Writer("old")) as cluster:
            cluster.save(0).result()
            writer.write()
            cluster.save(1).result()
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert find_checkpoint(tmp_path)[0] == folder_of(tmp_path, 0)
    assert not list(tmp_path.glob("*.partial"))


def test_a_rank_that_cannot_write_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    def run() -> None:
        with asynchronous(tmp_path, writer := Writer("old")) as cluster:
            cluster.save(0).result()
            writer.write("No space left on device")
            for rollout_id in range(1000):
                time.sleep(0.01)
                cluster.train(rollout_id, SampleTable.from_samples([])).result()

    with pytest.raises(OSError, match=r"cannot be written .*No space left.* are free there"):
        run()
    assert find_checkpoint(tmp_path)[0] is None


def test_a_checkpoint_is_due_by_rollouts_by_minutes_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def rollouts(**flags: Any) -> list[int]:
        """Those of ten that take 50 seconds each after which a checkpoint is saved."""
        nonlocal now
        saves, saved = Saves(Args(save="here", **flags), 10), []
        for rollout_id in range(10):
            now += 50
            if saves.due(rollout_id):
                saved.append(rollout_id)
        return saved

    assert rollouts() == []
    assert rollouts(save_interval=4) == [3, 7, 9]
    assert rollouts(save_interval_minutes=2) == [2, 5, 8, 9]
    assert rollouts(save_interval=4, save_interval_minutes=2.0) == [2, 3, 6, 7, 9]
