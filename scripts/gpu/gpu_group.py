"""The checks of gpu_check.sh, which runs them one group at a time. Each returns numbers with bounds."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import time
import traceback
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gpu_grpo import (
    adapters_reach_the_engine,
    critic_learns,
    muon_speed,
    prompts_are_shared,
    recomputes_what_it_compiles,
    repeats,
    tree_attends,
)
from gpu_lab import Lab, NotRun, Number, Numbers, relative, scores, step
from gpu_machine import profiled, saver_keeps, shells_do_not_matter
from gpu_memory import another_process_reads, fits_a_small_card, reference_is_policy
from gpu_table import predicted_beside_measured

import train
from slimelite.arguments import make_args
from slimelite.cluster import Cluster, launch
from slimelite.cluster.remote import LocalRemote, RemoteSink
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.tracking.metrics_file import read_metrics
from slimelite.tracking.tracker import Tracker
from slimelite.training.attention import varlen_attention
from slimelite.training.batch import PackedSequences, laid_out
from slimelite.training.model import chunked_log_probs

# dense bf16, from the data sheets
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312}
NOT_RUN = "not run: no GPU"
SGLANG = "SGLang colocated with FSDP2"
COMMON = "--launcher local --use-dynamic-batch-size --max-tokens-per-gpu 16384 --input-key messages --rollout-shuffle"
LOCAL = f"{COMMON} --rollout-backend embedded"
RL = "--label-key label --apply-chat-template --n-samples-per-prompt 8 --colocate --ci-test"
Result = dict[str, Any]


@torch.no_grad()
def engine_agrees(lab: Lab, dtype: torch.dtype) -> Numbers:
    """Greedy and sampled responses, with shared and ragged prompts, compared with transformers on the same tokens."""
    rng = np.random.default_rng(0)
    requests: list[GenerateRequest] = []
    for group in range(lab.size(8, 3)):
        prompt = tuple(rng.integers(0, lab.config().vocab_size, rng.integers(5, lab.size(300, 30))).tolist())
        for temperature in (0.0, 1.0, 1.0):
            params = SamplingParams(lab.size(48, 8), temperature, ignore_eos=True, seed=len(requests))
            requests.append(GenerateRequest(str(len(requests)), prompt, params, prefix_key=str(group)))
    with lab.engine(dtype=dtype) as engine:
        results = asyncio.run(engine.generate(requests))
    pairs = [(request.input_ids, result.output_ids) for request, result in zip(requests, results, strict=True)]
    exact, model = lab.transformers(torch.float32), lab.transformers(dtype)
    truth, theirs = (torch.cat([scores(m, *pair)[0] for pair in pairs]) for m in (exact, model))
    below = torch.cat([scores(model, *pair)[1] for pair in pairs[::3]])
    mine = torch.tensor([p for result in results for p in result.log_probs], device=lab.device)
    gap, their_gap = (mine - truth).abs(), (theirs - truth).abs()
    largest, equal, short = (0.5, 0.7, 0.25) if dtype == torch.bfloat16 else (1e-3, 0.98, 1e-3)
    return {
        "mean log-prob gap to fp32": Number(float(gap.mean()), 1.5 * float(their_gap.mean()) + 1e-4),
        "largest gap": Number(float(gap.max()), largest),
        "greedy tokens that are transformers'": Number(float((below == 0).float().mean()), low=equal),
        "furthest a greedy token is below the best": Number(float(below.max()), short),
    }


def attention_agrees(lab: Lab, window: int | None) -> Numbers:
    """Packed attention in bf16 (varlen_attn on a GPU), compared with bucketed SDPA in fp32."""
    torch.manual_seed(0)
    config, lengths = lab.config(), [lab.size(n, n % 40 + 1) for n in (700, 1, 33, 1500, 690, 128, 1024, 2)]
    layout, width = PackedSequences.from_lengths(lengths, lab.device), config.hidden_size // config.num_attention_heads
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    inputs = [torch.randn(1, count, sum(lengths), width, device=lab.device).bfloat16() for count in heads]
    probe, found = torch.randn(1, sum(lengths), heads[0], width, device=lab.device).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs]
        with laid_out(layout):
            out, _ = varlen_attention(torch.nn.Module(), q, k, v, None, sliding_window=window)
        found.append((out, *torch.autograd.grad(out, leaves, probe.to(dtype))))
    return {name: Number(relative(a, b), 2e-2) for name, a, b in zip(("values", "dq", "dk", "dv"), *found, strict=True)}


def head_agrees(lab: Lab) -> Numbers:
    """The chunked LM head in fp32 and bf16, compared with log_softmax of the whole logits in fp32. The worst of four
    tensors counts."""
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


def step_agrees(lab: Lab) -> Numbers:
    """A trainer step on pairs of rows with one prompt, compared with one by transformers in fp32, row by row."""
    table = lab.table(lab.size(16, 6), lab.size(64, 20), lab.size(64, 4), lab.size(512, 16), group=2)
    rows = [[table.row_slice(f"{part}_tokens", row) for part in ("prompt", "response")] for row in range(len(table))]
    model = lab.transformers(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    start = []
    for row, advantage in zip(rows, table.advantage, strict=True):
        log_probs = scores(model, *row)[0]
        (-log_probs.mean() * advantage / len(rows)).backward()
        start.append(log_probs.detach().cpu())
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    with torch.no_grad():
        end = torch.cat([scores(model, *row)[0].cpu() for row in rows])
    del model, optimizer
    mine = step(lab, table, max_tokens_per_gpu=lab.size(2048, 40))  # several micro-batches
    moves = torch.stack([mine.after - mine.before, end - torch.cat(start)])
    tolerance, norm_tolerance, least = (0.05, 0.02, 0.95) if lab.cuda else (1e-4, 1e-4, 0.99)
    if lab.mixture and lab.cuda:  # rounding sends a token to another expert now and then
        tolerance, norm_tolerance, least = 0.1, 0.05, 0.9
    return {
        "mean log-prob gap": Number(float((mine.before - torch.cat(start)).abs().mean()), tolerance),
        "relative gap of the gradient norm": Number(abs(mine.norm / norm - 1), norm_tolerance),
        "correlation of what the step moved": Number(float(torch.corrcoef(moves)[0, 1]), low=least),
        "mean move": Number(float(moves[0].abs().mean())),
        "peak GB": Number(mine.peak),
    }


def variant_agrees(lab: Lab, memory: float, **changes: Any) -> Numbers:
    """A step that saves memory, compared with the plain one. ``memory``: the largest allowed share of the plain one's
    peak."""
    table = lab.table(lab.size(16, 6), lab.size(512, 8), lab.size(1536, 4), lab.size(1536, 16))
    plain, saving = step(lab, table), step(lab, table, **changes)
    gap, move = (float((plain.after - x).abs().mean()) for x in (saving.after, plain.before))
    return {
        "relative gap of the gradient norm": Number(abs(saving.norm / plain.norm - 1), 0.01 if lab.cuda else 1e-5),
        "log-prob gap after it, of its move": Number(gap / move, 0.03 if lab.cuda else 1e-4),
        "peak GB": Number(saving.peak, memory * plain.peak),
        "peak GB of the plain step": Number(plain.peak),
    }


def learns(lab: Lab) -> Numbers:
    """The quickstart: SFT, then GRPO, which is stopped and resumed half-way."""
    task, runs, rollouts = lab.task(), lab.work / "runs", lab.size(20, 4)
    sft = (
        f"{LOCAL} --device {lab.device} --hf-checkpoint {task}/model --prompt-data {task}/sft.parquet --num-epoch 1 "
        "--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --rollout-batch-size 800 "
        f"--global-batch-size 64 --optimizer muon --muon-lr 0.02 --lr 5e-3 --save-hf {runs}/model --run-dir {runs}/sft"
    )
    grpo = (
        f"{LOCAL} {RL} --device {lab.device} --hf-checkpoint {runs}/model --prompt-data {task}/train.parquet "
        f"--rm-type gsm8k --rollout-batch-size {lab.size(32, 4)} --rollout-max-response-len 32 --eps-clip-high 0.28 "
        f"--lr 1e-3 --lr-warmup-iters 5 --save {runs}/checkpoint --save-interval 100 --load {runs}/checkpoint "
        f"--run-dir {runs}/grpo --num-rollout"
    )
    for flags in (sft, f"{grpo} {rollouts // 2}", f"{grpo} {rollouts}"):
        assert train.main(flags.split()) == 0, "train.py failed; the log says why"
    losses, rewards, gaps = (
        [record[name] for record in read_metrics(runs / run) if name in record]
        for run, name in (
            ("sft", "train/loss"),
            ("grpo", "rollout/raw_reward"),
            ("grpo", "train/train_rollout_logprob_abs_diff"),
        )
    )
    first, last = float(np.mean(rewards[: rollouts // 4])), float(np.mean(rewards[-rollouts // 4 :]))
    return {
        "rollouts": Number(len(rewards), rollouts, rollouts),
        "SFT loss, last of first": Number(losses[-1] / losses[0], lab.size(50, 100) / 100),
        "reward of the first quarter": Number(first),
        "of the last": Number(last, low=-math.inf if lab.tiny else first + 0.1),
        "largest train_rollout_logprob_abs_diff": Number(max(gaps), 0.02),
    }


class Watched:
    """A cluster that records the device memory after each verb."""

    def __init__(self, lab: Lab, cluster: Cluster) -> None:
        self.lab, self.cluster, self.args = lab, cluster, cluster.args
        self.memory: dict[str, float] = {}

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            result = getattr(self.cluster, verb)(*given)
            wait([result])
            self.memory[" ".join([verb, *(x for x in given if isinstance(x, str))])] = self.lab.gigabytes()
            return result

        return call


def takes_turns(lab: Lab) -> Numbers:
    """Trainer, reference and engine on one GPU with --offload: the memory after each phase of train.py's loop."""
    flags = (
        f"{LOCAL} {RL} --device {lab.device} --hf-checkpoint {lab.folder()} --run-dir {lab.work}/runs/colocate "
        f"--prompt-data {lab.task()}/train.parquet --rm-type random --rollout-batch-size 4 --num-rollout 2 "
        "--rollout-max-response-len 64 --sglang-context-length 2048 --use-kl-loss --kl-loss-coef 0.01 --lr 1e-5 "
        "--offload"
    )
    args = make_args(flags.split())
    with Tracker(args) as tracker, launch(args) as cluster:
        watched = Watched(lab, cluster)
        train.train(watched, tracker)  # type: ignore[arg-type]
    left = {"release_engines": 0.3, "offload_trainers": lab.weights_gb() + 0.3}
    assert not lab.cuda or left.keys() <= watched.memory.keys(), f"no memory was given back: {watched.memory}"
    return {f"GB after {verb}": Number(used, left.get(verb, math.inf)) for verb, used in watched.memory.items()}


