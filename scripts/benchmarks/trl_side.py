"""TRL's side of the questions, run by TRL's own interpreter. It writes a line of JSON to ``--marks`` at the end of
every step.

    $TRL_PYTHON scripts/benchmarks/trl_side.py grpo --model M --data D.parquet --steps 20 --rows 256 --marks F

All of TRL's default features stay on. Gradient checkpointing, which trades time for memory, is off.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def right(text: str, label: str) -> float:
    """1 if the number after #### is the label."""
    found = NUMBER.search(text)
    return float(found is not None and found.group(1).replace(",", "") == label)


def answers(completions: Sequence[Any], label: Sequence[str], **_: object) -> list[float]:
    """The reward of the quickstart's task."""
    return [right(c[0]["content"], x) for c, x in zip(completions, label, strict=True)]


def coins(completions: Sequence[Any], **_: object) -> list[float]:
    """A reward that differs between the samples of a group, so that every row has a gradient."""
    return torch.rand(len(completions)).tolist()


def greedy_accuracy(model: Any, tokenizer: Any, rows: Sequence[Any], tokens: int, batch: int = 250) -> float:
    """The share of right greedy answers."""
    model.eval()
    good = 0.0
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        asked = [row["messages"] for row in part]
        options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "padding": True}
        ids = tokenizer.apply_chat_template(asked, return_dict=True, **options)
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
        texts = tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :])
        good += sum(right(text, str(row["label"])) for text, row in zip(texts, part, strict=True))
    model.train()
    return good / len(rows)


class Marks(TrainerCallback):
    """Writes a line at the end of each step, and evaluates at the requested steps."""

    def __init__(self, given: argparse.Namespace, tokenizer: Any) -> None:
        self.given, self.tokenizer = given, tokenizer
        self.heldout = pq.read_table(given.evaluate).to_pylist()[: given.eval_rows] if given.evaluate else []

    def note(self, **values: object) -> None:
        """Append a line."""
        with Path(self.given.marks).open("a") as file:
            file.write(json.dumps({"time": time.time(), **values}) + "\n")

    def on_step_end(self, _: Any, state: Any, __: Any, **kept: Any) -> None:
        """Write the step's mark, then the evaluation's."""
        self.note(kind="step", step=state.global_step)
        if self.heldout and state.global_step % self.given.eval_every == 0:
            score = greedy_accuracy(kept["model"], self.tokenizer, self.heldout, self.given.new_tokens)
            self.note(kind="eval", step=state.global_step, score=score)

    def on_log(self, _: Any, state: Any, __: Any, logs: Any = None, **___: Any) -> None:
        """Write the numbers that TRL logs."""
        self.note(kind="log", step=state.global_step, **{k: v for k, v in logs.items() if isinstance(v, int | float)})


def build(given: argparse.Namespace, tokenizer: Any, common: dict[str, Any]) -> Any:
    """The trainer of a task."""
    rows = pq.read_table(given.data).to_pylist()
    rows = rows * (1 + given.steps * given.rows // max(1, len(rows)))
    steps: dict[str, Any] = {"per_device_train_batch_size": given.batch, "max_steps": given.steps}
    marks = [Marks(given, tokenizer)]
    if given.task == "grpo":
        data = [{"prompt": row["messages"], "label": str(row["label"])} for row in rows]
        config = GRPOConfig(
            **common,
            **steps,
            gradient_accumulation_steps=given.rows // given.batch,
            num_generations=8,
            max_completion_length=given.new_tokens,
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
        )
        reward = coins if given.reward == "random" else answers
        return GRPOTrainer(given.model, reward, config, Dataset.from_list(data), None, tokenizer, None, marks)
    if given.task == "sft":
        name = "conversation" if "conversation" in rows[0] else "messages"
        data = [{"prompt": row[name][:-1], "completion": row[name][-1:]} for row in rows]
        own: dict[str, Any] = {"packing": True, "max_length": given.packed} if given.packed else {"max_length": None}
        accumulate = 1 if given.packed else given.rows // given.batch
        config = SFTConfig(**common, **steps, **own, gradient_accumulation_steps=accumulate, completion_only_loss=True)
        options: dict[str, Any] = {"processing_class": tokenizer, "callbacks": marks}
        return SFTTrainer(given.model, config, train_dataset=Dataset.from_list(data), **options)

    def reply(row: dict[str, Any], column: str) -> Any:
        found = row[column]
        return [{"role": "assistant", "content": found}] if isinstance(found, str) else found

    data = [{"prompt": r["messages"], "chosen": reply(r, "chosen"), "rejected": reply(r, "rejected")} for r in rows]
    config = DPOConfig(
        **common, **steps, gradient_accumulation_steps=given.rows // given.batch, beta=0.5, label_smoothing=0.1
    )
    options = {"processing_class": tokenizer, "callbacks": marks}
    return DPOTrainer(given.model, None, config, train_dataset=Dataset.from_list(data), **options)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["grpo", "sft", "dpo"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--marks", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, default=256, help="samples, rows or pairs in a step")
    parser.add_argument("--batch", type=int, default=64, help="rows in a forward pass")
    parser.add_argument("--packed", type=int, default=0, help="sft: pack into --batch sequences of this length")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--reward", choices=["random", "answer"], default="answer")
    parser.add_argument("--evaluate", help="parquet of held-out prompts")
    parser.add_argument("--eval-every", type=int, default=2)
    parser.add_argument("--eval-rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # not AutoTokenizer, whose class for Qwen2 leaves out the word-level tokenizer's own splitting: other prompts
    side = "left" if given.task == "grpo" else "right"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(given.model, padding_side=side)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = "<|endoftext|>"
    common = {
        "output_dir": str(Path(given.marks).parent / "trl-out"),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "learning_rate": given.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": given.seed,
        "model_init_kwargs": {"dtype": "float32"},
    }
    build(given, tokenizer, common).train()


if __name__ == "__main__":
    main()
