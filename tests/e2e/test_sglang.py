"""Whole runs of train.py on real SGLang servers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slimelite.models.checkpoints import MARKER
from slimelite.samples.table import SampleTable

from .conftest import ROOT, metrics, run_process
from .test_endings import alive, command, family, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.sglang]
SGLANG = ("--rollout-backend", "sglang", "--sglang-max-total-tokens", "16384", "--sglang-max-running-requests", "32")
# its reward is 1 for every response; in rollout 1 it first kills the process of server 0, by whose log it knows it
KILLER = """
import os, pathlib, signal

def grade(args, sample, **kwargs):
    mark, log = pathlib.Path(args.run_dir) / "killed", pathlib.Path(args.run_dir).absolute() / "logs" / "sglang_0.log"
    if sample.index >= 40 and not mark.exists():
        mark.touch()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if (process / "fd" / "1").resolve() == log:
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                pass
    return float(sample.index % 2)
"""
# on a CPU nothing is offloaded; the memory saver is that of tests/support/sglang_cpu
TAKING_TURNS = """
import dataclasses, sys
import train

parse_args = train.parse_args
train.parse_args = lambda argv, **more: dataclasses.replace(
    parse_args(argv, **more), offload_rollout=True, offload_train=True
)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("adapter", [[], ["--lora-rank", "4", "--lr", "0.1"]], ids=["weights", "adapter"])
def test_engines_and_trainer_agree_after_every_sync_when_they_take_turns(
    grpo_args: list[str], sglang_environment: dict[str, str], tmp_path: Path, adapter: list[str]
) -> None:
    """As on a shared GPU: the server releases its memory, loses what it loses there, and resumes."""
    flags = ["--launcher", "local", "--num-rollout", "4", "--ci-test", *adapter]
    done = run_process(
        sys.executable,
        "-c",
        TAKING_TURNS,
        *grpo_args,
        *SGLANG,
        *flags,
        "--run-dir",
        str(tmp_path),
        env=sglang_environment,
    )
    assert done.returncode == 0, done.stderr
    assert "Unclosed" not in done.stderr
    gaps = metrics(tmp_path, "train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 4
    assert max(gaps) < 1e-3
    log = (tmp_path / "logs" / "sglang_0.log").read_text()
    for what in ("release", "resume"):
        # before the first sync and in each rollout; the weights before a sync, the KV cache after it
        assert log.count(f'"POST /{what}_memory_occupation HTTP/1.1" 200') == {"release": 5, "resume": 10}[what]
    assert metrics(tmp_path, "perf/memory_sleep_after")
    last = SampleTable.from_parquet(next(tmp_path.rglob("rollouts/0000003.parquet")))
    assert set(last.weight_versions.tolist()) == {3}


def test_a_killed_engine_costs_nothing_but_time(
    grpo_args: list[str], sglang_environment: dict[str, str], tmp_path: Path
) -> None:
    """Two servers; one is killed while a rollout is generated."""
    run = tmp_path / "run"
    (tmp_path / "killer.py").write_text(KILLER)
    flags = ["--num-rollout", "4", "--rollout-num-gpus", "2", "--use-fault-tolerance"]
    flags += ["--rollout-health-check-interval", "2", "--custom-rm-path", f"{tmp_path}/killer.py:grade"]
    flags += ["--save-debug-rollout-data", str(tmp_path / "dump" / "{rollout_id}.parquet"), "--run-dir", str(run)]
    args = [flag for flag in grpo_args if flag != "--colocate"]
    done = run_process(sys.executable, "train.py", *args, *SGLANG, *flags, env=sglang_environment)
    assert done.returncode == 0, done.stderr
    assert (run / "killed").exists()
    deaths = metrics(run, "rollout/engine_deaths")
    assert deaths[-1] == 1
    for rollout in range(4):
        table = SampleTable.from_parquet(str(tmp_path / "dump" / f"{rollout}.parquet"))
        groups = table.group_id.tolist()
        assert len(groups) == 32
        assert all(groups.count(group) == 4 for group in set(groups))
        assert len(set(table.sample_id.tolist())) == 32
    log = (run / "logs" / "rollout.log").read_text()
    assert "engine 0 has died" in log
    assert "engine 0 has weight version" in log
    # back for the next rollout: it answers requests after its second start
    second = (run / "logs" / "sglang_0.log").read_text().split("fired up and ready")[-1]
    assert '"POST /generate HTTP/1.1" 200' in second


# samples through the address that slime's plugins post to, without a `lora_path` of its own
PLUGIN = """
from slime.rollout.sglang_rollout import generate as posts

async def generate(args, sample, sampling_params):
    return await posts(args, sample, sampling_params)
"""


def test_servers_sample_from_the_adapter_alone(
    grpo_args: list[str], sglang_environment: dict[str, str], tmp_path: Path
) -> None:
    """Both ways of requests: a plugin's through the front in training, our client's in the probe after each sync."""
    (tmp_path / "own.py").write_text(PLUGIN)
    flags = ["--launcher", "local", "--num-rollout", "3", "--check-weight-update-equal", "--lora-rank", "4"]
    flags += ["--lora-type", "rslora", "--lr", "0.1", "--custom-generate-function-path", f"{tmp_path}/own.py:generate"]
    run = tmp_path / "run"
    done = run_process(
        *(sys.executable, "train.py", *grpo_args, *SGLANG, *flags, "--run-dir", str(run)),
        env=sglang_environment,
    )
    assert done.returncode == 0, done.stderr
    gaps = metrics(run, "train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 3
    assert max(gaps) < 1e-3
    assert max(metrics(run, "perf/update_weights_logprob_abs_diff")) < 1e-3
    # the adapter is far from 0, so that requests without it would show
    assert max(metrics(run, "train/grad_norm")) > 0
    log = (run / "logs" / "sglang_0.log").read_text()
    assert log.count('"POST /load_lora_adapter_from_tensors HTTP/1.1" 200') == 4
    assert log.count('"POST /unload_lora_adapter HTTP/1.1" 200') == 3
    assert "update_weights_from" not in log
    sent = metrics(run, "perf/update_weights_bytes")
    assert max(sent) < 100_000


def server_process(process: subprocess.Popen[str], what: str) -> psutil.Process:
    """That of the run's one server whose command line begins with ``what``, or names its module."""
    (found,) = [each for each in family(process) if command(each).startswith(what)]
    return found


@pytest.mark.slow
@pytest.mark.chaos(
    "the only SGLang server: its front and its scheduler killed and stopped",
    "named if stopped; it comes back with the current weights, and the run finishes",
)
@pytest.mark.parametrize("ahead", [[], ["--async-rollout"]], ids=["synchronous", "ahead"])
def test_the_only_server_killed_and_stopped_comes_back_alone(
    grpo_args: list[str], sglang_environment: dict[str, str], tmp_path: Path, ahead: list[str]
) -> None:
    """Its front and its scheduler, one after the other, without a flag; ahead of training the run is started again."""
    run, args = tmp_path / "run", [flag for flag in grpo_args if flag != "--colocate" or not ahead]
    flags = ["--num-rollout", "40", "--hang-timeout", "15", "--run-dir", str(run), "--save", str(tmp_path / "saved")]
    flags += ["--save-interval", "1", "--max-restarts", "8", "--rollout-max-response-len", "64", *ahead]
    process = subprocess.Popen(
        [sys.executable, "train.py", *args, *SGLANG, *flags],
        cwd=ROOT,
        env={name: value for name, value in sglang_environment.items() if not name.startswith("RAY_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    marker, members = tmp_path / "saved" / MARKER, set[psutil.Process]()

    def await_more(rollouts: int) -> None:
        """Until so many more rollouts are in the newest checkpoint."""
        before = int(marker.read_text()) if marker.is_file() else -1
        wait_until(lambda: marker.is_file() and int(marker.read_text()) >= before + rollouts, process, 400)

    front = f"{sys.executable} -m slimelite.engines.sglang.server"
    for what, number in [(what, n) for n in (signal.SIGKILL, signal.SIGSTOP) for what in ("sglang::scheduler", front)]:
        await_more(2)
        members |= set(family(process)[1:])
        server_process(process, what).send_signal(number)
        began = time.monotonic()
        await_more(3)  # one may have been under way
        print(f"{what} {number!r}: three more rollouts are saved {time.monotonic() - began:.0f} s later")
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out
    assert "Traceback" not in out
    starts, deaths = out.count("train.py: start "), metrics(run, "rollout/engine_deaths")[-1]
    print(f"{starts} restarts, {deaths} deaths in the last start\n{out[-3000:]}")
    assert starts == 0 or ahead
    assert deaths == 4 or ahead
    assert len(metrics(run, "train/loss")) == 40
    assert len(re.findall(r"process \d+ on \S+ \(.{10,80}\) was stopped for \d+\.\d s \(SIGSTOP\)", out)) == 2
    assert alive(list(members)) == []
