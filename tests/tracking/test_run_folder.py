from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fake_run import make_args, make_table

from slimelite.arguments import Derivation
from slimelite.arguments import make_args as parse
from slimelite.plan.devices import Machine
from slimelite.samples.table import SampleTable
from slimelite.tracking.run_folder import RunFolder, commit, gpus, versions

COMPLETE = (
    "--hf-checkpoint owner/model --prompt-data p.jsonl --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--rollout-max-response-len 16 --colocate "
)


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("", ""),
        ("--calculate-per-token-loss --eps-clip 0.3 --lr 2e-6 --swiglu --wandb-group x", ""),
        (
            "--use-kl-loss --kl-loss-coef 0.01 --disable-grpo-std-normalization --eval-interval 2 "
            '--eval-prompt-data a b.jsonl --apply-chat-template-kwargs {"a":1} --rollout-stop-token-ids 1 2 '
            "--save x --save-interval 2 --preset dapo",
            "",
        ),
        (
            "--sglang-disable-radix-cache --sglang-no-enable-tf32-matmul --sglang-dtype half "
            "--sglang-cuda-graph-bs 1 2 --sglang-sidecar-args [1] "
            '--sglang-json-model-override-args {"a":1} --sglang-preferred-sampling-params {"a":1}',
            "--sglang-dtype bfloat16",
        ),
        ("--train-backend megatron --debug-rollout-only", "--no-debug-rollout-only"),
        ("--seed 3", "--seed 5"),
        ("", "--seed 5"),
        ("--seed 1234", "--lr 2e-6"),
        ("--eps-clip 0.3", "--eps-clip 0.4 --lr 2e-6"),
        ("--kl-coef 0.1 --advantage-estimator reinforce_plus_plus", "--kl-loss-type k1"),
        ("", "--calculate-per-token-loss --rollout-batch-size 8 --hf-checkpoint owner/other"),
        ("", "--use-tis"),
        ("--lr 2e-6", "--preset dapo"),
        ("--global-batch-size 4", "--n-samples-per-prompt 4"),
    ],
)
def test_config_yaml_stands_for_the_words_of_the_command_line(tmp_path: Path, words: str, more: str) -> None:
    """Alone it repeats a run; with other flags whatever was derived or a default is so again."""
    machine = Machine(gpus=2, sglang=True)
    first = [*COMPLETE.split(), *words.split()]
    RunFolder(tmp_path).save_config(parse(first, machine=machine))
    again = parse(["--config", str(tmp_path / "config.yaml"), "--run-dir", "r", *more.split()], machine=machine)
    args = parse([*first, "--run-dir", "r", *more.split()], machine=machine)
    assert replace(again, config=None, user_values={}) == replace(args, user_values={})


def test_the_configuration_says_why_and_keeps_secrets(tmp_path: Path) -> None:
    args = make_args(
        tmp_path,
        lr=1e-6,
        prompt_data=["a: b.jsonl@[0:10]", "#c"],
        train_env_vars={"A": "1"},
        wandb_key="secret",
        wandb_group="two\nlines",
        rollout_stop=["\n", "# x"],
        sglang_overrides={"api_key": "secret"},
        derivations=(
            Derivation("global_batch_size", 8, "4 prompts x 2 samples"),
            Derivation("train_backend", "fsdp", "there is one"),
        ),
        user_values={
            "lr": 1e-6,
            "prompt_data": ["a: b.jsonl@[0:10]", "#c"],
            "train_env_vars": {"A": "1"},
            "wandb_key": "secret",
            "rollout_stop": ["\n", "# x"],
            "train_backend": "megatron",
        },
        notes=("two\nlines",),
        no_effect=(("--swiglu", "the model says so"),),
    )
    RunFolder(tmp_path).save_config(args)
    text = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(text) == {
        "lr": 1e-6,
        "prompt_data": ["a: b.jsonl@[0:10]", "#c"],
        "train_env_vars": {"A": "1"},
        "rollout_stop": ["\n", "# x"],
        "train_backend": "megatron",
    }
    assert "\ntrain_backend: megatron  # here fsdp: there is one\n" in text
    assert "\n# global_batch_size: 8  # 4 prompts x 2 samples\n" in text
    assert "\n# eps_clip: 0.2\n" in text
    assert "\n# sglang-api-key: not saved; give it again" in text
    assert "# two lines\n# no effect here: --swiglu: the model says so\n" in text
    assert "secret" not in text

    whole = json.loads((tmp_path / "config.json").read_text())
    assert whole["derivations"] == {"global_batch_size": "4 prompts x 2 samples", "train_backend": "there is one"}
    assert whole["eval_datasets"][0]["name"] == "sums"
    assert whole["wandb_key"] == "***"


def test_samples_are_kept_and_names_stay_inside_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_rollout(12, make_table())
    folder.save_eval("math/500", 3, make_table(1.0))
    folder.save_eval("math/500", -1, make_table(0.0))
    assert SampleTable.from_parquet(tmp_path / "rollouts" / "0000012.parquet").response == make_table().response
    assert SampleTable.from_parquet(tmp_path / "eval" / "math_500-0000003.parquet").reward.tolist() == [1.0] * 8
    assert SampleTable.from_parquet(tmp_path / "eval" / "math_500-start.parquet").reward.tolist() == [0.0] * 8


def test_versions_are_found_without_importing_anything_heavy() -> None:
    code = (
        "import sys, json; from slimelite.tracking.run_folder import versions\n"
        "print(json.dumps(versions('cpu'))); assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    import torch

    assert found["torch"] == torch.__version__
    assert found["sglang"] is None or found["sglang"][0].isdigit()
    assert found["machine"]["cores"] >= 1
    assert found["python"] == sys.version.split()[0]


def test_the_command_line_is_kept_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--lr", "1e-3", "--prompt-data", "a b.jsonl", "--wandb-key", "abcdef"]
    )
    assert versions("cpu")["command"] == "train.py --lr 1e-3 --prompt-data 'a b.jsonl' --wandb-key '***'"


def test_gpus_as_the_driver_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    line = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.1"
    tool.write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus() == [line] * 2
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9")
    assert gpus() == []


def test_the_commit_and_whether_files_were_changed(tmp_path: Path) -> None:
    assert commit(tmp_path) is None

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    git("tag", "v1")
    head = git("rev-parse", "HEAD").strip()
    assert commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == head + "-dirty"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_that_goes_on_earlier_forgets_what_it_repeats(ahead: bool, tmp_path: Path) -> None:
    """Rollout 2 is made again: its files and later ones are of a history that is over; a user's own file stays.

    If it was generated ahead, the checkpoint has its samples, and its dropped groups are in the run folder alone.
    """
    folder = RunFolder(tmp_path)
    names = [
        "rollouts/0000001",
        "rollouts/0000002",
        "token_stats/0000003",
        "dropped/0000002",
        "dropped/0000003",
        "rollouts/mine",
    ]
    names += ["eval/a-b-start", "eval/a-b-0000001", "eval/a-b-0000002"]
    for name in names:
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    folder.forget(2, ahead=ahead)
    left = {str(path.relative_to(tmp_path).with_suffix("")) for path in tmp_path.rglob("*.parquet")}
    kept = {"rollouts/0000001", "rollouts/mine", "eval/a-b-start", "eval/a-b-0000001"}
    assert left == kept | ({"dropped/0000002"} if ahead else set())
