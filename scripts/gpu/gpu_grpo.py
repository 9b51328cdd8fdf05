"""Checks of gpu_check.sh about the parts of GRPO: shared prompts, adapters, recomputation, a critic, repetition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from gpu_lab import Lab, Number, Numbers, relative, step, within
from torch import Tensor

from slimelite.cluster.remote import LocalRemote, RemoteSink
from slimelite.training.attention import varlen_attention
from slimelite.training.batch import Nodes, PackedSequences, laid_out, ranges
from slimelite.training.trainer import Trainer

# rows of a group, which have one prompt
GROUP = 8


def tree_attends(lab: Lab, width: int) -> Numbers:
    """Attention over a tree in bf16, with two levels of shared prefixes and seven queries for each key. It is compared
    with its rows one by one in fp32.
    """
    torch.manual_seed(0)
    prompt, turn, answers = lab.size(300, 7), lab.size(90, 5), [lab.size(200 + 7 * i, 3 + i) for i in range(GROUP)]
    # two groups; the second half of each shares a turn after the prompt
    lengths = np.array([prompt + turn * (i >= GROUP // 2) + n for _ in range(2) for i, n in enumerate(answers)])
    one = [0, *[prompt] * (GROUP // 2), *[prompt + turn] * (GROUP // 2 - 1)]
    nodes, leaves = Nodes.of_rows(lengths, np.array(one * 2))
    tree, flat = PackedSequences(nodes, lab.device), PackedSequences.from_lengths(lengths, lab.device)
    depths = ranges(np.zeros(len(lengths), np.int64), lengths)
    places = torch.from_numpy(nodes.positions(np.repeat(leaves, lengths), depths)).to(lab.device)
    heads, tokens = (14, 2, 2), int(tree.sizes.sum())
    inputs = [torch.randn(1, count, tokens, width, device=lab.device).bfloat16() for count in heads]
    probe, found = torch.randn(1, len(places), heads[0], width, device=lab.device).bfloat16(), []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = leaves_ = [x.to(dtype).requires_grad_() for x in inputs]
        half = dtype == torch.bfloat16
        rows = [q, k, v] if half else [x[:, :, places] for x in (q, k, v)]
        with laid_out(tree if half else flat):
            out = varlen_attention(torch.nn.Module(), *rows, None)[0]
        out = out[:, places] if half else out
        found.append((out, *torch.autograd.grad(out, leaves_, probe.to(dtype))))
    errors = zip(("values", "dq", "dk", "dv"), *found, strict=True)
    return {
        "levels of shared prefixes": Number(len(tree.shared), 2, 2),
        "tokens of the tree, of its rows": Number(tokens / len(places), 0.7),
        **{name: Number(relative(a, b), 2e-2) for name, a, b in errors},
    }


@contextmanager
def counted(trainer: Trainer) -> Iterator[list[int]]:
    """Record the tokens of each forward pass of the policy."""
    tokens: list[int] = []
    embedding = trainer.model.hf.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].numel()))
    try:
        yield tokens
    finally:
        hook.remove()


def prompts_are_shared(lab: Lab) -> Numbers:
    """A step on groups of eight in trees, compared with the same step row by row: tokens, memory, log-probs and
    gradient."""
    table = lab.table(lab.size(32, 8), lab.size(1024, 24), lab.size(64, 4), lab.size(512, 8), group=GROUP)
    shared, flat = step(lab, table), step(lab, table, share_prefixes=False)
    with closing(lab.trainer()) as trainer, counted(trainer) as tokens:
        trainer.log_probs(table)
    move = float((flat.after - flat.before).abs().mean())
    return {
        "tokens computed, of the rows'": Number(sum(tokens) / int(table.total_lengths.sum()), 0.6),
        "mean log-prob gap": Number(float((shared.before - flat.before).abs().mean()), within(lab, 0.02, 1e-5)),
        "relative gap of the gradient norm": Number(abs(shared.norm / flat.norm - 1), within(lab, 0.02, 1e-5)),
        "log-prob gap after it, of its move": Number(
            float((shared.after - flat.after).abs().mean()) / move, within(lab, 0.05, 1e-3)
        ),
        "peak GB": Number(shared.peak, flat.peak),
        "peak GB row by row": Number(flat.peak),
    }


def adapters_reach_the_engine(lab: Lab) -> Numbers:
    """LoRA: a step, a release of the trainer's memory, a push of merged weights, and then the engine's log-probs."""
    table = lab.table(lab.size(16, 4), lab.size(256, 8), lab.size(32, 4), lab.size(128, 8), group=4)
    with (
        closing(lab.trainer(lora_rank=16, lr=within(lab, 2e-3, 1e-2))) as trainer,
        lab.engine(dtype=lab.engine_dtype) as engine,
    ):
        before = trainer.log_probs(table)
        trainer.train(0, table)
        mine = trainer.log_probs(table)
        lab.gigabytes()
        trainer.memory.offload()
        left = lab.gigabytes()
        sent = trainer.push_weights(RemoteSink([LocalRemote(engine, "engine")]), 1)["perf/update_weights_bytes"]
        trainer.memory.onload()
        again = trainer.log_probs(table)
        theirs: list[float] = []
        for row in range(len(table)):
            prompt, response = (table.row_slice(f"{part}_tokens", row).tolist() for part in ("prompt", "response"))
            theirs += asyncio.run(engine.score([*prompt, *response], len(prompt))).log_probs
    return {
        "mean move of the step": Number(float(np.abs(mine - before).mean()), low=1e-3),
        "mean gap of engine and trainer": Number(
            float(np.abs(np.array(theirs) - mine).mean()), within(lab, 0.05, 1e-4)
        ),
        "gap after release and return": Number(float(np.abs(again - mine).max()), 0.0),
        "GB left after the release": Number(left, within(lab, 0.3 + lab.weights_gb(), 0.0)),
        "GB sent": Number(sent / 1e9),
    }


def recomputes_what_it_compiles(lab: Lab) -> Numbers:
    """The tensors that a step saves for its backward pass, its peak and its seconds: plain, compiled, recomputed, and
    both."""
    table = lab.table(lab.size(16, 4), lab.size(512, 8), lab.size(256, 4), lab.size(512, 8), group=4)
    numbers: Numbers = {}
    norms: dict[str, float] = {}
    found: dict[str, tuple[float, float]] = {}
    for name, flags in {
        "plain": {},
        "recomputed": {"gradient_checkpointing": True},
        "compiled": {"compile": True},
        "both": {"compile": True, "gradient_checkpointing": True},
    }.items():
        with closing(lab.trainer(**flags)) as trainer:
            norms[name] = trainer.train(0, table)["train/grad_norm"]
            lab.gigabytes()
            saved = saved_bytes(lambda trainer=trainer: trainer.train(1, table)) / 1e9
            peak = lab.gigabytes(peak=True)
            if lab.cuda:
                numbers[f"s {name}"] = Number(lab.seconds(lambda trainer=trainer: trainer.train(2, table)))
        found[name] = saved, peak
    for name, (saved, peak) in found.items():
        limit = (
            1.1 * found["recomputed"][0]
            if name == "both"
            else 0.8 * found["plain"][0]
            if name == "recomputed"
            else None
        )
        numbers[f"GB saved {name}"] = Number(saved, *([limit] if limit is not None else []))
        numbers[f"peak GB {name}"] = Number(peak)
        gap = abs(norms[name] / norms["plain"] - 1)
        numbers[f"gap of the gradient norm {name}"] = Number(gap, within(lab, 0.01, 1e-4))
    return numbers


def saved_bytes(work: Callable[[], object]) -> int:
    """Bytes of all tensors that are saved for backward passes during ``work``. Shared memory counts once for each
    pass."""
    sizes: dict[int, int] = {}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in sizes:
            sizes[storage.data_ptr()] = storage.nbytes()
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return total


def critic_learns(lab: Lab) -> Numbers:
    """PPO with a critic of the policy's size. Its loss must fall on the same rollout."""
    table = lab.table(lab.size(16, 4), lab.size(256, 8), lab.size(64, 4), lab.size(128, 8), group=4)
    table.advantage = np.linspace(-1.0, 1.0, len(table))
    flags: dict[str, Any] = {"advantage_estimator": "ppo", "use_critic": True, "critic_lr": within(lab, 1e-4, 1e-3)}
    with closing(lab.trainer(**flags, lr=1e-6)) as trainer:
        losses = [trainer.train(i, table)["train/critic-value_loss"] for i in range(6)]
    return {
        "value loss of the first step": Number(losses[0], low=0.0),
        "of the sixth, of the first": Number(losses[-1] / losses[0], within(lab, 1.0, 0.9)),
        "peak GB": Number(lab.gigabytes(peak=True)),
    }


