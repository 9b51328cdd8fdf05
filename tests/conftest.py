"""Tests marked ``sglang`` or ``vllm`` need the real one: without it they fail and say how to get it."""

from __future__ import annotations

import gc
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from slimelite.slime.plugins import files_run

if find_spec("hypothesis"):  # which a machine with a GPU may lack
    from hypothesis import settings

    # an example that takes long shows that the machine is busy, not that the program is wrong
    settings.register_profile("slimelite", deadline=None)
    settings.load_profile("slimelite")

ROOT = Path(__file__).parents[1]
# Ray keeps the token that a process begins with: without one here, the first test that starts Ray would settle on
# another than the runs that later tests start in this process
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
SHIMS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
REMEDIES = {"sglang": "bash scripts/install_sglang_cpu.sh", "vllm": "docs/install.md has the commands"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run the files, their classes and tests in random order"
    )


@pytest.hookimpl(tryfirst=True)  # pytest then puts the tests together that share a fixture's parameter
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--shuffle``, the tests of a file and of a class stay together, because they share what it started."""
    if (seed := config.getoption("--shuffle")) is None:
        return
    draw = random.Random(seed)
    files: dict[Path, dict[object, list[pytest.Item]]] = {}
    for number, item in enumerate(items):
        together = item.cls if isinstance(item, pytest.Function) and item.cls else number
        files.setdefault(item.path, {}).setdefault(together, []).append(item)
    shuffled = []
    for groups in draw.sample(list(files.values()), len(files)):
        for tests in draw.sample(list(groups.values()), len(groups)):
            shuffled += draw.sample(tests, len(tests))
    items[:] = shuffled


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A skip could hide that nothing was tested."""
    for package, remedy in REMEDIES.items():
        if item.get_closest_marker(package) and find_spec(package) is None:
            pytest.fail(f"{package} is not installed: {remedy}; -m 'not sglang and not vllm' does without", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write what a test marked ``chaos(fault, what happens)`` saw into the file that ``SLIMELITE_FAULTS`` names.

    `scripts/dev/fault_table.py` reads it.
    """
    report: pytest.TestReport = yield
    file, mark = os.environ.get("SLIMELITE_FAULTS"), item.get_closest_marker("chaos")
    if file and mark and mark.args and call.when == "call":
        fault, happens = mark.args
        row = {"fault": fault, "happens": happens, "passed": report.passed, "date": time.strftime("%Y-%m-%d")}
        row |= {
            "id": item.nodeid,
            "test": item.nodeid.partition("::")[0],
            "slow": item.get_closest_marker("slow") is not None,
        }
        row["seconds"] = dict(item.user_properties).get("seconds", "–")
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    return report


@pytest.fixture(autouse=True)
def imported_files() -> Iterator[None]:
    """Processes that a later test starts do not run the files that this one has given to ``--import-file``."""
    before = list(files_run)
    yield
    files_run[:] = before


def sglang_variables() -> dict[str, str]:
    """What SGLang needs in its environment on this machine; without a GPU that takes tests/support/sglang_cpu."""
    shims = [] if torch.cuda.is_available() else [str(ROOT / "tests" / "support" / "sglang_cpu")]
    path = os.pathsep.join([*shims, str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**(SHIMS if shims else {}), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def sglang_environment() -> dict[str, str]:
    """The environment in which SGLang runs."""
    return {**os.environ, **sglang_variables()}


@pytest.fixture
def alone() -> Iterator[Callable[[], float]]:
    """Returns a clock: seconds of the processor that this thread took, while nothing is collected.

    The heap of a process that ran thousands of tests takes seconds to collect, and other tests' threads may still run.
    """
    gc.collect()
    gc.disable()
    yield time.thread_time
    gc.enable()
