"""An out-of-memory error ends with what was needed, what was there, and flags that would have fitted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from slimelite.arguments import make_args
from slimelite.cluster.remote import ClusterError, MemoryShortage, Pending, Turns, with_memory
from slimelite.plan.devices import Machine

ROOT = Path(__file__).parents[2]
MODEL = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024}
MODEL |= {"num_attention_heads": 4, "vocab_size": 2000, "tie_word_embeddings": True, "bos_token_id": 1}
WORDS = (
    "--num-rollout 1 --rollout-batch-size 32 --n-samples-per-prompt 2 --rollout-max-prompt-len 64 "
    "--rollout-max-response-len 448 --use-dynamic-batch-size --max-tokens-per-gpu 32768 --prompt-data p.jsonl "
)
# what torch says when a GPU is full
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.10 GiB is "
    "free. Including non-PyTorch memory, this process has 22.54 GiB memory in use."
)
LIMITED = """
import resource, sys
import torch, transformers, slimelite.training.trainer
size = 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData")))
resource.setrlimit(resource.RLIMIT_DATA, (size + (900 << 20), resource.RLIM_INFINITY))
import train
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def test_the_host_runs_out_of_memory(model: Path, tmp_path: Path) -> None:
    """A real run whose process may take 900 MB more than its libraries; its one micro-batch needs 7 GB."""
    words = f"{WORDS} --hf-checkpoint {model} --run-dir {tmp_path / 'run'} --launcher local --debug-train-only"
    saved = tmp_path / "rollout.parquet"
    _rollout(saved)
    words += f" --load-debug-rollout-data {saved} --tokenizer {_tokenizer(tmp_path)} --save-rollouts none"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *words.split()], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert last.startswith("train.py: out of memory: can't allocate memory: you tried to allocate ")
    assert "Predicted: train needs " in last
    assert " GB that the machine and its limits allow. " in last
    assert "--max-tokens-per-gpu " in last
    assert last.endswith("would fit (predicted)")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["message"].removeprefix("ClusterError: ") in last
    assert "Traceback" not in done.stderr


def test_a_gpu_runs_out_of_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of torch, raised in a verb: the caller gets the message, with the GPU's size as torch named it."""
    words = f"{WORDS} --hf-checkpoint {model} --colocate --no-gradient-checkpointing --max-tokens-per-gpu 900000"
    args = make_args(words.split(), machine=Machine(gpus=1, gpu_bytes=25 * 10**9))
    turns = Turns(inline=True, explained=partial(with_memory, args=args))

    def work() -> None:
        raise torch.OutOfMemoryError(FULL)

    pending = turns.take(Pending[None](turns), work)
    with pytest.raises(ClusterError) as error:
        pending.result()
    assert str(error.value).startswith("out of memory: CUDA out of memory. Predicted: train needs ")
    assert "of the 22.3 GB that tensors can use on a GPU" in str(error.value)  # 88 % of 23.65 GiB
    assert "--gradient-checkpointing" in str(error.value)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


def test_a_killed_worker_and_other_errors(model: Path) -> None:
    args = make_args(f"{WORDS} --hf-checkpoint {model}".split(), machine=Machine(gpus=0))
    told = with_memory(MemoryShortage("trainer_0 was killed"), args)
    assert str(told).startswith("trainer_0 was killed. Predicted: ")
    assert with_memory(told, args) is told
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert with_memory(other, args) is other


def test_a_rank_that_does_not_answer(model: Path) -> None:
    """Gloo's own errors, of two ranks of which one never comes."""
    args = make_args(f"{WORDS} --hf-checkpoint {model}".split(), machine=Machine(gpus=0))
    store, groups = dist.HashStore(), list[dist.ProcessGroupGloo]()

    def meet(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=120)))

    threads = [Thread(target=meet, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    short = dist.AllreduceOptions()
    short.timeout = timedelta(seconds=0.5)
    # either order of joining: the first call sends or receives
    for said in ("Timed out waiting 500ms for (send|recv) operation to complete", "Application timeout caused"):
        with pytest.raises(RuntimeError, match=said) as caught:
            groups[0].allreduce([torch.ones(1)], short).wait()
        told = with_memory(caught.value, args)
        assert isinstance(told, ClusterError)
        assert str(told).startswith("a training rank got no answer from another rank: the other rank is stopped or")
        assert re.search(rf"--distributed-timeout-minutes 10 \({said}", str(told))


def _rollout(file: Path) -> None:
    from slimelite.samples.sample import Sample
    from slimelite.samples.table import SampleTable

    samples = []
    for row in range(64):
        # rows that begin alike would be computed once
        tokens = [1 + row, *range(2, 65)]
        sample = Sample(group_index=row, index=row, reward=float(row % 2), tokens=tokens)
        sample.append_response_tokens([2] * 448, log_probs=[-1.0] * 448)
        samples.append([sample])
    SampleTable.from_samples(samples).to_parquet(file)


def _tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
