"""peft as the judge of every adapter that a run can write: families × modules × ranks, opened by real peft.

The suite takes a few families; ``pytest -m slow tests/training/test_peft.py`` takes all that docs/algorithms.md calls
trainable, with each name of a module alone.
"""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from slimelite.apps.runnable import Source, merged
from slimelite.arguments import Args
from slimelite.arguments.training import ALL_LINEAR, read_adapter
from slimelite.models.small import VOCABULARY, small_config
from slimelite.training.loading import inspect_model
from slimelite.training.lora import (
    adapters,
    add_adapters,
    check_readable,
    last_name,
    peft_config,
    peft_weights,
    save_adapter,
)
from tests.training.test_lora import log_probs
from tests.training.tiny import Recorder, one_rank, random_table, tiny_args

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "dev"))
from check_families import BEGIN, END, FIELDS, LAYERS, PAGE, REFUSED, UNSEEN

logging.disable_progress_bar()

# what the families of the suite have: (fields, modules)
SAMPLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # a dense layer, shared experts, latent attention
    "deepseek_v3": ({"first_k_dense_replace": 1, "num_hidden_layers": 2}, (ALL_LINEAR, "mlp", "kv_a_proj_with_mqa")),
    "glm4_moe": ({"first_k_dense_replace": 1, "num_hidden_layers": 2}, (ALL_LINEAR, "gate_proj")),
    "qwen3_moe": ({"mlp_only_layers": [0], "num_hidden_layers": 2}, (ALL_LINEAR, "up_proj,o_proj", "attn")),
    # experts alone
    "olmoe": ({"num_hidden_layers": 1}, (ALL_LINEAR,)),
    # linear attention, a shared expert and its gate
    "qwen3_next": ({"num_hidden_layers": LAYERS}, (ALL_LINEAR, "shared_expert_gate")),
    # a weight of Mamba's that its layer does not call, and a name that experts have too
    "granitemoehybrid": ({"num_hidden_layers": LAYERS}, (ALL_LINEAR, "input_linear")),
    "nemotron_h": ({}, (ALL_LINEAR,)),
    # fused projections; biases; tied embeddings, and two that are not
    "phi3": ({"num_hidden_layers": 2}, (ALL_LINEAR, "qkv_proj", "lm_head,embed_tokens")),
    "starcoder2": ({"num_hidden_layers": 2}, (ALL_LINEAR,)),
    "gemma3_text": ({"num_hidden_layers": 2}, (ALL_LINEAR, "layers.1.mlp.down_proj")),
}
RANKS: tuple[dict[str, Any], ...] = (
    {"lora_rank": 2, "lora_alpha": 3.0},
    {"lora_rank": 5, "lora_alpha": 2.0, "lora_type": "rslora"},
    {"lora_rank": 1, "lora_alpha": 1.0, "lora_type": "canonical_lora"},
)


# families without torch's own linear layers, and one that peft cannot read
REFUSES_ALL = ("gpt2", "gpt-sw3", "openai-gpt", "falcon", "laguna")


