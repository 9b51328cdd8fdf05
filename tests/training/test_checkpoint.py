"""What is saved is what goes on; what is wrong with a checkpoint is said in one line, and a stranger's runs no code."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from slimelite.base.lifecycle import Stopped
from slimelite.plan.devices import Machine
from slimelite.preflight import inspect
from slimelite.training.checkpoint import _optimizer_slots
from slimelite.training.parallel import whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_resuming_goes_on_bit_for_bit(model: Path, tmp_path: Path, optimizer: str) -> None:
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True, "ref_update_interval": 2}
    schedule = {"lr_decay_style": "cosine", "num_rollout": 6}
    args = tiny_args(model, optimizer=optimizer, deterministic_mode=True, **kl, **schedule)
    tables = [random_table(seed=i) for i in range(6)]
    try:
        with one_rank(args) as trainer:
            straight = [trainer.train(i, table) for i, table in enumerate(tables)]
            expected, drawn = weights_of(trainer), torch.rand(3)
        with one_rank(args) as trainer:
            for i in range(3):
                trainer.train(i, tables[i])
            trainer.save(str(tmp_path), 2)
        with one_rank(args) as trainer:
            assert trainer.load(str(tmp_path)) == 2
            resumed = [trainer.train(i, tables[i]) for i in range(3, 6)]
            found, drawn_again = weights_of(trainer), torch.rand(3)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(straight[3:], resumed, strict=True):
        same = {k: v for k, v in a.items() if not k.startswith("perf/")}
        assert same == {k: v for k, v in b.items() if not k.startswith("perf/")}
    for name, weight in expected.items():
        assert torch.equal(weight, found[name]), name
    assert torch.equal(drawn, drawn_again)


# what the parser would have derived
DEVICES = {
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "rollout_backend": "embedded",
}


def test_parts_can_be_left_out(model: Path, tmp_path: Path) -> None:
    with one_rank(tiny_args(model, no_save_optim=True)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
        saved = weights_of(trainer)
    with one_rank(tiny_args(model)) as trainer, pytest.raises(ValueError, match="--no-load-optim"):
        trainer.load(str(tmp_path))
    args = replace(tiny_args(model), resume_directory=str(tmp_path), run_dir=str(tmp_path / "run"), **DEVICES)
    said = f"--load: {tmp_path} was saved with --no-save-optim; resume it with --no-load-optim"
    assert said in inspect(args, Machine(0), files_only=True).problems, "a start says it, not a trainer minutes later"
    assert said not in inspect(replace(args, no_load_optim=True), Machine(0), files_only=True).problems
    with one_rank(tiny_args(model)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(whole := tmp_path / "whole"), 0)
    args = replace(args, resume_directory=str(whole))
    assert not any("--no-save-optim" in line for line in inspect(args, Machine(0), files_only=True).problems)
    for given in ({"no_load_optim": True, "no_load_rng": True}, {"finetune": True}):
        with one_rank(tiny_args(model, **given)) as trainer:
            torch.manual_seed(5)
            trainer.load(str(tmp_path))
            assert torch.initial_seed() == 5
            assert not trainer.optimizers.all[0].state
            assert trainer.progress.steps == (0 if "finetune" in given else 1)
            for name, weight in weights_of(trainer).items():
                assert torch.equal(weight, saved[name]), name


def test_the_saved_schedule_wins_unless_overridden(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with one_rank(tiny_args(model, lr=1e-3)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
    for lr, override, expected in ((1e-3, False, 1e-3), (5e-3, True, 5e-3), (5e-3, False, 1e-3)):
        assert "--override-lr-scheduler" not in caplog.text
        with one_rank(tiny_args(model, lr=lr, override_lr_scheduler=override)) as trainer:
            trainer.load(str(tmp_path))
            assert trainer.train(1, random_table())["train/lr-pg_0"] == pytest.approx(expected)

    assert "--lr 0.001 (not 0.005); add --override-lr-scheduler" in caplog.text


def test_optimizer_state_is_read_to_the_device_of_its_weight(model: Path, tmp_path: Path) -> None:
    with one_rank(tiny_args(model)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
        saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
        elsewhere = {n: torch.nn.Parameter(whole(p).to("meta")) for n, p in trainer.model.named_weights()}
        slots = _optimizer_slots(saved, elsewhere)
        live = {
            f"{n}.{key}": v
            for n, p in trainer.model.named_weights()
            for key, v in trainer.optimizers.all[0].state[p].items()
        }
    assert slots.keys() == live.keys()
    for path, slot in slots.items():
        assert (slot.device.type, slot.dtype, slot.shape) == ("meta", live[path].dtype, live[path].shape), path


def test_what_is_no_checkpoint_of_this_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", num_hidden_layers=3)
    with one_rank(tiny_args(model)) as trainer:
        with pytest.raises(ValueError, match="no trainer state"):
            trainer.load(str(tmp_path))
        trainer.save(str(tmp_path / "saved"), 0)
    with one_rank(tiny_args(other)) as trainer, pytest.raises(ValueError, match="another model"):
        trainer.load(str(tmp_path / "saved"))
    updates = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True, "ref_update_interval": 2}
    said = "has no reference model: it was saved without --ref-update-interval"
    with one_rank(tiny_args(model, **updates)) as trainer, pytest.raises(ValueError, match=said):
        trainer.load(str(tmp_path / "saved"))


@pytest.mark.parametrize(("saved", "other"), [("adam", "muon"), ("muon", "adamw")])
def test_another_optimizer_is_refused_before_anything_is_restored(
    model: Path, tmp_path: Path, saved: str, other: str
) -> None:
    with one_rank(tiny_args(model, optimizer=saved)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
    with one_rank(tiny_args(model, optimizer=other)) as trainer:
        before = weights_of(trainer)
        with pytest.raises(ValueError, match=rf"--optimizer {saved}, not {other}; .* --no-load-optim") as refusal:
            trainer.load(str(tmp_path))
        assert f"resume with --optimizer {saved}" in str(refusal.value)
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainer).items())
    with one_rank(tiny_args(model, optimizer=other, no_load_optim=True)) as trainer:
        trainer.load(str(tmp_path))
        assert trainer.train(1, random_table())["train/grad_norm"] > 0


NAME = "model.model.norm.weight"


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with one_rank(tiny_args(model)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(folder), 0)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "iter_0000000"))


def refusal(model: Path, folder: Path, **given: Any) -> str:
    with one_rank(tiny_args(model, **given)) as trainer, pytest.raises(ValueError, match=str(folder)) as caught:
        trainer.load(str(folder))
    assert "Traceback" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    """All of a part but its size."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (".metadata", cut, "is damaged or cut short"),
        (".metadata", garble, "is damaged or cut short"),
        (".metadata", Path.unlink, "is missing"),
        ("__0_0.distcp", cut, "is cut short: "),
        ("__0_0.distcp", garble, "a part is damaged"),
        ("__0_0.distcp", Path.unlink, "is missing"),
        ("trainer.json", cut, "is damaged or cut short: not JSON"),
        ("trainer.json", lambda path: path.write_text("{}"), "is damaged (KeyError: 'schedule')"),
        ("trainer.json", lambda path: path.write_text("[1]"), "is damaged: it does not contain a JSON object"),
    ],
)
def test_a_damaged_file_is_named(
    model: Path, folder: Path, name: str, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder / name)
    text = refusal(model, folder)
    assert said in text
    assert text.startswith(str(folder if "a part" in said else folder / name))
    assert text.endswith("; resume from an earlier checkpoint with --ckpt-step")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 64}, "model.model.embed_tokens.weight is 61 x 32 in it but 61 x 64 in this run's"),
        ({"num_hidden_layers": 1}, "it has model.model.layers.1."),
        ({"num_hidden_layers": 3}, "it has no model.model.layers.2."),
    ],
)
def test_another_model_is_named(folder: Path, tmp_path: Path, changes: dict[str, int], said: str) -> None:
    text = refusal(save_tiny_model(tmp_path / "other", **changes), folder)
    assert "a checkpoint of another model" in text
    assert said in text


