"""Every program that a person starts answers ``--version``, and so does each command of `slimelite`."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from slimelite import __version__
from slimelite.apps.command import main

ROOT = Path(__file__).parents[2]
# other scripts start these, some in the interpreter of a rival, without this package
INTERNAL = ("lib/", "_side.py", "rival_engine.py", "tree.py", "gpu/gpu_group.py")
SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and not any(word in path.as_posix() for word in INTERNAL)
]
# the ones that import little, run here
LIGHT = ("prepare_data.py", "fetch_smollm2.py", "figures/figures.py", "dev/house_counts.py")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_reads_the_flag(path: Path) -> None:
    text = path.read_text()
    main_block = text.partition('if __name__ == "__main__":\n')[2]
    assert re.search(r"= argparse\.ArgumentParser\((.|\n)*?\)\n +add_version\(", text) or main_block.startswith(
        "    answer_version()\n"
    )


@pytest.mark.parametrize("name", LIGHT)
def test_a_script_prints_it(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"slimelite {__version__}\n"


def test_the_server_of_environments_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--version"])
    monkeypatch.delitem(sys.modules, "slimelite.environments.serve", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("slimelite.environments.serve", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"slimelite {__version__}\n"


@pytest.mark.parametrize("words", [["env", "check"], ["env"], ["compare", "runs/a"]])
def test_every_command_prints_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*words, "--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"slimelite {__version__}\n"
