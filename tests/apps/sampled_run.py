"""Run folders with samples, without a run: real parquet files, made-up texts and numbers, a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable, TokenStats
from slimelite.tracking.metrics_file import MetricsFile

LINES = [
    "What is 12 + 7?",
    "naïve café, über 你好 😀",
    "so the answer is \\boxed{19}",
    "<tool_call>{}</tool_call> it's",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(folder: Path) -> Tokenizer:
    """A byte-level BPE tokenizer, saved in ``folder``; most characters beyond ASCII take it several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES[:1] * 4 + LINES[2:] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_run(folder: Path, tokenizer: Path | str | None, rollouts: int = 1) -> Path:
    """A run folder with configuration and metrics, which ``save`` fills with samples."""
    folder.mkdir(parents=True)
    named = {"hf_checkpoint": tokenizer and str(tokenizer), "tokenizer": tokenizer and str(tokenizer)}
    (folder / "config.json").write_text(json.dumps({**named, "run_dir": str(folder)}))
    (folder / "status.json").write_text(json.dumps({"status": "finished", "rollouts_done": rollouts}))
    metrics = MetricsFile(folder)
    for i in range(rollouts):
        metrics.write(
            "rollout", {"rollout/step": i, "rollout/raw_reward": 0.1 * i, "rollout/weight_staleness/max": 9.0}
        )
    metrics.close(False)
    return folder


def sample(
    tokenizer: Tokenizer, group: int, index: int, prompt: Any, response: str, reward: Any, **more: Any
) -> Sample:
    """A finished sample with log-probs -0.001, -0.002, …, one weight version and all tokens in the loss."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    made = Sample(group_index=group, index=index, prompt=prompt, tokens=tokenizer.encode(text).ids)
    ids = tokenizer.encode(response, add_special_tokens=False).ids
    log_probs = [-0.001 * (i + 1) for i in range(len(ids))]
    made.append_response_tokens(ids, log_probs, weight_version=more.pop("version", 0))
    made.response, made.reward = tokenizer.decode(ids, skip_special_tokens=False), reward
    made.status = Sample.Status.COMPLETED
    for name, value in more.items():
        setattr(made, name, value)
    return made


def save(path: Path, groups: Sequence[Sequence[Sample]], key: str | None = None) -> SampleTable:
    """Write the groups as a file of samples; each group gets advantages reward - mean."""
    table = SampleTable.from_samples(groups, key)
    for group in np.unique(table.group_id):
        rows = table.group_id == group
        table.advantage[rows] = table.reward[rows] - table.reward[rows].mean()
    table.to_parquet(path)
    return table


def save_stats(path: Path, table: SampleTable, of: Callable[[int], bool] = lambda row: True) -> None:
    """Write token stats for the rows that ``of`` accepts: the trainer is 0.0123 below the engine; entropy is 0.5."""
    computed = np.repeat([of(row) for row in range(len(table))], table.response_lengths)
    log_probs = np.where(computed, table.rollout_log_probs - 0.0123, np.nan).astype(np.float32)
    entropy = np.where(computed, 0.5, np.nan).astype(np.float32)
    TokenStats(table.sample_id, table.response_offsets, log_probs, entropy).to_parquet(path)
