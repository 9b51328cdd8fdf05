"""What a user brings: groups of flags, and files that register entries, here and in other processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import ArgumentError, make_args, parse_args
from slimelite.arguments.parse import plugin_paths
from tests.arguments.conftest import COMPLETE, CPU

ROOT = Path(__file__).parents[2]
OWN = """
from dataclasses import dataclass

from slimelite.arguments import flag

@dataclass(frozen=True)
class MyArgs:
    \"\"\"Mine.\"\"\"

    my_bonus: float = flag(0.5, "reward of mine")

class NoGroup:
    pass
"""


def test_a_group_is_named_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    named = ["--args-group", f"{tmp_path}/own.py:MyArgs"]
    args: Any = make_args([*COMPLETE.split(), "--my-bonus", "0.7", *named], machine=CPU)
    assert (args.my_bonus, args.global_batch_size) == (0.7, 8)
    assert "--args-group" not in dict(plugin_paths(args)), "the pre-flight would call it a function"
    config = tmp_path / "c.yaml"
    config.write_text(f"args_group: ['{tmp_path}/own.py:MyArgs']\nmy_bonus: 0.2")
    assert make_args([*COMPLETE.split(), "--config", str(config)], machine=CPU).my_bonus == 0.2  # type: ignore
    with pytest.raises(SystemExit):
        parse_args(["--help", *named])
    assert "\nMINE\n" in capsys.readouterr().out
    with pytest.raises(ArgumentError) as caught:
        make_args([*COMPLETE.split(), "--args-group", f"{tmp_path}/own.py:NoGroup"], machine=CPU)
    assert "is not a frozen dataclass" in caught.value.problems[0]
    with pytest.raises(ArgumentError, match=f"--args-group: no plugin file {tmp_path}/nowhere.py"):
        make_args([*COMPLETE.split(), "--args-group", f"{tmp_path}/nowhere.py:MyArgs"], machine=CPU)
    (tmp_path / "fails.py").write_text("import os\nos.nothing\n")
    with pytest.raises(ArgumentError, match=f"^--args-group {tmp_path}/fails.py, line 2: AttributeError: module 'os'"):
        make_args([*COMPLETE.split(), "--args-group", f"{tmp_path}/fails.py:MyArgs"], machine=CPU)


def test_composed_arguments_travel_to_other_processes_and_places(tmp_path: Any) -> None:
    """A worker has not loaded the file; on another node of a job only the working directory has it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.py").write_text(OWN)
    (tmp_path / "there").mkdir()
    program = (
        "import pickle, sys; a = pickle.load(open(sys.argv[1], 'rb')); b = pickle.loads(pickle.dumps(a));"
        "from slimelite.arguments import Args; from dataclasses import replace;"
        "print(a.my_bonus, a == b, isinstance(a, Args), replace(a, lr=1.0).my_bonus, type(a).__mro__[1].__name__)"
    )
    with contextlib.chdir(tmp_path / "here"):
        args = make_args([*COMPLETE.split(), "--my-bonus", "0.7", "--args-group", "own.py:MyArgs"], machine=CPU)
    (tmp_path / "args.pickle").write_bytes(pickle.dumps(args))
    for place in ("here", "there"):
        if place == "there":
            (tmp_path / "here" / "own.py").rename(tmp_path / "there" / "own.py")
        command = [sys.executable, "-c", program, str(tmp_path / "args.pickle")]
        done = subprocess.run(command, cwd=tmp_path / place, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["0.7", "True", "True", "0.7", "MyArgs"], done.stderr


REGISTERS = """
from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.arguments.sources import PRESETS, Preset
from slimelite.rewards.rules import RULES, Rule

RULES.add(Rule("own_rule", lambda _: 0.25))
PRESETS.add(Preset("own_preset", "2402.03300", "--lr 0.5"))
ESTIMATORS.add(Estimator("own_estimator", "R", group=lambda rewards: rewards.rewards))
"""
PYTHON = [sys.executable, "-c"]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what it registers is not there in this one."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_what_an_imported_file_registers_is_a_choice_like_ours(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REGISTERS)
    keys = "import_file: [own.py]\nadvantage_estimator: own_estimator\npreset: [own_preset]\n"
    (tmp_path / "run.yaml").write_text(keys)
    done = run(tmp_path, sys.executable, str(ROOT / "train.py"), "--import-file", "own.py", "--help")
    assert ",ppo_turns,own_estimator}" in "".join(done.stdout.split()), done.stderr
    parsed = "from slimelite.arguments import make_args; a = make_args({}.split()); print(a.advantage_estimator, a.lr)"
    assert run(tmp_path, *PYTHON, parsed.format(repr(f"{COMPLETE} --config run.yaml"))).stdout == "own_estimator 0.5\n"
    twice = f"{parsed}; make_args({{}}.split())".format(*[repr(f"{COMPLETE} --import-file own.py")] * 2)
    assert run(tmp_path, *PYTHON, twice).returncode == 0, "the second time, it is there already"
    without = run(tmp_path, *PYTHON, parsed.format(repr(f"{COMPLETE} --advantage-estimator own_estimator")))
    assert "not 'own_estimator'" in without.stderr


def test_an_imported_file_that_fails_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REGISTERS)
    (tmp_path / "fails.py").write_text("import os\nos.nothing\n")
    (tmp_path / "syntax.py").write_text("x = (\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "clashes.py").write_text(REGISTERS.replace("own_rule", "math"))
    (tmp_path / "quits.py").write_text("import os\nos._exit(0)\n")
    files = ("owm.py", "fails.py", "syntax.py", "ends.py", "quits.py", "clashes.py")
    done = run(tmp_path, sys.executable, str(ROOT / "train.py"), *(w for f in files for w in ("--import-file", f)))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"train.py: --import-file: no plugin file {tmp_path}/owm.py; did you mean own.py?",
        f"train.py: --import-file {tmp_path}/fails.py, line 2: AttributeError: module 'os' has no attribute 'nothing'",
        "train.py: --import-file: SyntaxError: '(' was never closed (syntax.py, line 1)",
        f"train.py: --import-file {tmp_path}/ends.py, line 2: it calls sys.exit(3)",
        f"train.py: --import-file {tmp_path}/quits.py, line 2: it calls os._exit(0)",
        f"train.py: --import-file {tmp_path}/clashes.py, line 6: another reward rule is already called 'math'; choose "
        "another name for yours",
    ]