def sglang_takes_turns(lab: Lab) -> Numbers:
    """Ten rollouts of a colocated SGLang server and the trainer: seconds and memory by phase, and whether both
    agree."""
    run, rollouts = lab.work / "runs" / "sglang", lab.size(10, 2)
    flags = (
        f"{COMMON} {RL} --device {lab.device} --hf-checkpoint {lab.folder()} --run-dir {run} --rollout-backend sglang "
        f"--prompt-data {lab.task()}/train.parquet --rm-type random --rollout-batch-size {lab.size(32, 4)} "
        f"--num-rollout {rollouts} --rollout-max-response-len {lab.size(512, 16)} --sglang-context-length 2048 "
        f"--sglang-max-running-requests {lab.size(256, 32)} --lr 1e-5 --offload "
        + ("--sglang-mem-fraction-static 0.6" if lab.cuda else "--sglang-max-total-tokens 8192")
    )
    assert train.main(flags.split()) == 0, "train.py failed; the log says why"
    records = read_metrics(run)

    def values(name: str) -> list[float]:
        return [record[name] for record in records if name in record]

    times = [f"perf/{phase}_time" for phase in ("rollout", "train", "update_weights", "sleep", "wake_up")]
    memory = sorted({name for record in records for name in record if name.startswith("perf/memory_")})
    gaps = values("train/train_rollout_logprob_abs_diff")
    return {
        "rollouts": Number(len(gaps), rollouts, rollouts),
        "largest train_rollout_logprob_abs_diff": Number(max(gaps), 0.02 if lab.cuda else 1e-3),
        **{f"s, {name[5:-5]}": Number(float(np.mean(values(name)))) for name in times if values(name)},
        **{f"GB, {name[12:]}": Number(values(name)[-1]) for name in memory},
    }


