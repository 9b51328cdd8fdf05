"""Checkpoint folders through crashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.cluster.cluster import Cluster
from slimelite.models.checkpoints import STATE_FILE, Checksums, find_checkpoint, folder_of, mark_best
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
