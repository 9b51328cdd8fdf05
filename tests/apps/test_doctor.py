"""slimelite doctor: an environment in order has no findings, and each planted fault is named with its remedy."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import packaging
import pytest

from slimelite import __version__
from slimelite.apps import doctor as program
from slimelite.engines.sglang.server import missing_for_kernels, reserve_port
from slimelite.plan.devices import Machine
from slimelite.sandbox import confine

ROOT = Path(__file__).parents[2]
QUIET = (
    "RAY_ADDRESS",
    "HF_HOME",
    "HF_TOKEN",
    "OMP_NUM_THREADS",
    "TMPDIR",
    "CC",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "no_proxy",
)


def doctor(
    *arguments: str, files: int | None = None, **environment: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit status, and findings by state."""
    kept = {name: value for name, value in os.environ.items() if name not in QUIET}
    done = subprocess.run(
        [sys.executable, "-m", "slimelite.apps.command", "doctor", "--json", *arguments],
        cwd=ROOT,
        env={**kept, "HF_HUB_OFFLINE": "1", **environment},
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))) if files else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    findings = json.loads(done.stdout)
    return done.returncode, {
        state: [finding for finding in findings if finding["state"] == state] for state in ("ok", "warning", "broken")
    }


def overlay(folder: Path, name: str, version: str) -> str:
    """A path for PYTHONPATH on which ``name`` has another ``version``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.fixture
def taken() -> Iterator[None]:
    """Ray's port of the dashboard is somebody's."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", 8265))
            other.listen()
        except OSError:
            pass  # it is taken already
        yield


@pytest.fixture
def closed_port() -> Iterator[int]:
    with reserve_port("127.0.0.1") as reserved:
        yield reserved.getsockname()[1]


@pytest.mark.pinned
def test_the_tested_environment_is_in_order() -> None:
    status, findings = doctor("--versions")
    assert (status, findings["broken"], findings["warning"]) == (0, [], [])


FAULTS = {
    "a package too old": ("transformers 4.9", "broken", "transformers"),
    "a package newer than the tested": ("accelerate 99", "warning", "packages"),
    "few open files": ("files", "warning", "open files"),
    "too many threads": ("OMP_NUM_THREADS=512", "warning", "threads"),
    "no compiler": ("CC=/nowhere/cc PATH=/nowhere", "warning", "compiler"),
    "a dead cluster": ("RAY_ADDRESS=127.0.0.1:PORT", "broken", "Ray"),
    "a cache that is a file": ("HF_HOME=/dev/null", "broken", "hub"),
    "a proxy for everything": ("HTTPS_PROXY=http://user:secret@127.0.0.1:PORT", "warning", "proxy"),
    "no hub": ("HF_HUB_OFFLINE=0 HF_ENDPOINT=http://127.0.0.1:PORT", "warning", "hub"),
    "no temporary folder": ("TMPDIR=/nowhere", "warning", "temporary files"),
    "a file system in ASCII": ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0", "broken", "locale"),
}


@pytest.mark.pinned
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(fault: str, closed_port: int, tmp_path: Path) -> None:
    planted, state, part = FAULTS[fault]
    assignments = dict(word.split("=", 1) for word in planted.replace("PORT", str(closed_port)).split() if "=" in word)
    if not assignments and planted != "files":
        name, version = planted.split()
        assignments = {"PYTHONPATH": overlay(tmp_path, name, version)}
    status, findings = doctor(files=64 if planted == "files" else None, **assignments)
    named = [finding for finding in findings[state] if finding["part"] == part]
    assert named, findings
    assert named[0]["remedy"]
    assert "secret" not in json.dumps(findings)
    assert status == int(bool(findings["broken"]))
    others = [finding for kind in ("warning", "broken") for finding in findings[kind] if finding["part"] != part]
    assert [finding["part"] for finding in others if finding["part"] not in ("Ray", "this folder")] == []


def test_a_cluster_that_ray_looks_for_is_not_asked() -> None:
    status, findings = doctor(RAY_ADDRESS="auto")
    assert status == 0, findings


