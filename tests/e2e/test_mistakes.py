"""A user's mistake is answered at once, in plain words, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import train

pytestmark = pytest.mark.e2e


@pytest.fixture
def empty_dataset(tmp_path: Path) -> Path:
    schema = pa.schema(
        [("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))), ("label", pa.string())]
    )
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    return tmp_path / "empty.parquet"


@pytest.fixture
def broken_reward(tmp_path: Path) -> str:
    (tmp_path / "reward.py").write_text(
        "async def grade(args, sample, **kwargs):\n    return 1 / 0\n\n"
        "async def grade_one(args, samples, **kwargs):\n    return [1.0]\n"
    )
    return f"{tmp_path / 'reward.py'}:grade"


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    try:
        status = train.main([*args, "--num-rollout", "1"])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    assert status == 2
    assert "Traceback" not in captured.err
    return captured.err


def test_each_mistake(
    grpo_args: list[str], empty_dataset: Path, broken_reward: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--launcher", "local", "--run-dir", str(tmp_path / "run")]
    mistakes = {
        "did you mean --eps-clip?": ["--esp-clip", "0.3"],
        "no such file": ["--prompt-data", str(tmp_path / "absent.parquet")],
        "its columns are ['label', 'messages']": ["--label-key", "answer"],
        "if 'messages' is the conversation, add --label-key label:": ["--label-key", "answer"],
        "--hidden-size is 1024 but the model's config.json has 64": ["--hidden-size", "1024"],
        "empty.parquet": ["--prompt-data", str(empty_dataset)],
        "division by zero": ["--custom-rm-path", broken_reward],
        "for 4 samples must return a list": ["--custom-rm-path", f"{broken_reward}_one", "--group-rm"],
        "did you mean q_proj?": ["--lora-rank", "8", "--lora-target-modules", "q_prj,v_proj"],
        "--lora-rank 1000000: the matrices that get an adapter have at most rank 64": ["--lora-rank", "1000000"],
        "Muon trains whole matrices": ["--lora-rank", "8", "--optimizer", "muon"],
        "adapter_config.json cannot be read": ["--lora-adapter-path", str(tmp_path)],
    }
    for answer, flags in mistakes.items():
        assert answer.lower() in refused([*grpo_args, *run, *flags], capsys).lower(), flags
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_a_plugin_that_ends_the_process(
    grpo_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 0, as if the run had done its work; nothing is done, so the run says which plugin, and fails."""
    file = tmp_path / "own.py"
    file.write_text("import sys\n\nasync def generate(args, sample, sampling_params):\n    sys.exit(0)\n")
    flags = ["--launcher", "local", "--num-rollout", "1", "--run-dir", str(tmp_path / "run")]
    assert train.main([*grpo_args, *flags, "--custom-generate-function-path", f"{file}:generate"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"train.py: the plugin {file}:generate called sys.exit(0) ({file}, line 4, in generate)"
    assert '"failed"' in (tmp_path / "run" / "status.json").read_text()
    script = tmp_path / "script.py"
    script.write_text("import sys\n\nsys.exit(0)\n")
    text = refused([*grpo_args, *flags[:2], "--custom-generate-function-path", f"{script}:generate"], capsys)
    assert "it calls sys.exit(0) while it is imported" in text


def test_all_problems_at_once(grpo_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--label-key", "answer", "--hidden-size", "1024", "--run-dir", str(tmp_path / "run")]
    text = refused([*grpo_args, *flags], capsys)
    assert "answer" in text
    assert "1024" in text


def test_a_file_in_the_way_of_the_saved_model(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What no check can foresee, a full disk say, ends a run in one line too."""
    (tmp_path / "1").touch()
    status = train.main(
        [
            *("--launcher", "local", "--hf-checkpoint", str(task / "model"), "--loss-type", "sft_loss"),
            *("--prompt-data", f"{task / 'sft.parquet'}@[:8]", "--input-key", "messages", "--rollout-batch-size", "4"),
            *(
                "--num-rollout",
                "2",
                "--save-interval",
                "1",
                "--save",
                str(tmp_path / "save"),
                "--run-dir",
                str(tmp_path / "run"),
                "--save-hf",
                str(tmp_path / "{rollout_id}"),
            ),
        ]
    )
    said = capsys.readouterr().err.splitlines()
    assert status == 1
    assert said[-1] == f"train.py: [Errno 17] File exists: '{tmp_path / '1'}'"
    assert not any("Traceback" in line for line in said)