def small_model(family: str, folder: Path, **fields: Any) -> Path:
    """A model of ``family`` with strong random weights."""
    config = small_config(AutoConfig.for_model(family, **fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in hf.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    hf.save_pretrained(folder)
    return folder


def opened(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@torch.no_grad()
def logits(hf: nn.Module) -> Tensor:
    ids = torch.randint(1, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    return hf(input_ids=ids, use_cache=False).logits


def adapted(base: PreTrainedModel, args: Args) -> PreTrainedModel:
    """``base`` with a new adapter. Raises ValueError if a run refuses it."""
    hf = copy.deepcopy(base)
    add_adapters(hf, args, seed=0)
    check_readable(hf)
    return hf


def judged(base: PreTrainedModel, ours: PreTrainedModel, args: Args, folder: Path) -> float:
    """How far an adapter with random weights moves the logits of ``base``.

    Raises AssertionError if peft, or this program, opens it as another one.
    """
    rng = torch.Generator().manual_seed(1)
    for _, parameter in peft_weights(ours):
        parameter.data.copy_(torch.randn(parameter.shape, generator=rng) * 0.2)
    expected = logits(ours)
    folder.mkdir(exist_ok=True)
    weights = {name: parameter.detach() for name, parameter in peft_weights(ours)}
    save_adapter(folder, weights, peft_config(ours, args, "base"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="peft")
        # transformers' bigbird_pegasus has tie_word_embeddings and ties nothing
        warnings.filterwarnings("ignore", message=".* tie")
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
        there = {name for name, module in theirs.base_model.model.named_modules() if hasattr(module, "lora_A")}
        assert there == {name for name, _ in adapters(ours)}
        tolerance = 2e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(
            logits(theirs.merge_and_unload()), expected, rtol=0, atol=5 * tolerance
        )  # rounds once more
    again = copy.deepcopy(base)
    add_adapters(again, Args(lora_adapter_path=str(folder), **read_adapter(str(folder))), seed=1)
    assert torch.equal(logits(again), expected)
    return float((expected - logits(base)).abs().max())


@pytest.mark.newest
@pytest.mark.parametrize("family", SAMPLE)
def test_peft_opens_adapters_as_they_were_trained(family: str, tmp_path: Path) -> None:
    fields, choices = SAMPLE[family]
    base = opened(small_model(family, tmp_path / "base", **FIELDS.get(family, {}) | fields))
    for modules, ranks in zip(choices, RANKS, strict=False):
        args = Args(**ranks, lora_targets=tuple(modules.split(",")))
        assert judged(base, adapted(base, args), args, tmp_path / "adapter") > 1e-2


def trainable() -> list[str]:
    """The families that docs/algorithms.md calls trainable, but for emu3, whose small copy transformers cannot load."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if line.startswith("| ")]
    trained = {family for names, how, *_ in rows[1:] if how not in (REFUSED, UNSEEN) for family in names.split(", ")}
    return sorted(trained - {"emu3"})


def configured(family: str) -> dict[str, Any]:
    """Fields of a config of few layers."""
    fields: dict[str, Any] = {"num_hidden_layers": LAYERS}
    if family == "gpt_neo":
        fields["attention_types"] = [[["global", "local"], LAYERS // 2]]
    if "text_config" in CONFIG_MAPPING[family].sub_configs:
        fields = {"text_config": fields}
    return fields | FIELDS.get(family, {})


@pytest.mark.slow
@pytest.mark.parametrize("family", trainable())
def test_every_adapter_of_every_family(family: str, tmp_path: Path) -> None:
    base = opened(small_model(family, tmp_path / "base", **configured(family)))
    names = [name for name, module in base.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    alone = sorted({last_name(name) for name in names})
    for i, modules in enumerate((ALL_LINEAR, names[len(names) // 2], "attn", "mlp", *alone)):
        args = Args(**RANKS[i % len(RANKS)], lora_targets=(modules,))
        try:
            ours = adapted(base, args)
        except ValueError as error:
            print(f"{family} {modules}: refused: {error}")
            assert modules != ALL_LINEAR or family in REFUSES_ALL
        else:
            print(f"{family} {modules}: {judged(base, ours, args, tmp_path / 'adapter'):.2g}")


RUNS = {
    "deepseek_v3": {"first_k_dense_replace": 1, "num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "phi3": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("family", RUNS)
def test_a_run_leaves_one_model_everywhere(family: str, tmp_path: Path) -> None:
    """Its adapter in peft and in `serve`, its merged folder, its checkpoint and what a sync sends are one model."""
    model = small_model(family, tmp_path / "base", **RUNS[family])
    places = [tmp_path / name for name in ("adapter", "checkpoint", "served", "merged")]
    adapter, checkpoint, served, whole = places
    table, sink = random_table(), Recorder()
    flags = {"lora_rank": 2, "lora_alpha": 3.0, "lora_dropout": 0.1}
    with one_rank(tiny_args(model, **flags)) as trainer:
        for step in range(2):
            trainer.train(step, table)
        trainer.save_hf(str(adapter))
        trainer.save(str(checkpoint), 1)
        trainer.push_weights(sink, 1)
        expected = trainer.log_probs(table)
    with one_rank(tiny_args(model, **flags, lora_merge=True)) as trainer:
        trainer.load(str(checkpoint))
        np.testing.assert_array_equal(trainer.log_probs(table), expected)
        trainer.save_hf(str(whole))
    merged(Source(str(adapter), str(model)), served, "float32")
    theirs = PeftModel.from_pretrained(opened(model), adapter).merge_and_unload()
    for hf in (theirs, opened(served), opened(whole)):
        np.testing.assert_allclose(log_probs(hf, model), expected, rtol=0, atol=1e-5)
    assert np.abs(log_probs(opened(model), model) - expected).max() > 1e-3
    files = load_file(whole / "model.safetensors")
    assert files.keys() == load_file(model / "model.safetensors").keys()
    assert {name.rpartition(".")[2] for name in files.keys() ^ sink.tensors.keys()} <= {"e_score_correction_bias"}
    assert all(torch.equal(value, files[name]) for name, value in sink.tensors.items())


def test_a_choice_that_peft_cannot_read_is_refused_or_merged(tmp_path: Path) -> None:
    model = small_model("laguna", tmp_path / "base", num_hidden_layers=2)
    args = tiny_args(model, lora_rank=2, save_hf=str(tmp_path / "saved"))
    with pytest.raises(
        ValueError, match=r"not find the adapter of .*shared_experts.*; add --lora-merge, or leave the module out"
    ):
        inspect_model(args, str(model), trained=True)
    for change in ({"lora_merge": True}, {"save_hf": None}, {"lora_targets": ("attn",)}):
        inspect_model(replace(args, **change), str(model), trained=True)


@pytest.mark.parametrize(
    ("family", "word", "said"),
    [
        ("gpt2", ALL_LINEAR, "in gpt2 it is a Conv1D; only torch.nn.Linear and torch.nn.Embedding can have adapters"),
        (
            "mamba",
            "out_proj",
            "mamba uses the module's weight without calling the module, so an adapter would change nothing",
        ),
        ("gemma", "embed_tokens", "in gemma it is a GemmaTextScaledWordEmbedding"),
    ],
)
def test_modules_that_can_have_no_adapter_are_named(family: str, word: str, said: str) -> None:
    hf = AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model(family, num_hidden_layers=1)))
    with pytest.raises(ValueError, match=f"--lora-target-modules {word}: {said}"):
        add_adapters(hf, Args(lora_rank=2, lora_targets=(word,)), seed=0)
