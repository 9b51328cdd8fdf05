"""The checks of gpu_check.sh: functions that return numbers, each with the bounds it must keep.

On a GPU every group of checks runs in a process of its own: after one CUDA error a process is good for nothing more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import train
from slimelite.arguments import Args, make_args
from slimelite.cluster import Cluster, launch
from slimelite.cluster.local import LocalSink
from slimelite.data.arithmetic import write_model_folder
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.sample import Sample
from slimelite.table import SampleTable
from slimelite.tracking import Tracker
from slimelite.tracking.metrics_file import read_metrics
from slimelite.training.attention import PackedSequences, varlen_attention
from slimelite.training.lm_head import chunked_log_probs
from slimelite.training.trainer import Trainer

# group of checks -> seconds it may take
GROUPS = {"engine": 100, "kernels": 70, "trainer": 150, "loop": 170, "speed": 110}
# dense bf16, from the data sheets
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312}
NOT_RUN = "not run: no GPU"
QWEN2_5_0_5B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
TINY = {"vocab_size": 151, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Number:
    """What was measured; the check fails when it is not within the bounds (NaN never is)."""

    value: float
    high: float = math.inf
    low: float = -math.inf

    @property
    def ok(self) -> bool:
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        bounds = [f"{sign} {x:.3g}" for sign, x in ((">=", self.low), ("<=", self.high)) if math.isfinite(x)]
        return f"{self.value:.4g}" + (f" ({', '.join(bounds)})" if bounds else "")


Numbers = dict[str, Number]
Result = dict[str, Any]


@dataclass(frozen=True)
class Lab:
    """Where the checks run, and the model they share."""

    device: str
    tiny: bool
    work: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What the trainer computes in."""
        return torch.bfloat16 if self.cuda else torch.float32

    def size(self, full: int, tiny: int) -> int:
        """A size, by ``--tiny``."""
        return tiny if self.tiny else full

    def config(self, **changes: Any) -> PretrainedConfig:
        """Qwen2.5-0.5B, or the same in small."""
        return AutoConfig.for_model("qwen2", **(QWEN2_5_0_5B | (TINY if self.tiny else {}) | changes))

    @torch.no_grad()
    def folder(self) -> str:
        """The model with random weights that bf16 holds exactly, and the quickstart's tokenizer."""
        path = self.work / "model"
        if not path.exists():
            torch.manual_seed(0)
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases and norms other than 0 and 1, so that each matters
                    parameter += 0.1 * torch.randn_like(parameter)
            model.get_decoder().norm.weight *= 4  # log-probs that are far from uniform
            write_model_folder(path)
            model.save_pretrained(path)
        return str(path)

    def transformers(self, dtype: torch.dtype) -> PreTrainedModel:
        """That model as transformers computes it."""
        return AutoModelForCausalLM.from_pretrained(self.folder(), dtype=dtype).to(self.device)

    @contextmanager
    def engine(self, **options: Any) -> Iterator[EmbeddedEngine]:
        """An embedded engine with that model."""
        engine = EmbeddedEngine(self.folder(), device=self.device, max_context_len=2048, **options)
        try:
            yield engine
        finally:
            asyncio.run(engine.close())

    def trainer(self, **changes: Any) -> Trainer:
        """A trainer of that model, which takes one optimizer step a rollout."""
        given = {"lr": 3e-4, "num_rollout": 9, "num_steps_per_rollout": 1, "global_batch_size": 4096} | changes
        limits = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16384}
        return Trainer(Args(hf_checkpoint=self.folder(), device=self.device, **limits, **given))

    def table(self, rows: int, prompt: int, shortest: int, longest: int) -> SampleTable:
        """Random tokens with random advantages."""
        rng, vocabulary = np.random.default_rng(0), self.config().vocab_size
        samples = [Sample(group_index=i, index=i, reward=0.0) for i in range(rows)]
        for sample in samples:
            sample.tokens = rng.integers(0, vocabulary, prompt).tolist()
            response = rng.integers(0, vocabulary, rng.integers(shortest, longest + 1)).tolist()
            sample.append_response_tokens(response, log_probs=[-1.0] * len(response))
        table = SampleTable.from_samples([[sample] for sample in samples])
        table.advantage = rng.normal(size=rows)
        return table

    def gigabytes(self, *, peak: bool = False) -> float:
        """Device memory in tensors now, or the most since the last call; 0 on a CPU."""
        if not self.cuda:
            return 0.0
        used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return used / 1e9

    def seconds(self, work: Callable[[], object], times: int = 3) -> float:
        """Wall clock of one call, the best of several after a warm-up, with all it started on the device."""
        took = []
        for _ in range(times + 1):
            start = time.perf_counter()
            work()
            if self.cuda:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        return min(took[1:])


