"""What GPUs, their driver and a build of torch can do is said before anything loads; stand-ins answer for all three."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from arguments.conftest import COMPLETE

from slimelite.arguments import make_args
from slimelite.cluster.workers import EngineFactory, make_trainer
from slimelite.plan.devices import GENERATIONS, Machine, generation, gpus, this_machine
from slimelite.preflight import check_devices, check_torch
from slimelite.preflight.findings import Findings

Said = Callable[..., Findings]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What is found of one GPU and a build of torch; ``begins``: why CUDA does not, or True."""

    def inspect(
        capability: tuple[int, int] | None = (9, 0),
        driver: str | None = "580.65.06",
        words: str = "",
        cuda: str | None = "13.0",
        kernels: str = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
        begins: str | bool = True,
    ) -> Findings:
        def init() -> None:
            if begins is not True:
                raise RuntimeError(begins)

        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: begins is True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability or (7, 5))
        monkeypatch.setattr(torch.cuda, "get_arch_list", kernels.split)
        machine = Machine(1, True, 8 * 10**10, None, capability, driver)
        args = make_args([*COMPLETE.split(), "--colocate", *words.split()], machine=machine)
        findings = Findings()
        check_devices(args, machine, findings)
        if not findings.problems:
            check_torch(args, machine, findings)
        return findings

    return inspect


@pytest.mark.parametrize("old", [(6, 1), (7, 0), (7, 5)])
def test_gpus_without_bf16_and_flash_attention_are_refused(said: Said, old: tuple[int, int]) -> None:
    (problem,) = said(old).problems
    assert f"compute capability {old[0]}.{old[1]} ({generation(old).name}" in problem
    assert "use GPUs of 8.0 or newer (A100, A10G, RTX 30), or --device cpu" in problem
    (later,) = said(None).problems  # an old nvidia-smi did not say it, and torch does
    assert "7.5 (Turing: T4, RTX 20)" in later
    assert said(old, words="--actor-num-nodes 2").problems == []  # the GPUs may be on other nodes


