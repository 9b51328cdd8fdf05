"""Code as the answer: what passes, and that no program harms or outlives its grading."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import RewardArgs
from slimelite.rewards.code import last_block, quick, read_tests, run_code
from slimelite.rewards.grader import Grader
from slimelite.rewards.rules import Answer
from slimelite.samples.sample import Sample
from slimelite.sandbox.confine import OPEN_FILES

SECONDS = 1.2
ADD = {"test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(-1, 1) == 0", "entry_point": "add"}
ECHO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


@pytest.fixture(autouse=True, scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Programs run in folders in here: `running` knows them by it from those of other tests, which run meanwhile."""
    folder = tmp_path_factory.mktemp("programs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.fixture(scope="module")
def grader(place: Path) -> Iterator[Grader]:
    args = RewardArgs(rm_type="code", code_timeout=SECONDS, code_memory_mb=256, reward_error="fail")
    grader = Grader(args, workers=1)
    while score(grader, "def add(a, b):\n    return a + b\n", ADD) != 1.0:
        pass  # the first import of a machine that has much else to do takes longer than the limit
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def patient(place: Path) -> Iterator[Grader]:
    """For programs that end by themselves, on a machine that has much else to do."""
    grader = Grader(RewardArgs(rm_type="code", code_timeout=20.0, code_memory_mb=256, reward_error="fail"), workers=1)
    yield grader
    grader.close()


def fenced(code: str) -> str:
    return f"I think\n```python\n{code}\n```\nDone."


def score(grader: Grader, code: str, metadata: dict[str, Any], label: str | None = None) -> Any:
    sample = Sample(index=0, group_index=0, response=fenced(code), label=label, metadata=dict(metadata))
    asyncio.run(grader.grade([sample]))
    return sample.reward


def running() -> list[str]:
    """Processes that run a program under test of this module."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b'"answer.py"' not in (folder / "cmdline").read_bytes():
                continue
            if os.environb[b"TMPDIR"] in (folder / "environ").read_bytes():
                found.append(folder.name)
        except PermissionError:
            found.append(folder.name)
        except OSError:
            continue  # it ended meanwhile
    return found


@pytest.mark.parametrize(
    ("code", "metadata", "label", "expected"),
    [
        ("def add(a, b):\n    return a + b", ADD, None, 1.0),
        ("def add(a, b):\n    return a - b", ADD, None, 0.0),
        ("from __future__ import annotations\ndef add(a, b):\n    return a + b", ADD, None, 1.0),
        ("def add(a, b):\n    return plus(a, b)", {**ADD, "prefix": "from operator import add as plus"}, None, 1.0),
        ("    return a + b", {**ADD, "prefix": "def add(a, b):\n    '''The sum.'''"}, None, 1.0),
        (
            "def add(a, b):\n    return a + b",
            {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]},
            None,
            1.0,
        ),
        ("def add(a, b):\n    return 3", {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}, None, 0.0),
        ("def add(a, b):\n    return a + b", {}, '["assert add(1, 2) == 3"]', 1.0),
        ("print(sum(map(int, input().split())))", ECHO, None, 1.0),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())), ' \\n')", ECHO, None, 1.0),
        ("print(3)", ECHO, None, 0.0),
        ("print(sum(map(int, input().split())))\nraise ValueError", ECHO, None, 0.0),
        ("def add(a, b) return a + b", ADD, None, 0.0),
    ],
)
def test_an_answer_passes_all_tests_or_none(
    patient: Grader, code: str, metadata: dict[str, Any], label: str | None, expected: float
) -> None:
    assert score(patient, code, metadata, label) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("\n    return a + b\n\ndef more():\n    syntax error", 1.0),
        (" return a + b", 1.0),
        ("\n    c = a\n\n    return c + b\n```\nThe sum.", 1.0),
        ("\n    return a\n\ndef add(a, b):\n    return a + b", 0.0),
        ("\ndef add(a, b):\n    return a + b", 0.0),
    ],
)
def test_a_completion_goes_on_where_the_prefix_ends(patient: Grader, response: str, expected: float) -> None:
    head = "def add(a, b):" if response.startswith(" ") else "def add(a, b):\n    'The sum.'"
    metadata = {**ADD, "prefix": head, "completion": True}
    sample = Sample(index=0, group_index=0, response=response, metadata=metadata)
    asyncio.run(patient.grade([sample]))
    assert sample.reward == expected


MISBEHAVING = {
    "infinite loop": "while True:\n    pass",
    "sleeps": "import time\ntime.sleep(9999)",
    "memory hog": "x = bytearray(1 << 30)",
    "grows": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))",
    "file writer": "with open('big', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))",
    "many files": "for n in range(100):\n    open(str(n), 'wb').write(bytes(1 << 20))",
    "many names": "for n in range(5000):\n    open(str(n), 'wb').close()",
    "files without a name": "import os\nkept = []\nfor n in range(30):\n    kept.append(open('x', 'wb', 0))\n"
    "    os.remove('x')\n    for _ in range(15):\n        kept[-1].write(bytes(1 << 20))\nimport time\ntime.sleep(0.3)",
    "mapped files without a name": "import mmap, os, time\nkept = []\nfor n in range(30):\n"
    "    with open('x', 'w+b', 0) as f:\n        os.remove('x')\n        for _ in range(15):\n"
    "            f.write(bytes(1 << 20))\n        kept.append(mmap.mmap(f.fileno(), 4096))\ntime.sleep(0.3)",
    "long names": "import os\nfor n in range(30):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)",
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "starts a process": "import subprocess\nsubprocess.Popen(['sleep', '9999'])",
    "starts threads": "import threading\n[threading.Thread(target=print).start() for _ in range(200)]",
    "leaves its session": "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(9999)",
    "huge output": "while True:\n    print('x' * 100000)",
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "reads stdin": "name = input()",
    "raises": "raise RuntimeError('no')",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "opens a socket": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "breaks its interpreter": "import ctypes\nctypes.string_at(0)",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "deletes what it finds": "import shutil\nshutil.rmtree('.')\nraise SystemExit",
    "unclosed string": 'x = """',
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_program_that_misbehaves_gets_0_in_time_and_leaves_nothing(grader: Grader, name: str) -> None:
    right = "def add(a, b):\n    return a + b\n"
    worker = grader._pool._workers[0]._process
    assert score(grader, right + MISBEHAVING[name], ADD) == 0.0
    assert running() == []
    assert grader._pool._workers[0]._process is worker  # the worker itself came to no harm
    assert worker is not None
    assert worker.poll() is None


def test_a_program_dies_with_the_process_that_grades_it() -> None:
    grader = Grader(RewardArgs(rm_type="code"), workers=1)
    sample = Sample(index=0, group_index=0, response=fenced("import time\ntime.sleep(99)"), metadata=dict(ADD))

    async def kill_while_grading() -> None:
        grading = asyncio.ensure_future(grader.grade([sample]))
        worker = None
        for _ in range(2):  # the first time, the answer goes to a new process
            while grader._pool._workers[0]._process in (worker, None) or not running():
                await asyncio.sleep(0.02)
            worker = grader._pool._workers[0]._process
            assert worker is not None
            worker.kill()
            while running():  # else the next process is killed while it starts
                await asyncio.sleep(0.02)
        await grading

    asyncio.run(kill_while_grading())
    grader.close()
    assert "crash" in sample.metadata["reward_error"]
    while running():
        time.sleep(0.02)


def test_all_cases_share_one_time_limit(grader: Grader) -> None:
    slow = "import time\ntime.sleep(0.6)\nprint(input())"
    cases = {"inputs": ["a"] * 50, "outputs": ["a"] * 50}
    assert score(grader, slow, cases) == 0.0


def test_the_program_sees_neither_environment_nor_folder_of_the_run(
    patient: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    look = "import os\ndef look():\n    return sorted(k for k in os.environ if 'KEY' in k), os.listdir('.')"
    assert score(patient, look, {"test_list": ["assert look() == ([], []), look()"]}) == 1.0
    write = "open('left', 'w').write('x')\nimport os\ndef look():\n    return os.getcwd()"
    assert score(patient, write, {"test_list": ["assert look() != '/' and 'answer-' in look()"]}) == 1.0


def test_memory_is_limited_by_the_flag() -> None:
    for memory, expected in ((128, 0.0), (512, 1.0)):
        grader = Grader(RewardArgs(rm_type="code", code_memory_mb=memory), workers=1)
        assert score(grader, "x = bytearray(200 << 20)", {"test_list": ["assert x"]}) == expected
        grader.close()


def test_a_grader_with_more_memory_and_files_than_the_limits_starts_programs() -> None:
    with ExitStack() as stack, mmap.mmap(-1, 4 << 30):
        for _ in range(OPEN_FILES):
            stack.enter_context(open(os.devnull))
        assert run_code("print(1)", None, "", seconds=20, memory_mb=1024).output == "1\n"


def test_the_last_closed_python_block_counts() -> None:
    assert last_block("```\na\n```\ntext\n```python\nb\nc\n```\n```output\nd\n```") == "b\nc"
    assert last_block("```py\na\n```\n```python\nb") == "a"
    assert last_block("```python\nb") is None
    assert quick(Answer("no code", "", ADD)) == 0.0


def test_a_row_without_tests_is_a_reward_error() -> None:
    for metadata in ({}, {"test": "x"}, {"inputs": ["1"], "outputs": []}):
        with pytest.raises(ValueError, match="code needs tests in metadata"):
            read_tests(Answer("", "42", metadata))
