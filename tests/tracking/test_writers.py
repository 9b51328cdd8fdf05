from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from fake_run import make_args, play

from slimelite.tracking.metrics_file import read_metrics
from slimelite.tracking.writers import (
    PrometheusWriter,
    WandbWriter,
    open_writers,
    prometheus_run_name,
    tensorboard_directory,
)

BLOCK = 32768


def wandb_records(root: Path) -> list[Any]:
    """The protobuf records of the offline run under ``root``: wandb keeps them in LevelDB's log format."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # waits for wandb's process, which writes the file after `finish` has returned
    (path,) = root.glob("wandb/offline-run-*/run-*.wandb")
    raw, position, whole, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(raw):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        length, kind = struct.unpack("<xxxxHB", raw[position : position + 7])
        whole += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


INTERRUPTED = """
import os, signal, sys
from fake_run import make_args
from slimelite.base.lifecycle import StopSignals, Watchdog
from slimelite.tracking.tracker import Tracker
args = make_args(sys.argv[1], use_wandb=True, wandb_mode="offline")
with StopSignals() as stop, Watchdog(args.run_dir), Tracker(args):
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(stop.status)
"""


def test_ctrl_c_with_wandb_is_no_traceback(tmp_path: Path) -> None:
    """The watchdog ends what the run has started, wandb's process too, which wandb must not miss then."""
    search = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    assert [r.exit.exit_code for r in wandb_records(tmp_path) if r.HasField("exit")] == [1]


# its process is stopped after the first step, which the thread that looks for hangs sees, and killed after the second
TROUBLED = """
import logging, os, signal, sys, time
for name in [name for name in os.environ if name.startswith("WANDB_")]:
    del os.environ[name]  # an earlier test's process of wandb would be used
import psutil
from fake_run import make_args
from slimelite.cluster.hangs import Monitor
from slimelite.tracking.writers import open_writers
logging.basicConfig()
writers = open_writers(make_args(sys.argv[1], use_wandb=True, wandb_mode="offline"), {})
(core,) = [each for each in psutil.Process().children(recursive=True) if "wandb-core" in each.name()]
for step in range(5):
    for writer in writers:
        writer.write("rollout", {"rollout/step": step, "rollout/raw_reward": 0.5})
    if step == 0:
        with Monitor(0.5):
            core.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 120
            time.sleep(0.1)
            while core.status() == psutil.STATUS_STOPPED and time.monotonic() < deadline:
                time.sleep(0.02)
    if step == 1:
        core.kill()
        psutil.wait_procs([core], 10)
for writer in writers:
    writer.close(False)
"""


@pytest.mark.chaos(
    "wandb's process stopped, then killed",
    "continued with a warning, then the run goes on without wandb, with one message",
)
def test_a_run_continues_wandb_if_it_is_stopped_and_goes_on_without_it_if_it_dies(tmp_path: Path) -> None:
    search = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", TROUBLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(
        r"process \d+ on \S+ \(.*wandb-core.*\) was stopped for \d+ s \(SIGSTOP\) and runs again", done.stderr
    )
    assert done.stderr.count("wandb failed (ConnectionResetError: ") == 1
    steps = [record["rollout/step"] for record in read_metrics(tmp_path) if "rollout/raw_reward" in record]
    assert steps == [0, 1, 2, 3, 4]


def test_wandb_offline_holds_every_metric_on_its_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HF_TOKEN": "secret-" * 6}
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.5", "--train-env-vars", json.dumps(variables)])
    args = make_args(
        tmp_path,
        use_wandb=True,
        wandb_mode="offline",
        wandb_project="sums",
        wandb_team="us",
        wandb_group="grpo",
        wandb_key="secret-" * 6,
        train_env_vars=variables,
        wandb_host="https://wandb.example.com",
    )
    play(args, range(2))
    records = wandb_records(tmp_path)
    (run,) = {r.run.run_id: r.run for r in records if r.HasField("run")}.values()
    assert (run.project, run.entity, run.display_name) == ("sums", "us", run.run_group)
    assert run.run_group.startswith("grpo_")
    assert {i.key: i.value_json for i in run.config.update}["rollout_batch_size"] == "4"
    metrics = {m.glob_name or m.name: m.step_metric for r in records if r.HasField("metric") for m in [r.metric]}
    assert metrics["train/*"] == "train/step"
    assert metrics["eval/*"] == "eval/step"
    assert metrics["rollout/*"] == metrics["perf/*"] == metrics["passrate/*"] == "rollout/step"
    history = [
        {i.key or i.nested_key[0]: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(h["train/step"], h["train/loss"]) for h in history if "train/loss" in h] == [(0, -0.01), (1, -0.005)]
    assert [(h["eval/step"], h["eval/sums"]) for h in history if "eval/sums" in h] == [(-1, 0.1), (1, 0.35)]
    assert [h["rollout/step"] for h in history if "perf/step_time" in h] == [0, 1]
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]
    environments = [r.environment for r in records if r.HasField("environment")]
    assert ["--lr", "0.5", "--train-env-vars", "***"] in [list(e.args) for e in environments]
    leaks = [p for p in tmp_path.rglob("*") if p.is_file() and b"secret-secret" in p.read_bytes()]
    assert leaks == [], "the API key is in a file"