def test_each_worker_of_a_cluster_checks_the_gpus_of_its_machine(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that submits a run does not have the GPUs, so its checks find nothing."""
    old = Machine(1, True, capability=(7, 5), driver="535.104.05")
    args = make_args([*COMPLETE.split(), "--colocate", "--rollout-backend", "sglang"], machine=old)
    workers: list[Callable[[], object]] = [partial(make_trainer, args), partial(EngineFactory(args).server, 0)]
    embedded = make_args([*COMPLETE.split(), "--colocate", "--rollout-backend", "embedded"], machine=old)
    workers.append(partial(EngineFactory(embedded).engine, 0))
    said((7, 5))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    findings = Findings()
    check_devices(args, old, findings)
    check_torch(args, old, findings)
    assert findings.problems == []
    monkeypatch.setattr("slimelite.plan.cuda.this_machine", lambda: old)
    for worker in workers:
        with pytest.raises(ValueError, match=r"^[^\n]*: --device cuda: GPUs of compute capability 7\.5 [^\n]*$"):
            worker()
    said(begins="The NVIDIA driver on your system is too old")
    with pytest.raises(ValueError, match=r"the driver is 535\.104\.05, and CUDA 13\.0 of torch"):
        make_trainer(args)


@pytest.mark.parametrize("new", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_runs_on_newer_ones_is_a_fact(said: Said, new: tuple[int, int]) -> None:
    found = said(new)
    assert found.problems == []
    assert any(f"{new[0]}.{new[1]} (" in fact and "FlashAttention 2 in the trainer" in fact for fact in found.facts)


@pytest.mark.parametrize(("engine", "named"), [("sglang", True), ("embedded", False)])
def test_the_attention_of_an_engine_that_is_not_there_is_no_fact(engine: str, named: bool) -> None:
    machine, findings = Machine(8, True, 80 * 2**30, gpus()["h100"], (9, 0)), Findings()
    words = f"--colocate --dry-run --plan-gpu h100:8 --rollout-backend {engine}"
    check_devices(make_args([*COMPLETE.split(), *words.split()], machine=machine), machine, findings)
    assert any("FlashAttention 2 in the trainer" in fact for fact in findings.facts)
    assert any("SGLang" in fact for fact in findings.facts) is named


def test_planned_gpus_are_refused_as_those_that_are_here() -> None:
    """Every GPU of the list, on a machine without one."""
    for name, device in gpus().items():
        machine = Machine(8, True, device.bytes, device, device.capability)
        words = f"--colocate --dry-run --plan-gpu {name}:8"
        findings = Findings()
        check_devices(make_args([*COMPLETE.split(), *words.split()], machine=machine), machine, findings)
        assert bool(findings.problems) is (name in ("t4", "v100")), name


TWO = "--actor-num-nodes 2 --actor-num-gpus-per-node 8"
SHORT = (
    "the 2 node(s) of --plan-gpu h100:8 have 16: give --colocate, or lower --rollout-num-gpus or the GPUs of training"
)


@pytest.mark.parametrize(
    ("plan", "words", "says"),
    [
        ("h100:4", f"--colocate {TWO}", "--actor-num-gpus-per-node 8: a node of --plan-gpu h100:4 has 4 GPU(s)"),
        ("h100:4", "--colocate --actor-num-gpus-per-node 8", "a node of --plan-gpu h100:4 has 4 GPU(s)"),
        ("h100:8", f"{TWO} --rollout-num-gpus 8", SHORT),
        ("h100:8", f"{TWO} --rollout-num-gpus 8", "or name more nodes: --plan-gpu h100:8x3"),
        ("h100:8x1", f"--colocate {TWO}", "--actor-num-nodes 2: --plan-gpu h100:8x1 has 1 node(s)"),
        ("h100:8", "--actor-num-gpus-per-node 4 --rollout-num-gpus 8", "12 GPUs are needed (4 for training, 8 for"),
        ("h100:8x3", f"{TWO} --rollout-num-gpus 8", None),
        ("h100:8", f"--colocate {TWO}", None),
        ("h100:8", "--actor-num-gpus-per-node 4 --rollout-num-gpus 4", None),
    ],
)
def test_a_plan_for_gpus_that_its_nodes_do_not_have_is_refused(plan: str, words: str, says: str | None) -> None:
    machine, findings = this_machine(plan), Findings()
    words = f"--dry-run --plan-gpu {plan} {words}"
    check_devices(make_args([*COMPLETE.split(), *words.split()], machine=machine), machine, findings)
    assert [(says or "") in problem for problem in findings.problems] == ([] if says is None else [True]), (
        findings.problems
    )
    assert not findings.warnings


@pytest.mark.parametrize(("plan", "uses"), [("h100:8x3", 8), ("h100:8", 8), ("h100:16", 8)])
def test_a_plan_warns_of_gpus_that_the_run_does_not_use(plan: str, uses: int) -> None:
    machine, findings = this_machine(plan), Findings()
    words = f"--dry-run --plan-gpu {plan} --colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8"
    check_devices(make_args([*COMPLETE.split(), *words.split()], machine=machine), machine, findings)
    names = machine.gpus * (machine.nodes or 1)
    assert [f"have {names} GPUs" in line and f"the run uses {uses}:" in line for line in findings.warnings] == (
        [] if names == uses else [True]
    )


def test_an_old_driver_is_told_apart_from_a_build_for_cpus(said: Said) -> None:
    (build,) = said(cuda=None, begins="Torch not compiled with CUDA enabled").problems
    assert "is a build for CPUs; install its CUDA build" in build
    old = "The NVIDIA driver on your system is too old (found version 12020)"
    (driver,) = said(driver="535.104.05", begins=old).problems
    assert "the driver is 535.104.05, and CUDA 13.0 of torch" in driver
    assert "needs 580 or newer: update the driver, or install torch's build for CUDA 12" in driver
    (unknown,) = said(driver=None, begins=old).problems
    assert unknown.endswith(f"RuntimeError: {old}")
    (fabric,) = said(begins="Error 802: system not yet initialized").problems
    assert fabric.endswith("RuntimeError: Error 802: system not yet initialized")
    assert said(driver="535.104.05").problems == []  # NVIDIA's forward compatibility runs it nevertheless


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((12, 0), "sm_80 sm_90 sm_100", False),
        ((12, 0), "sm_80 sm_90 compute_90", True),
        ((8, 9), "sm_80 sm_90a", True),
        ((8, 0), "sm_86 sm_90", False),
    ],
)
def test_a_build_of_torch_needs_kernels_for_the_gpu(
    said: Said, capability: tuple[int, int], kernels: str, runs: bool
) -> None:
    problems = said(capability, kernels=kernels).problems
    assert problems == [] if runs else f"has no kernels for compute capability {capability[0]}." in problems[0]


def test_the_page_has_the_generations() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu_status.md").read_text()
    for each in GENERATIONS[1:]:
        trainer, engine = each.attention or ("refused", "refused")
        capability = ".".join(map(str, each.capability))
        assert f"| {capability} | {each.name} | {each.examples} | {trainer} | {engine} |" in page
