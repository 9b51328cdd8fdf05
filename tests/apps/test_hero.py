from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from slimelite.apps.runs import Run
from tests.tracking.fake_run import make_args, play

SCRIPT = Path(__file__).parents[2] / "scripts" / "figures" / "hero.py"
SPEC = importlib.util.spec_from_file_location("hero", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
hero = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hero)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose samples are wrong in their tail, less of them in every rollout."""
    found = tmp_path_factory.mktemp("runs") / "run"
    play(make_args(found), range(5))
    return found


def test_the_samples_are_of_the_run_and_of_like_prompts(folder: Path) -> None:
    guess, steps = hero.pair(Run.read(folder))
    assert (guess.rollout_id, guess.reward, steps.rollout_id, steps.reward) == (0, 0.0, 4, 1.0)
    # group 1 is the first one with a wrong sample in rollout 0, and right in rollout 4
    assert guess.prompt == steps.prompt
    assert guess.response.startswith("I think [bold]")
    assert "\x1b" not in guess.response
    assert "\\boxed{" in steps.response


def test_marks_of_the_chat_template_are_left_out() -> None:
    prompt = "<|im_start|>user\n5+2+4+8=?<|im_end|>\n<|im_start|>assistant\n"
    assert hero._plain(prompt) == "5+2+4+8=?"
    assert hero._plain("7 < 8 | 9\n#### 14<|im_end|>") == "7 < 8 | 9\n#### 14"


def test_its_command_draws_a_light_and_a_dark_picture(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(pictures) == {"hero-light.png", "hero-dark.png"}
    for raw in pictures.values():
        assert raw.startswith(b"\x89PNG")
        assert int.from_bytes(raw[16:20], "big") == 1800
        assert len(raw) <= 200_000
    assert pictures["hero-light.png"] != pictures["hero-dark.png"]


def test_a_run_of_one_rollout_has_no_story(tmp_path: Path) -> None:
    play(make_args(tmp_path / "run"), range(1))
    with pytest.raises(ValueError, match="too few files in rollouts/: 1"):
        hero.pair(Run.read(tmp_path / "run"))