def test_arguments_bring_the_imported_file_to_other_processes_and_places(tmp_path: Path) -> None:
    """As for groups, on another node of a job only the working directory has it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.py").write_text(REGISTERS)
    (tmp_path / "there").mkdir()
    words = f"{COMPLETE} --import-file own.py --advantage-estimator own_estimator"
    write = f"import pickle, sys; from slimelite.arguments import make_args; args = make_args({words.split()!r});"
    written = run(tmp_path / "here", *PYTHON, write + "pickle.dump(args, open('../args.pickle', 'wb'))")
    assert written.returncode == 0, written.stderr
    read = (
        "import pickle; a = pickle.load(open('../args.pickle', 'rb')); b = pickle.loads(pickle.dumps(a));"
        "from slimelite.rewards.rules import RULES; print(a == b, RULES['own_rule'].quick(None))"
    )
    for place in ("here", "there"):
        if place == "there":
            (tmp_path / "here" / "own.py").rename(tmp_path / "there" / "own.py")
        done = run(tmp_path / place, *PYTHON, read)
        assert done.stdout.split() == ["True", "0.25"], done.stderr
    (tmp_path / "there" / "own.py").unlink()
    assert f"--import-file: no plugin file {tmp_path}/here/own.py" in run(tmp_path / "there", *PYTHON, read).stderr
