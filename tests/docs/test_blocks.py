"""Every shell block of README.md and docs/ is run as it stands, or says why it is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.docs.blocks import PAGES, ROOT, blocks

# these pages have a test of their own, which runs their blocks
ELSEWHERE = {"docs/extending.md": "tests/test_extending.py"}
# the suite does not start itself, and what README ran is there for the tutorial
LEFT_OUT = {
    "README.md": re.compile(r"^bash scripts/test\.sh.*\n", re.MULTILINE),
    "docs/tutorial.md": re.compile(r"^bash scripts/quickstart\.sh\n", re.MULTILINE),
}
# in the clone's ``python``: README starts processes as a user does, other pages leave the imports out
WARM = '[ -n "$WARM" ] && [ "$1" = train.py ] && exec PYTHON -I tests/docs/warm.py "$WARM" "$@"'


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkout's files in a folder of their own, with a .venv as scripts/setup.sh leaves it."""
    folder = tmp_path_factory.mktemp("clone") / "slimelite"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    here = Path(sys.executable).parent
    (binaries / "activate").write_text(f"export PATH={binaries}:$PATH\n")
    for name in ("python", "pip", "ray", "pytest", "slimelite"):
        # nothing may be installed from a folder that is removed afterwards
        refused = 'case "$*" in *"pip "*install*) echo "pip install: not here" >&2; exit 1;; esac'
        script = f'#!/bin/sh\n{refused}\n{WARM if name == "python" else ""}\nexec {here / name} "$@"\n'
        (binaries / name).write_text(script.replace("PYTHON", str(here / "python")))
        (binaries / name).chmod(0o755)
    digest = "cat constraints.txt pyproject.toml | cksum | cut -d' ' -f1"
    versions = subprocess.run(["bash", "-c", digest], cwd=folder, check=True, capture_output=True, text=True).stdout
    for gpu in ("true", "false"):
        for dev in ("true", "false"):
            (folder / ".venv" / f".slimelite-{versions.strip()}-gpu-{gpu}-dev-{dev}").write_text("\n")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def warm(clone: Path) -> Iterator[dict[str, str]]:
    """The variables with which ``python train.py`` in the clone is forked from a process that has its imports."""
    address, env = str(clone / ".venv" / "warm"), {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, "tests/docs/warm.py", address], cwd=clone, env=env)
    try:
        while not os.path.exists(address):
            assert server.poll() is None
            time.sleep(0.1)
        yield {"WARM": address}
    finally:
        server.kill()
        server.wait()