def test_wandb_of_a_resumed_run_goes_on_under_its_id(tmp_path: Path) -> None:
    args = make_args(tmp_path, use_wandb=True, wandb_mode="offline", wandb_group="g", num_steps_per_rollout=3)
    args_by_step = replace(args, wandb_always_use_train_step=True)
    ids = []
    for run_args in (args, args_by_step):
        writer = WandbWriter(run_args, {})
        ids.append((writer._run.id, writer._run.group))
        writer.write("rollout", {"rollout/step": 2, "rollout/raw_reward": 1.0})
        summary = dict(writer._run.summary)
        writer.close(False)
    assert ids[0] == ids[1]
    assert summary["rollout/step"] == 6, "--wandb-always-use-train-step: three optimizer steps a rollout"


def test_wandb_without_a_key_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "WANDB_CONFIG_DIR": tmp_path / "wandb"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"^--use-wandb: .*\n?.*`wandb login`.*--wandb-mode offline"):
        WandbWriter(make_args(tmp_path, use_wandb=True, wandb_mode="online"), {})


def test_wandb_disabled_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    writers = open_writers(make_args(tmp_path, use_wandb=True, wandb_mode="disabled"), {})
    assert [writer.name for writer in writers] == ["metrics"]
    writers[0].close(False)


def test_tensorboard_holds_every_metric_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    play(make_args(tmp_path, use_tensorboard=True), range(4))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert values["eval/sums"] == [(-1, 0.1), (1, 0.35), (3, 0.65)]
    assert [step for step, _ in values["train/loss"]] == [0, 1, 2, 3]
    assert [step for step, _ in values["perf/step_time"]] == [0, 1, 2, 3]
    assert "rollout/step" not in values


def test_where_tensorboard_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    run = make_args(Path("runs/x"), tb_project_name="sums", tb_experiment_name="first")
    assert tensorboard_directory(run) == Path("runs/x/tensorboard/sums/first")
    monkeypatch.setenv("TENSORBOARD_DIR", "/logs")
    assert tensorboard_directory(run) == Path("/logs/sums/first")
    assert tensorboard_directory(make_args(Path("runs/x"), tensorboard_dir="here")) == Path("here")


def scraped(writer: PrometheusWriter) -> list[str]:
    with urlopen(writer.where, timeout=600) as answer:
        text: str = answer.read().decode()
    return [line for line in text.splitlines() if not line.startswith("#") and "_seconds" not in line]


def test_prometheus_tells_metrics_apart_whose_names_it_does_not_allow(tmp_path: Path) -> None:
    args = make_args(tmp_path / "a", use_prometheus=True, prometheus_port=0)
    writer = PrometheusWriter(args)
    try:
        assert len(scraped(writer)) == 1, "the run alone, before the first metric"
        writer.write("eval", {"eval/a-pass@2": 0.5, "eval/a_b": 1, "eval/a-b": float("nan"), "rollout/step": 3})
        assert scraped(writer)[1:] == [
            'slimelite_eval_a_pass_at_2{metric="eval/a-pass@2",run_name="a"} 0.5',
            'slimelite_eval_a_b{metric="eval/a_b",run_name="a"} 1.0',
            'slimelite_eval_a_b{metric="eval/a-b",run_name="a"} NaN',
            'slimelite_rollout_step{metric="rollout/step",run_name="a"} 3.0',
        ]
        taken = replace(args, prometheus_port=int(writer.where.split(":")[-1].partition("/")[0]))
        with pytest.raises(ValueError, match=r"^--prometheus-port: 127.0.0.1:\d+ is taken: name another port, or 0"):
            PrometheusWriter(taken)
        with pytest.raises(ValueError, match=r"^--prometheus-host, --prometheus-port: cannot listen on 203.0.113.1:0"):
            PrometheusWriter(replace(args, prometheus_host="203.0.113.1"))
    finally:
        writer.close(False)


def test_what_a_run_is_called_in_prometheus(tmp_path: Path) -> None:
    args = make_args(tmp_path / "a")
    assert prometheus_run_name(args) == "a"
    assert prometheus_run_name(replace(args, wandb_group="b")) == "b"
    assert prometheus_run_name(replace(args, wandb_group="b", prometheus_run_name="c")) == "c"
