"""Every recipe of docs/extending.md as it stands there: its files are written, its commands run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer, MistralConfig

from slimelite.samples.table import SampleTable

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCK = re.compile(r"```(python|bash)\n(.*?)```", re.DOTALL)
# one process for all recipes: each starts from train.main, as a user's command does
DRIVER = """
import json, pathlib, sys
import train
results = {}
for name, argv in json.loads(pathlib.Path(sys.argv[1]).read_text()).items():
    print(f"=== {name}", flush=True)
    results[name] = train.main(argv)
pathlib.Path(sys.argv[2]).write_text(json.dumps(results))
"""


@dataclass
class Recipe:
    """A section of the page: its files by name, the scripts among them that it runs first, and the arguments of each of
    its commands."""

    files: dict[str, str] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)


def read_page() -> dict[str, Recipe]:
    """Title of a section -> what it holds. ``${RUN[@]}`` stands for the flags above the first section."""
    introduction, *sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    run = re.search(r"RUN=\((.*?)\)", introduction, re.DOTALL)
    assert run is not None
    recipes = {}
    for section in sections:
        recipe = recipes.setdefault(section.partition("\n")[0], Recipe())
        for language, text in BLOCK.findall(section):
            if language == "python":
                first, _, rest = text.partition("\n")
                recipe.files[first.removeprefix("# ")] = rest
            else:
                for line in text.splitlines():
                    python, program, *flags = shlex.split(line.replace('"${RUN[@]}"', run[1]))
                    assert python == "python"
                    if program == "train.py":
                        recipe.commands.append(flags)
                    else:
                        recipe.scripts.append(program)
                        assert not flags
    return recipes


RECIPES = read_page()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every command of the page was run, in one folder that holds nothing but the recipes' files and the task."""
    folder = tmp_path_factory.mktemp("extending")
    prepare = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), "quickstart", "--out", "task"]
    subprocess.run([*prepare, "--held-out", "4", "--sft-rows", "64"], cwd=folder, check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "task" / "model")
    tokenizer.save_pretrained(folder / "task" / "mistral")
    MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["MistralForCausalLM"],
    ).save_pretrained(folder / "task" / "mistral")
    commands = {}
    for title, recipe in RECIPES.items():
        for name, text in recipe.files.items():
            (folder / name).write_text(text)
        for script in recipe.scripts:
            subprocess.run([sys.executable, script], cwd=folder, check=True)
        for number, flags in enumerate(recipe.commands):
            name = f"{title} {number}"
            commands[name] = [*flags, "--run-dir", str(folder / name)]
    (folder / "commands.json").write_text(json.dumps(commands))
    command = [sys.executable, "-c", DRIVER, "commands.json", "results.json"]
    path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    failed = [name for name, status in json.loads((folder / "results.json").read_text()).items() if status]
    assert not failed, done.stdout[-3000:] + done.stderr[-3000:]
    (folder / "printed.txt").write_text(done.stdout)
    return {name: folder / name for name in commands}