def repeats(lab: Lab) -> Numbers:
    """--deterministic-mode: the same two steps, twice from the start."""
    table = lab.table(lab.size(16, 8), lab.size(256, 8), lab.size(64, 4), lab.size(256, 8), group=GROUP)
    ends = []
    for _ in range(2):
        with closing(lab.trainer(deterministic_mode=True)) as trainer:
            norms = [trainer.train(i, table)["train/grad_norm"] for i in range(2)]
            ends.append((np.array(norms), trainer.log_probs(table)))
    return {
        "largest gap of log-probs": Number(float(np.abs(ends[0][1] - ends[1][1]).max()), 0.0),
        "gap of gradient norms": Number(float(np.abs(ends[0][0] - ends[1][0]).max()), 0.0),
    }


def muon_speed(lab: Lab) -> Numbers:
    """Seconds of a step with Muon and with AdamW."""
    table = lab.table(lab.size(8, 4), lab.size(64, 8), lab.size(64, 4), lab.size(64, 8))
    took = {}
    for name, flags in {"AdamW": {}, "Muon": {"optimizer": "muon", "muon_lr": 1e-3}}.items():
        with closing(lab.trainer(**flags)) as trainer:
            took[name] = lab.seconds(lambda trainer=trainer: trainer.train(0, table))
    return {**{f"s {name}": Number(each) for name, each in took.items()}, "ratio": Number(took["Muon"] / took["AdamW"])}
