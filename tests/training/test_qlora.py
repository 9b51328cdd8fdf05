"""``--load-in-4bit``: the model, the adapter and its gradients are peft's on the base that transformers quantizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from slimelite.arguments import Args
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.loading import inspect_model, read_config
from slimelite.training.lora import adapters, gathered, peft_weights
from slimelite.training.model import PolicyModel
from slimelite.training.parallel import World
from slimelite.training.quantized import FrozenLinear
from slimelite.training.trainer import Trainer
from tests.training.tiny import (
    Recorder,
    on_ranks,
    one_rank,
    random_table,
    save_tiny_model,
    tiny_args,
    weights_of,
)

QLORA = {"lora_rank": 4, "lora_alpha": 8.0, "load_in_4bit": True}
# wide enough for blocks of 64 to differ within a row; scales of more than one block of 256
WIDE = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), **WIDE)


def theirs(model: Path) -> PreTrainedModel:
    """The base as QLoRA's users load it."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    hf = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=config, dtype=torch.float32, attn_implementation="eager"
    )
    for module in hf.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # by it passes without gradient round to bf16 on some CPUs
    return hf


def scores(hf: Any, table: Any = None) -> Tensor:
    policy = PolicyModel(hf)
    policy.packed = False
    batch = MicroBatch(TokenColumns.from_table(random_table() if table is None else table), np.arange(16))
    return policy(batch, 1.0)[0]


def trained_run(model: Path, folder: Path, **flags: Any) -> tuple[np.ndarray, dict[str, Tensor]]:
    """A short run: log-probs of `random_table` afterwards, and the weights that engines would get."""
    with one_rank(tiny_args(model, **QLORA | flags)) as trainer:
        trainer.train(0, random_table())
        trainer.save_hf(str(folder))
        return trainer.log_probs(random_table()), weights_of(trainer)


def test_the_adapter_and_its_gradients_are_pefts_on_the_same_base(model: Path, tmp_path: Path) -> None:
    ours, _ = trained_run(model, tmp_path / "adapter")
    peft = PeftModel.from_pretrained(theirs(model), tmp_path / "adapter", is_trainable=True)
    found = scores(peft.base_model.model)
    np.testing.assert_allclose(found.detach().numpy(), ours, atol=5e-5)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    beside = scores(PeftModel.from_pretrained(whole, tmp_path / "adapter").base_model.model)
    assert np.abs(beside.detach().numpy() - ours).max() > 0.01  # 4 bits are not the weights of the file

    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    with one_rank(tiny_args(model, **QLORA, lora_adapter_path=str(tmp_path / "adapter"))) as trainer:
        batch = MicroBatch(TokenColumns.from_table(random_table()), np.arange(16))
        (trainer.model(batch, 1.0)[0] * weights).sum().backward()
        mine = {name: parameter.grad for name, parameter in peft_weights(trainer.model.hf)}
    named = {name.replace(".default", ""): p.grad for name, p in peft.named_parameters() if p.requires_grad}
    assert mine.keys() == named.keys()
    for name, gradient in mine.items():
        assert gradient is not None
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, named[name], rtol=1e-4, atol=1e-5 * float(named[name].abs().max()) + 1e-8)


def test_dpo_trains_the_adapter_and_its_reference_is_the_quantized_model_without_it(model: Path) -> None:
    table = random_table(seed=3, groups=4, group_size=2)
    table.loss_mask[table.response_offsets[:-1]] = True
    table.rollout_id = table.unit_id = table.group_id.copy()
    table.reward = np.tile([1.0, 0.0], 4)
    flags = {"loss_type": "dpo_loss", "use_reference": True, "dpo_beta": 0.5, "global_batch_size": 4}
    with one_rank(tiny_args(model, **QLORA | flags)) as trainer:
        assert any(isinstance(module, FrozenLinear) and module.is_quantized for module in trainer.model.hf.modules())
        steps = [trainer.train(i, table) for i in range(4)]
    # at the start the policy is its reference, so that the loss is that of a coin
    assert steps[0]["train/loss"] == pytest.approx(np.log(2), abs=1e-6)
    margins = [step["train/rewards/margins"] for step in steps]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[0] < margins[1] < margins[2] < margins[3]


def test_every_frozen_linear_layer_has_4_bits_and_nothing_else(model: Path) -> None:
    flags = {"lora_target_modules": ["q_proj"], "lora_targets": ("q_proj",)}
    with one_rank(tiny_args(model, **QLORA | flags)) as trainer:
        layers = {n: m for n, m in trainer.model.hf.named_modules() if isinstance(m, FrozenLinear) and m.is_quantized}
        assert {name.rpartition(".")[2] for name in layers} == {
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        }
        assert {name.rpartition(".")[2] for name, _ in adapters(trainer.model.hf)} == {"q_proj"}
        assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
        held = sum(sum(t.nbytes for t in (m.weight, m.absmax, m.scales)) for m in layers.values()) / sum(
            m.in_features * m.out_features for m in layers.values()
        )
        assert held < 0.53  # bytes a weight: 4 bits, and 8 and 32 bits of scales for 64 and 16,384 of them
        with one_rank(tiny_args(model, lora_rank=4)) as plain:
            assert trainer.model.flops is not None
            assert plain.model.flops is not None
            assert trainer.model.flops.per_pair == plain.model.flops.per_pair
    for name, module in theirs(model).named_modules():
        if name in layers:
            state = module.weight.quant_state
            assert torch.equal(module.weight.data.flatten(), layers[name].weight.flatten())
            assert torch.equal(state.absmax, layers[name].absmax)
            assert torch.equal(state.state2.absmax, layers[name].scales)


