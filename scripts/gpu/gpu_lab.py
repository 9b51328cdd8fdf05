"""The common part of the checks of gpu_check.py: numbers with bounds, and a model of real shape with its engine and
trainer."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from scripts.lib.arithmetic import write_model_folder
from slimelite.arguments import Args
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.trainer import Trainer

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
QWEN2_5_0_5B, TINY = (151936, 896, 4864, 24, 14), (151, 64, 96, 2, 4)
# a mixture of the same vocabulary: 1.1B parameters, of which 0.2B work on a token
MIXTURE: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "head_dim": 64}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
TINY_MIXTURE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Number:
    """A measurement. The check fails if it is outside the bounds; NaN always is."""

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


class NotRun(Exception):
    """A check needs something that is missing."""


@dataclass(frozen=True)
class Lab:
    """The device of the checks, and the model that they share. ``mixture``: the model has experts."""

    device: Literal["cpu", "cuda"]
    tiny: bool
    work: Path
    mixture: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, full: int, tiny: int) -> int:
        """``tiny`` with ``--tiny``, else ``full``."""
        return tiny if self.tiny else full

    def config(self) -> PretrainedConfig:
        """The config of Qwen2.5-0.5B or a small copy of it; with ``mixture``, of a Qwen3 with experts."""
        if self.mixture:
            sizes = TINY_MIXTURE | TINY_EXPERTS if self.tiny else MIXTURE | EXPERTS
            sizes |= {"vocab_size": (TINY if self.tiny else QWEN2_5_0_5B)[0], "num_key_value_heads": 2}
            return AutoConfig.for_model("qwen3_moe", tie_word_embeddings=True, eos_token_id=2, **sizes)
        shape = zip(SHAPE, TINY if self.tiny else QWEN2_5_0_5B, strict=True)
        return AutoConfig.for_model(
            "qwen2", num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=2, **dict(shape)
        )

    @torch.no_grad()
    def folder(self) -> str:
        """The model with random weights that bf16 holds exactly, and the quickstart's tokenizer."""
        path = self.work / ("mixture" if self.mixture else "model")
        if not path.exists():
            torch.manual_seed(0)
            with torch.device(self.device):
                model = AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases and norms other than 0 and 1, so that each matters
                    parameter += 0.1 * torch.randn_like(parameter)
            model.get_decoder().norm.weight *= 2  # log-probs that are far from uniform
            write_model_folder(path)
            model.save_pretrained(path)
        return str(path)

    def weights_gb(self) -> float:
        """Size of that folder's weights [GB]."""
        return sum(file.stat().st_size for file in Path(self.folder()).glob("*.safetensors")) / 1e9

    @property
    def engine_dtype(self) -> torch.dtype:
        """The dtype of an engine that agrees with the trainer."""
        return torch.bfloat16 if self.cuda else torch.float32

    def with_experts(self) -> Lab:
        """The same lab with a mixture of experts."""
        return replace(self, mixture=True)

    def task(self) -> Path:
        """The quickstart's data."""
        path = self.work / "task"
        if not path.exists():
            command = ["scripts/prepare_data.py", "quickstart", "--out", str(path)]
            subprocess.run([sys.executable, *command, "--sft-rows", str(self.size(22400, 1600))], check=True)
        return path

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
        """A trainer of that model, with one optimizer step for each rollout."""
        given: dict[str, Any] = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16384, "global_batch_size": 4096}
        given |= {"lr": 3e-4, "num_rollout": 9, "num_steps_per_rollout": 1} | changes
        return Trainer(Args(hf_checkpoint=self.folder(), device=self.device, **given))

    def table(self, rows: int, prompt: int, shortest: int, longest: int, group: int = 1) -> SampleTable:
        """Random tokens with random advantages. ``group`` rows have the same prompt."""
        rng, vocabulary = np.random.default_rng(0), self.config().vocab_size
        samples = [Sample(group_index=i // group, index=i, reward=0.0) for i in range(rows)]
        prompts = rng.integers(0, vocabulary, (rows, prompt)).tolist()
        for i, sample in enumerate(samples):
            sample.tokens = list(prompts[i // group])
            response = rng.integers(0, vocabulary, rng.integers(shortest, longest + 1)).tolist()
            sample.append_response_tokens(response, log_probs=[-1.0] * len(response))
        table = SampleTable.from_samples([[sample] for sample in samples])
        table.advantage = rng.normal(size=rows)
        return table

    def gigabytes(self, *, peak: bool = False) -> float:
        """Device memory of tensors now, or the peak since the last call [GB]; 0 on a CPU."""
        if not self.cuda:
            return 0.0
        gc.collect()
        used = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return used / 1e9

    def empty(self) -> None:
        """Release the allocator's unused memory."""
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, work: Callable[[], object], times: int = 3) -> float:
        """Wall time of one call, with all work that it started on the device: the best of several calls after a
        warm-up."""
        took = []
        for _ in range(times + 1):
            start = time.perf_counter()
            work()
            if self.cuda:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        return min(took[1:])


class Step(NamedTuple):
    """Log-probs ``before`` and ``after`` an optimizer step, its gradient ``norm`` and ``peak`` GB."""

    before: Tensor
    norm: float
    after: Tensor
    peak: float


def step(lab: Lab, table: SampleTable, **changes: Any) -> Step:
    """An optimizer step of a trainer with these flags."""
    with closing(lab.trainer(**changes)) as trainer:
        before = torch.from_numpy(trainer.log_probs(table))
        lab.gigabytes()
        norm = trainer.train(0, table)["train/grad_norm"]
        peak = lab.gigabytes(peak=True)
        return Step(before, norm, torch.from_numpy(trainer.log_probs(table)), peak)


def within(lab: Lab, cuda: float, cpu: float) -> float:
    """A bound that depends on the precision of the device."""
    return cuda if lab.cuda else cpu


@torch.no_grad()
def relative(found: Tensor, expected: Tensor) -> float:
    """Length of the difference divided by the length of the expected value."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def scores(model: PreTrainedModel, prompt: Any, response: Any) -> tuple[Tensor, Tensor]:
    """[response tokens] log-probs by transformers from full logits, and the distance of each to the best token's."""
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    log_p = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    chosen = log_p.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return chosen, log_p.amax(-1) - chosen
