"""What checkpoints take on a disk, beside the table of docs/operations.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import train

from .conftest import ROOT

pytestmark = pytest.mark.e2e
PAGE = (ROOT / "docs" / "operations.md").read_text()
FLAGS = """
    --launcher local --device cpu --hf-checkpoint model --prompt-data data/train.jsonl --input-key prompt
    --label-key label --custom-rm-path reward.py:digits --rollout-batch-size 3 --n-samples-per-prompt 4
    --rollout-max-response-len 8
    --num-rollout 1 --save out --save-interval 1 --run-dir run
"""
ENTRY = 3000  # bytes of a tensor's entry in the files, at most


def stated(words: str) -> int:
    """Bytes for each weight in the row of the table that starts with ``words``."""
    return int(re.findall(rf"(?m)^\| {re.escape(words)}.*\| (\d+) \|$", PAGE)[0])


def saved(folder: Path) -> dict[str, int]:
    """Bytes of weights and of each moment in a checkpoint, and the number of its entries."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {"entries": len(entries)}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            kind = "weights" if name.startswith("model.") else name.rpartition(".")[2]
            number = prod(entry.size) * (entry.properties.dtype.itemsize if entry.properties.dtype else 0)
            sizes[kind] = sizes.get(kind, 0) + number
    return sizes


@pytest.fixture
def checkpoint(small: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """``checkpoint(flags)``: the folder of the checkpoint that a run of one rollout with these flags saved."""
    monkeypatch.chdir(small)

    def run(flags: str) -> Path:
        assert train.main(shlex.split(f"{FLAGS} {flags}")) == 0
        return small / "out" / "iter_0000000"

    return run


def weights() -> int:
    return sum(tensor.numel() for tensor in load_file("model/model.safetensors").values())


def test_adam_and_a_critic(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("--advantage-estimator ppo")
    policy, critic = saved(folder), saved(folder / "critic")
    assert policy["weights"] == stated("weights alone") * weights()
    moments = policy["exp_avg"] + policy["exp_avg_sq"]
    assert policy["weights"] + moments == stated("weights and both moments of Adam") * weights()
    trained = critic["weights"] // 4
    assert weights() < trained, "the critic has a head of its own"
    assert critic["weights"] + critic["exp_avg"] + critic["exp_avg_sq"] == stated("the critic of PPO") * trained
    whole = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    assert 12 * weights() < whole < 12 * weights() + ENTRY * policy["entries"]
    measured = re.findall(r"(?m)^\| tiny, of the tests \| ([\d,]+) \| .*? (\d+) entries \|", PAGE)[0]
    assert [int(number.replace(",", "")) for number in measured] == [weights(), policy["entries"]]


def test_muon_has_one_moment_of_matrices(checkpoint: Callable[[str], Path]) -> None:
    sizes = saved(checkpoint("--optimizer muon --muon-lr 0.01"))
    matrices, others = sizes["momentum"] // 4, sizes["exp_avg"] // 4
    assert matrices + others == weights()
    rows = stated("weights and the momentum of Muon"), stated("weights and both moments of Adam")
    assert sizes["weights"] + sizes["momentum"] + 2 * sizes["exp_avg"] == rows[0] * matrices + rows[1] * others


def test_lora_saves_its_adapters_alone(checkpoint: Callable[[str], Path]) -> None:
    sizes = saved(checkpoint("--lora-rank 2"))
    trained = sizes["weights"] // 4
    assert 0 < trained < weights() / 2
    assert sizes["weights"] + sizes["exp_avg"] + sizes["exp_avg_sq"] == 12 * trained