class Touch:
    """A pickle of it makes a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def metadata(folder: Path) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def plant(folder: Path, payload: object, *, name: str = NAME, as_bytes: bool = False) -> None:
    """Put ``payload`` in place of a tensor of the .distcp; ``as_bytes``: and say that it is no tensor."""
    found, stream = metadata(folder), io.BytesIO()
    torch.save(payload, stream)
    (key,) = (key for key in found.storage_data if key.fqn == name)
    where = found.storage_data[key]
    with (folder / where.relative_path).open("ab") as file:
        where.offset, where.length = file.tell(), len(stream.getvalue())
        file.write(stream.getvalue())
    if as_bytes:
        found.state_dict_metadata[name] = BytesStorageMetadata()
        del found.storage_data[key]
        found.storage_data[type(key)(name)] = where
    (folder / ".metadata").write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("inside", [False, True])
def test_a_program_in_the_metadata_does_not_run(model: Path, folder: Path, tmp_path: Path, inside: bool) -> None:
    mark = tmp_path / "ran"
    planted: Any = Touch(mark)
    if inside:
        planted = metadata(folder)
        planted.planner_data = Touch(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(planted))
    text = refusal(model, folder)
    assert not mark.exists()
    assert "Path.touch" in text or "getattr" in text
    assert "do not load it" in text
    pickle.loads((folder / ".metadata").read_bytes())
    assert mark.exists(), "the attack is a real one"


@pytest.mark.parametrize("finetune", [False, True])
def test_bytes_instead_of_a_tensor_are_not_opened(model: Path, folder: Path, tmp_path: Path, finetune: bool) -> None:
    mark = tmp_path / "ran"
    plant(folder, Touch(mark), as_bytes=True)
    text = refusal(model, folder, finetune=finetune)
    assert not mark.exists()
    assert f"{NAME} is bytes instead of a tensor" in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": {NAME.removeprefix("model."): torch.zeros(32)}}, checkpoint_id=folder, no_dist=True)
    assert mark.exists(), "the attack is a real one"


def test_a_random_state_that_is_none(model: Path, folder: Path) -> None:
    state = torch.zeros_like(torch.get_rng_state())
    plant(folder, state, name="rng.cpu0")
    assert "the random state is damaged (Invalid mt19937 state); add --no-load-rng to resume without it" in refusal(
        model, folder
    )
    with one_rank(tiny_args(model, no_load_rng=True)) as trainer:
        assert trainer.load(str(folder)) == 0


def test_an_object_in_place_of_a_tensor_is_not_made(model: Path, folder: Path, tmp_path: Path) -> None:
    plant(folder, Touch(tmp_path / "ran"))
    assert "a part is damaged (UnpicklingError: Weights only load failed" in refusal(model, folder)
    assert not (tmp_path / "ran").exists()


def test_files_outside_the_checkpoint_are_not_read(model: Path, folder: Path, tmp_path: Path) -> None:
    found = metadata(folder)
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    for where in found.storage_data.values():
        where.relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    assert "names ../elsewhere, a file outside the checkpoint" in refusal(model, folder)


def test_a_run_that_is_ended_while_it_reads_is_no_damage(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch catches Ctrl-C and SIGTERM among the errors of a rank, and sends them around."""

    def stopped(*_: Any) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", stopped)
    with one_rank(tiny_args(model)) as trainer, pytest.raises(Stopped, match="SIGTERM") as caught:
        trainer.load(str(folder))
    assert caught.value.status == 143
