"""``train.py --stages``: each stage starts from the one before, and a command that failed goes on where it was."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

import train
from slimelite.preflight import problems_of
from slimelite.stages import read_stages, run_stages
from tests.data.tokenizers import byte_tokenizer

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
    assert "stage 0 (of stages 0 to 1) is finished" in done.stdout
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
        ("--stages missing.yaml --run-dir out", "stage 0 (missing.yaml): missing.yaml: cannot be read"),
        ("--stages=a.yaml", "needs --run-dir"),
        ("--stages=a.yaml b.yaml --run-dir=out --config=b.yaml", "put the flags into the files"),
        (
            "--stages a.yaml b.yaml --run-dir=out --save-hf=m",
            "--save-hf with --stages: all stages would use the same folder",
        ),
        (
            "--stages a.yaml folder.yaml --run-dir out",
            "folder.yaml): --run-dir here: the stage's folder is always out/1-folder",
        ),
        (
            "--stages a.yaml other.yaml --run-dir out",
            "other.yaml): --hf-checkpoint m: a stage starts from the model of",
        ),
        ("--stages saves.yaml saves.yaml --run-dir out", "--save-hf same is also the folder of stage 0 (saves.yaml)"),
        ("--stages each.yaml a.yaml --run-dir out", "leave {rollout_id} out"),
        ("--stages a.yaml b.yaml --run-dir out --lr=x", "stage 1 (b.yaml): --lr takes a number, not 'x'"),
    ],
)
def test_mistakes_end_before_a_stage_begins(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_py: TrainPy
) -> None:
    for name, flags in (("a", {}), ("b", {}), ("folder", {"run_dir": "here"}), ("other", {"hf_checkpoint": "m"})):
        write(tmp_path / f"{name}.yaml", num_rollout=1, **flags)
    for name, template in (("saves", "same"), ("each", "m/{rollout_id}")):
        write(tmp_path / f"{name}.yaml", num_rollout=1, save_hf=template)
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


def test_a_value_may_be_written_with_an_equals_sign(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.yaml", lr=1), write(tmp_path / "b.yaml", lr=1)
    spaced = f"--stages {one} {two} --run-dir out --lora-rank 8 --save-interval 5 --stop=--"
    stages = read_stages(
        f"--stages={one} {two} --run-dir=out --lora-rank=8 --save-interval=5 --rollout-stop=--".split()
    )
    assert [stage.argv for stage in stages] == [
        stage.argv for stage in read_stages(spaced.replace("--stop", "--rollout-stop").split())
    ]
    for stage, name in zip(stages, ("0-a", "1-b"), strict=True):
        assert stage.folder == Path("out", name)
        assert stage.settings.values["rollout_stop"] == ["--"]
        assert stage.argv[-7:] == [
            *("--save-hf", f"out/{name}/model", "--load", f"out/{name}/checkpoints"),
            *("--save", f"out/{name}/checkpoints", "--lora-merge"),
        ]


@pytest.fixture
def two(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two stages of SFT, each of one rollout; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    rows = {"prompt_data": [str(task / "sft.parquet")], "loss_type": "sft_loss", "rollout_batch_size": 8}
    write(tmp_path / "one.yaml", hf_checkpoint=str(task / "model"), num_rollout=1, **rows)
    write(tmp_path / "two.yaml", num_rollout=1, **rows)
    return tmp_path


TWO = ["--stages", "one.yaml", "two.yaml", "--launcher", "local", "--input-key", "messages", "--run-dir", "out"]


def test_every_stage_is_checked_before_the_first_begins(two: Path, train_py: TrainPy) -> None:
    second = yaml.safe_load((two / "two.yaml").read_text())
    write(two / "two.yaml", **second | {"prompt_data": ["gone.parquet"], "label_key": "x"})
    done = train_py(*TWO)
    assert done.returncode == 2
    named = "--prompt-data: no such file: gone.parquet (--prompt-data, --eval-prompt-data)"
    assert done.stderr == f"train.py: stage 1 (two.yaml): {named}\n"
    assert not (two / "out").exists()


def test_stages_may_name_what_earlier_ones_make(two: Path, train_py: TrainPy) -> None:
    """A stage's own ``--save-hf`` is where the next one starts, and an edited stage is never called finished."""
    flags = {name: yaml.safe_load((two / f"{name}.yaml").read_text()) for name in ("one", "two")}
    write(two / "one.yaml", **flags["one"], save_hf="models/sft")
    write(
        two / "two.yaml",
        **flags["two"],
        hf_checkpoint="models/sft",
        tokenizer="models/sft",
        save_hf="models/{rollout_id}",
    )
    assert train_py(*TWO, "--dry-run").stdout.count("ready to start") == 2
    done = train_py(*TWO)
    assert done.returncode == 0, done.stderr
    assert (two / "models" / "sft" / "config.json").is_file()
    assert (two / "models" / "0" / "config.json").is_file()
    assert yaml.safe_load((two / "out" / "1-two" / "config.yaml").read_text())["hf_checkpoint"] == "models/sft"
    assert train_py(*TWO, "--use-tensorboard").stdout.count("is finished") == 2

    write(two / "one.yaml", **flags["one"] | {"lr": 0.25}, save_hf="models/sft")
    edited = train_py(*TWO)
    assert edited.returncode == 2
    assert edited.stderr == (
        "train.py: stage 0 (one.yaml): it has finished with other flags: lr was not given and is 0.25; to run "
        "the stage again, remove out/0-one, out/1-two; to keep it, give its earlier flags\n"
    )
    shutil.rmtree(two / "out" / "0-one")
    later = train_py(*TWO)
    assert later.returncode == 2
    assert "stage 1 (two.yaml): it started from another model of the previous stage" in later.stderr