def relative(found: Tensor, expected: Tensor) -> float:
    """Length of the difference over the length of what was expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def scores(model: PreTrainedModel, prompt: Any, response: Any) -> tuple[Tensor, Tensor]:
    """[response tokens] log-probs by transformers, from full logits, and how far each is below the best token's."""
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    log_p = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    chosen = log_p.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return chosen, log_p.amax(-1) - chosen


@torch.no_grad()
def engine_agrees(lab: Lab, dtype: torch.dtype) -> Numbers:
    """Greedy and sampled responses, prompts shared and ragged, against transformers over the same tokens."""
    rng, requests = np.random.default_rng(0), []
    for group in range(lab.size(8, 3)):
        prompt = tuple(rng.integers(0, lab.config().vocab_size, rng.integers(5, lab.size(300, 30))).tolist())
        for temperature in (0.0, 1.0, 1.0):
            params = SamplingParams(lab.size(48, 8), temperature, ignore_eos=True, seed=len(requests))
            requests.append(GenerateRequest(str(len(requests)), prompt, params, prefix_key=str(group)))
    with lab.engine(dtype=dtype) as engine:
        results = asyncio.run(engine.generate(requests))
    pairs = [(request.input_ids, result.output_ids) for request, result in zip(requests, results, strict=True)]
    truth, theirs, below = [], [], []
    for found, model in ((truth, lab.transformers(torch.float32)), (theirs, lab.transformers(dtype))):
        found += [scores(model, *pair)[0] for pair in pairs]
    below = torch.cat([scores(model, *pair)[1] for pair in pairs[::3]])
    mine = torch.tensor([p for result in results for p in result.log_probs], device=lab.device)
    gap, their_gap = ((x - torch.cat(truth)).abs() for x in (mine, torch.cat(theirs)))
    half = dtype == torch.bfloat16
    return {
        "mean log-prob gap to fp32": Number(float(gap.mean()), 1.5 * float(their_gap.mean()) + 1e-4),
        "largest gap": Number(float(gap.max()), 0.5 if half else 1e-3),
        "greedy tokens that are transformers'": Number(float((below == 0).float().mean()), low=0.7 if half else 0.98),
        "furthest a greedy token is below the best": Number(float(below.max()), 0.25 if half else 1e-3),
    }


def attention_agrees(lab: Lab, window: int | None) -> Numbers:
    """Packed attention in bf16 (on a GPU varlen_attn) against bucketed SDPA in fp32."""
    torch.manual_seed(0)
    config, lengths = lab.config(), [lab.size(n, n % 40 + 1) for n in (700, 1, 33, 1500, 690, 128, 1024, 2)]
    layout, width = PackedSequences.from_lengths(lengths, lab.device), config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [torch.randn(1, count, sum(lengths), width, device=lab.device).bfloat16() for count in heads]
    probe, found = torch.randn(1, sum(lengths), heads[0], width, device=lab.device).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, _ = varlen_attention(torch.nn.Module(), q, k, v, None, sequences=layout, sliding_window=window)
        found.append((out, *torch.autograd.grad(out, leaves, probe.to(dtype))))
    return {name: Number(relative(a, b), 1e-2) for name, a, b in zip(("values", "dq", "dk", "dv"), *found, strict=True)}


