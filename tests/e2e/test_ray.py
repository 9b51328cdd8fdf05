"""Whole runs of train.py on Ray actors."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.base.traces import assert_laid_out, spans

from .conftest import ROOT, metrics, run_process

pytestmark = pytest.mark.e2e


def test_grpo_learns(grpo_args: list[str], task: Path, tmp_path: Path) -> None:
    """One trainer, one engine, the rollout manager: reward up, and every tracker has it."""
    flags = [
        "--num-rollout",
        "12",
        "--rollout-batch-size",
        "16",
        "--n-samples-per-prompt",
        "8",
        "--lr-warmup-iters",
        "2",
    ]
    watched = [
        "--eval-interval",
        "12",
        "--eval-prompt-data",
        "heldout",
        str(task / "heldout.parquet"),
        "--eval-top-k",
        "1",
    ]
    trackers = [
        "--trace",
        "--use-wandb",
        "--wandb-mode",
        "offline",
        "--use-tensorboard",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = run_process(sys.executable, "train.py", *grpo_args, *flags, *watched, *trackers)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    rewards = metrics(run, "rollout/raw_reward")
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    before, after = metrics(run, "eval/heldout")
    assert after > before + 0.15
    assert max(metrics(run, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert list(run.rglob("*.wandb"))
    bars = spans((run / "trace.json").read_text())
    assert_laid_out(bars)
    assert {("engine_0", "generate_batch"), ("trainer_0", "push_weights"), ("engine_0", "load_weights")} <= {
        (bar["worker"], bar["name"]) for bar in bars
    }
    # clocks agree: an engine generates within the call that the rollout's side waits for
    outer = [bar for bar in bars if bar["worker"] == "rollout" and bar["name"] in ("generate", "evaluate")]
    for inner in (bar for bar in bars if (bar["worker"], bar["name"]) == ("engine_0", "generate_batch")):
        assert any(o["ts"] < inner["ts"] and inner["ts"] + inner["dur"] < o["ts"] + o["dur"] + 1e4 for o in outer)
    assert list(run.rglob("events.out.tfevents.*"))
    assert (run / "curves.png").stat().st_size > 1000
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    # Ray's and the engines' noise is in the run folder
    assert "(pid=" not in done.stdout + done.stderr
    assert (run / "logs" / "engine_0.log").is_file()


def gsm8k_script(grpo_args: list[str], task: Path, run: Path) -> tuple[list[str], dict[str, str]]:
    """slime's arrays with everything that is about the real model overridden on the command line, and environment."""
    model = grpo_args[grpo_args.index("--hf-checkpoint") + 1]
    config = json.loads((Path(model) / "config.json").read_text())
    (task / "test.parquet").write_bytes((task / "heldout.parquet").read_bytes())
    architecture = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--num-query-groups": config["num_key_value_heads"],
        "--norm-epsilon": config["rms_norm_eps"],
        "--rotary-base": config["rope_parameters"]["rope_theta"],
        "--vocab-size": config["vocab_size"],
    }
    flags = [str(part) for pair in architecture.items() for part in pair]
    small = (
        "--rm-type gsm8k --num-rollout 1 --rollout-batch-size 2 --over-sampling-batch-size 4 --n-samples-per-prompt 4 "
        "--global-batch-size 8"
    )
    lengths = "--rollout-max-response-len 32 --eval-max-response-len 32 --skip-eval-before-train"
    env = {
        "MODEL": model,
        "DATA": str(task),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WANDB_API_KEY": "",
    }
    script = ["bash", "scripts/test-qwen2.5-0.5B-gsm8k.sh", *flags, *small.split(), *lengths.split()]
    return [*script, "--run-dir", str(run)], env


def test_the_gsm8k_script_starts_its_own_head_and_submits(grpo_args: list[str], task: Path, tmp_path: Path) -> None:
    script, env = gsm8k_script(grpo_args, task, tmp_path / "run")
    done = run_process(*script, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(metrics(tmp_path / "run", "train/loss")) == 1
    assert "succeeded" in done.stdout + done.stderr
    log = done.stdout.split("(log: ")[1].split(")")[0]
    assert "Authentication" not in done.stderr
    assert "SIGTERM" in Path(log).read_text()  # the head it started, it stopped


def test_the_gsm8k_script_submits_to_the_head_that_ray_address_names(
    grpo_args: list[str], task: Path, tmp_path: Path
) -> None:
    """Another program stands in for Ray, and notes what it is told."""
    script, env = gsm8k_script(grpo_args, task, tmp_path / "run")
    (tmp_path / "ray").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{tmp_path}/told"\n')
    (tmp_path / "ray").chmod(0o755)
    # in an environment that is active, the script's own .venv does not come first
    here = {"PATH": f"{tmp_path}:{env['PATH']}", "VIRTUAL_ENV": sys.prefix, "RAY_ADDRESS": "http://10.0.0.1:8265"}
    done = run_process(*script, env={**env, **here})
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text().splitlines()
    assert told[:5] == ["job", "submit", "--address", "http://10.0.0.1:8265", "--"]
    assert told[-2:] == ["--run-dir", str(tmp_path / "run")]
    assert str(ROOT / "train.py") in told
    assert told.count("job") == 2, "the other one is the name of the job's shell"


def test_a_head_that_takes_no_jobs_is_waited_for_aloud_and_not_for_ever(tmp_path: Path) -> None:
    """Another program stands in for Ray: its head lives, and no job is taken. Bash's clock runs ahead in each pause."""
    (tmp_path / "ray").write_text('#!/bin/sh\n[ "$1" = job ] && { echo "not yet"; exit 1; }\nexec sleep 600\n')
    (tmp_path / "ray").chmod(0o755)
    words = "source scripts/lib/submit.sh; sleep() { SECONDS=$((SECONDS + 31)); }; start_head"
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run_process("bash", "-c", words, env={"PATH": path, "VIRTUAL_ENV": sys.prefix})
    assert done.returncode == 1
    assert done.stdout.count("waiting for the Ray head to take jobs") > 3
    assert "takes no jobs: not yet; its log:" in done.stderr


def test_a_job_for_a_head_that_runs_already_and_its_end(grpo_args: list[str], tmp_path: Path) -> None:
    """As users type it: ``ray start --head``, ``ray job submit --working-dir . -- python train.py``, and a stop."""
    head, run = tmp_path / "head.sh", tmp_path / "stopped"
    endless = [sys.executable, "train.py", *grpo_args, "--num-rollout", "9999", "--run-dir", str(run)]
    head.write_text(
        "set -eu\nsource scripts/lib/submit.sh\nstart_head\n"
        'ray job submit --no-wait --submission-id stopped --address "$RAY_ADDRESS" --working-dir . -- '
        f"{shlex.join(endless)}\n"
        f"while ! [ -f {run / 'rollouts' / '0000001.parquet'} ]; do sleep 0.1; done\n"
        "ray job stop stopped\n"
        "ray job logs stopped\n"
        # without the token the same cluster refuses
        'if RAY_AUTH_TOKEN=wrong ray job list --address "$RAY_ADDRESS" >/dev/null 2>&1; then exit 7; fi\n'
    )
    done = run_process("bash", str(head), env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(metrics(run, "train/loss")) >= 1
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["message"]) == ("interrupted", "SIGTERM")
    assert "SIGTERM: the run is shutting down" in done.stdout
    assert (run / "curves.png").is_file()
