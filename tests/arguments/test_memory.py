"""Gradient checkpointing and the reduction of gradients, chosen by the model's shapes and the GPUs' memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimelite.arguments import Args
from slimelite.plan import devices
from slimelite.plan.devices import Machine, this_machine
from tests.arguments.conftest import Make

# vocabulary, width, width of the MLP, layers, heads, key/value heads, tied
QWEN2_5 = {
    "0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "7B": (152064, 3584, 18944, 28, 28, 4, False),
    "32B": (152064, 5120, 27648, 64, 40, 8, False),
}
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.fixture
def plan(make: Make, tmp_path: Path) -> Make:
    """Arguments for a Qwen2.5 of some size on so many GPUs of so many GB, 9,216 tokens at a time."""

    def plan(size: str, gpus: int, gigabytes: float | None, words: str = "") -> Args:
        *sizes, groups, tied = QWEN2_5[size]
        config = dict(zip(NAMES, sizes, strict=True)) | {"model_type": "qwen2", "num_key_value_heads": groups}
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        here = Machine(gpus=gpus, gpu_bytes=None if gigabytes is None else int(gigabytes * 1e9))
        words += f" --actor-num-nodes {max(1, gpus // 8)} --actor-num-gpus-per-node {min(gpus, 8)}"
        flags = f"--colocate --use-dynamic-batch-size --max-tokens-per-gpu 9216 --hf-checkpoint {tmp_path} {words}"
        return make(flags, here)

    return plan


def reason(args: Args, name: str) -> str:
    return {d.name: d.reason for d in args.derivations}[name]


@pytest.mark.parametrize(
    ("size", "gpus", "gigabytes", "needed", "says"),
    [
        ("0.5B", 1, 80, False, "takes about 23 GB; a GPU has 70 GB for training"),
        ("0.5B", 1, 24, True, "takes about 23 GB, with checkpointing 11 GB; a GPU has 21 GB"),
        ("7B", 8, 80, True, "takes about 80 GB, with checkpointing 26 GB; a GPU has 70 GB"),
        ("7B", 8, 141, False, "takes about 80 GB; a GPU has 124 GB"),
        ("32B", 64, 80, True, ", with checkpointing "),
    ],
)
def test_checkpointing_where_the_shapes_need_it(
    plan: Make, size: str, gpus: int, gigabytes: float, needed: bool, says: str
) -> None:
    """A simulated step of all layers, with the gradient of an earlier micro-batch: docs/planner.md has the table."""
    args = plan(size, gpus, gigabytes)
    assert args.gradient_checkpointing is needed
    assert says in reason(args, "gradient_checkpointing")
    assert args.notes == ()


def test_a_flag_wins_and_what_will_not_fit_is_noted(plan: Make) -> None:
    args = plan("7B", 8, 80, "--no-gradient-checkpointing")
    assert args.gradient_checkpointing is False
    (note,) = args.notes
    assert "takes about 80 GB of a GPU, but a GPU has 70 GB" in note
    assert "--gradient-checkpointing, a lower --max-tokens-per-gpu" in note
    assert plan("0.5B", 1, 80, "--gradient-checkpointing").gradient_checkpointing is True
    assert plan("0.5B", 1, 80, "--recompute-granularity full").gradient_checkpointing is True
    (note,) = plan("7B", 1, 80).notes
    assert "--gradient-checkpointing" not in note
    assert plan("7B", 1, 80, "--fsdp-cpu-offload").notes == ()


def test_engines_that_keep_their_memory_leave_less(plan: Make) -> None:
    assert plan("0.5B", 1, 40).gradient_checkpointing is False
    assert plan("0.5B", 1, 40, "--no-offload-rollout").gradient_checkpointing is True


def test_gradients_are_reduced_once_a_step_where_whole_ones_fit(plan: Make) -> None:
    for size, gpus, once in (("0.5B", 8, True), ("7B", 8, True), ("32B", 64, False), ("0.5B", 1, False)):
        args = plan(size, gpus, 80)
        assert args.reduce_once_a_step is once, size
    assert "a step takes about" in reason(plan("7B", 8, 80), "reduce_once_a_step")


def test_without_numbers_checkpointing_is_on(plan: Make, make: Make) -> None:
    longest = plan("0.5B", 1, 80, "--no-use-dynamic-batch-size --micro-batch-size 4")
    unread = "the longest micro-batch is not known before the prompts are read"
    assert unread in reason(longest, "gradient_checkpointing")
    assert "the GPUs' memory is not known" in reason(plan("0.5B", 1, None), "gradient_checkpointing")
    hub = make("--colocate --use-dynamic-batch-size --max-tokens-per-gpu 9216", Machine(gpus=1, gpu_bytes=8 * 10**10))
    for args in (plan("0.5B", 1, None), hub):
        assert args.gradient_checkpointing is True
        assert args.reduce_once_a_step is False
    assert "the model's shapes are not known" in reason(hub, "gradient_checkpointing")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"hidden_size": Infinity}', '{"intermediate_size": [1]}', "[]"])
def test_a_config_without_shapes_is_left_to_the_checks_before_a_start(make: Make, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    args = make(f"--colocate --hf-checkpoint {tmp_path}", Machine(gpus=1, gpu_bytes=8 * 10**10))
    assert "the model's shapes are not known" in reason(args, "gradient_checkpointing")


def test_a_cpu_recomputes_nothing_unless_asked(make: Make) -> None:
    assert make().gradient_checkpointing is False
    assert make("--gradient-checkpointing").gradient_checkpointing is True
    assert make().reduce_once_a_step is True


@pytest.mark.parametrize(
    ("visible", "order", "found"),
    [
        (None, "PCI_BUS_ID", (7, 5)),
        ("1", "PCI_BUS_ID", (8, 0)),
        ("0", "PCI_BUS_ID", (7, 5)),
        ("0,1", "PCI_BUS_ID", (7, 5)),
        ("GPU-2b", None, (8, 0)),
        ("GPU-1a, -1", None, (7, 5)),
        ("0", None, (8, 0)),
        ("1", None, (7, 5)),
        ("MIG-2b", None, (7, 5)),
    ],
)
def test_only_visible_gpus_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    order: str | None,
    found: tuple[int, int],
) -> None:
    """Without CUDA_DEVICE_ORDER, number 0 is the fastest GPU. nvidia-smi does not list parts of a GPU."""
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("slimelite.plan.devices._count_gpus", lambda: 1)
    answer = "echo 15360, 580.65.06, GPU-1a2b, 7.5, Tesla T4; echo 81920, 580.65.06, GPU-2b3c, 8.0, NVIDIA A100"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    devices._nvidia_smi.cache_clear()
    here = this_machine()
    devices._nvidia_smi.cache_clear()
    assert here.capability == found
    assert here.gpu_bytes == (15360 if found == (7, 5) else 81920) * 2**20


def test_the_smallest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvidia-smi` as it answers; one that fails is one that is not there, an old one knows no compute capability."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("slimelite.plan.devices._count_gpus", lambda: 2)
    two = "echo 81559, 580.65.06, GPU-1, 9.0, NVIDIA H100; echo 24564, 580.65.06, GPU-2, 8.9, NVIDIA GeForce RTX 4090"
    old = "case $1 in *compute_cap*) exit 2;; esac; echo '15360, 470.57.02, GPU-1, Tesla T4'"
    card = 24564 * 2**20
    devices._nvidia_smi.cache_clear()
    assert this_machine().gpu_bytes is None
    for answer, found in (
        (two, (card, (8, 9), "580.65.06")),
        (old, (15360 * 2**20, (7, 5), "470.57.02")),
        ("echo '24564, 580.1, GPU-1, [N/A], NVIDIA L4'", (card, (8, 9), "580.1")),
        ("echo '[N/A]'", (None, None, None)),
        ("exit 9", (None, None, None)),
    ):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        devices._nvidia_smi.cache_clear()
        here = this_machine()
        assert (here.gpu_bytes, here.capability, here.driver) == found, answer
        assert here.gpus == 2
    devices._nvidia_smi.cache_clear()
