"""What on-policy distillation derives, and what is checked of its teacher before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slimelite.plan.devices import Machine
from slimelite.preflight import inspect
from tests.arguments.conftest import QWEN, Make

TEACHER = "--use-opd --opd-teacher-load owner/teacher --opd-type"


def test_slimes_megatron_is_the_trainer(make: Make) -> None:
    args = make(f"{TEACHER} megatron --opd-kl-coef 0.5")
    assert (args.opd_type, args.opd_kl_coef) == ("trainer", 0.5)
    assert any(d.name == "opd_type" and "megatron" in d.reason for d in args.derivations)


def test_without_a_reward_every_reward_is_zero(make: Make) -> None:
    assert make(f"{TEACHER} trainer").rm_type == "zero"
    assert make(f"{TEACHER} trainer --rm-type math").rm_type == "math"
    assert make(f"{TEACHER} trainer --custom-rm-path my.fn").rm_type is None
    assert make().rm_type is None


def test_a_group_of_one_is_said_to_learn_from_the_teacher_alone(make: Make) -> None:
    def said(words: str) -> bool:
        return any("learns only from the teacher" in note for note in make(f"{TEACHER} trainer {words}").notes)

    assert said("--n-samples-per-prompt 1")
    assert not said("--n-samples-per-prompt 1 --disable-rewards-normalization")
    assert not said("--n-samples-per-prompt 2")


def test_its_flags_without_it_have_no_effect(make: Make) -> None:
    flags = dict(make("--opd-type sglang --opd-kl-coef 2").no_effect)
    assert flags == {"--opd-type": "needs --use-opd", "--opd-kl-coef": "needs --use-opd"}


def teacher_folder(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of ``model`` with another config."""
    shutil.copytree(model, folder)
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    return folder


def found(make: Make, model: Path, data: Path, teacher: Path | str) -> list[str]:
    words = f"--hf-checkpoint {model} --prompt-data {data} --input-key messages --label-key label"
    words += f" --apply-chat-template --launcher local --use-opd --opd-type trainer --opd-teacher-load {teacher}"
    return inspect(make(words), Machine(gpus=0)).problems


def test_a_teacher_must_speak_the_students_vocabulary(make: Make, model: Path, data: Path, tmp_path: Path) -> None:
    padded = teacher_folder(model, tmp_path / "padded", vocab_size=640, num_hidden_layers=4)
    assert found(make, model, data, padded) == []
    (problem,) = found(make, model, data, teacher_folder(model, tmp_path / "small", vocab_size=200))
    assert "the teacher's vocabulary has 200 tokens, fewer than the teacher's tokenizer" in problem
    other = teacher_folder(model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (problem,) = found(make, model, data, other)
    assert "differs from the student's in 2 tokens, such as 'a'" in problem
    (problem,) = found(make, model, data, tmp_path / "nowhere")
    assert "no such folder" in problem


def test_a_teacher_in_megatrons_format_is_called_that(make: Make, model: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    (problem,) = found(make, model, data, tmp_path)
    assert problem == f"--opd-teacher-load {tmp_path}: is in Megatron format; name the model's Hugging Face folder"


@pytest.mark.parametrize(
    ("size", "says"), [(512, None), (640, "the teacher's vocabulary has 640 tokens, but the student's has 512")]
)
def test_without_a_tokenizer_the_sizes_must_agree(
    make: Make, model: Path, data: Path, tmp_path: Path, size: int, says: str | None
) -> None:
    bare = teacher_folder(model, tmp_path / "bare", vocab_size=size)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    problems = found(make, model, data, bare)
    assert (problems == []) if says is None else (says in problems[0])


def test_a_server_is_asked_before_the_start(make: Make, model: Path, data: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("slimelite.rollout.teacher.ATTEMPTS", 1)
    words = f"--hf-checkpoint {model} --prompt-data {data} --input-key messages --label-key label"
    words += " --apply-chat-template --launcher local --use-opd --opd-type sglang --rm-url http://127.0.0.1:9"
    (problem,) = inspect(make(words), Machine(gpus=0)).problems
    assert "did not answer" in problem
