"""A launch script as slime's are, run unmodified by scripts/run_slime_script.sh, while somebody else's Ray is alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, metrics, run_process

pytestmark = pytest.mark.e2e

SCRIPT = r"""#!/bin/bash
pkill -9 sglang
sleep 0.1
ray stop --force
pkill -9 ray
pkill -9 python

set -ex
export PYTHONUNBUFFERED=16
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi

SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"
source /root/slime/scripts/models/qwen2.5-0.5B.sh # is not there, and ours has the name
MODEL_ARGS=("${TINY_ARGS[@]}")

CKPT_ARGS=(--hf-checkpoint /root/model --ref-load /root/model_torch_dist/)
ROLLOUT_ARGS=(
   --prompt-data /root/task/train.parquet
   --input-key messages
   --label-key label
   --apply-chat-template
   --rm-type gsm8k
   --num-rollout 3000
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --rollout-max-response-len 32
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 512)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats --dashboard-port=8265
RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/:${SCRIPT_DIR}\",
    \"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 1 \
   --colocate \
   --custom-rollout-log-function-path own_log.note \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]}
"""
LOG = """
import json, os
def note(rollout_id, args, samples, metrics, seconds):
    assert [*json.loads(os.environ["SLIMELITE_WORKER_ENV"])] == ["PYTHONPATH", "NCCL_NVLS_ENABLE"]
    metrics["rollout/nvls"] = float(os.environ["NCCL_NVLS_ENABLE"]) + args.note_bonus
"""
GROUP = '''
from dataclasses import dataclass
from slimelite.arguments import flag

@dataclass(frozen=True)
class NoteArgs:
    """Notes."""

    note_bonus: float = flag(0.5, "added to a metric")
'''
# the rule is asked in a grading process, the estimator in a trainer
ENTRIES = """
from slimelite.algorithms.estimators import ESTIMATORS, Estimator
from slimelite.rewards.rules import RULES, Rule

RULES.add(Rule("quarter", lambda _: None, lambda _: 0.25))
ESTIMATORS.add(Estimator("flat", "R", group=lambda rewards: rewards.rewards))
"""


def test_it_runs_as_it_is_and_ends_nothing_of_others(grpo_args: list[str], task: Path, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    root, place = tmp_path / "root", tmp_path / "scripts"
    (place / "models").mkdir(parents=True)
    root.mkdir()
    (root / "task").symlink_to(task)
    model = Path(grpo_args[grpo_args.index("--hf-checkpoint") + 1])
    (root / "model").symlink_to(model)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    (place / "models" / "tiny.sh").write_text(f"TINY_ARGS=(--num-layers {layers} --add-qkv-bias)\n")
    (place / "own_log.py").write_text(LOG)
    (tmp_path / "own_args.py").write_text(GROUP)
    (tmp_path / "own_entries.py").write_text(ENTRIES)
    (place / "run-tiny.sh").write_text(SCRIPT)
    wrapper = ["bash", str(ROOT / "scripts" / "run_slime_script.sh"), "--map", f"/root={root}"]
    command = [*wrapper, str(place / "run-tiny.sh"), "--num-rollout", "1", "--run-dir", str(tmp_path / "run")]
    command += ["--args-group", "own_args.py:NoteArgs", "--note-bonus", "7"]
    command += ["--import-file", "own_entries.py", "--rm-type", "quarter", "--advantage-estimator", "flat"]
    # if the wrapper let a command through, it would come to these, and kill nothing
    stubs, reached = tmp_path / "stubs", tmp_path / "reached"
    stubs.mkdir()
    for name in ("pkill", "killall", "ray"):
        (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{reached}"\n')
        (stubs / name).chmod(0o755)
    env = {"PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}"}

    others = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "sglang"])
    try:
        done = run_process(*command, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert not reached.exists(), reached.read_text()
        assert bystander.poll() is None
        assert others.head_node.dead_processes() == []
    finally:
        bystander.kill()
        others.shutdown()
    assert len(metrics(tmp_path / "run", "train/loss")) == 1
    assert metrics(tmp_path / "run", "rollout/nvls") == [7.0], "a plugin in a worker reads a flag of the user's own"
    assert metrics(tmp_path / "run", "rollout/raw_reward") == [0.25], "so has a grading process of a rollout worker"
    for said in (
        "pkill -9 sglang ends nothing",
        "ray stop --force does nothing",
        "ray start --head does nothing",
        f"source {root}/slime/scripts/models/qwen2.5-0.5B.sh is models/qwen2.5-0.5B.sh",
        f"/root/task/train.parquet is {root}/task/train.parquet",
        "train.py is ",
    ):
        assert f"run_slime_script: {said}" in done.stderr, said


def test_nothing_runs_on_another_machine(tmp_path: Path) -> None:
    reached, stubs, script = tmp_path / "reached", tmp_path / "stubs", tmp_path / "run.sh"
    stubs.mkdir()
    others = ("ssh", "pdsh", "pssh", "parallel-ssh", "clush", "srun", "mpirun", "mpiexec", "sudo", "pkill", "ray")
    for name in others:
        (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{reached}"\n')
        (stubs / name).chmod(0o755)
    (tmp_path / "hostfile").write_text("node-a\nnode-b\n")
    script.write_text(
        "set -e\n"
        f"for WORKER in $(awk '{{print $1}}' {tmp_path}/hostfile); do\n"
        '  ssh root@"${WORKER}" "pkill -9 sglang ; ray stop --force ; ray start --address=1.2.3.4:6379" &\n'
        "done\nwait\n"
        f'while read -r host; do ssh "$host" nvidia-smi; done < {tmp_path}/hostfile\n'
        "pdsh -w node-[a-b] uptime\npssh -i x\nparallel-ssh x\nclush -a x\nsrun hostname\nmpirun -n 2 hostname\n"
        "mpiexec hostname\nsudo -n -u root pkill -9 python\nsudo apt-get install python3\necho the end\n"
    )
    env = {"PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_process("bash", str(ROOT / "scripts" / "run_slime_script.sh"), str(script), "--dry-run", env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "the end"), done.stderr
    assert reached.read_text() == "sudo apt-get install python3\n", "only what is not replaced is the real command"
    assert "run_slime_script: left out: ssh root@node-b 'pkill -9 sglang" in done.stderr
    assert "pkill -9 python ends nothing" in done.stderr
    lines = [line for line in done.stderr.splitlines() if "nothing runs on another machine; join" in line]
    assert len(lines) == 11, lines
    assert len([line for line in lines if "nvidia-smi" in line]) == 2, "the first ssh did not read the host file"


def test_flags_win_and_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("set -e\npython3 -c 'print(6 * 7)'\npython3 tools/convert_hf_to_torch_dist.py --save x\n")
    wrapper = ["bash", str(ROOT / "scripts" / "run_slime_script.sh"), str(script)]
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_process(*wrapper, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "42")
    assert "convert_hf_to_torch_dist.py is left out" in done.stderr
    script.write_text("cd /\nexec python3 train_async.py --num-rollout 1 --lr x\n")
    done = run_process(*wrapper, "--lr", "y", "--dry-run", env=env)
    assert done.returncode == 2
    assert "--lr takes a number, not 'y'" in done.stderr
    assert "--async-rollout" in done.stderr
    assert run_process(*wrapper[:2], env=env).returncode == 2