def paste(page: str, clone: Path, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run the blocks of a page in one shell with more environment ``variables``; returns what they printed."""
    pasted = "\n".join(block.text for block in blocks(ROOT / page) if block.why is None)
    if page in LEFT_OUT:
        pasted, count = LEFT_OUT[page].subn("", pasted)
        assert count == 1
    return shell(pasted, clone, variables)


def shell(pasted: str, clone: Path, variables: Mapping[str, str]) -> str:
    """Run commands as `paste` does."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(clone),  # the console script is installed from elsewhere
        "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}",
        **variables,
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", pasted]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def after_readme(clone: Path) -> tuple[Path, str]:
    """The clone in which the blocks of README.md were run, as other pages ask for, and what was printed."""
    return clone, paste("README.md", clone)


def curve(run: Path, name: str) -> list[float]:
    """The values of a metric of a run folder, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.e2e
def test_readme_runs_as_pasted(after_readme: tuple[Path, str]) -> None:
    """The quickstart learns; the run by hand learns the format, and goes on from it."""
    clone, printed = after_readme
    scores = curve(clone / "runs/quickstart/seed-0/grpo", "eval/heldout")
    assert scores[0] < 0.4
    assert scores[-1] >= 0.9
    assert "ready to start" in printed
    sft, grpo = sorted((clone / "runs").glob("*-*"), key=lambda folder: folder.stat().st_ctime)
    losses = curve(sft, "train/loss")
    assert losses[-1] < losses[0] / 2, "SFT learns"
    assert max(curve(grpo, "rollout/raw_reward")) > 0, "GRPO goes on from what SFT saved"


# page -> run folders that its blocks make, each with a metric that shows what the page is about and how often it stands
SHOWN: dict[str, dict[str, tuple[str, int]]] = {
    "docs/tutorial.md": {
        "tutorial/rule": ("eval/heldout", 3),
        "tutorial/mine": ("rollout/reward/right", 10),
        "tutorial/long": ("rollout/raw_reward", 7),
    },
    "docs/tutorial_chats.md": {},
    "docs/tutorial_reward.md": {},
    "docs/tutorial_agent.md": {},
    "docs/tutorial_cluster.md": {},
    "docs/tutorial_wrong_run.md": {},
    "docs/examples/reward_components/README.md": {"examples/reward_components": ("rollout/reward/shown", 2)},
    "docs/examples/advantage_and_loss/README.md": {"examples/advantage_and_loss": ("train/bad_tokens", 2)},
    "docs/examples/filter_and_curriculum/README.md": {"examples/filter_and_curriculum": ("rollout/dropped_groups", 2)},
    "docs/examples/own_data/README.md": {"examples/own_data": ("rollout/raw_reward", 2)},
    "docs/examples/sft_then_grpo/README.md": {
        "examples/sft_then_grpo/sft": ("train/loss", 20),
        "examples/sft_then_grpo/grpo": ("rollout/raw_reward", 2),
        "examples/stages/1-grpo": ("rollout/raw_reward", 2),
    },
    "docs/examples/dpo_from_rollouts/README.md": {"examples/dpo": ("train/rewards/accuracies", 2)},
    "docs/examples/sweep/README.md": {
        "examples/lr-1e-4-seed-2": ("eval/heldout", 2),
        "examples/lr-1e-3-seed-1": ("eval/heldout", 3),
    },
    "docs/serving.md": {},
    "docs/from_bytes.md": {},
    "docs/data_formats.md": {},
    "docs/use_your_model.md": {},
    "docs/agents.md": {"examples/first_agent": ("rollout/environment/turns", 2)},
    "docs/examples/environment/README.md": {
        "examples/environment": ("rollout/environment/turns", 2),
        "examples/environment_over_http": ("rollout/environment/turns", 2),
    },
    "docs/examples/tool/README.md": {"examples/tool/rl": ("rollout/environment/tool_calls", 2)},
    "docs/examples/self_play/README.md": {"examples/self_play/rl": ("rollout/environment/winning_moves", 2)},
    "docs/lora.md": {"examples/lora": ("rollout/raw_reward", 2)},
    "docs/evaluation.md": {"examples/tasks": ("eval/sums", 3), "eval/seed-0/sft-model": ("eval/sums", 1)},
    "docs/examples/agent_program/README.md": {"examples/agent_program": ("rollout/environment/turns", 2)},
    "docs/examples/offline_rl/README.md": {"examples/offline": ("train/mismatch_k3", 2)},
}


# page -> lines that its blocks print, and that the page shows
CONTAINS: dict[str, list[str]] = {
    "docs/tutorial_reward.md": ["golden answer  the golden answer scores highest", "no faults"],
    "docs/tutorial_cluster.md": ["fits: train needs most, 11.2 of the 22.7 GB that tensors can use on a GPU"],
    "docs/tutorial_wrong_run.md": ["the right answer as the response to the first prompt gets 1.0 (label '0')"],
}


@pytest.mark.e2e
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_runs_as_pasted(page: str, after_readme: tuple[Path, str], warm: dict[str, str]) -> None:
    clone, _ = after_readme
    printed = paste(page, clone, warm)
    for run, (metric, count) in SHOWN[page].items():
        assert len(curve(clone / "runs" / run, metric)) == count
    if page == "docs/tutorial.md":
        scores = curve(clone / "runs/tutorial/rule", "eval/heldout")
        assert scores[-1] > scores[0] + 0.3, "it learns to write the steps"
    if page in CONTAINS:
        shown = (ROOT / page).read_text()
        assert [line for line in CONTAINS[page] if line not in printed or line not in shown] == []
    if page == "docs/serving.md":
        answers, at = [], printed.find("{")
        while at >= 0:  # curl ends no line, and what the model says in the terminal comes between
            answer, end = json.JSONDecoder().raw_decode(printed, at)
            answers.append(answer)
            at = printed.find("{", end)
        first, second, record, closed = answers
        assert first["choices"][0]["logprobs"]["content"][0]["logprob"] < 0
        assert len(record["turns"][0]["output_ids"]) == second["usage"]["completion_tokens"]
        assert closed["deleted"]


@pytest.mark.slow
def test_the_speedrun_runs_at_a_smaller_size(clone: Path, warm: dict[str, str]) -> None:
    """The command of the page, and again: every stage ends, and what is done is not done again."""
    (command,) = [block.text for block in blocks(ROOT / "docs/speedrun.md") if "speedrun-cpu.sh" in block.text]
    shell(command, clone, {**warm, "SIZE": "tiny"})
    run = clone / "runs" / "speedrun-tiny" / "seed-0"
    assert {path.name for path in run.glob("[0-9]-*")} == {"0-base", "1-sft", "2-rl"}
    assert (run / "report.html").is_file()
    results = (run / "results.md").read_text()
    for line in ("bits per byte of the held-out packages", "sft: questions right", "rl: sums well-formed"):
        assert line in results
    assert (clone / "data" / "speedrun-tiny" / "sources.md").read_text().count("| held_out |") > 0
    assert shell(command, clone, {**warm, "SIZE": "tiny"}).count("is finished") == 3


def test_every_page_with_a_block_to_run_has_a_test() -> None:
    pages = {str(page.relative_to(ROOT)) for page in PAGES if any(block.why is None for block in blocks(page))}
    assert pages == {"README.md", *SHOWN, *ELSEWHERE}


def test_pages_with_a_test_of_their_own_have_one() -> None:
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()


def test_a_block_that_is_not_run_says_why() -> None:
    reasons = [block.why for page in PAGES for block in blocks(page) if block.why is not None]
    assert all(len(reason.split()) >= 2 for reason in reasons)