def training_speed(lab: Lab) -> Numbers:
    """A step on 16k-token packs. FLOPs are the model's (recomputation does not count), and MFU uses the data sheet."""
    config, table = lab.config(), lab.table(lab.size(32, 4), lab.size(512, 8), lab.size(1536, 8), lab.size(1536, 8))
    with closing(lab.trainer()) as trainer:
        took = lab.seconds(lambda: trainer.train(0, table))
        head = config.vocab_size * config.hidden_size
        layers = sum(p.numel() for _, p in trainer.model.named_weights()) - head
    square = torch.randn(lab.size(8192, 256), lab.size(8192, 256), device=lab.device).bfloat16()
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
    """A whole call: prefill of 64-token prompts, one for 8 responses each, and 128 new tokens for each response."""
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
    """Send all weights from the trainer to an engine in the same process."""
    with closing(lab.trainer()) as trainer, lab.engine() as engine:
        sink = RemoteSink([LocalRemote(engine, "engine")])
        took = lab.seconds(lambda: trainer.push_weights(sink, 1))
        sent = trainer.push_weights(sink, 2)["perf/update_weights_bytes"]
    return {"seconds": Number(took), "GB": Number(sent / 1e9), "GB/s": Number(sent / 1e9 / took)}


def offload_speed(lab: Lab) -> Numbers:
    """Move weights and AdamW's moments to host memory and back. Also the device memory that the trainer still has
    meanwhile."""
    with closing(lab.trainer()) as trainer:
        # long enough for activations that the allocator would keep
        trainer.train(0, lab.table(lab.size(16, 4), lab.size(512, 8), lab.size(512, 4), lab.size(1024, 16)))
        took: list[float] = []
        for _ in range(3):  # the first takes the host memory
            for move in (trainer.memory.offload, trainer.memory.onload):
                start = time.perf_counter()
                move()
                took.append(time.perf_counter() - start)
        trainer.memory.offload()
        size = sum(taken for _, _, taken in trainer.memory.away.values()) / 1e9
        reserved = torch.cuda.memory_reserved() / 1e9 if lab.cuda else 0.0
    return {
        "GB": Number(size),
        "GB/s the first time": Number(size / took[0]),
        "GB/s out": Number(size / took[-2], low=8.0 if lab.cuda else 0.0),
        "GB/s back": Number(size / took[-1], low=8.0 if lab.cuda else 0.0),
        "GB reserved after training and offload": Number(reserved, 0.3),
    }