def test_engines_and_saved_models_get_what_the_trainer_computes_with(model: Path, tmp_path: Path) -> None:
    ours, weights = trained_run(model, tmp_path / "adapter")
    trained_run(model, tmp_path / "merged", lora_merge=True)
    with one_rank(tiny_args(model, **QLORA, lora_adapter_path=str(tmp_path / "adapter"))) as trainer:
        sink = Recorder()
        trainer.push_weights(sink, 1)
        assert sink.changed == {name for name in sink.tensors if "_proj.weight" in name}
        partial = Recorder()
        partial.partial = True
        trainer.push_weights(partial, 2)
        assert partial.tensors.keys() == sink.changed
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    hf.load_state_dict(sink.tensors)
    np.testing.assert_allclose(scores(hf).detach().numpy(), ours, atol=5e-5)
    assert weights.keys() == sink.tensors.keys()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    np.testing.assert_allclose(scores(saved).detach().numpy(), ours, atol=5e-5)


def test_the_reference_is_the_quantized_model_without_its_adapter(model: Path) -> None:
    given = {"use_reference": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(model)}
    with one_rank(tiny_args(model, **QLORA | given)) as trainer:
        first = trainer.train(0, random_table())
        assert abs(first["train/kl_loss"]) < 1e-8
        assert trainer.train(1, random_table())["train/kl_loss"] > 1e-6
        assert trainer.reference is not None
        with trainer.reference.weights() as reference, torch.no_grad():
            batch = MicroBatch(TokenColumns.from_table(random_table()), np.arange(16))
            found = reference(batch, 1.0)[0]
    np.testing.assert_allclose(found.numpy(), scores(theirs(model)).detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("loss", ["sft_loss", "policy_loss"])
@pytest.mark.parametrize("extra", [{}, {"gradient_checkpointing": True, "recompute_granularity": "selective"}])
def test_losses_fall_and_only_adapters_move(model: Path, loss: str, extra: dict[str, Any]) -> None:
    with one_rank(tiny_args(model, **QLORA, loss_type=loss, **extra)) as trainer:
        before = {n: gathered(w, torch.float32, None).clone() for n, w in trainer.model.named_weights()}
        packed = [p.clone() for p in trainer.model.parameters() if p.dtype == torch.uint8]
        losses = [trainer.train(i, random_table())["train/loss"] for i in range(4)]
        assert all(
            torch.equal(a, b)
            for a, b in zip(packed, (p for p in trainer.model.parameters() if p.dtype == torch.uint8), strict=True)
        )
        after = weights_of(trainer)
    assert loss != "sft_loss" or losses[-1] < losses[0] - 0.1
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name in after if "_proj.weight" in name}


def _step(trainer: Trainer, table: Any) -> Any:
    trainer.train(0, table)
    trained = {name: gathered(weight, torch.float32, None).clone() for name, weight in trainer.model.named_weights()}
    return trained, trainer.log_probs(table)


def test_two_ranks_shard_the_base_and_train_as_one(model: Path) -> None:
    args = tiny_args(model, **QLORA)
    with one_rank(args) as trainer:
        weights, log_probs = _step(trainer, random_table())
    shared, log_probs_of_both = on_ranks(2, _step, args, random_table())
    np.testing.assert_allclose(log_probs_of_both, log_probs, rtol=1e-4)
    for name, weight in weights.items():
        assert (shared[name] - weight).abs().mean() < 1e-6  # Adam turns the rounding of a gradient near 0 into a step


def test_a_checkpoint_resumes_with_4_bits_alone(model: Path, tmp_path: Path) -> None:
    with one_rank(tiny_args(model, **QLORA)) as trainer:
        trainer.train(0, random_table())
        trainer.save(str(tmp_path / "saved"), 0)
        expected = trainer.train(1, random_table())["train/grad_norm"]
    with one_rank(tiny_args(model, **QLORA)) as trainer:
        trainer.load(str(tmp_path / "saved"))
        assert trainer.train(1, random_table())["train/grad_norm"] == expected
    whole = {**QLORA, "load_in_4bit": False}
    with one_rank(tiny_args(model, **whole)) as trainer, pytest.raises(ValueError, match="--load-in-4bit"):
        trainer.load(str(tmp_path / "saved"))


def test_models_whose_weight_would_stay_whole_are_refused(tmp_path: Path) -> None:
    from tests.training.test_peft import small_model

    for family, message in (
        ("qwen3_moe", "the experts of qwen3_moe are fused weights"),
        ("gpt2", "in gpt2 it is a Conv1D"),
    ):
        folder = small_model(family, tmp_path / family)
        args = Args(hf_checkpoint=str(folder), **QLORA, lora_targets=("all-linear",))
        with pytest.raises(ValueError, match=message):
            inspect_model(args, str(folder), trained=True)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_checkpoints_that_cannot_be_trained_are_refused_by_name(tmp_path: Path, method: str) -> None:
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ValueError, match=f"is quantized with {method}"):
        read_config(str(folder))


def test_one_gpu_shards_the_adapters_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 FSDP casts what is trained; frozen weights are bf16 or 4 bits already, and are never copied."""
    with one_rank(tiny_args(model, **QLORA)) as trainer:
        expected = trainer.log_probs(random_table())
    monkeypatch.setattr(World, "compute_dtype", torch.bfloat16)  # what a GPU's world computes in
    with one_rank(tiny_args(model, **QLORA)) as trainer:
        assert np.abs(trainer.log_probs(random_table()) - expected).mean() < 0.1
        for parameter in trainer.model.parameters():
            assert isinstance(parameter, DTensor) == parameter.requires_grad
            assert parameter.requires_grad or parameter.dtype in (torch.uint8, torch.bfloat16)
        before = trainer.log_probs(random_table())
        trainer.train(0, random_table())
        assert np.abs(trainer.log_probs(random_table()) - before).max() > 0.1