def head_agrees(lab: Lab) -> Numbers:
    """The chunked LM head, fp32 and bf16, against log_softmax of the whole logits in fp32; worst of four tensors."""
    torch.manual_seed(0)
    tokens, config = lab.size(4096, 50), lab.config()
    inputs = [torch.randn(n, config.hidden_size, device=lab.device).bfloat16() for n in (tokens, config.vocab_size)]
    targets = torch.randint(0, config.vocab_size, (tokens,), device=lab.device)
    probes, found, peaks = torch.randn(2, tokens, device=lab.device), [], []
    for chunk, dtype in ((0, torch.float32), (lab.size(-1, 16), torch.float32), (lab.size(-1, 16), torch.bfloat16)):
        hidden, weight = leaves = [(x * 0.3).to(dtype).requires_grad_() for x in inputs]
        start = lab.gigabytes()
        if chunk:
            pair = chunked_log_probs(hidden, weight, targets, 0.7, entropy_grad=True, chunk_size=chunk)
        else:
            log_p = (hidden @ weight.T).div(0.7).log_softmax(-1)
            pair = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        grads = torch.autograd.grad((torch.stack(pair) * probes).sum(), leaves)
        found.append([x.detach() for x in (*pair, *grads)])
        peaks.append(lab.gigabytes(peak=True) - start)
    fp32, bf16 = (max(relative(a, b) for a, b in zip(mine, found[0], strict=True)) for mine in found[1:])
    return {
        "error in fp32": Number(fp32, 1e-5),
        "error in bf16": Number(bf16, 3e-2),
        "peak GB": Number(peaks[1], 0.7 * peaks[0]),
        "peak GB of the full logits": Number(peaks[0]),
    }


def step(lab: Lab, table: SampleTable, **changes: Any) -> tuple[Tensor, float, Tensor, float]:
    """Log-probs, gradient norm, log-probs after one optimizer step, and the step's peak GB."""
    with closing(lab.trainer(**changes)) as trainer:
        before = torch.from_numpy(trainer.log_probs(table))
        lab.gigabytes()
        norm = trainer.train(0, table)["train/grad_norm"]
        peak = lab.gigabytes(peak=True)
        return before, norm, torch.from_numpy(trainer.log_probs(table)), peak