# group, name, whether what it proves needs a GPU (elsewhere it only tries itself), check
CHECKS: list[tuple[str, str, bool, Callable[[Lab], Numbers]]] = [
    ("engine", "engine = transformers, fp32", False, partial(engine_agrees, dtype=torch.float32)),
    ("engine", "engine = transformers, bf16", False, partial(engine_agrees, dtype=torch.bfloat16)),
    ("kernels", "varlen_attn = SDPA", True, partial(attention_agrees, window=None)),
    ("kernels", "varlen_attn = SDPA, sliding window", True, partial(attention_agrees, window=20)),
    ("kernels", "tree of shared prompts = its rows, heads of 64", True, partial(tree_attends, width=64)),
    ("kernels", "tree of shared prompts = its rows, heads of 128", True, partial(tree_attends, width=128)),
    ("kernels", "tree of shared prompts = its rows, heads of 256", True, partial(tree_attends, width=256)),
    ("kernels", "chunked LM head = full logits", False, head_agrees),
    ("trainer", "optimizer step = transformers in fp32", False, step_agrees),
    ("trainer", "gradient checkpointing", False, partial(variant_agrees, memory=0.8, gradient_checkpointing=True)),
    ("trainer", "reference = policy before the first step", True, reference_is_policy),
    ("trainer", "CUDA IPC into another process", True, another_process_reads),
    ("trainer", "a step on a card of 24 GB", True, fits_a_small_card),
    ("trainer", "fsdp cpu offload", True, partial(variant_agrees, memory=0.95, fsdp_cpu_offload=True)),
    ("grpo", "prompts that rows share = row by row", False, prompts_are_shared),
    ("grpo", "LoRA: step, release, push, engine", False, adapters_reach_the_engine),
    ("grpo", "compile x gradient checkpointing", False, recomputes_what_it_compiles),
    ("grpo", "mixture: optimizer step = transformers in fp32", False, lambda lab: step_agrees(lab.with_experts())),
    ("grpo", "critic", False, critic_learns),
    ("grpo", "--deterministic-mode repeats", True, repeats),
    ("loop", "quickstart learns, and resumes", False, learns),
    ("loop", "colocate with --offload", True, takes_turns),
    ("sglang", SGLANG, True, sglang_takes_turns),
    ("speed", "training", True, training_speed),
    ("speed", "decoding, 64 sequences", True, partial(decoding_speed, rows=64)),
    ("speed", "decoding, 256 sequences", True, partial(decoding_speed, rows=256)),
    ("speed", "weight sync", True, sync_speed),
    ("speed", "Muon", True, muon_speed),
    ("speed", "offload", True, offload_speed),
    ("machine", "memory saver: contents after pause and resume", True, saver_keeps),
    ("machine", "CUDA IPC with expandable segments in the shell", True, shells_do_not_matter),
    ("machine", "profile of a step", True, profiled),
    ("table", "predicted beside measured", True, predicted_beside_measured),
]


