"""A step of training on fake CUDA tensors: right devices, right dtypes, and the memory that the shapes say.

The product's own `Trainer` runs in a process that believes in a GPU (see `fake_cuda`). What it finds is right or wrong
by `problems`; mistakes that are planted there must be among them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch

from slimelite.plan.memory import Load, Shapes, total

ROOT = Path(__file__).parents[2]
# all on 8 ranks; of those with tied and those with other weights at their ends, one on 1 rank and one on 64
RANKS = {"0.5B": (1, 8), "4B": (8, 64), "7B": (1, 8), "32B": (8, 64)}
RUNS: dict[str, dict[str, Any]] = {
    f"{shape} on {ranks}": {"shape": shape, "ranks": ranks, "rank": 63 if ranks == 64 else 0, "again": ranks == 8}
    for shape, worlds in RANKS.items()
    for ranks in worlds
}
CRITIC = {"advantage_estimator": "ppo", "use_critic": True, "critic_lr": 1e-5}
FEATURES: dict[str, dict[str, Any]] = {
    "checkpointing, entropy": {
        "shape": "4B",
        "ranks": 8,
        "again": True,
        "gradient_checkpointing": True,
        "entropy_coef": 0.01,
    },
    "selective recomputation": {
        "shape": "4B",
        "ranks": 8,
        "again": True,
        "gradient_checkpointing": True,
        "recompute_granularity": "selective",
    },
    "shared prompts": {
        "shape": "0.5B",
        "ranks": 8,
        "layers": 1,
        "shared": True,
        "gradient_checkpointing": True,
        "recompute_granularity": "selective",
    },
    "replicas": {"shape": "0.5B", "ranks": 64, "rank": 9, "dp_replicate_size": 8},
    "reference updated": {"shape": "0.5B", "ranks": 8, "layers": 1, "ref_update_interval": 1},
    "fsdp cpu offload": {"shape": "0.5B", "ranks": 8, "again": True, "fsdp_cpu_offload": True},
    "muon": {"shape": "0.5B", "ranks": 8, "optimizer": "muon"},
    "two reductions": {"shape": "7B", "ranks": 8, "again": True, "reduce_once_a_step": False},
    "critic": {"shape": "0.5B", "ranks": 8, "again": True, **CRITIC},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapters": {"shape": "7B", "ranks": 8, "again": True, "lora_rank": 16},
    "adapters, critic": {"shape": "0.5B", "ranks": 8, "again": True, "lora_rank": 16, **CRITIC},
}
OTHER_STATE = {"critic": "two", "fsdp cpu offload": "on the host"}
# mistake -> what is said of it
FAULTS = {
    "column left on the host": "two devices, cpu and cuda:0",
    "fp32 compute": "matrix products in other dtypes",
    "attention of CPUs": "no varlen_attn",
    "logits rounded to bf16": "no fp32 logits",
    "weights gathered in fp32": "weights for engines travel in",
    "offload forgotten": "while offloaded",
    "moments not offloaded": "while offloaded",
    "pageable memory": "0 MB of pinned host memory",
    "fresh memory": "the second offload takes more",
    "gradients kept": "between steps",
}
PRODUCTS = {
    "mm bfloat16 -> bfloat16",
    "addmm bfloat16 -> bfloat16",
    "mm bfloat16 -> float32",
    "_varlen_attn bfloat16 -> float32",
    "_varlen_attn_backward bfloat16 -> bfloat16",
    "bmm float32 -> float32",  # angles of the rotary embedding
}
MB = 10**6


def problems(found: dict[str, Any], ranks: int, *, optimizer: str = "adamw") -> list[str]:
    """What is wrong with a run of so many ranks, in words."""
    if "error" in found:
        return [found["error"]]
    wrong = []
    allowed = PRODUCTS | ({"baddbmm float32 -> float32"} if optimizer == "muon" else set())
    if others := found["products"].keys() - allowed:
        wrong.append(f"matrix products in other dtypes: {others}")
    if not found["products"].get("mm bfloat16 -> float32"):
        wrong.append("no fp32 logits")
    if not found["products"].get("_varlen_attn bfloat16 -> float32"):
        wrong.append("no varlen_attn")
    expected = found["state"] if optimizer != "on the host" else 0
    # fp32 weights and AdamW's two moments; Muon and a critic have others
    if optimizer == "adamw" and not 12 * found["shard"] <= expected <= 12.1 * found["shard"] + MB:
        wrong.append(f"{expected / MB:.0f} MB of weights and moments, not {12 * found['shard'] / MB:.0f}")
    for moment in ("resting", "onloaded"):
        if not expected <= found[moment] <= 1.01 * expected + MB:
            wrong.append(f"{found[moment] / MB:.0f} MB between steps ({moment}), not {expected / MB:.0f}")
    for moment in ("offloaded_first", "offloaded", "after_push"):
        if found[moment] > MB:
            wrong.append(f"{found[moment] / MB:.0f} MB while offloaded ({moment})")
    if found["pinned"] < expected:
        wrong.append(f"{found['pinned'] / MB:.0f} MB of pinned host memory")
    if found["pinned_later"] != found["pinned"]:
        wrong.append("the second offload takes more host memory")
    if found["pushed"] != 2 * found["parameters"]:
        wrong.append(f"{found['pushed']:.0f} bytes pushed")
    if ranks > 1:
        gathered = {name for name in found["sent"] if name.startswith("allgather")}
        reduced = {name for name in found["sent"] if name.startswith("reduce_scatter")}
        if (gathered, reduced) != ({"allgather_base bfloat16"}, {"reduce_scatter_base float32"}):
            wrong.append(f"a step gathers {gathered} and reduces {reduced}")
        reductions = found["sent"].get("reduce_scatter_base float32", 0) / (4 * found["parameters"])
        if not 1 <= reductions < 1.05:
            wrong.append(f"{reductions:.2f} gradient reductions a step of two micro-batches")
        if found["push_sent"] != {"all_gather_into_tensor bfloat16": 2 * found["parameters"]}:
            wrong.append(f"weights for engines travel in {found['push_sent']}")
    return wrong


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was found of each run, by name; half of them in each of two processes."""
    if shutil.which("g++") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no C++ compiler (g++) for the device guard")
    if torch.version.cuda is not None:
        pytest.skip("this torch has the device guard and hooks of real GPUs")
    guard = str(fake_cuda.build(tmp_path_factory.mktemp("guard")))
    faulty = {name: {"shape": "0.5B", "ranks": 8, "layers": 1, "plant": name} for name in FAULTS}
    runs = list((RUNS | FEATURES | ADAPTERS | faulty).items())
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LD_PRELOAD": guard}
    processes = []
    for part in (runs[::2], runs[1::2]):
        script = str(Path(__file__).with_name("simulate.py"))
        command = [sys.executable, script, json.dumps([case for _, case in part])]
        processes.append((part, subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)))
    found = {}
    for part, process in processes:
        lines = process.communicate(timeout=580)[0].splitlines()
        assert process.returncode == 0, "see stderr"
        found |= {name: json.loads(line) for (name, _), line in zip(part, lines, strict=True)}
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_step_runs_on_its_device_in_its_dtypes_and_its_memory(simulated: dict[str, Any], name: str) -> None:
    assert problems(simulated[name], RUNS[name]["ranks"]) == []


