"""The form of the Dockerfiles: the shell parses, sources exist, and programs run as a user who is not root. The tests
marked docker build them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from slimelite import __version__

ROOT = Path(__file__).parents[1]
FILES = ("Dockerfile", "docs/examples/docker/cpu.Dockerfile")
KNOWN = {"FROM", "RUN", "ARG", "ENV", "USER", "WORKDIR", "COPY", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, what follows it), with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def problems(text: str) -> list[str]:
    """What is wrong in a Dockerfile."""
    user, found, last = "root", list[str](), ""
    for word, rest in instructions(text):
        if word not in KNOWN:
            found.append(f"unknown instruction {word}")
        if word == "FROM" and not re.fullmatch(r"\S+:(?!latest)[\w.-]+", rest):
            found.append("the image has no fixed version")
        if word == "USER":
            user = rest
        if word == "RUN":
            found += _in_run(rest, user)
        if word == "COPY":
            owner, *sources, _target = shlex.split(rest)
            found += [] if owner == f"--chown={user}" else [f"COPY as {user} without --chown={user}"]
            found += [f"{source} is not there" for source in sources if not (ROOT / source).exists()]
        if word == "CMD" and not isinstance(json.loads(rest), list):
            found.append("CMD is no list")
        last = word
    if user in ("root", "0"):
        found.append("programs run as root")
    return [*found, *["the last instruction is no CMD"] * (last != "CMD")]


def _in_run(script: str, user: str) -> list[str]:
    found = []
    if subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode:
        found.append(f"the shell cannot read: {script}")
    if "apt-get" in script:
        found += [] if user == "root" else ["apt-get without root"]
        wanted = ("apt-get update &&", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
        found += [f"apt-get without {part}" for part in wanted if part not in script]
    if "pip install" in script:
        found += [
            f"pip install without {part}" for part in ("--no-cache-dir", "-c constraints.txt") if part not in script
        ]
    found += [f"{path} is not there" for path in re.findall(r"bash (\S+\.sh)", script) if not (ROOT / path).is_file()]
    created = re.findall(r"useradd .*?(\w+) &&", script)
    return [*found, *(f"{name} gets no folder" for name in created if f"install -d -o {name} /slimelite" not in script)]


@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_is_in_form_and_leaves_root(name: str) -> None:
    assert problems((ROOT / name).read_text()) == []


@pytest.mark.parametrize(
    ("part", "instead", "problem"),
    [
        ("USER $UID\n", "", "programs run as root"),
        ("COPY --chown=$UID . .", "COPY --chown=root . .", "COPY as $UID without --chown=$UID"),
        ("python:3.11-slim-bookworm", "python:latest", "the image has no fixed version"),
        (" && rm -rf /var/lib/apt/lists/*", "", "apt-get without rm -rf /var/lib/apt/lists/*"),
        ("scripts/setup.sh && rm", "scripts/setup.sh && (rm", "the shell cannot read"),
        ("scripts/setup.sh", "scripts/gone.sh", "scripts/gone.sh is not there"),
        ("WORKDIR /", "WORKDIRECTORY /", "unknown instruction WORKDIRECTORY"),
        ('CMD ["bash"]\n', "", "the last instruction is no CMD"),
    ],
)
def test_a_planted_mistake_is_seen(part: str, instead: str, problem: str) -> None:
    text = (ROOT / FILES[1]).read_text()
    assert part in text
    assert any(each.startswith(problem) for each in problems(text.replace(part, instead)))


@pytest.mark.docker
@pytest.mark.parametrize("name", FILES)
def test_a_dockerfile_builds_an_image_whose_programs_run_without_root(name: str) -> None:
    """The first takes the CUDA image and SGLang: some 30 GB of disk."""
    image = f"slimelite-test-{Path(name).stem.lower()}"
    build = ["docker", "build", "-t", image, "--build-arg", "UID=1234", "-f", name, "."]
    run = ["docker", "run", "--rm", image, "bash", "-c", "id -u && slimelite --version && ls -d data runs"]
    try:
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.stdout.split() == ["1234", "slimelite", __version__, "data", "runs"], done.stderr
    finally:
        subprocess.run(["docker", "image", "rm", "--force", image], capture_output=True)


def test_what_is_large_or_private_stays_out_of_the_image() -> None:
    assert {".git", ".venv", "data", "runs"} <= set((ROOT / ".dockerignore").read_text().split())
