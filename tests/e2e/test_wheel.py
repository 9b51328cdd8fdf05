"""A wheel has the whole program: it trains in another environment, away from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from .conftest import ROOT, SMALL_FLAGS, metrics, run_process

pytestmark = pytest.mark.e2e
SOURCES = (
    "slimelite",
    "train.py",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "constraints.txt",
    "README.md",
    "LICENSE",
)


def install(folder: Path) -> Path:
    """The ``bin`` folder of an environment with a wheel of slimelite; other packages are those of this one."""
    source, place = folder / "source", folder / "environment"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(built, check=True, capture_output=True)
    venv.create(place, symlinks=True)
    site = Path(place, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    # lines with folders alone: this environment's own slimelite is found by a hook, which is not loaded then
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    wheel = next(folder.glob("slimelite-*.whl"))
    installed = [*pip, "--python", str(place / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*installed, "--force-reinstall"], check=True, capture_output=True)
    return place / "bin"


def test_a_wheel_trains_in_another_environment(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    programs = install(tmp_path_factory.mktemp("wheel"))

    def run(*words: str) -> str:
        done = run_process(str(programs / words[0]), *words[1:], env={"PYTHONPATH": ""}, cwd=small)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    of_wheel = run("python", "-c", "import slimelite; print(slimelite.__file__)")
    assert of_wheel.startswith(str(programs.parent))
    # a module called train would take the place of anybody's
    assert run("python", "-c", "import importlib.util as u; print(u.find_spec('train'))") == "None\n"
    run("slimelite", "train", *SMALL_FLAGS, "--num-rollout", "1", "--run-dir", "run")
    assert len(metrics(small / "run", "train/loss")) == 2
    assert "packages" in run("slimelite", "doctor", "--versions")
    run("slimelite", "view", "run", "-o", "page.html")
