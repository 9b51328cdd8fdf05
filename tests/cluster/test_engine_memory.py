"""Servers that share the trainers' GPUs release their memory and lose what is in it. After the next sync they have
everything again: it was sent, or a copy in host memory kept it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.cluster.workers import EngineFactory
from slimelite.engines.protocol import MEMORY_TAGS
from slimelite.engines.registry import ENGINES, Content, EngineMemory
from slimelite.engines.sglang.client import SglangEngine
from slimelite.engines.sglang.server import Server, server_fields
from slimelite.training.lora import adapter_format
from slimelite.training.model import LanguageModel
from slimelite.training.trainer import Trainer
from tests.engines.bracketing import Bracketing, bracketing_server
from tests.training.tiny import VOCAB, one_rank, random_table, save_tiny_model, tiny_args, weights_of

LORA = {"lora_rank": 4, "lora_targets": ("attn",)}
DRAFT = {"sglang_overrides": {"speculative_algorithm": "EAGLE3"}}
RUNS: dict[str, dict[str, Any]] = {
    "weights": {},
    "adapter": {**LORA, "lora_sync": "adapter"},
    "merged": {**LORA, "lora_sync": "merged"},
    "merged with a backup": {**LORA, "lora_sync": "merged", "sglang_overrides": {"enable_weights_cpu_backup": True}},
    "draft": DRAFT,
}
# mixtures of experts -> their routers' bias, a buffer of transformers and a parameter of SGLang (0.5.20 and 0.5.23)
EXPERTS = {
    "qwen3_moe": "",
    "deepseek_v3": "model.layers.0.mlp.gate.e_score_correction_bias",
    "glm4_moe": "model.layers.0.mlp.gate.e_score_correction_bias",
    "minimax_m2": "model.layers.0.block_sparse_moe.e_score_correction_bias",
    "exaone_moe": "model.layers.0.mlp.e_score_correction_bias",
}


def colocated(model: Path, **changes: Any) -> Args:
    run = {"rollout_backend": "sglang", "update_weight_transport": "http", "offload_rollout": True}
    return tiny_args(model, run_dir=str(model.parent), **run | changes)


@contextmanager
def started(args: Args) -> Iterator[tuple[Trainer, Bracketing, list[float]]]:
    """A trainer and the server of its run, which trained and took turns twice; the bytes of each sync."""
    setup = EngineFactory(args).setup(0)
    with bracketing_server(server_fields(setup)) as server, one_rank(args) as trainer:
        adapter = adapter_format(trainer.model.hf, args, args.hf_checkpoint) if args.sends_adapter else None
        sink = EngineFactory(args).transport(torch.device("cpu"), adapter=adapter).to([Server(server.url)])
        engine, sent = SglangEngine(Server(server.url), setup.model_path), []
        for version in range(3):
            asyncio.run(engine.release_memory(MEMORY_TAGS))
            if args.lora_rank:
                trainer.train(version, random_table(seed=version))
            asyncio.run(engine.resume_memory(["weights"]))
            sent.append(trainer.push_weights(sink, version)["perf/update_weights_bytes"])
            asyncio.run(engine.resume_memory(["kv_cache", "cuda_graph"]))
        yield trainer, server, sent
        asyncio.run(engine.close())


def filed(trainer: Trainer) -> dict[str, Tensor]:
    """What the files of the trained model would hold."""
    found = dict(trainer.model.saved_buffers())
    for name, weight in weights_of(trainer).items():
        found |= trainer.model.as_filed(name, weight)
    return found


@pytest.mark.parametrize("run", RUNS)
def test_after_a_release_and_a_sync_a_server_lacks_nothing(tmp_path: Path, run: str) -> None:
    args = colocated(save_tiny_model(tmp_path / "model"), **RUNS[run])
    with started(args) as (trainer, server, sent):
        assert server.lost() == []
        found = filed(trainer)
        if args.sends_adapter:
            base = AutoModelForCausalLM.from_pretrained(args.hf_checkpoint).state_dict()
            assert all(torch.equal(weight, base[name]) for name, weight in server.weights.items())
            parts = [part.detach() for part in trainer.model.trained().values()]
            assert sum(p.numel() for p in server.adapters["policy"].values()) == sum(p.numel() for p in parts)
        else:
            assert server.weights.keys() == found.keys()
            assert all(torch.equal(weight, found[name]) for name, weight in server.weights.items())
        # what survives need not come again
        assert (sent[2] < sent[0]) == (run == "merged with a backup")


@pytest.mark.parametrize("run", ["adapter", "merged", "draft"])
def test_the_server_shows_what_the_record_leaves_out(tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that says nothing is lost, as there was none: else the test above would prove nothing."""
    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], memory=EngineMemory()))
    args = colocated(save_tiny_model(tmp_path / "model"), **RUNS[run])
    with started(args) as (_, server, _):
        assert server.lost()


def save_biased(kind: str, folder: Path) -> Path:
    """A tiny model whose router has a bias that decides."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if kind != "deepseek_v3" else 4, "head_dim": 8}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    count = {"n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_hidden_layers": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    own = latent if kind == "deepseek_v3" else {}
    config = AutoConfig.for_model(kind, **sizes, **heads, **own, **count, **groups, **ends)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(4))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "bias"), EXPERTS.items())
def test_experts_and_biases_of_routers_are_sent_under_the_names_of_the_files(
    tmp_path: Path, kind: str, bias: str
) -> None:
    args = colocated(save_biased(kind, tmp_path / "model"))
    with started(args) as (trainer, server, _):
        assert not bias or server.weights[bias].std() > 0.1
        assert server.lost() == []
        found = filed(trainer)
        assert server.weights.keys() == found.keys()
        assert all(torch.equal(weight, found[name]) for name, weight in server.weights.items())


def test_an_update_without_a_routers_biases_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageModel, "saved_buffers", lambda _self: {})
    with (
        pytest.raises(ValueError, match=r"lacks 2 weights \(model.layers.0.mlp.gate.e_score_correction_bias"),
        started(colocated(save_biased("glm4_moe", tmp_path / "model"))),
    ):
        pass


def test_a_record_says_what_options_and_host_memory_follow() -> None:
    memory, draft = ENGINES["sglang"].memory, {"speculative_algorithm": "EAGLE3"}
    assert memory.needed({}, adapter_alone=False) == {}
    assert memory.needed({}, adapter_alone=True) == {"enable_weights_cpu_backup": True}
    assert memory.needed(draft, adapter_alone=False) == {"enable_draft_weights_cpu_backup": True}
    assert memory.on_host({}, adapter_alone=False) == frozenset()
    assert memory.on_host({}, adapter_alone=True) == {Content.WEIGHTS}
    assert memory.on_host({"enable_weights_cpu_backup": True}, adapter_alone=False) == {Content.WEIGHTS}
    assert ENGINES["embedded"].memory.survives(Content.WEIGHTS, {})