def metrics(run: Path) -> dict[str, float]:
    """Metric -> its last value in a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: value for row in rows for name, value in row.items()}


def samples(run: Path) -> SampleTable:
    """The samples of the first rollout of a run."""
    return SampleTable.from_parquet(run / "rollouts" / "0000000.parquet")


@pytest.mark.parametrize("title", RECIPES)
def test_every_file_of_a_recipe_is_used(title: str) -> None:
    recipe = RECIPES[title]
    assert recipe.files
    assert recipe.commands
    for name in recipe.files:
        assert name in recipe.scripts or any(name in part for flags in recipe.commands for part in flags)


def test_an_estimator(runs: dict[str, Path]) -> None:
    table = samples(runs["An advantage estimator 0"])
    assert table.reward.std() > 0
    for group in np.unique(table.group_id):
        rewards = table.reward[table.group_id == group]
        middle = np.sort(rewards)[(len(rewards) - 1) // 2]  # torch's median is the lower of two
        np.testing.assert_allclose(table.advantage[table.group_id == group], rewards - middle, atol=1e-6)


def test_a_loss(runs: dict[str, Path]) -> None:
    table, found = samples(runs["A loss 0"]), metrics(runs["A loss 0"])
    assert 0 < found["train/bad_tokens"] < 1
    bad = np.repeat(table.advantage < 0, table.response_lengths) & table.loss_mask
    assert found["train/bad_tokens"] == pytest.approx(bad.sum() / table.loss_mask.sum())


def test_the_dry_run_tries_an_estimator(runs: dict[str, Path]) -> None:
    printed = (runs["An advantage estimator 1"].parent / "printed.txt").read_text()
    told = printed.split("=== An advantage estimator 1\n")[1].split("=== ")[0]
    assert "rewards 0, 1, 0.5, 1 of one prompt give -0.5, 0.5, 0, 0.5" in " ".join(told.split())
    assert not runs["An advantage estimator 1"].exists()


def test_grpo_and_a_term(runs: dict[str, Path]) -> None:
    found = metrics(runs["GRPO and a term of your own 0"])
    assert found["train/calm_loss"] > 0
    assert found["train/loss"] == pytest.approx(found["train/pg_loss"] + found["train/calm_loss"], abs=1e-6)


def test_a_metric(runs: dict[str, Path]) -> None:
    table, found = samples(runs["A metric 0"]), metrics(runs["A metric 0"])
    assert found["rollout/digits"] == np.mean([sum(map(str.isdigit, text)) for text in table.response])
    assert found["rollout/best_reward"] == table.reward.max()
    assert "rollout/raw_reward" in found, "the others are logged as ever"


def test_a_curriculum(runs: dict[str, Path]) -> None:
    first, second = (
        SampleTable.from_parquet(runs["A curriculum 0"] / "rollouts" / f"000000{i}.parquet") for i in range(2)
    )
    assert all(int(label) <= 20 for label in first.label)
    rose = first.reward.mean() >= 0.3
    assert [int(label) > 20 for label in second.label] == [rose] * len(second)
    rows = [json.loads(line) for line in (runs["A curriculum 0"] / "metrics.jsonl").read_text().splitlines()]
    assert next(row["rollout/level"] for row in rows if "rollout/level" in row) == float(rose)


def test_a_column(runs: dict[str, Path]) -> None:
    table, found = samples(runs["A column 0"]), metrics(runs["A column 0"])
    rows = parquet.read_table(runs["A column 0"] / "rollouts" / "0000000.parquet")["difficulty"].to_pylist()
    difficulty = np.concatenate(rows)
    np.testing.assert_allclose(difficulty, -table.rollout_log_probs, rtol=1e-6)
    assert found["train/difficulty"] == pytest.approx(difficulty[table.loss_mask].mean(), rel=1e-5)


def test_rewards(runs: dict[str, Path]) -> None:
    brief, contains = samples(runs["A reward 0"]), samples(runs["A reward 1"])
    right = [float(part["right"]) for part in brief.numeric_components()]
    np.testing.assert_allclose(brief.reward, right - 0.001 * np.array([len(r) for r in brief.response]), atol=1e-6)
    expected = [float(str(label) in text) for label, text in zip(contains.label, contains.response, strict=True)]
    assert any(expected)
    np.testing.assert_array_equal(contains.reward, expected)


def test_a_filter(runs: dict[str, Path]) -> None:
    table = samples(runs["A filter 0"])
    assert metrics(runs["A filter 0"])["rollout/dynamic_filter/drop_all_cut_off"] > 0
    for group in np.unique(table.group_id):
        lengths = table.response_lengths[table.group_id == group]
        assert lengths.min() < 12, "a group of responses that were all cut off would have been dropped"


def test_a_generate_function(runs: dict[str, Path]) -> None:
    table = samples(runs["A generate function 0"])
    masks = np.split(table.loss_mask, table.response_offsets[1:-1])
    assert all(mask.sum() == len(mask) - 1 for mask in masks), "the hint is not trained on"
    assert not any(mask[-1] == 0 for mask in masks), "every row has a second turn"
    assert all("=" in text for text in table.response)
    tokenizer = AutoTokenizer.from_pretrained(runs["A generate function 0"].parent / "task" / "model")
    rows = np.split(table.response_tokens, table.response_offsets[1:-1])
    at = [int(np.flatnonzero(mask == 0)[0]) for mask in masks]
    for row, place, text in zip(rows, at, table.response, strict=True):
        assert text == tokenizer.decode(row[:place]) + "=" + tokenizer.decode(row[place + 1 :])


def test_a_group_of_flags(runs: dict[str, Path]) -> None:
    table = samples(runs["A group of flags 0"])
    assert "lucky_bonus: 0.7" in (runs["A group of flags 0"] / "config.yaml").read_text()
    assert table.reward.any()
    np.testing.assert_allclose(table.reward, [0.7 * ("7" in text) for text in table.response], atol=1e-6)


def test_a_model_family(runs: dict[str, Path]) -> None:
    assert metrics(runs["A model family 0"])["train/train_rollout_logprob_abs_diff"] < 1e-5


def test_an_engine(runs: dict[str, Path]) -> None:
    found = metrics(runs["An engine 0"])
    assert found["train/train_rollout_logprob_abs_diff"] < 1e-5
    assert "rollout_backend: hf" in (runs["An engine 0"] / "config.yaml").read_text()


def test_an_estimator_of_a_user_is_in_the_help_and_checked(runs: dict[str, Path]) -> None:
    folder = runs["An advantage estimator 0"].parent
    own = ["--import-file", "median.py"]
    base = [sys.executable, str(ROOT / "train.py")]
    shown = subprocess.run([*base, *own, "--help"], cwd=folder, capture_output=True, text=True)
    assert "ppo_turns,median}" in "".join(shown.stdout.split()), shown.stdout[-2000:]
    flags = [*RECIPES["An advantage estimator"].commands[0], "--dry-run"]
    kl = ["--kl-coef", "0.1", "--ref-load", "task/model"]
    refused = subprocess.run([*base, *flags, *kl], cwd=folder, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "--kl-coef 0.1 has no effect with median" in refused.stderr