def step_agrees(lab: Lab) -> Numbers:
    """An optimizer step of the trainer against the same one in fp32 by transformers, row by row."""
    table = lab.table(lab.size(16, 6), lab.size(64, 8), lab.size(64, 4), lab.size(512, 16))
    rows = [[table.row_slice(f"{part}_tokens", row) for part in ("prompt", "response")] for row in range(len(table))]
    model = lab.transformers(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    before = []
    for row, advantage in zip(rows, table.advantage, strict=True):
        before.append(scores(model, *row)[0])
        (-before[-1].mean() * advantage / len(rows)).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    with torch.no_grad():
        theirs = [torch.cat(before).cpu(), torch.cat([scores(model, *row)[0] for row in rows]).cpu()]
    del model, optimizer, before
    mine = step(lab, table)
    moves = torch.stack([mine[2] - mine[0], theirs[1] - theirs[0]])
    return {
        "mean log-prob gap": Number(float((mine[0] - theirs[0]).abs().mean()), 0.03 if lab.cuda else 1e-4),
        "relative gap of the gradient norm": Number(abs(mine[1] / norm - 1), 0.02 if lab.cuda else 1e-4),
        "correlation of what the step moved": Number(float(torch.corrcoef(moves)[0, 1]), low=0.9 if lab.cuda else 0.99),
        "mean move": Number(float(moves[0].abs().mean())),
        "peak GB": Number(mine[3]),
    }


def variant_agrees(lab: Lab, memory: float, **changes: Any) -> Numbers:
    """A step that saves memory against the plain one; ``memory``: the most of the plain one's peak it may take."""
    table = lab.table(lab.size(16, 6), lab.size(512, 8), lab.size(1536, 4), lab.size(1536, 16))
    plain, saving = step(lab, table), step(lab, table, **changes)
    return {
        "relative gap of the gradient norm": Number(abs(saving[1] / plain[1] - 1), 0.01 if lab.cuda else 1e-5),
        "mean log-prob gap after": Number(float((saving[2] - plain[2]).abs().mean()), 0.03 if lab.cuda else 1e-4),
        "peak GB": Number(saving[3], memory * plain[3]),
        "peak GB of the plain step": Number(plain[3]),
    }


def learns(lab: Lab) -> Numbers:
    """The quickstart: SFT, then GRPO, stopped and resumed half-way."""
    task, runs, rollouts = lab.work / "task", lab.work / "runs", lab.size(20, 6)
    command = ["scripts/prepare_data.py", "quickstart", "--out", str(task), "--sft-rows", str(3200 * lab.size(7, 1))]
    subprocess.run([sys.executable, *command], check=True)
    common = (
        f"--launcher local --device {lab.device} --rollout-backend embedded --use-dynamic-batch-size "
        "--max-tokens-per-gpu 16384 --input-key messages --rollout-shuffle"
    )
    sft = (
        f"--hf-checkpoint {task}/model --prompt-data {task}/sft.parquet --loss-type sft_loss --calculate-per-token-loss "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --disable-compute-advantages-and-returns "
        f"--debug-train-only --num-epoch 1 --rollout-batch-size 1600 --global-batch-size {lab.size(64, 32)} "
        f"--optimizer muon --muon-lr 0.02 --lr 5e-3 --save-hf {runs}/model --run-dir {runs}/sft"
    )
    grpo = (
        f"--hf-checkpoint {runs}/model --prompt-data {task}/train.parquet --label-key label --apply-chat-template "
        f"--rm-type gsm8k --rollout-batch-size {lab.size(32, 16)} --n-samples-per-prompt 8 --rollout-max-response-len 32 "
        "--eps-clip-high 0.28 --lr 1e-3 --lr-warmup-iters 5 --colocate --ci-test "
        f"--save {runs}/checkpoint --save-interval 100 --load {runs}/checkpoint --run-dir {runs}/grpo --num-rollout"
    )
    for flags in (sft, f"{grpo} {rollouts // 2}", f"{grpo} {rollouts}"):
        assert train.main([*common.split(), *flags.split()]) == 0, "train.py failed; the log says why"
    losses = [r["train/loss"] for r in read_metrics(runs / "sft") if "train/loss" in r]
    rewards = [r["rollout/raw_reward"] for r in read_metrics(runs / "grpo") if "rollout/raw_reward" in r]
    name = "train/train_rollout_logprob_abs_diff"
    gaps = [r[name] for r in read_metrics(runs / "grpo") if name in r]
    fifth = max(1, rollouts // 5)
    first, last = float(np.mean(rewards[:fifth])), float(np.mean(rewards[-fifth:]))
    return {
        "rollouts": Number(len(rewards), rollouts, rollouts),
        "SFT loss, last of first": Number(losses[-1] / losses[0], lab.size(1, 2) / 2),
        "first rewards": Number(first),
        "last rewards": Number(last, low=first + (0.0 if lab.tiny else 0.2)),
        "largest train_rollout_logprob_abs_diff": Number(max(gaps), 0.02),
    }


class Watched:
    """A cluster that notes the device memory after each of its verbs."""

    def __init__(self, lab: Lab, cluster: Cluster) -> None:
        self.lab, self.cluster = lab, cluster
        self.memory: dict[str, float] = {}

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = getattr(self.cluster, verb)(*given)
            self.memory[" ".join([verb, *(x for x in given if isinstance(x, str))])] = self.lab.gigabytes()
            return result

        return call


def takes_turns(lab: Lab) -> Numbers:
    """Trainer, reference and engine on one GPU under --offload: the memory after each phase of train.py's loop."""
    flags = (
        f"--launcher local --device {lab.device} --rollout-backend embedded --colocate --offload --hf-checkpoint {lab.folder()} "
        f"--prompt-data {lab.work}/task/train.parquet --input-key messages --label-key label --apply-chat-template "
        "--rm-type random --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 64 --num-rollout 2 "
        "--use-dynamic-batch-size --max-tokens-per-gpu 16384 --use-kl-loss --kl-loss-coef 0.01 --ci-test --lr 1e-5 "
        f"--sglang-context-length 2048 --run-dir {lab.work}/runs/colocate"
    )
    args = make_args(flags.split())
    with Tracker(args) as tracker, launch(args) as cluster:
        watched = Watched(lab, cluster)
        train.train(cluster.complete_args(), watched, tracker)  # type: ignore[arg-type]
    weights = sum(file.stat().st_size for file in Path(lab.folder()).glob("*.safetensors")) / 1e9
    left = {"release_engines kv_cache weights": 0.3, "offload_trainers": weights + 0.3}
    assert not lab.cuda or left.keys() <= watched.memory.keys(), f"no memory was given back: {watched.memory}"
    return {f"GB after {verb}": Number(used, left.get(verb, math.inf)) for verb, used in watched.memory.items()}


def training_speed(lab: Lab) -> Numbers:
    """A step on 16k-token packs; FLOPs are those of the model (nothing recomputed counts), MFU by the data sheet."""
    config, table = lab.config(), lab.table(lab.size(32, 4), lab.size(512, 8), lab.size(1536, 8), lab.size(1536, 8))
    with closing(lab.trainer()) as trainer:
        took = lab.seconds(lambda: trainer.train(0, table))
        head = config.vocab_size * config.hidden_size
        layers = sum(p.numel() for _, p in trainer.model.named_weights()) - head
    square = torch.randn(lab.size(8192, 256), lab.size(8192, 256), device=lab.device, dtype=lab.dtype)
    measured = 2 * len(square) ** 3 / lab.seconds(lambda: square @ square) / 1e12
    name = torch.cuda.get_device_name() if lab.cuda else ""
    peak = next((tflops for gpu, tflops in PEAK_TFLOPS.items() if gpu in name), measured)
    tokens, longest = int(table.total_lengths.sum()), int(table.total_lengths.max())
    causal = 6 * longest * config.hidden_size * config.num_hidden_layers
    tflops = (tokens * (6 * layers + causal) + 6 * head * len(table.response_tokens)) / took / 1e12
    return {
        "tokens/s": Number(tokens / took),
        "TFLOP/s": Number(tflops),
        "MFU": Number(tflops / peak),
        "TFLOP/s of a square matrix product": Number(measured),
        "peak GB": Number(lab.gigabytes(peak=True)),
    }


def decoding_speed(lab: Lab, rows: int) -> Numbers:
    """All of a call: prefill of 64-token prompts, one for 8 responses each, and 128 new tokens for each response."""
    params, rng = SamplingParams(lab.size(128, 4), ignore_eos=True), np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, lab.config().vocab_size, lab.size(64, 8)).tolist()) for _ in range(rows // 8)]
    requests = [GenerateRequest(str(i), prompts[i // 8], params, prefix_key=str(i // 8)) for i in range(rows)]
    with lab.engine(max_running_requests=rows) as engine:
        took = lab.seconds(lambda: asyncio.run(engine.generate(requests)))
    return {
        "tokens/s": Number(rows * params.max_new_tokens / took),
        "ms a step": Number(1e3 * took / params.max_new_tokens),
    }


def sync_speed(lab: Lab) -> Numbers:
    """All weights from the trainer into an engine of the same process."""
    with closing(lab.trainer()) as trainer, lab.engine() as engine:
        took = lab.seconds(lambda: trainer.push_weights(LocalSink([engine]), 1))
        sent = trainer.push_weights(LocalSink([engine]), 2)["perf/update_weights_bytes"]
    return {"seconds": Number(took), "GB": Number(sent / 1e9), "GB/s": Number(sent / 1e9 / took)}


# group, name, whether what it proves needs a GPU (elsewhere it only tries itself), check
CHECKS: list[tuple[str, str, bool, Callable[[Lab], Numbers]]] = [
    ("engine", "engine = transformers, fp32", False, partial(engine_agrees, dtype=torch.float32)),
    ("engine", "engine = transformers, bf16", False, partial(engine_agrees, dtype=torch.bfloat16)),
    ("kernels", "varlen_attn = SDPA", True, partial(attention_agrees, window=None)),
    ("kernels", "varlen_attn = SDPA, sliding window", True, partial(attention_agrees, window=20)),
    ("kernels", "chunked LM head = full logits", False, head_agrees),
    ("trainer", "optimizer step = transformers in fp32", False, step_agrees),
    ("trainer", "gradient checkpointing", False, partial(variant_agrees, memory=0.8, gradient_checkpointing=True)),
    ("trainer", "fsdp cpu offload", True, partial(variant_agrees, memory=0.95, fsdp_cpu_offload=True)),
    ("loop", "quickstart learns, and resumes", False, learns),
    ("loop", "colocate with --offload", True, takes_turns),
    ("speed", "training", True, training_speed),
    ("speed", "decoding, 64 sequences", True, partial(decoding_speed, rows=64)),
    ("speed", "decoding, 256 sequences", True, partial(decoding_speed, rows=256)),
    ("speed", "weight sync", True, sync_speed),
]


def run_check(lab: Lab, name: str, needs_gpu: bool, check: Callable[[Lab], Numbers]) -> Result:
    """What the check found, whatever happens in it."""
    start, numbers, error = time.perf_counter(), {}, ""
    try:
        numbers = check(lab)
    except (Exception, SystemExit) as problem:
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}".replace("\n", " ")[:300]
    status = "FAIL" if error or not all(number.ok for number in numbers.values()) else "PASS"
    shown = error or ", ".join(f"{what} {number}" for what, number in numbers.items())
    if status == "PASS" and needs_gpu and not lab.cuda:
        status, shown, numbers = NOT_RUN, "tried on the CPU", {}
    values = {what: number.value if math.isfinite(number.value) else None for what, number in numbers.items()}
    seconds = round(time.perf_counter() - start, 1)
    return {"name": name, "status": status, "shown": shown, "seconds": seconds, "numbers": values}


def run_groups(options: argparse.Namespace, work: Path, groups: list[str]) -> list[Result]:
    """The checks of ``groups`` in one process, whose output goes to a log; those it did not live to see fail."""
    found, log = work / f"{groups[0]}.json", options.out / f"{groups[0]}.log"
    command = [sys.executable, __file__, "--work", str(work), "--out", str(options.out), "--device", options.device]
    command += [*(["--tiny"] if options.tiny else []), "--groups", *groups]
    limit = sum(GROUPS[group] for group in groups)
    try:
        with log.open("w") as output:
            ended = f"status {subprocess.run(command, stdout=output, stderr=output, timeout=limit).returncode}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after {limit} s"
    results: list[Result] = json.loads(found.read_text()) if found.exists() else []
    lost = {"status": "FAIL", "shown": f"no result; its process: {ended}; see {log}", "seconds": 0.0, "numbers": {}}
    names = [name for group, name, *_ in CHECKS if group in groups]
    results += [{"name": name} | lost for name in names[len(results) :]]
    for result in results:
        print(f"{result['status']}  {result['name']}: {result['shown']}", flush=True)
    return results


def run_all(options: argparse.Namespace) -> int:
    """Every group, a line for each check, a table, results.json; returns the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    start, results = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as work:
        for groups in [options.groups] if options.device == "cpu" else [[group] for group in options.groups]:
            results += run_groups(options, Path(work), groups)
    summary = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" and torch.cuda.is_available() else "cpu",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": platform.python_version()},
        "tiny": options.tiny,
        "seconds": round(time.perf_counter() - start, 1),
        "checks": results,
    }
    (options.out / "results.json").write_text(json.dumps(summary, indent=2))
    print(f"\n{summary['device']}, {summary['versions']}, {summary['seconds']} s")
    for result in results:
        print(f"  {result['name']:40}{result['seconds']:7.1f} s  {result['status']}")
    return int(any(result["status"] == "FAIL" for result in results))


def main() -> int:
    """The command line; ``--work`` makes this one of the processes of `run_groups`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the checks themselves")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and the logs")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="only these checks")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.work:
        return run_all(options)
    results = []
    for group, *check in CHECKS:
        if group in options.groups:
            results.append(run_check(Lab(options.device, options.tiny, options.work), *check))
            (options.work / f"{options.groups[0]}.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
