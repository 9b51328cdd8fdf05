"""A checkpoint that is written while training goes on has the bytes of one that training waits for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from slimelite.models.checkpoints import damage, part_file
from slimelite.training.trainer import Trainer
from tests.training.tiny import on_ranks, one_rank, random_table, save_tiny_model, tiny_args


def save_both_ways(trainer: Trainer, folder: Path) -> None:
    """Of the same state; it changes as soon as `Trainer.begin_save` returns, and a second one overwrites its copies."""
    trainer.train(0, random_table())
    waiting, beside, again = (folder / name for name in ("waiting", "beside", "again"))
    trainer.save(str(waiting), 0)
    for place in (beside, again):
        trainer.begin_save(str(place), 0)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(7)
        while not part_file(place, trainer.world.rank).is_file():
            time.sleep(0.01)


def check(folder: Path, ranks: int) -> None:
    files = {path.relative_to(folder / "waiting") for path in (folder / "waiting").rglob("*") if path.is_file()}
    assert Path("critic/__0_0.distcp") in files
    for file in files - {Path(".metadata"), Path("critic/.metadata")}:  # these have a random id
        assert (folder / "beside" / file).read_bytes() == (folder / "waiting" / file).read_bytes(), file
        if file.suffix == ".distcp" and file.parent == Path():
            assert (folder / "again" / file).read_bytes() != (folder / "waiting" / file).read_bytes(), file
    sums = {}
    for rank in range(ranks):
        sums |= json.loads(part_file(folder / "beside", rank).read_text())["checksums"]
    assert sums.keys() == {str(file) for file in files}
    (folder / "beside" / "checksums.json").write_text(json.dumps({"files": sums}))
    assert damage(folder / "beside") is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_bytes(ranks: int, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    critic = {"use_critic": True, "advantage_estimator": "ppo", "critic_lr": 1e-2}
    args = tiny_args(model, **critic, async_save=True, save=str(tmp_path))
    if ranks == 1:
        with one_rank(args) as trainer:
            save_both_ways(trainer, tmp_path)
    else:
        on_ranks(ranks, save_both_ways, args, tmp_path)
    check(tmp_path, ranks)


def test_what_goes_wrong_is_in_the_file(tmp_path: Path) -> None:
    with one_rank(tiny_args(save_tiny_model(tmp_path / "model"), async_save=True)) as trainer:
        place = tmp_path / "new"
        place.mkdir()
        (place / "trainer.json").mkdir()  # in the place of a file
        trainer.begin_save(str(place), 0)
        while not part_file(place, 0).is_file():
            time.sleep(0.01)
    assert "IsADirectoryError" in json.loads(part_file(place, 0).read_text())["error"]