def test_a_stage_that_chats_after_pretraining_needs_a_tokenizer_with_a_template(
    two: Path, task: Path, train_py: TrainPy
) -> None:
    """Pretraining goes on from a chat model, whose template stands in for the one that its result does not have."""
    (two / "texts.jsonl").write_text('{"text": "1+1=2"}\n')
    texts = {"prompt_data": ["texts.jsonl"], "loss_type": "pretrain_loss", "seq_length": 8, "global_batch_size": 1}
    write(two / "one.yaml", hf_checkpoint=str(task / "model"), num_rollout=1, **texts)
    done = train_py(*TWO)
    assert done.returncode == 2
    assert done.stderr == (
        "train.py: stage 1 (two.yaml): it needs a chat template, but the model of stage 0 (one.yaml) will have none, "
        "because its --loss-type is pretrain_loss: give a tokenizer that has a chat template as --tokenizer\n"
    )
    assert not (two / "out").exists()
    write(two / "two.yaml", **yaml.safe_load((two / "two.yaml").read_text()), tokenizer=str(task / "model"))
    done = train_py(*TWO)
    assert done.returncode == 0, done.stderr
    assert (two / "out" / "1-two" / "model" / "chat_template.jinja").is_file()


def test_every_stage_is_checked_though_the_first_makes_a_new_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_py: TrainPy
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained("tokenizer")
    Path("texts.jsonl").write_text('{"text": "1+1=2"}\n')
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    size = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "vocab_size": 272}
    texts = {"prompt_data": ["texts.jsonl"], "loss_type": "pretrain_loss", "seq_length": 8, "global_batch_size": 1}
    chats = {"loss_type": "sft_loss", "rollout_batch_size": 1, "num_rollout": 1, "tokenizer": "tokenizer"}
    write(tmp_path / "one.yaml", num_rollout=1, tokenizer="tokenizer", **size, **texts)
    write(tmp_path / "two.yaml", prompt_data=["chats.jsonl"], **chats)
    checked = train_py(*TWO, "--dry-run")
    assert checked.stdout.count("ready to start") == 2, checked.stdout
    write(tmp_path / "three.yaml", prompt_data=["gone.jsonl"], **chats)
    done = train_py(*[*TWO[:3], "three.yaml", *TWO[3:]])
    assert done.returncode == 2
    named = "--prompt-data: no such file: gone.jsonl (--prompt-data, --eval-prompt-data)"
    assert done.stderr == f"train.py: stage 2 (three.yaml): {named}\n"
    assert not (tmp_path / "out").exists()


