"""What a start on Ray costs, in processes and in modules: each worker imports what its role needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.test_local import ROOT, tiny_flags

PROGRAM = """
import gc, json, sys, psutil, ray
from slimelite.arguments import parse_args
from slimelite.cluster import launch
from slimelite.preflight import preflight, problems
from slimelite.tracking.tracker import Tracker

HEAVY = ("torch", "torch._dynamo", "sympy", "accelerate", "matplotlib", "pandas", "wandb", "aiohttp")
USUAL = gc.get_threshold()

def loaded(_=None):
    assert gc.get_threshold() == USUAL, "objects are collected as usual once a process has loaded"
    return sorted(set(HEAVY) & set(sys.modules))

args = parse_args(sys.argv[1:], inspect=problems)
assert preflight(args) == 0
with Tracker(args) as tracker, launch(args) as cluster:
    cluster.sync(0).result()
    rollout = cluster.generate(0).result()
    tracker.log_rollout(0, rollout.table, rollout.metrics)
    tracker.log_train(0, *cluster.train(0, rollout.table).result())
    workers = [cluster._rollout, *cluster._engines, *cluster._trainers]
    modules = {w.name: ray.get(w.handle.__ray_call__.remote(loaded)) for w in workers} | {"train.py": loaded()}
    commands = [" ".join(p.cmdline()[:3]) for p in psutil.Process().children(recursive=True)]
print(json.dumps([modules, commands, rollout.metrics, rollout.table.reward.tolist()]))
"""
AGENT = """
import json, os, sys, urllib.request

row = json.loads(sys.stdin.readline())
body = json.dumps({"model": "any", "prompt": row["prompt"][0]["content"], "max_tokens": 4, "logprobs": 0}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(
    urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
) as answer:
    log_probs = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
print(json.dumps({"reward": sum(log_probs)}))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, *command],
        env=env | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_each_role_imports_its_own_and_ray_starts_what_is_needed(tmp_path: Path) -> None:
    """The run trains a program, which is answered by an engine in another process."""
    (tmp_path / "agent.py").write_text(AGENT)
    flags = tiny_flags(tmp_path, "--launcher", "ray", "--colocate", "--rollout-batch-size", "2")
    agent = ("--agent-command", f"{sys.executable} {tmp_path / 'agent.py'}", "--n-samples-per-prompt", "2")
    done = run("-c", PROGRAM, *flags, *agent, "--rollout-max-response-len", "4")
    assert done.returncode == 0, done.stderr
    modules, commands, metrics, rewards = json.loads(done.stdout.splitlines()[-1])
    assert (metrics["rollout/environment/turns"], metrics["rollout/environment/errors"]) == (1, 0)
    assert len(rewards) == 4
    assert all(-40 < reward < 0 for reward in rewards)
    assert {*modules["train.py"], *modules["rollout"]} <= {"aiohttp"}  # for the program's requests
    assert "torch" in modules["engine_0"]
    assert "torch" in modules["trainer_0"]
    assert not {"pandas", "wandb", "matplotlib", "aiohttp"} & {*modules["engine_0"], *modules["trainer_0"]}
    assert sum("ray::" in command and "Agent" not in command for command in commands) == 3, commands
    needless = ("log_monitor.py", "monitor.py", "dashboard.py", "ray::IDLE")
    assert not [command for command in commands if any(name in command for name in needless)]
    assert any("gcs_server" in command for command in commands)


def test_what_is_wrong_with_a_model_is_one_line_of_the_first_trainers(tmp_path: Path) -> None:
    """It is nothing that shows without torch, which train.py's process lacks; the engine, which stumbles over it too,
    stays silent.
    """
    flags = tiny_flags(tmp_path, "--launcher", "ray", "--colocate", "--rollout-batch-size", "2")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": {"rope_type": "nope"}}))
    done = run("train.py", *flags, "--rollout-max-response-len", "4")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("train.py: warning")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(
        f"train.py: --hf-checkpoint {tmp_path / 'model'}: the installed transformers cannot build a"
    )
    assert lines[0].endswith("compare it with the original, or use another model")
