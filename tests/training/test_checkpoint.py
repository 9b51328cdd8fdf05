"""What is saved is what goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of

from slimelite.training.checkpoint import _optimizer_slots


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


def test_parts_can_be_left_out(model: Path, tmp_path: Path) -> None:
    with one_rank(tiny_args(model, no_save_optim=True)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
        saved = weights_of(trainer)
    with one_rank(tiny_args(model)) as trainer, pytest.raises(ValueError, match="--no-load-optim"):
        trainer.load(str(tmp_path))
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

    assert "--lr 0.001 (not 0.005); --override-lr-scheduler" in caplog.text


def test_optimizer_state_is_read_to_the_device_of_its_weight(model: Path, tmp_path: Path) -> None:
    with one_rank(tiny_args(model)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
        saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
        elsewhere = {n: torch.nn.Parameter(p.full_tensor().to("meta")) for n, p in trainer.model.named_weights()}
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
