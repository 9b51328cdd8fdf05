from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from slimelite.apps.command import COMMANDS, main


def test_help_lists_every_command_with_an_example_and_loads_next_to_nothing() -> None:
    heavy = {"torch", "numpy", "pyarrow", "rich", "matplotlib", "argparse"}
    code = f"import sys; from slimelite.apps.command import main; main([]); print(sorted({heavy} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert said.endswith("[]\n")
    for name, command in COMMANDS.items():
        assert f"  {name} " in said
        assert command.example in said
        assert command.example.startswith(f"slimelite {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    usage = "python train.py" if COMMANDS[name].own else f"usage: slimelite {name} "
    assert usage in capsys.readouterr().out
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN, "else a later write to a closed pipe ends this process"


def test_a_misspelt_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plott", "runs/a"]) == 2
    assert "there is no command plott; did you mean plot?" in capsys.readouterr().err


def test_a_users_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err == f"slimelite plot: {tmp_path} is not a run folder: it has no metrics.jsonl\n"
    assert said.out == ""


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("slimelite.apps.plot.main", interrupted)
    assert main(["plot"]) == 130
    assert capsys.readouterr().err == "\n"


def test_head_may_close_the_pipe() -> None:
    command = f"{sys.executable} -m slimelite.apps.command plot --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: slimelite plot ")
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_leave_no_merged_model_behind(number: int, tmp_path: Path) -> None:
    program = f"""
import os, signal, sys, tempfile, time, types
from slimelite.apps.command import main
signal.signal({int(number)}, signal.SIG_DFL)  # a test run under nohup ignores SIGHUP
def chat(_):
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        try:
            os.kill(os.getpid(), {int(number)})
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(60)  # Ctrl-C ends an answer, not the program
sys.modules["slimelite.apps.chat"] = types.SimpleNamespace(main=chat)
sys.argv = ["slimelite", "chat"]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=600)
    assert (done.returncode, list(tmp_path.iterdir())) == (128 + number, [])
