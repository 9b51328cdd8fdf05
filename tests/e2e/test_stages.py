"""``train.py --stages``: each stage starts from the one before, and a command that failed goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slimelite.stages import read_stages

from .conftest import TrainPy, metrics

pytestmark = pytest.mark.e2e


def write(path: Path, **flags: object) -> Path:
    path.write_text(yaml.safe_dump(flags))
    return path


def test_a_failed_stage_is_taken_up_again(task: Path, tmp_path: Path, train_py: TrainPy) -> None:
    """SFT, then GRPO whose reward fails in rollout 1: SFT is not run again, and GRPO goes on from its checkpoint."""
    reward, mended = tmp_path / "reward.py", tmp_path / "mended"
    reward.write_text(
        "from pathlib import Path\n"
        "def reward(args, sample):\n"
        f"    if sample.index is not None and sample.index >= 16 and not Path({str(mended)!r}).exists():\n"
        "        raise RuntimeError('not yet')\n"
        "    return len(sample.response) % 2\n"
    )
    sft = write(
        tmp_path / "sft.yaml",
        hf_checkpoint=str(task / "model"),
        prompt_data=[str(task / "sft.parquet")],
        loss_type="sft_loss",
        rollout_batch_size=64,
        num_rollout=1,
    )
    grpo = write(
        tmp_path / "grpo.yaml",
        prompt_data=[str(task / "train.parquet")],
        label_key="label",
        apply_chat_template=True,
        custom_rm_path=f"{reward}:reward",
        reward_error="fail",
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        rollout_max_response_len=8,
        num_rollout=2,
        save_interval=1,
    )
    flags = ["--launcher", "local", "--input-key", "messages", "--lr", "1e-3", "--run-dir", str(tmp_path / "out")]
    command = ["--stages", str(sft), str(grpo), *flags]
    checked = train_py(*command, "--dry-run")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("ready to start") == 2
    assert not (tmp_path / "out").exists()

    failed = train_py(*command)
    assert failed.returncode == 1
    assert "not yet" in failed.stderr
    made = (tmp_path / "out" / "0-sft" / "model" / "model.safetensors").stat().st_mtime_ns

    mended.touch()
    done = train_py(*command)
    assert done.returncode == 0, done.stderr
    assert "stage 0 of 0 to 1 is finished" in done.stdout
    assert (tmp_path / "out" / "0-sft" / "model" / "model.safetensors").stat().st_mtime_ns == made
    second = tmp_path / "out" / "1-grpo"
    assert len(metrics(second, "rollout/raw_reward")) == 2, "it resumes after rollout 0"
    config = yaml.safe_load((second / "config.yaml").read_text())
    assert config["hf_checkpoint"] == str(tmp_path / "out" / "0-sft" / "model")
    assert (second / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stages --run-dir out", "names no file"),
        ("--stages a.yaml", "needs --run-dir"),
        ("--stages a.yaml --run-dir out --config b.yaml", "put the flags into the files"),
        ("--stages missing.yaml --run-dir out", "missing.yaml"),
    ],
)
def test_mistakes_end_before_a_stage_begins(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_py: TrainPy
) -> None:
    write(tmp_path / "a.yaml", num_rollout=1)
    monkeypatch.chdir(tmp_path)
    done = train_py(*words.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_stage_of_adapters_ends_with_a_whole_model(tmp_path: Path) -> None:
    """The next stage starts from it."""
    for name, flags in (("sft", {"lora_rank": 4}), ("rl", {"lr": 1e-5})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(flags))
    argv = ["--stages", f"{tmp_path}/sft.yaml", f"{tmp_path}/rl.yaml", "--run-dir", str(tmp_path / "run")]
    assert ["--lora-merge" in stage.argv for stage in read_stages(argv)] == [True, False]
    assert all("--lora-merge" in stage.argv for stage in read_stages([*argv, "--lora-rank", "8"]))
