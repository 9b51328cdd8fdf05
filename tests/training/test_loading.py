"""Ranks that read their own parts of a model's files hold the same weights as one that has read all of them."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.base import reading
from slimelite.models.files import UNKNOWN_BYTES, saved_buffers, weight_bytes, weight_sources
from slimelite.models.sources import Stored, everything
from slimelite.training import loading
from slimelite.training import trainer as trainer_file
from slimelite.training.critic import ValueModel
from slimelite.training.loading import build_model, build_policy, build_scorer, load_model, read_config
from slimelite.training.packing import Packing
from slimelite.training.parallel import whole
from slimelite.training.trainer import Trainer
from tests.training.tiny import on_ranks, one_rank, save_tiny_model, tiny_args

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
# the experts of a mixture have a matrix each in files, and are one weight of the model
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 5, **MIXTURE},
    "mixtral": {"num_local_experts": 4},
    # with a bias of the router, which is a buffer
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **MIXTURE},
}


def save_family(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A random model in several files."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for buffer in saved_buffers(hf).values():
        buffer.normal_()
    hf.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.mark.newest
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_that_transformers_reads(family: str, tmp_path: Path) -> None:
    folder = str(save_family(tmp_path, family))
    config = read_config(folder)
    empty, read = (load_model(folder, config, seed=0, attention="sdpa", empty=each) for each in (True, False))
    sources = weight_sources(folder, empty)
    assert sources is not None
    tensors = dict(read.named_parameters()) | saved_buffers(read)
    assert sources.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(everything(sources[name]).to(tensor.dtype), tensor), name
        count = len(tensor)
        for begin, end in ((count // 3, count // 2 + 1), (0, 0), (count - 1, count)):
            rows = sources[name].rows(begin, end)
            assert rows.shape == tensor[begin:end].shape
            assert torch.equal(rows.to(tensor.dtype), tensor[begin:end]), name


def test_files_that_cannot_be_read_in_parts(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    empty = load_model(str(folder), read_config(str(folder)), seed=0, attention="sdpa", empty=True)
    assert weight_sources("a/hub-id", empty) is None
    empty.config.quantization_config = {"quant_method": "fp8"}
    assert weight_sources(str(folder), empty) is None
    del empty.config.quantization_config
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "odd": torch.zeros(2, dtype=torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    assert weight_sources(str(folder), empty) is None
    torch.save(weights, folder / "pytorch_model.bin")
    file.unlink()
    assert weight_sources(str(folder), empty) is None


def tensors_of(trainer: Trainer, folders: dict[str, Path]) -> list[dict[str, torch.Tensor]]:
    """Parameters and buffers of models that are loaded in many ways."""
    with (
        mock.patch.object(loading, "may_pack", return_value=Packing.SHARED),  # the probes of families take long
        mock.patch.object(constants, "HF_HUB_CACHE", str(folders["qwen2"].parent / "hub")),
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
    ):
        return _tensors_of(trainer, folders)


def _tensors_of(trainer: Trainer, folders: dict[str, Path]) -> list[dict[str, torch.Tensor]]:
    lora = replace(trainer.args, lora_rank=4)
    found = []

    def note(model: torch.nn.Module) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        found.append({name: whole(tensor.detach()).clone() for name, tensor in named})

    note(trainer.model)
    for folder in folders.values():
        note(build_policy(trainer.args, trainer.world, str(folder), trainable=True))
    note(build_policy(trainer.args, trainer.world, str(folders["qwen2"]), trainable=False))
    note(build_policy(lora, trainer.world, str(folders["llama"]), trainable=True))
    note(build_policy(replace(lora, load_in_4bit=True), trainer.world, str(folders["llama"]), trainable=True))
    note(build_model(trainer.args, trainer.world, str(folders["llama"]), ValueModel, trainable=True, new_head=True))
    return found


def read_in_parts(trainer: Trainer, folders: dict[str, Path]) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """`tensors_of`, and the bytes that each model took of the files; nobody reads a whole model."""
    counts = list[int]()
    rows, build = Stored.rows, loading.weight_sources

    def counted(self: Stored, begin: int, end: int) -> torch.Tensor:
        part = rows(self, begin, end)
        counts[-1] += part.nbytes
        return part

    def started(*args: Any, **options: Any) -> object:
        counts.append(0)
        return build(*args, **options)

    unused = mock.Mock(side_effect=AssertionError("a whole model is read"))
    with (
        mock.patch.object(Stored, "rows", counted),
        mock.patch.object(loading, "weight_sources", started),
        mock.patch.object(loading, "load_weights", unused),
    ):
        return tensors_of(trainer, folders), counts


def save_in_cache(model: Path, cache: Path, name: str) -> Path:
    """Put ``model`` where the hub's library keeps downloads, under ``name``: links to files with other names. Returns
    their folder."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repo / "snapshots" / "0a1b", repo / "blobs"
    for folder in (snapshot, blobs, repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_two_ranks_hold_what_one_does_to_the_bit_and_each_reads_its_half(tmp_path: Path) -> None:
    folders = {family: save_family(tmp_path / family, family) for family in FAMILIES}
    snapshot = save_in_cache(folders["llama"], tmp_path / "hub", "who/llama")
    folders["hub"] = Path("who/llama")
    args = tiny_args(save_tiny_model(tmp_path / "trained"))
    with one_rank(args) as trainer:
        alone = tensors_of(trainer, folders)
    two, counts = on_ranks(2, read_in_parts, args, folders)
    for theirs, mine in zip(alone, two, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype
            assert torch.equal(mine[name], tensor), name
    folders["hub"] = snapshot
    for folder, count in zip(folders.values(), counts, strict=False):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert 0.4 * size < count < 0.55 * size, folder


def test_collectives_wait_as_long_as_the_files_need_while_a_model_loads(tmp_path: Path) -> None:
    """At 50 MB/s, beside --distributed-timeout-minutes, which holds afterwards."""
    folder = save_tiny_model(tmp_path)
    seen = []

    def timeout() -> float:
        group: Any = dist.group.WORLD
        found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
        return found / timedelta(minutes=1)

    def build(*args: Any, **options: Any) -> object:
        seen.append(timeout())
        return build_policy(*args, **options)

    with (
        mock.patch.object(trainer_file, "build_policy", build),
        mock.patch.object(loading, "weight_bytes", lambda path: 60 * 50_000_000 if path == str(folder) else 0),
        one_rank(tiny_args(folder, distributed_timeout_minutes=3)),
    ):
        assert seen == [4]
        assert timeout() == 3


def test_what_is_read_is_printed_with_its_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console shows the last line of rank 0's log."""
    monkeypatch.setattr(reading, "SAY_S", 0.1)
    clock = iter([0.0, 0.05, 2.0, 2.0, 2.05, 4.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with reading.Reading(4 * 10**9) as counter:
        for count in (1, 1, 2):
            counter.add(count * 10**9)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "read 2 GB of this rank's 4 GB of weights, 1 GB a second",
        "read 4 GB of this rank's 4 GB of weights, 1 GB a second",
    ]
    log = tmp_path / "trainer_0.log"
    assert reading.last_reading(log) is None
    log.write_text("\n".join(lines) + "\n")
    assert reading.last_reading(log) == lines[-1]
    log.write_text("\n".join([*lines, "a warning"]))
    assert reading.last_reading(log) is None


def test_bytes_of_a_model(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "llama")
    assert weight_bytes(str(folder)) == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert weight_bytes("a/hub-id") == UNKNOWN_BYTES


def scores(trainer: Trainer, folder: Path) -> dict[str, torch.Tensor]:
    model = build_scorer(trainer.args, trainer.world, str(folder), trainable=True)
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def test_a_new_head_is_drawn_as_by_one_rank(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    args = tiny_args(folder, loss_type="reward_model_loss")
    with one_rank(args) as trainer:
        theirs = scores(trainer, folder)
    mine = on_ranks(2, scores, args, folder)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
