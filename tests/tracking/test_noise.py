from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from slimelite.tracking.noise import log_to_file, stderr_to_file

LIBC = ctypes.CDLL(None)


def test_an_actor_process_prints_into_its_file(tmp_path: Path) -> None:
    code = (
        "import os, sys, subprocess\n"
        "from slimelite.tracking.noise import redirect_process_output\n"
        "print('before')\n"
        f"redirect_process_output({str(tmp_path / 'logs' / 'actor.log')!r})\n"
        "print('from python'); os.write(2, b'from C\\n'); subprocess.run(['echo', 'from a child'])\n"
        "sys.stderr.write('an error\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\n", "")
    text = (tmp_path / "logs" / "actor.log").read_text()
    assert sorted(text.splitlines()) == ["an error", "from C", "from a child", "from python"]


def test_printed_lines_reach_the_file_while_the_process_runs(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from slimelite.tracking.noise import redirect_process_output\n"
        f"redirect_process_output({str(tmp_path / 'actor.log')!r})\n"
        "print('last words'); os._exit(1)\n"  # as a crash does: nothing is flushed
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, env=environment)
    assert (tmp_path / "actor.log").read_text() == "last words\n"


def test_stderr_goes_to_the_file_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stderr.txt"
    path.write_text("an earlier run\n")
    with stderr_to_file(path):
        LIBC.dprintf(2, b"[W socket.cpp] noise\n")
        print("still seen")
    os.write(2, b"after\n")
    assert path.read_text() == "an earlier run\n[W socket.cpp] noise\n"
    assert capfd.readouterr() == ("still seen\n", "after\n")


def test_logs_and_warnings_go_to_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    with log_to_file(path), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("slimelite.rollout").info("a group is done")
        logging.getLogger("somebody.else").info("chatter")
        logging.getLogger("somebody.else").warning("mind this")
        warnings.warn("old api", DeprecationWarning, stacklevel=1)
    logging.getLogger("slimelite.rollout").warning("too late")
    text = path.read_text()
    assert "INFO slimelite.rollout: a group is done" in text
    assert "WARNING somebody.else: mind this" in text
    assert "DeprecationWarning: old api" in text
    assert "chatter" not in text
    assert "too late" not in text


def test_transformers_talks_to_the_log_alone(tmp_path: Path) -> None:
    code = (
        "from slimelite.tracking.noise import log_to_file, quiet_transformers\n"
        "from transformers.utils import logging\n"
        f"with log_to_file({str(tmp_path / 'log.txt')!r}):\n"
        "    quiet_transformers()\n"
        "    logging.get_logger('transformers.models').warning('weights are newly initialised')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "newly initialised" not in done.stderr
    assert (tmp_path / "log.txt").read_text().count("weights are newly initialised") == 1
