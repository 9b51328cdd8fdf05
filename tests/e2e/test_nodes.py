"""Runs of train.py on several nodes: machines of a network of their own, in Linux namespaces."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import train
from slimelite.models.checkpoints import find_checkpoint
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import read_metrics
from tests.base.traces import spans
from tests.support.machines import CLUSTER, Machine, clock_ahead, machines, start_ray

from .conftest import ROOT, metrics

pytestmark = pytest.mark.e2e

Nodes = tuple[list[Machine], Machine, str]


@pytest.fixture(scope="module")
def local_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which each machine has its own."""
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory, local_folder: Path) -> Iterator[Nodes]:
    """Two machines with a Ray of 4 CPUs each, one outside, and the address of Ray's head."""
    with machines(2, private=[local_folder]) as (nodes, outside):
        yield nodes, outside, start_ray(nodes, tmp_path_factory.mktemp("ray"), cpus=4)


@pytest.fixture
def on_two_nodes(grpo_args: list[str]) -> list[str]:
    """A run with a rank and an engine on each of two nodes."""
    own = [
        *grpo_args,
        "--num-rollout",
        "2",
        "--rollout-num-gpus",
        "2",
        "--actor-num-gpus-per-node",
        "1",
        "--actor-num-nodes",
        "2",
    ]
    own.remove("--colocate")
    return own


def trains_as_one_process_does(
    nodes: list[Machine],
    address: str,
    grpo_args: list[str],
    on_two_nodes: list[str],
    folder: Path,
) -> Path:
    """2 rollouts of one step: on a rank and an engine on each of two nodes, and on one of each in this process."""
    common = ["--deterministic-mode", "--use-kl-loss", "--kl-loss-coef", "0.1"]
    one, two, env = folder / "one", folder / "two", {**CLUSTER, "RAY_ADDRESS": address}
    kept = ["--save", str(folder / "saved"), "--save-interval", "2", "--trace", "--run-dir", str(two)]
    done = nodes[0].run(sys.executable, "train.py", *on_two_nodes, *common, *kept, env=env)
    assert done.returncode == 0, done.stderr
    assert [node.left() for node in nodes] == [[], []]
    alone = ["--num-rollout", "2", "--launcher", "local", "--run-dir", str(one)]
    assert train.main([*grpo_args, *common, *alone]) == 0
    assert metrics(two, "rollout/raw_reward") == metrics(one, "rollout/raw_reward")
    for name in ("train/loss", "train/kl_loss", "train/grad_norm"):
        assert metrics(two, name) == pytest.approx(metrics(one, name), rel=1e-5, abs=1e-6), name
    return two


@pytest.mark.slow
def test_a_long_cable_that_loses_frames(grpo_args: list[str], on_two_nodes: list[str], tmp_path: Path) -> None:
    """20 ms later each way, and one frame in a hundred never."""
    with machines(2, delay_ms=20, loss=0.01) as (nodes, _):
        address = start_ray(nodes, tmp_path, cpus=4)
        trains_as_one_process_does(nodes, address, grpo_args, on_two_nodes, tmp_path)
        came, lost = nodes[1].pull()
        print(f"{lost} of {came} frames were lost")
        assert lost > 0


@pytest.mark.slow
def test_clocks_that_differ(grpo_args: list[str], on_two_nodes: list[str], tmp_path: Path) -> None:
    """The second node's clock is an hour ahead."""
    with machines(2) as (nodes, _):
        more = {"node2": clock_ahead(tmp_path, 3600)}
        address = start_ray(nodes, tmp_path, cpus=4, more=more)
        two = trains_as_one_process_does(nodes, address, grpo_args, on_two_nodes, tmp_path)
    first, second = (two / file for file in ("trace.json", "trace-10.77.0.2.json"))
    begins = [min(bar["ts"] for bar in spans(file.read_text().rstrip(",]\n") + "]")) for file in (first, second)]
    assert (begins[1] - begins[0]) / 1e6 == pytest.approx(3600, abs=300), "the workers there had that clock"