def test_packages_are_not_right_where_one_is_broken(tmp_path: Path) -> None:
    _, findings = doctor("--versions", PYTHONPATH=overlay(tmp_path, "transformers", "4.9"))
    assert "packages" not in [finding["part"] for finding in findings["ok"]]


@pytest.mark.parametrize("missing", ["packaging", "slimelite"])
def test_a_python_without_the_packages_is_named(missing: str, tmp_path: Path) -> None:
    (tmp_path / "slimelite").symlink_to(ROOT / "slimelite")
    if missing != "packaging":
        (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "slimelite.apps.command", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert f"broken   {missing} " in done.stdout
    assert "-> bash scripts/setup.sh" in done.stdout


def test_what_cannot_be_used_without_an_optional_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_installed", lambda name: None if name in program.COSTS else "1")
    costs = {finding.part: finding.text for finding in program.versions() if finding.state == "ok"}
    assert costs["mcp"] == "is not installed: --environment mcp:COMMAND cannot be used"
    assert costs.keys() == program.COSTS.keys()


FINE = "print('2.13.0', '13.0', True)"
TORCHES = {
    "raise ImportError('no libcudart')": ("torch", "broken", "cannot be imported: ImportError: no libcudart"),
    "print('2.13.0', None, False)": ("GPU", "broken", "is a build for CPUs, and this machine has GPUs"),
    "print('2.13.0', '13.0', False)": ("GPU", "broken", "for CUDA 13.0 cannot use the GPU; driver 535.1"),
    FINE: ("GPU", "ok", "2 with driver 535.1, torch 2.13.0"),
}


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs, and a glibc and a PATH on which SGLang can compile nothing; returns the path of their torch."""
    node = Machine(2, True, driver="535.1")
    monkeypatch.setattr(program, "this_machine", lambda: node)
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.31")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "torch.py"


@pytest.mark.parametrize("code", TORCHES)
def test_a_torch_that_cannot_use_the_gpus_is_named(code: str, gpus: Path) -> None:
    part, state, text = TORCHES[code]
    gpus.write_text(f"{code}\nraise SystemExit\n")
    first = next(program.graphics())
    assert (first.part, first.state) == (part, state)
    assert text in first.text
    assert bool(first.remedy) == (state == "broken")


def test_what_sglangs_kernels_lack_is_said_as_the_dry_run_says_it(gpus: Path) -> None:
    gpus.write_text(f"{FINE}\nraise SystemExit\n")
    said = [finding.text for finding in program.graphics() if finding.part == "SGLang"]
    assert said == [*missing_for_kernels()]
    assert len(said) == 2


@pytest.mark.parametrize(
    ("library", "state", "text"),
    [(("glibc", "2.17"), "broken", "2.17 is older than 2.28"), (("", ""), "warning", "the C library is unknown")],
)
def test_a_c_library_for_which_torch_has_no_wheels_is_named(
    library: tuple[str, str], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    (finding,) = [finding for finding in program.system() if finding.part == "glibc"]
    assert finding.state == state
    assert text in finding.text


def test_a_kernel_without_the_layers_of_the_sandbox_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "landlock_abi", lambda: 0)
    (finding,) = [finding for finding in program.system() if finding.part == "sandbox"]
    assert finding.state == "warning"
    assert finding.text.startswith("the sandbox of code answers is weaker: there is no Landlock, so the code can read")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_full_disks_and_a_full_shared_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 10**8, 10**8))
    warned = {finding.part: finding.text for finding in program.storage() if finding.state == "warning"}
    assert warned.keys() >= {"this folder", "temporary files", "shared memory"}
    assert warned["shared memory"].startswith("/dev/shm has 100 MB free: ")


@pytest.mark.usefixtures("taken")
def test_a_port_of_rays_that_is_taken_is_named() -> None:
    _, findings = doctor()
    assert any("8265 (dashboard) is taken" in finding["text"] for finding in findings["warning"])


@pytest.mark.parametrize(
    "words", [["train.py"], ["-m", "slimelite.apps.command"], ["-m", "slimelite.apps.command", "eval"]]
)
def test_every_program_tells_its_version(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"slimelite {__version__}\n"
