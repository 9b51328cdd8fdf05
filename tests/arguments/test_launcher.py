"""torchrun's processes are the ranks of a run that it has started."""

from __future__ import annotations

import pytest

from tests.arguments.conftest import Make, Problems

SFT = "--loss-type sft_loss"


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("two_nodes")
def test_the_ranks_are_those_that_torchrun_has_started(make: Make, problems: Problems) -> None:
    args = make(SFT)
    assert (args.launcher, args.actor_num_nodes, args.actor_num_gpus_per_node) == ("torchrun", 2, 4)
    assert problems(f"{SFT} --actor-num-gpus-per-node 2") == ["--actor-num-gpus-per-node 2: torchrun has started 4"]
    assert problems(f"{SFT} --launcher ray") == ["--launcher ray: leave --launcher out"]
    engines = problems("")
    remedy = "and this run needs engines: start it without torchrun"
    assert engines == [f"--launcher torchrun is for runs without engines, {remedy}"]


def test_torchrun_starts_a_run_of_torchruns(make: Make, problems: Problems) -> None:
    assert make("").launcher == "ray"
    remedy = "start the run with torchrun --nproc-per-node 8 train.py ..."
    assert problems(f"{SFT} --launcher torchrun") == [f"--launcher torchrun: {remedy}"]
