"""Checkpoints whose files are not what was written, and what is taken instead."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from slimelite.models.checkpoints import CHECKSUMS, LOCK, DamagedCheckpoint, best_of, checksums, damage, find_checkpoint


def write(root: Path, step: int, state: str = '{"steps": 1}') -> Path:
    folder = root / f"iter_{step:07d}"
    (folder / "critic").mkdir(parents=True)
    (folder / "rollout_state.json").write_text('{"rollout_seed": 1}')
    (folder / "trainer.json").write_text(state)
    (folder / "critic" / "trainer.json").write_text('{"steps": 1}')
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 100)
    sum_up(folder)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def sum_up(folder: Path) -> None:
    """Write checksums of what is there."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    (folder / CHECKSUMS).write_text(json.dumps({"files": checksums(folder, files)}))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped": (lambda f: flip(f / "__0_0.distcp"), "__0_0.distcp: its contents have changed"),
    "short": (lambda f: os.truncate(f / "__0_0.distcp", 99), "__0_0.distcp: has 99 bytes, but 25,600"),
    "absent": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: is missing"),
    "part": (lambda f: flip(f / "critic" / "trainer.json"), "critic/trainer.json: its contents have changed"),
    "state": (
        lambda f: (f / "rollout_state.json").write_text('{"rollout_seed": 2}'),
        "rollout_state.json: its contents have changed",
    ),
    "sums": (lambda f: os.truncate(f / CHECKSUMS, 20), "checksums.json: cannot be read"),
    "sums' key": (
        lambda f: (f / CHECKSUMS).write_text((f / CHECKSUMS).read_text().replace('"bytes"', '"bytez"', 1)),
        "checksums.json: cannot be read",
    ),
    "no sums": (lambda f: (f / CHECKSUMS).unlink(), "checksums.json: is missing"),
    "folder": (lambda f: f.rename(f.with_name("gone")), "iter_0000009: does not exist"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_newest_whole_checkpoint_is_taken_only_when_asked(tmp_path: Path, kind: str) -> None:
    """4 is whole, 6 is damaged too, 9 is the newest."""
    for step in (2, 4, 6, 9):
        write(tmp_path, step)
    harm, said = DAMAGE[kind]
    flip(tmp_path / "iter_0000006" / "__0_0.distcp")
    assert find_checkpoint(tmp_path) == (tmp_path / "iter_0000009", "")
    harm(tmp_path / "iter_0000009")
    with pytest.raises(ValueError, match="iter_0000004 is the newest complete checkpoint before it") as caught:
        find_checkpoint(tmp_path)
    assert said in str(caught.value)
    assert "--load-fallback or --ckpt-step 4" in str(caught.value)
    found, note = find_checkpoint(tmp_path, fallback=True)
    assert found == tmp_path / "iter_0000004"
    assert said in note
    assert find_checkpoint(tmp_path, 4)[0] == tmp_path / "iter_0000004"


def test_nothing_whole_is_left(tmp_path: Path) -> None:
    for step in (2, 4):
        flip(write(tmp_path, step) / "__0_0.distcp")
    for step, said in ((None, "no earlier checkpoint is complete"), (2, "there is no earlier checkpoint")):
        with pytest.raises(ValueError, match=said):
            find_checkpoint(tmp_path, step, fallback=True)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("trainer.json", '{"steps": ', "is damaged or cut short: not JSON"),
        (
            "trainer.json",
            '{"format": 2}',
            "has format 2, but this slimelite reads format 1: use the slimelite",
        ),
        ("trainer.json", '{"format": true}', "has format True"),
        ("rollout_state.json", "[]", "is damaged: it does not contain a JSON object"),
        ("rollout_state.json", "{}", "is damaged: it has no rollout_seed"),
    ],
)
def test_what_has_its_checksums_is_read_with_care(tmp_path: Path, name: str, content: str, said: str) -> None:
    """Whoever made the checkpoint made its checksums, too."""
    whole, folder = write(tmp_path, 2), write(tmp_path, 3)
    (folder / name).write_text(content)
    sum_up(folder)
    with pytest.raises(DamagedCheckpoint, match=re.escape(f"{folder / name}: {said}")) as caught:
        find_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)
    assert find_checkpoint(tmp_path, fallback=True)[0] == whole


def test_a_checkpoint_that_names_its_format_or_none_is_taken(tmp_path: Path) -> None:
    for step, state in enumerate(('{"format": 1, "steps": 1}', '{"steps": 1}')):
        folder = write(tmp_path, step, state)
        assert find_checkpoint(tmp_path) == (folder, "")


def test_a_part_is_verified_by_itself(tmp_path: Path) -> None:
    """``--critic-load`` names the critic's folder of a checkpoint."""
    folder = write(tmp_path, 3)
    flip(folder / "__0_0.distcp")
    assert damage(folder / "critic") is None
    flip(folder / "critic" / "trainer.json")
    assert "critic/trainer.json" in str(damage(folder / "critic"))


def test_a_long_comparison_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 3)
    find_checkpoint(tmp_path)
    assert not capsys.readouterr().err
    monkeypatch.setattr("slimelite.models.checkpoints.SAID_ABOVE", 1000)
    find_checkpoint(tmp_path)
    assert f"comparing 0 GB of {tmp_path / 'iter_0000003'} with its checksums" in capsys.readouterr().err


def test_a_marker_that_names_no_rollout(tmp_path: Path) -> None:
    folder = write(tmp_path, 0)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration.txt: is damaged: .* --ckpt-step"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path, 0)[0] == folder


def test_what_load_does_not_take(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        find_checkpoint(tmp_path / "file")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / LOCK).touch()  # of a run that was killed before its first checkpoint
    assert find_checkpoint(tmp_path / "save")[0] is None


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "best_checkpointed_iteration.txt"])
def test_a_marker_that_is_no_number_of_a_rollout(tmp_path: Path, name: str) -> None:
    write(tmp_path, 4)
    (tmp_path / name).write_text("nine")
    if name.startswith("best"):
        assert best_of(tmp_path) is None
        return
    with pytest.raises(DamagedCheckpoint, match="is damaged: it must contain the number of a rollout"):
        find_checkpoint(tmp_path)
