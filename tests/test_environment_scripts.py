"""Scripts use the environment that VENV names; launchers of miles's are answered with a command of train.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slimelite.arguments import make_args
from slimelite.plan.devices import Machine

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Scripts and the Makefile beside an environment whose programs say only that they were called; no setup."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "Makefile", root)
    for script in ("setup.sh", "install_sglang_cpu.sh"):
        (root / "scripts" / script).write_text("exit 0\n")
    for program in ("ruff", "mypy", "python", "mkdocs"):
        path = root / "env" / "bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho ours: {program} $*\n")
        path.chmod(0o755)
    return root


def said(*command: str, cwd: Path, venv: Path | str) -> str:
    env = {**os.environ, "VENV": str(venv)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr


@pytest.mark.parametrize("absolute", [True, False])
def test_an_environment_elsewhere_is_used(checkout: Path, absolute: bool) -> None:
    venv = checkout / "env" if absolute else "env"
    text = said("bash", "scripts/test.sh", "tests/x.py", cwd=checkout, venv=venv)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("ours:")] == [
        "ruff",
        "ruff",
        "mypy",
        "python",
    ]
    assert "ours: mkdocs build" in said("make", "site", cwd=checkout, venv=venv)


def test_no_script_finds_its_programs_in_another_way() -> None:
    assert [path.name for path in ROOT.glob("scripts/*.sh") if "$PWD/${VENV" in path.read_text()] == []


def test_make_site_says_what_is_missing(checkout: Path) -> None:
    (checkout / "env" / "bin" / "mkdocs").unlink()
    assert "bash scripts/setup.sh --dev installs it" in said("make", "site", cwd=checkout, venv="env")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A checkout with an environment of three packages, whose Python only notes its calls."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    python = root / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >> {root}/calls\n')
    python.chmod(0o755)
    for package in ("torch-2.13.0+cpu", "ray-2.50.0", "peft-0.18.0"):
        (root / "env/lib/python3.11/site-packages" / f"{package}.dist-info").mkdir(parents=True)
    return root


READY = "env is ready. To use it in a shell: source env/bin/activate"


def setup(root: Path, *words: str) -> tuple[str, bool]:
    """What setup.sh prints, and whether it has called pip."""
    (root / "calls").write_text("")
    printed = said("bash", "scripts/setup.sh", *words, cwd=root, venv="env")
    calls = (root / "calls").read_text()
    assert (READY in printed) == ("pip" in calls)
    assert calls or not printed, "a finished environment is quiet"
    return printed, "pip" in calls


@pytest.mark.parametrize("now", ["removed", "ray-2.49.0.dist-info"])
def test_setup_installs_again_if_a_package_is_gone_or_has_another_version(environment: Path, now: str) -> None:
    assert setup(environment, "--dev")[1]
    package = environment / "env/lib/python3.11/site-packages/ray-2.50.0.dist-info"
    if now == "removed":
        package.rmdir()
    else:
        package.rename(package.with_name(now))
    for words in ((), ("--dev",)):
        printed, installed = setup(environment, *words)
        assert installed
        assert "installing again:\nray-2.50.0\n" in printed
        assert "peft" not in printed
    assert not setup(environment)[1]


def test_setup_installs_again_if_the_stamp_does_not_list_the_packages(environment: Path) -> None:
    """Earlier versions of the script left empty stamps."""
    assert setup(environment)[1]
    for stamp in (environment / "env").glob(".slimelite-*"):
        stamp.write_text("")
    assert setup(environment)[1]
    assert not setup(environment)[1]


def test_setup_leaves_a_finished_environment_alone(environment: Path) -> None:
    assert setup(environment, "--dev")[1]
    (environment / "env/lib/python3.11/site-packages/yours-1.0.dist-info").mkdir()
    for words in ((), ("--dev",), ()):
        assert not setup(environment, *words)[1]


LAUNCHER = """
from dataclasses import dataclass
from typing import Literal

import typer

import miles.utils.external_utils.command_utils as U
from miles.recipes import LENGTH

app = typer.Typer()


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model_name: Literal["Tiny", "Large"] = "Large"
    steps: int | None = None
    correct: bool = False
    data_dir: str = "/root/datasets"

    def __post_init__(self):
        self.gpus = U.NUM_GPUS_OF_HARDWARE["H100"]


@app.command()
@U.dataclass_cli
def prepare(args: ScriptArgs):
    U.exec_command_cpu(f"rm -rf {args.data_dir}")


@app.command()
@U.dataclass_cli
def train(args: ScriptArgs):
    U.hf_download_dataset("owner/data", data_dir=args.data_dir)
    mis = f"--custom-config-path {U.encode_pseudo_file('use_tis: true')} " if args.correct else ""
    U.execute_train(
        train_args=(
            f"--hf-checkpoint /root/models/{args.model_name} --prompt-data '{args.data_dir}/two words.jsonl' "
            f"--num-rollout {args.steps} --rollout-batch-size 4 --n-samples-per-prompt 2 {mis}"
            f"--rollout-max-response-len {LENGTH} --tensor-model-parallel-size 2 --rollout-num-gpus {args.gpus // 2} "
            f"{U.get_default_wandb_args(__file__)} "
        ),
        config=args,
        num_gpus_per_node=args.gpus,
        megatron_model_type="tiny",
        train_script="train_async.py",
        extra_env_vars={"NCCL_DEBUG": "a b"},
    )


if __name__ == "__main__":
    app()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``launch(*words)`` gives a launcher of a checkout of miles to scripts/run_slime_script.sh."""
    script = tmp_path / "miles-checkout" / "scripts" / "run_tiny.py"
    script.parent.mkdir(parents=True)
    script.write_text(LAUNCHER)
    (script.parents[1] / "miles").mkdir()
    (script.parents[1] / "miles" / "recipes.py").write_text("LENGTH = 64\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "scripts" / "run_slime_script.sh"), "--map", "/root=/data", str(script), *words]
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)

    return run


def test_a_launcher_of_miles_is_answered_with_the_command(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = launch("train", "--model-name", "Tiny", "--steps", "3", "--correct")
    assert done.returncode == 2, "nothing has run"
    assert "hf_download_dataset is left out: owner/data" in done.stderr
    first, _, rest = done.stdout.partition(" \\\n")
    assert first == "NCCL_DEBUG='a b' python train.py"
    monkeypatch.chdir(tmp_path)  # the file beside which the command was printed
    args = make_args(shlex.split(rest.replace("\\\n", " ")), machine=Machine(gpus=8, sglang=True))
    assert (args.hf_checkpoint, args.prompt_data) == ("/data/models/Tiny", ["/data/datasets/two words.jsonl"])
    assert (args.num_rollout, args.rollout_max_response_len, args.rollout_num_gpus) == (3, 64, 4)
    assert args.async_rollout
    assert args.correction == "tis"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes one of its commands: prepare, train"),
        (["prepare"], "run_tiny.py starts no training with these options"),
        (["train", "--modle-name", "Tiny"], "unrecognized arguments: --modle-name"),
    ],
)
def test_a_launcher_that_starts_nothing_says_why(
    launch: Callable[..., subprocess.CompletedProcess[str]], words: list[str], said: str
) -> None:
    done = launch(*words)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
