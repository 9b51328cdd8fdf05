"""Checkpoints that are damaged, folders that are taken, disks that are full: what `train.py` says and leaves behind."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import train
from slimelite.base.files import hold
from slimelite.models.checkpoints import CHECKSUMS, checksums, find_checkpoint
from slimelite.samples.table import SampleTable

from .conftest import SMALL_FLAGS, metrics

pytestmark = pytest.mark.e2e
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(*flags)`` in the folder ``small``: exit status and what stands on the error stream."""
    monkeypatch.chdir(small)

    def start(*flags: str) -> tuple[int, str]:
        capsys.readouterr()
        try:
            status = train.main([*SMALL_FLAGS, *flags])
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return status, said

    return start


def test_a_flipped_bit_is_seen_and_the_run_goes_on_before_it(run: Run, small: Path) -> None:
    save = ("--save", "saved", "--save-interval", "1")
    assert run("--run-dir", "straight", *save, "--num-rollout", "3")[0] == 0
    found = dcp.FileSystemReader(small / "saved" / "iter_0000002").read_metadata().storage_data
    (moment,) = (where for key, where in found.items() if key.fqn == "optimizer.model.norm.weight.exp_avg")
    part = small / "saved" / "iter_0000002" / moment.relative_path
    data = bytearray(part.read_bytes())
    data[moment.offset + moment.length // 2] ^= 1
    part.write_bytes(data)
    resumed = ("--run-dir", "resumed", *save, "--load", "saved", "--num-rollout", "3")
    status, said = run(*resumed)
    assert status == 2
    assert f"{part}: its contents have changed since it was written" in said
    assert "checkpoint before it: resume from iter_0000001 with --load-fallback or --ckpt-step 1" in said
    assert not (small / "resumed").exists()
    assert run(*resumed, "--load-fallback")[0] == 0
    assert "resuming from iter_0000001 instead (--load-fallback)" in (small / "resumed" / "log.txt").read_text()
    whole, after = (metrics(small / name, "train/grad_norm") for name in ("straight", "resumed"))
    assert (len(whole), after) == (6, whole[4:])
    assert find_checkpoint(small / "saved") == (small / "saved" / "iter_0000002", ""), "it was written anew"


def test_a_checkpoint_of_another_tokenizer_is_refused_before_the_start(run: Run, small: Path) -> None:
    assert run("--run-dir", "begun", "--save", "saved", "--save-interval", "1", "--num-rollout", "1")[0] == 0
    file = small / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words |= {"3": words["4"], "4": words["3"]}
    file.write_text(json.dumps(content))
    status, said = run("--run-dir", "resumed", "--load", "saved", "--num-rollout", "2")
    assert status == 2
    assert "saved with another tokenizer, which differs in its vocabulary and its way of splitting text" in said
    assert not (small / "resumed").exists()
    assert run("--run-dir", "tuned", "--load", "saved", "--finetune", "--num-rollout", "1")[0] == 0


def test_a_checkpoint_of_a_stranger_is_read_with_care(run: Run, small: Path) -> None:
    """Its checksums are right, whatever it holds: each file is judged when it is read."""
    assert run("--run-dir", "begun", "--save", "saved", "--save-interval", "2")[0] == 0
    folder = small / "saved" / "iter_0000001"
    cases = [
        ("rollout_state.json", {"data_source": ...}, "does not contain the position in the data"),
        ("rollout_state.json", {"data_source": {}}, "rollout_state.json: is damaged (KeyError: 'dataset')"),
        ("ahead.parquet", b"PAR1", "ahead.parquet: is missing, damaged or cut short"),
        ("critic/.metadata", b"\x80", "critic/.metadata: is damaged or cut short"),
    ]
    for name, change, said in cases:
        before = (folder / name).read_bytes()
        if isinstance(change, dict):
            state = {**json.loads(before), **change}
            change = json.dumps({key: value for key, value in state.items() if value is not ...}).encode()
        (folder / name).write_bytes(change)
        (folder / CHECKSUMS).unlink()
        files = [path for path in folder.rglob("*") if path.is_file()]
        (folder / CHECKSUMS).write_text(json.dumps({"files": checksums(folder, files)}))
        status, text = run("--run-dir", "resumed", "--load", "saved", "--ckpt-step", "1")
        assert status == 1, name
        assert said in text.splitlines()[-1]
        (folder / name).write_bytes(before)


def test_a_folder_in_which_another_run_writes_is_refused(run: Run, small: Path) -> None:
    for flag, other in (("--save", "--run-dir"), ("--run-dir", "--save")):
        with hold({flag: str(small / "taken")}):
            status, said = run(flag, "taken", other, "free", "--save-interval", "1")
        assert status == 1
        assert (
            f"train.py: {flag} {small / 'taken'}: another run writes to this folder: process {os.getpid()} on " in said
        )
        assert not (small / "taken").exists() or not list((small / "taken").iterdir())


@pytest.fixture
def small_files() -> Iterator[None]:
    """A file may have 100 kB: the kernel refuses the rest, as it does on a full disk, and that needs no privilege."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.chaos(
    "a disk too full for a checkpoint",
    "one message that says how much disk space is needed; no partial checkpoint is left",
)
def test_a_checkpoint_that_does_not_fit_leaves_nothing_and_says_so(run: Run, small: Path, small_files: None) -> None:
    status, said = run("--run-dir", "run2", "--save", "saved", "--save-interval", "2")
    assert status == 1
    last = said.splitlines()[-1]
    assert last.startswith(f"train.py: {small}/saved/iter_0000001: the checkpoint cannot be written (File too large); ")
    assert "it takes about 346 kB, and " in last
    assert " are free there after the incomplete checkpoint was removed: free disk space" in last
    assert not list((small / "saved").iterdir())
    recorded = json.loads((small / "run2" / "status.json").read_text())
    assert (recorded["status"], recorded["rollouts_done"]) == ("failed", 1)
    assert "the checkpoint cannot be written" in recorded["message"]
    assert not [*(small / "run2").glob("*.partial"), *(small / "run2").glob("*.lock")]


def test_a_saved_model_that_does_not_fit_leaves_nothing_and_says_so(run: Run, small: Path) -> None:
    (small / "hf").mkdir()
    (small / "hf" / "config.json").symlink_to("/dev/full")
    status, said = run("--run-dir", "run2", "--save-hf", "hf", "--num-rollout", "1")
    assert status == 1
    assert f"{small}/hf: the model cannot be written ([Errno 28] No space left on device" in said.splitlines()[-1]


@pytest.mark.chaos("a disk full from the start", "one message with the remedy, exit 1")
def test_a_disk_that_is_full_from_the_start(run: Run, small: Path) -> None:
    """/dev/full takes nothing."""
    (small / "run2").mkdir()
    (small / "run2" / "metrics.jsonl").symlink_to("/dev/full")
    status, said = run("--run-dir", "run2")
    assert status == 1
    assert "No space left on device; " in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith(
        "free more space, and resume from the last checkpoint with --load: 'run2/metrics.jsonl'"
    )
    assert json.loads((small / "run2" / "status.json").read_text())["status"] == "failed"


def test_runs_of_two_seeds_sample_differently_and_a_resumed_one_keeps_its_seed(run: Run, small: Path) -> None:
    def sampled(folder: str) -> list[int]:
        table = SampleTable.from_parquet(small / folder / "rollouts" / "0000002.parquet")
        return [int(token) for token in table.response_tokens]

    flags = ("--num-rollout", "3", "--save", "saved", "--save-interval", "2")
    for seed in ("1", "2"):
        assert run("--run-dir", seed, "--seed", seed, *flags)[0] == 0
    assert sampled("1") != sampled("2")
    # the checkpoint is of seed 2, and the run that goes on does not say so
    assert run("--run-dir", "again", *flags, "--load", "saved", "--ckpt-step", "1")[0] == 0
    assert sampled("again") == sampled("2")
