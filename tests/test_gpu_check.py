"""The GPU checks, tried without a GPU: those that can hold here hold, and what is wrong is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu")]

import gpu_check  # noqa: E402
import gpu_group  # noqa: E402
from gpu_lab import Lab, Number  # noqa: E402

from slimelite.arguments import make_args  # noqa: E402
from slimelite.plan.devices import Machine  # noqa: E402
from slimelite.training.batch import PackedSequences  # noqa: E402

NEEDS_GPU = {name for _, name, needs_gpu, _ in gpu_group.CHECKS if needs_gpu}


@pytest.mark.e2e
@pytest.mark.sglang
def test_every_check_holds_on_a_cpu_or_says_that_it_needs_a_gpu(
    sglang_environment: dict[str, str], tmp_path: Path
) -> None:
    check = ROOT / "scripts" / "gpu" / "gpu_check.sh"
    command = ["bash", str(check), "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env={**sglang_environment, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check for check in json.loads((tmp_path / "results.json").read_text())["checks"]}
    assert found.keys() == {name for _, name, *_ in gpu_group.CHECKS}
    assert {name for name, check in found.items() if check["status"] in ("not run: no GPU", "not run")} == NEEDS_GPU
    assert all(check["numbers"] for name, check in found.items() if name not in NEEDS_GPU)
    assert found["quickstart learns, and resumes"]["numbers"]["rollouts"] == 4


@pytest.mark.parametrize(
    "name", ["tree of shared prompts = its rows, heads of 64", "prompts that rows share = row by row"]
)
def test_a_tree_that_forgets_a_shared_prompt_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lab, (check,) = Lab("cpu", True, tmp_path), [check for _, each, _, check in gpu_group.CHECKS if each == name]
    assert gpu_group.run_check(lab, name, False, check)["status"] == "PASS"
    monkeypatch.setattr(PackedSequences, "shared", property(lambda sequences: []))
    assert gpu_group.run_check(lab, name, False, check)["status"] == "FAIL"


def test_a_call_takes_ten_minutes_and_all_calls_make_all_checks() -> None:
    assert sorted(group for call in gpu_check.CALLS for group in call) == sorted(gpu_check.GROUPS)
    assert {group for group, *_ in gpu_group.CHECKS} == gpu_check.GROUPS.keys()
    assert all(sum(gpu_check.GROUPS[group] for group in call) <= 600 for call in gpu_check.CALLS)


def test_neither_ray_nor_sglang_is_needed(tmp_path: Path) -> None:
    blocked = "import sys\nsys.modules.update(dict.fromkeys(['ray', 'sglang', 'vllm', 'wandb', 'peft']))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    command = [
        sys.executable,
        ROOT / "scripts" / "gpu" / "gpu_check.py",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        tmp_path / "out",
    ]
    done = subprocess.run(
        [*command, "--groups", "kernels", "trainer", "grpo"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout


def test_a_wrong_attention_fails_though_no_gpu_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, check = Lab("cpu", True, tmp_path), gpu_group.attention_agrees
    right = gpu_group.run_check(lab, "attention", True, lambda lab: check(lab, 5))
    original = gpu_group.varlen_attention

    def one_token_further(*inputs: Any, sliding_window: int, **options: Any) -> Any:
        half = inputs[1].dtype == gpu_group.torch.bfloat16
        return original(*inputs, sliding_window=sliding_window + half, **options)

    monkeypatch.setattr(gpu_group, "varlen_attention", one_token_further)
    wrong = gpu_group.run_check(lab, "attention", True, lambda lab: check(lab, 5))
    assert (right["status"], wrong["status"]) == ("not run: no GPU", "FAIL")
    assert wrong["numbers"]["values"] > 0.02


@pytest.mark.parametrize("check", [gpu_group.learns, gpu_group.takes_turns, gpu_group.sglang_takes_turns])
def test_the_command_lines_for_a_gpu_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Lab], gpu_group.Numbers]
) -> None:
    seen = []

    def parse(words: list[str]) -> Any:
        seen.append(make_args(words, machine=Machine(gpus=1, sglang=True)))
        raise InterruptedError

    folder = Lab("cpu", True, tmp_path).folder()
    monkeypatch.setattr(Lab, "folder", lambda lab: folder)
    monkeypatch.setattr(gpu_group, "make_args", parse)
    monkeypatch.setattr(gpu_group.train, "main", parse)
    with pytest.raises(InterruptedError):
        check(Lab("cuda", True, tmp_path))
    assert seen[0].device == "cuda"


def test_without_sglang_its_check_says_that_it_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_group, "find_spec", lambda name: None)
    lab = Lab("cuda", True, tmp_path)
    result = gpu_group.run_check(lab, gpu_group.SGLANG, True, gpu_group.sglang_takes_turns)
    assert result["status"] == "not run: no SGLang"


def test_an_error_is_a_failure_with_its_message(tmp_path: Path) -> None:
    def broken(lab: Lab) -> gpu_group.Numbers:
        raise RuntimeError(f"no kernel for {lab.device}")

    result = gpu_group.run_check(Lab("cuda", True, tmp_path), "broken", True, broken)
    assert (result["status"], result["shown"]) == ("FAIL", "RuntimeError: no kernel for cuda")


@pytest.mark.parametrize(
    ("python", "limit", "says"), [(sys.executable, 0.1, "stopped after 0.1 s"), ("false", 60, "status 1")]
)
def test_a_process_that_ends_badly_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, limit: float, says: str
) -> None:
    monkeypatch.setitem(gpu_check.GROUPS, "kernels", limit)
    monkeypatch.setattr(sys, "executable", python)
    (check,) = gpu_check.run_groups(Namespace(device="cpu", tiny=True, out=tmp_path), tmp_path, ["kernels"])["checks"]
    assert check["status"] == "FAIL"
    assert check["shown"].startswith(says)


def test_bounds() -> None:
    assert Number(1.0, high=1.0).ok
    assert not Number(1.1, high=1.0).ok
    assert not Number(0.9, low=1.0).ok
    assert not Number(float("nan")).ok
    assert str(Number(0.5, high=1.0, low=0.1)) == "0.5 (>= 0.1, <= 1)"