def run_check(lab: Lab, name: str, needs_gpu: bool, check: Callable[[Lab], Numbers]) -> Result:
    """The result of a check, even if it raises."""
    start, numbers, error = time.perf_counter(), {}, ""
    if name == SGLANG and find_spec("sglang") is None:
        shown = "SGLang is not installed (docs/install.md): what it proves is still unproven"
        return {"name": name, "status": "not run: no SGLang", "shown": shown, "seconds": 0.0, "numbers": {}}
    try:
        numbers = check(lab)
    except NotRun as reason:
        return {"name": name, "status": "not run", "shown": str(reason), "seconds": 0.0, "numbers": {}}
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


def main() -> None:
    """Run checks one by one. The file of results is complete at any time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, required=True, help="folder that groups share")
    parser.add_argument("--results", type=Path, required=True, help="JSON to write")
    parser.add_argument("groups", nargs="+")
    options = parser.parse_args()
    lab = Lab(options.device, options.tiny, options.work)
    gpu = torch.cuda.get_device_name() if lab.cuda and torch.cuda.is_available() else "no GPU"
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    chosen = [(name, needs, check) for group, name, needs, check in CHECKS if group in options.groups]
    unfinished = {"status": "FAIL", "shown": "the process ended before the check did", "seconds": 0.0, "numbers": {}}
    results: list[Result] = [{"name": name} | unfinished for name, *_ in chosen]

    def save() -> None:
        options.results.write_text(json.dumps({"machine": {"gpu": gpu} | versions, "checks": results}))

    save()
    for index, (name, needs_gpu, check) in enumerate(chosen):
        results[index] = run_check(lab, name, needs_gpu, check)
        save()


if __name__ == "__main__":
    main()