@pytest.mark.parametrize("name", FEATURES)
def test_features_run_on_their_device(simulated: dict[str, Any], name: str) -> None:
    optimizer = FEATURES[name].get("optimizer", OTHER_STATE.get(name, "adamw"))
    found = problems(simulated[name], FEATURES[name]["ranks"], optimizer=optimizer)
    twice = {"critic", "two reductions"}  # two models, or two micro-batches
    expected = ["2.00 gradient reductions a step of two micro-batches"] if name in twice else []
    assert found == expected


@pytest.mark.parametrize("name", [name for name, run in (RUNS | FEATURES | ADAPTERS).items() if run.get("again")])
def test_the_estimate_of_memory_is_that_of_a_step(simulated: dict[str, Any], name: str) -> None:
    """That by which gradient checkpointing is chosen; micro-batches have 960 tokens."""
    run, found = (RUNS | FEATURES | ADAPTERS)[name], simulated[name]
    shapes = Shapes.of(fake_cuda.model_config(run["shape"], 2))
    assert shapes is not None
    load = Load(
        shapes,
        960,
        shards=run["ranks"],
        checkpointing=run.get("gradient_checkpointing", False),
        selective=run.get("recompute_granularity") == "selective",
        whole_grads=run.get("reduce_once_a_step", True),
        on_host=run.get("fsdp_cpu_offload", False),
        lora=shapes.adapter(16) if "lora_rank" in run else 0,
        critic=0 if "use_critic" in run else None,
        others=0 if "lora_rank" in run else 1,
        targets=768,
    )
    peaks = found["peaks"]
    assert found["parameters"] == shapes.parameters
    assert total(load.state()) == pytest.approx(found["resting"], rel=0.01, abs=MB)
    assert total(load.train()) == pytest.approx(max(peaks["actor_train"], peaks.get("critic_train", 0)), rel=0.1)
    assert total(load.log_probs()) == pytest.approx(peaks["ref_log_probs"], rel=0.1)
    for critic in load.learners[1:]:
        beside = total(load.state()) - total(critic.state())
        assert total(critic.train()) + beside == pytest.approx(peaks["critic_train"], rel=0.1)


def test_what_ranks_send_from_is_freed_after_each_reduction(simulated: dict[str, Any]) -> None:
    outer = 2 * 152064 * 3584
    assert simulated["7B on 8"]["peak"] - simulated["two reductions"]["peak"] > 4 * outer


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_mistake_is_found(simulated: dict[str, Any], fault: str) -> None:
    found = problems(simulated[fault], 8)
    assert any(FAULTS[fault] in problem for problem in found), found