def test_two_nodes_train_as_one_process_does(
    grpo_args: list[str], on_two_nodes: list[str], two_nodes: Nodes, tmp_path: Path
) -> None:
    nodes, _, address = two_nodes
    two = trains_as_one_process_does(nodes, address, grpo_args, on_two_nodes, tmp_path)
    # though the first node has room for all; its file also has what the rollout side sees of both engines
    first, second = ((two / file).read_text().rstrip(",]\n") + "]" for file in ("trace.json", "trace-10.77.0.2.json"))
    assert {bar["worker"] for bar in spans(second)} == {"trainer_1", "engine_1"}
    assert {bar["worker"] for bar in spans(first)} >= {"trainer_0", "engine_0"}
    assert "trainer_1" not in {bar["worker"] for bar in spans(first)}
    assert find_checkpoint(tmp_path / "saved")[0] is not None
    for file in sorted(two.glob("rollouts/*")):
        table, stats = SampleTable.from_parquet(file), pq.read_table(two / "token_stats" / file.name).to_pydict()
        assert stats["sample_id"] == table.sample_id.tolist()
        np.testing.assert_allclose(np.concatenate(stats["log_probs"]), table.rollout_log_probs, atol=1e-3)
    names = {f"{kind}_{n}.log" for kind in ("engine", "trainer") for n in (0, 1)}
    assert names <= {log.name for log in (two / "logs").iterdir()}


def test_a_worker_that_raises_is_one_message(grpo_args: list[str], two_nodes: Nodes, tmp_path: Path) -> None:
    """A reward that raises from the second row on, so that the check of one row does not see it; run from elsewhere.
    It raises only in a worker that has the variables of a slime script's --runtime-env-json, which Ray knows nothing
    about."""
    nodes, _, address = two_nodes
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "strictness.py").write_text("import os\nSTRICT = os.environ['GRADING'] == 'strict'\n")
    (tmp_path / "reward.py").write_text(
        "def grade(args, sample, **kwargs):\n"
        "    from strictness import STRICT\n"
        "    if sample.index > 3 and STRICT:\n"
        "        raise KeyError('broken')\n"
        "    return 1.0\n"
    )
    flags = ["--custom-rm-path", "reward.py:grade", "--reward-error", "fail", "--num-rollout", "1", "--run-dir", "run"]
    elsewhere = ["env", "--chdir", str(tmp_path), sys.executable, str(ROOT / "train.py")]
    given = {"GRADING": "strict", "PYTHONPATH": str(tmp_path / "plugins")}
    env = {**CLUSTER, "RAY_ADDRESS": address, "SLIMELITE_WORKER_ENV": json.dumps(given)} | given
    done = nodes[0].run(*elsewhere, *grpo_args, *flags, env=env)
    assert done.returncode == 1
    # the user's own function with its line, not ours or Ray's
    assert "train.py: reward reward.py:grade of sample" in done.stderr
    assert 'reward.py", line 4, in grade' in done.stderr
    assert "ray::" not in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"
    assert [node.left() for node in nodes] == [[], []]


