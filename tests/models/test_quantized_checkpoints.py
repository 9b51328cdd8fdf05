"""Quantized checkpoints: the trainer and the embedded engine read the same weights, or refuse the method by name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import make_args
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.models.files import as_filed, load_config
from slimelite.plan.devices import Machine
from slimelite.preflight import inspect
from slimelite.training.loading import load_model, read_config
from tests.arguments.conftest import COMPLETE
from tests.engines.tiny_models import greedy, log_probs
from tests.training.tiny import one_rank, tiny_args

BLOCK = 128
# a fast family, one that transformers' own modules compute, and mixtures of experts in both formats
FAMILIES = ("qwen3", "olmo2", "gpt_oss", "qwen3_moe")
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": BLOCK}


def fp8_checkpoint(folder: Path, family: str) -> dict[str, torch.Tensor]:
    """A small checkpoint as DeepSeek-V3 and Qwen3 publish theirs: fp8 matrices with a scale for each 128 x 128 block.
    Returns the weights that it stands for, in fp32."""
    config = AutoConfig.for_model(
        family,
        vocab_size=96,
        hidden_size=BLOCK,
        intermediate_size=2 * BLOCK,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        eos_token_id=1,
        pad_token_id=0,
        **(EXPERTS if family.endswith("_moe") else {}),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    files: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        files[name], meant[name] = weight, weight.float()
        if name.endswith("_proj.weight"):
            blocks = (20 * weight.float()).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            files[name] = (blocks / scales).reshape(weight.shape).to(torch.float8_e4m3fn)
            files[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            parts = files[name].float().reshape(blocks.shape)
            meant[name] = (parts * scales).reshape(weight.shape)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    quantized = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    add_to_config(folder, quantized)
    return meant


def mxfp4_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """A small checkpoint as gpt-oss publishes its own: the experts' matrices have 4 bits, and 32 numbers share an
    exponent. Returns the weights that it stands for, in fp32."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    config = AutoConfig.for_model("gpt_oss", vocab_size=96, eos_token_id=1, pad_token_id=0, **sizes, **heads)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])
    files: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name], meant[name] = weight, weight.float()
            continue
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
        files[f"{name}_blocks"], files[f"{name}_scales"] = blocks, exponents
        pairs = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1).flatten(-2)
        meant[name] = (pairs * 2.0 ** (exponents.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    add_to_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": others})
    return meant


def add_to_config(folder: Path, quantized: dict[str, object]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))


@pytest.mark.newest
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_and_the_engine_read_the_same_weights(tmp_path: Path, family: str) -> None:
    meant = mxfp4_checkpoint(tmp_path) if family == "gpt_oss" else fp8_checkpoint(tmp_path, family)
    model = load_model(str(tmp_path), read_config(str(tmp_path)), seed=0, attention="eager", empty=False).eval()
    for name, weight in as_filed(model, {name: weight.detach() for name, weight in model.named_parameters()}).items():
        torch.testing.assert_close(weight, meant.pop(name), rtol=1e-6, atol=0)
    assert not meant
    prompt = (5, 6, 7, 8)
    request = GenerateRequest("0", prompt, SamplingParams(8, temperature=0.0, ignore_eos=True))

    async def answer() -> tuple[list[int], list[float]]:
        engine = EmbeddedEngine(str(tmp_path), max_context_len=64)
        (result,) = await engine.generate([request])
        await engine.close()
        return result.output_ids, result.log_probs

    tokens, found = asyncio.run(answer())
    assert tokens == greedy(model, prompt, 8)
    torch.testing.assert_close(torch.tensor(found), log_probs(model, prompt, tokens).float(), rtol=0, atol=1e-5)


@pytest.mark.newest
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_run_saves_is_an_ordinary_model(tmp_path: Path, family: str) -> None:
    meant = mxfp4_checkpoint(tmp_path) if family == "gpt_oss" else fp8_checkpoint(tmp_path, family)
    with one_rank(tiny_args(tmp_path, save_hf_dtype="fp32")) as trainer:
        trainer.save_hf(str(tmp_path / "saved"))
    assert getattr(load_config(str(tmp_path / "saved")), "quantization_config", None) is None
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == meant.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(weight, meant[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    fp8_checkpoint(tmp_path, "qwen3")
    add_to_config(tmp_path, {"quant_method": method})
    with pytest.raises(ValueError, match=f"is quantized with {method}"):
        read_config(str(tmp_path))
    with pytest.raises(ValueError, match=f"its weights are quantized by {method}"):
        EmbeddedEngine(str(tmp_path), max_context_len=64)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_only_engines_that_restore_the_weights_take_new_ones(tmp_path: Path, family: str) -> None:
    node, method = Machine(gpus=1, sglang=True), "mxfp4" if family == "gpt_oss" else "fp8"
    _ = mxfp4_checkpoint(tmp_path) if family == "gpt_oss" else fp8_checkpoint(tmp_path, family)

    def problems(words: str) -> list[str]:
        given = ["--hf-checkpoint", str(tmp_path), "--colocate", "--dry-run", *words.split()]
        args = make_args([*COMPLETE.split(), *given], machine=node)
        return [problem for problem in inspect(args, node, files_only=True).problems if method in problem]

    (problem,) = problems("--rollout-backend sglang")
    assert problem.startswith(
        f"--hf-checkpoint {tmp_path}: its weights are quantized ({method}), and the engine sglang"
    )
    assert "docs/lora.md#quantized-checkpoints" in problem
    assert problems("--rollout-backend sglang --lora-rank 4 --lora-sync merged") == [problem]
    separate = "--no-colocate --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --plan-gpu h100:2"
    assert len(problems(f"--rollout-backend vllm {separate}")) == 1
    for kept in ("--rollout-backend embedded", "--debug-rollout-only", "--lora-rank 4 --lora-sync adapter"):
        assert problems(f"--rollout-backend sglang {kept}") == []