def test_a_stage_does_not_start_from_the_stand_in_of_a_model_that_was_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage, which makes a new model, ends well, but its model is not where this machine looks for it."""
    byte_tokenizer("{{ messages }}").save_pretrained(tmp_path / "tokenizer")
    size = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "vocab_size": 272}
    texts = {"prompt_data": ["a.jsonl"], "loss_type": "pretrain_loss", "seq_length": 8, "global_batch_size": 1}
    write(tmp_path / "one.yaml", num_rollout=1, tokenizer=str(tmp_path / "tokenizer"), **size, **texts)
    write(tmp_path / "two.yaml", loss_type="sft_loss", tokenizer=str(tmp_path / "tokenizer"))
    checked, ran = list[list[str]](), list[list[str]]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--stages", "one.yaml", "two.yaml", "--run-dir", "out"])
    assert run_stages(lambda argv: ran.append(argv or []) or 0, lambda argv: checked.append(argv) or []) == 0
    assert ["--hf-checkpoint" in argv for argv in checked] == [False, True]
    assert ["--hf-checkpoint" in argv for argv in ran] == [False, False]


class Killed(BaseException):
    """Stands in for the end of the process: nothing after it happens."""


def test_a_stage_that_was_killed_at_its_very_end_does_not_take_later_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has written its status and its model, and the command ends before it can write anything else."""
    write(tmp_path / "one.yaml", lr=0.1)
    ran = []

    def run(argv: list[str] | None) -> int:
        assert argv is not None
        ran.append(argv)
        folder = Path(argv[argv.index("--run-dir") + 1])
        (folder / "model").mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps({"status": "finished"}))
        raise Killed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--stages", "one.yaml", "--run-dir", "out"])
    with pytest.raises(Killed):
        run_stages(run, lambda _: [])
    assert run_stages(run, lambda _: []) == 0
    assert "stage 0 (of stages 0 to 0) is finished" in capsys.readouterr().out

    write(tmp_path / "one.yaml", lr=0.25)
    assert run_stages(run, lambda _: []) == 2
    assert "it has finished with other flags: lr was 0.1 and is 0.25" in capsys.readouterr().err
    record = tmp_path / "out" / "0-one" / "stage.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 2}))
    assert run_stages(run, lambda _: []) == 2
    assert "stage.json: has format 2, but this slimelite reads format 1: use the" in capsys.readouterr().err
    record.unlink()
    assert run_stages(run, lambda _: []) == 2
    assert "stage.json, the record of its flags, is missing; to run the stage again, remove out/0-one" in (
        capsys.readouterr().err
    )
    assert len(ran) == 1


def test_the_model_of_the_best_evaluation_goes_on(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SFT that ends early, after rollout 2, because its score was best after rollout 0: the next begins with that."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "from pathlib import Path\n"
        f"lines = Path({str(tmp_path / 'out' / '0-one' / 'metrics.jsonl')!r})\n"
        "def reward(args, sample):\n"
        "    steps = lines.read_text().count('train/loss') if lines.exists() else 0\n"
        "    return {0: 0.2, 1: 0.9}.get(steps, 0.1)\n"
    )
    (tmp_path / "texts.jsonl").write_text('{"messages": "3+4=?"}\n{"messages": "1+1=?"}\n')
    common = {"prompt_data": [str(task / "sft.parquet")], "loss_type": "sft_loss", "rollout_batch_size": 8}
    asked = {
        "eval_prompt_data": ["own", str(tmp_path / "texts.jsonl")],
        "eval_interval": 1,
        "eval_max_response_len": 2,
        "early_stop_patience": 2,
        "save_best": True,
    }
    plugin = {"custom_rm_path": f"{rewards}:reward", "hf_checkpoint": str(task / "model"), "num_rollout": 6}
    first = write(tmp_path / "one.yaml", **common, **asked, **plugin)
    second = write(tmp_path / "two.yaml", **common, num_rollout=1)
    flags = ["--launcher", "local", "--input-key", "messages", "--lr", "1e-2", "--run-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["train.py", "--stages", str(first), str(second), *flags])
    assert run_stages(train.main, problems_of) == 0, capsys.readouterr().err
    assert len(metrics(tmp_path / "out" / "0-one", "train/loss")) == 3
    config = json.loads((tmp_path / "out" / "1-two" / "config.json").read_text())
    assert config["hf_checkpoint"] == str(tmp_path / "out" / "0-one" / "model-best")