@pytest.mark.slow
@pytest.mark.chaos(
    "one of two nodes lost, `--max-restarts 2 --elastic`",
    "the run continues with one rank on the node that is left, and finishes",
)
def test_a_run_goes_on_with_the_node_that_is_left(
    on_two_nodes: list[str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with machines(2) as (nodes, _):
        env = {**CLUSTER, "RAY_ADDRESS": start_ray(nodes, tmp_path, cpus=4)}
        flags = ["--num-rollout", "12", "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "saved")]
        restarts = ["--save-interval", "1", "--max-restarts", "2", "--elastic"]
        run = nodes[0].start(sys.executable, "train.py", *on_two_nodes, *flags, *restarts, env=env)
        file = tmp_path / "run" / "metrics.jsonl"
        while not file.is_file() or len(metrics(file.parent, "train/loss")) < 2:
            assert run.poll() is None, run.communicate()
            time.sleep(0.2)
        killed = time.monotonic()
        nodes[1].kill()
        _, err = run.communicate(timeout=1200)
        record_property("seconds", f"{time.monotonic() - killed:.0f} until the last of 12 rollouts")
        assert run.returncode == 0, err
        assert "this start uses --actor-num-nodes 1\n" in err, "the node that is left has room for both engines"
        assert "Traceback" not in err
        losses = [record for record in read_metrics(tmp_path / "run") if "train/loss" in record]
        assert len(losses) == 12, "each once, but for those that the new start did again"
        assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"
        assert nodes[0].left() == []


@pytest.mark.slow
@pytest.mark.chaos(
    "one of two nodes lost, `--max-restarts 2`; another one joins",
    "the restart waits for the new node, and the run finishes",
)
def test_a_run_waits_for_a_machine_in_place_of_a_lost_one(on_two_nodes: list[str], tmp_path: Path) -> None:
    with machines(3) as ((first, second, third), _):
        address = start_ray([first, second], tmp_path, cpus=4)
        flags = ["--num-rollout", "8", "--run-dir", str(tmp_path / "run"), "--save", str(tmp_path / "saved")]
        restarts = ["--save-interval", "1", "--max-restarts", "2"]
        words, env = [*on_two_nodes, *flags, *restarts], {**CLUSTER, "RAY_ADDRESS": address}
        console = tmp_path / "console.txt"
        run = first.start(sys.executable, "train.py", *words, env=env, log=console)
        file = tmp_path / "run" / "metrics.jsonl"
        while not file.is_file() or len(metrics(file.parent, "train/loss")) < 2:
            assert run.poll() is None, console.read_text()
            time.sleep(0.2)
        second.kill()
        while "waiting for 4 CPUs" not in console.read_text().rpartition("start 2 of 3")[2]:
            assert run.poll() is None, console.read_text()
            time.sleep(0.2)
        start_ray([third], tmp_path, cpus=4, head=address)
        assert run.wait(400) == 0, console.read_text()
        assert "Traceback" not in console.read_text()
        losses = [record for record in read_metrics(tmp_path / "run") if "train/loss" in record]
        assert len(losses) == 8, "each once, but for those that the new start did again"
        assert [node.left() for node in (first, third)] == [[], []]


@pytest.mark.slow
@pytest.mark.chaos(
    "one of two nodes lost, `--max-restarts 3 --restart-wait 3`; none joins",
    "the restart gives up after its wait and says so; exit 1",
)
def test_a_job_from_outside_a_folder_of_each_node_and_a_lost_node(
    on_two_nodes: list[str], local_folder: Path, tmp_path: Path
) -> None:
    with machines(2, private=[local_folder]) as (nodes, outside):
        address = start_ray(nodes, tmp_path, cpus=4, dashboard=True)
        env = {**CLUSTER, "RAY_ADDRESS": address}
        # a third node is not there: an answer with the numbers, not a wait
        many = [*on_two_nodes[:-1], "3", "--rollout-num-gpus", "1", "--run-dir", f"{tmp_path}/many"]
        refused = nodes[0].run(sys.executable, "train.py", *many, env=env)
        assert refused.returncode == 1
        assert "needs 4 CPUs (3 nodes x 1 ranks" in refused.stderr
        assert "Ray has 4, 4 on 2 node(s)" in refused.stderr

        save = ["--save", str(local_folder), "--save-interval", "1"]
        refused = nodes[0].run(sys.executable, "train.py", *on_two_nodes, *save, "--run-dir", f"{tmp_path}/r", env=env)
        assert refused.returncode == 1
        assert (
            f"--save {local_folder}: trainer_1 on 10.77.0.2 cannot see the files that node1 writes there"
            in refused.stderr
        )
        assert "Traceback" not in refused.stderr
        assert not list(local_folder.iterdir())

        words = [sys.executable, "train.py", *on_two_nodes, "--run-dir", f"{tmp_path}/job", "--num-rollout", "1"]
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", "http://10.77.0.1:8265"]
        without = outside.run(*submit, "--", *words, env={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
        assert without.returncode != 0  # the token is another one
        done = outside.run(*submit, "--", "env", "--chdir", str(ROOT), *words, env=CLUSTER)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(metrics(tmp_path / "job", "rollout/raw_reward")) == 1

        lost = [*on_two_nodes, "--num-rollout", "200", "--run-dir", f"{tmp_path}/lost", "--save", f"{tmp_path}/saved"]
        lost += ["--save-interval", "1", "--max-restarts", "3", "--restart-wait", "3"]
        run = nodes[0].start(sys.executable, "train.py", *lost, env=env)
        file = tmp_path / "lost" / "metrics.jsonl"
        while not file.is_file() or not metrics(file.parent, "train/loss"):
            assert run.poll() is None, run.communicate()
            time.sleep(0.2)
        assert [line for line in nodes[0].left(0) if "ray::trainer" in line]
        nodes[1].kill()
        _, err = run.communicate(timeout=1200)
        assert run.returncode == 1
        assert "Traceback" not in err
        first, _, second = err.partition("start 2 of 4")
        assert "10.77.0.2" in first or "a training rank got no answer" in first, err
        assert "a restart has waited 3 s for its machines (--restart-wait): " in second
        assert "start 3 of 4" not in second, "nobody else would wait longer"
        assert json.loads((tmp_path / "lost" / "status.json").read_text())["status"] == "failed"
        assert nodes[0].left() == []
