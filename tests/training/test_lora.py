"""Adapters: against peft's own, in both directions; what is frozen costs nothing; save, resume and the reference."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slimelite.arguments import Args
from slimelite.arguments.training import ALL_LINEAR, read_adapter
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.loading import inspect_model
from slimelite.training.lora import add_adapters, peft_weights
from slimelite.training.model import ForwardFlops, PolicyModel
from slimelite.training.parallel import World, whole
from slimelite.training.trainer import Trainer
from tests.training.test_oracle import CASES, pairs
from tests.training.tiny import (
    Recorder,
    exact_norms,
    on_ranks,
    one_rank,
    random_table,
    save_tiny_model,
    tiny_args,
)

LORA = {"lora_rank": 4, "lora_alpha": 8.0}

SELECTIVE = {"gradient_checkpointing": True, "recompute_granularity": "selective"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", tie_word_embeddings=False)


def trained(trainer: Trainer) -> dict[str, Tensor]:
    return {n: whole(p.detach()).clone() for n, p in trainer.model.trained().items()}


def saved_run(model: Path, folder: Path, **flags: Any) -> tuple[Path, np.ndarray]:
    """A folder with the adapter of a short run, and the run's log-probs of `random_table`."""
    with one_rank(tiny_args(model, **LORA | flags)) as trainer:
        trainer.train(0, random_table())
        trainer.set_num_rollout(20)  # which a run with --num-epoch knows when it has read its rows
        trainer.save_hf(str(folder))
        assert "| trained | 1 of 20 rollouts " in (folder / "README.md").read_text()
        return folder, trainer.log_probs(random_table())


def log_probs(hf: PreTrainedModel, model: Path) -> np.ndarray:
    """Of `random_table`, by ``hf`` alone."""
    found = PolicyModel(hf)
    found.packed = False
    with torch.no_grad():
        batch = MicroBatch(TokenColumns.from_table(random_table()), np.arange(16), torch.device("cpu"))
        return np.asarray(found(batch, 1.0)[0])


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["lora", "rslora"])
@pytest.mark.parametrize("targets", [(ALL_LINEAR,), ("attn", "lm_head"), ("embed_tokens", "linear_fc2")])
def test_gradients_are_pefts(model: Path, targets: tuple[str, ...], kind: str) -> None:
    args = Args(**LORA, lora_type=kind, lora_targets=targets)
    ours = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    add_adapters(ours, args, seed=0)
    names = sorted({name.split(".")[-3 + ("embedding" in name)] for name, _ in peft_weights(ours)})
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, use_rslora=kind == "rslora")
    peft = get_peft_model(theirs, config, autocast_adapter_dtype=False).double()
    rng = torch.Generator().manual_seed(1)
    values = {n: torch.randn(p.shape, generator=rng, dtype=torch.float64) for n, p in peft_weights(ours)}
    ours.double()
    for hf, parameters in ((ours, dict(peft_weights(ours))), (theirs, dict(peft.named_parameters()))):
        exact_norms(hf)
        with torch.no_grad():
            for name, value in values.items():
                parameters.get(name, parameters.get(default_name(name))).copy_(value)
    batch = MicroBatch(TokenColumns.from_table(random_table()), np.arange(6), torch.device("cpu"))
    found = []
    for hf in (ours, theirs):
        policy = PolicyModel(hf)
        policy.packed = False
        if hf is theirs and "lm_head" in names:  # ours takes the head's weight instead of calling it
            states = policy.hidden(batch)
            scores = torch.log_softmax(hf.lm_head(states), -1).gather(1, batch.targets[:, None])[:, 0]
        else:
            scores, _ = policy(batch, 1.0)
        (scores * torch.linspace(-1, 1, len(scores), dtype=torch.float64)).sum().backward()
        found.append(scores.detach())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-9)
    grads = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad}
    assert len(grads) == len(values)
    for name, parameter in peft_weights(ours):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, grads[default_name(name)], rtol=0, atol=1e-9)
    assert all(p.grad is None for p in ours.parameters() if not p.requires_grad)


def default_name(name: str) -> str:
    """peft's name of a parameter in memory, where an adapter has a name of its own."""
    if "embedding" in name:
        return f"{name}.default"
    return name.replace(".weight", ".default.weight")


def test_what_is_frozen_costs_no_gradient(model: Path) -> None:
    """Counted in multiplications: backward takes the gradient of activations, and of weights that of A and B alone."""
    table = random_table()
    batch = MicroBatch(TokenColumns.from_table(table), np.arange(16), torch.device("cpu"))
    with one_rank(tiny_args(model, **LORA)) as trainer:
        for _ in range(2):  # the second pass is without FSDP's first preparations
            scores, _ = trainer.model(batch, 1.0)
            with FlopCounterMode(display=False) as counter:
                scores.sum().backward()
        tokens, targets = int(table.total_lengths.sum()), int(table.response_lengths.sum())
        flops = ForwardFlops.of(trainer.model)
        assert flops is not None
        adapters = 2.0 * sum(p.numel() for p in trainer.model.trained().values())
        counted = table.total_lengths, table.response_lengths, np.zeros(len(table))
        backward = flops.step(*counted) - flops.total(*counted)
        pairs = table.total_lengths.astype(float)
        pairs = flops.per_pair * float((pairs * (pairs + 1)).sum())
        matmuls = {str(op): n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)}
        # the chunked head recomputes its logits; its own weight would cost as much again
        bound = (flops.per_token + adapters) * tokens + 2 * flops.per_target * targets
        assert sum(matmuls.values()) <= 1.02 * bound, (matmuls, bound)
        # as perf/actor_train_tflops counts it, which leaves recomputation out
        assert backward == pytest.approx(bound - flops.per_target * targets + pairs)
        assert {n for n, p in trainer.model.named_parameters() if p.grad is not None} == {
            f"hf.{name}" for name in trainer.model.trained()
        }


@pytest.mark.newest
@pytest.mark.parametrize("flags", [{}, {"lora_type": "rslora", "lora_targets": ("q_proj", "lm_head", "embed_tokens")}])
def test_peft_opens_a_saved_adapter(model: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    folder, expected = saved_run(model, tmp_path / "adapter", **flags)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
    loaded = {name: value for name, value in peft.state_dict().items() if "lora_" in name}
    saved = load_file(folder / "adapter_model.safetensors")
    assert {default_name(name) for name in saved} == loaded.keys()
    assert all(torch.equal(value, loaded[default_name(name)]) for name, value in saved.items())
    assert any(value.abs().max() > 0 for name, value in saved.items() if "_B" in name)
    whole = peft.merge_and_unload()
    np.testing.assert_allclose(log_probs(whole, model), expected, atol=2e-5)
    assert np.abs(log_probs(AutoModelForCausalLM.from_pretrained(model), model) - expected).max() > 1e-3
    assert "library_name: peft" in (folder / "README.md").read_text()
    assert not (folder / "config.json").exists()


@pytest.mark.newest
def test_an_adapter_of_some_layers_says_which(model: Path, tmp_path: Path) -> None:
    """peft and --lora-adapter-path make no adapter where training had none."""
    folder, expected = saved_run(model, tmp_path / "adapter", lora_excluded=("layers.0.self_attn.q_proj", "o_proj"))
    saved = load_file(folder / "adapter_model.safetensors")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
    assert {default_name(name) for name in saved} == {name for name in peft.state_dict() if "lora_" in name}
    again = tiny_args(model, **LORA | read_adapter(str(folder)), lora_adapter_path=str(folder))
    with one_rank(again) as trainer:
        np.testing.assert_array_equal(trainer.log_probs(random_table()), expected)


@pytest.mark.newest
def test_the_merged_model_is_pefts(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tied")
    folder, expected = saved_run(model, tmp_path / "adapter")
    merged, _ = saved_run(model, tmp_path / "merged", lora_merge=True)
    hf, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert hf.config.tie_word_embeddings
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder).merge_and_unload()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(hf.state_dict()[name], weight, rtol=0, atol=1e-6)
    with one_rank(tiny_args(merged)) as trainer:
        np.testing.assert_allclose(trainer.log_probs(random_table()), expected, atol=2e-5)


@pytest.mark.newest
def test_an_adapter_of_pefts_loads(model: Path, tmp_path: Path) -> None:
    """`random_table` scores alike in both; `derive` reads rank, alpha, kind and modules from its config."""
    config = LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules=["v_proj", "down_proj"])
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(str(tmp_path / "theirs"))
    read = read_adapter(str(tmp_path / "theirs"))
    assert read == {
        "lora_rank": 3,
        "lora_alpha": 5.0,
        "lora_type": "rslora",
        "lora_targets": ("down_proj", "v_proj"),
        "lora_excluded": (),
    }
    with one_rank(tiny_args(model, lora_adapter_path=str(tmp_path / "theirs"), **read)) as trainer:
        np.testing.assert_allclose(
            trainer.log_probs(random_table()), log_probs(peft.merge_and_unload(), model), atol=2e-5
        )


@pytest.mark.parametrize("flags", [{}, {"lora_dropout": 0.3}, {"gradient_checkpointing": True}])
def test_a_resumed_run_is_the_straight_one(model: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    args = tiny_args(model, **LORA, **flags)
    with one_rank(args) as trainer:
        trainer.train(0, random_table())
        size = trainer.checkpoint_size()
        trainer.save(str(tmp_path), 0)
        trainer.train(1, random_table(seed=1))
        straight = trained(trainer)
    with one_rank(args) as trainer:
        trainer.load(str(tmp_path))
        trainer.train(1, random_table(seed=1))
        for name, weight in trained(trainer).items():
            assert torch.equal(weight, straight[name]), name
        # adapters, two moments of each and little else
        kept = sum(p.numel() * 4 for p in trainer.model.trained().values())
        assert size < 3 * kept + 2000 * 5 * len(straight) + 10_000
        assert all(p.dtype == torch.float32 for p in trainer.model.trained().values())


@pytest.mark.parametrize(
    ("saved", "flags", "said"),
    [
        ({}, LORA, "was saved without --lora-rank 4; resume it with the same setting"),
        (LORA, {}, "was saved with --lora-rank 4; resume it with the same setting"),
        (LORA, {"lora_rank": 8, "lora_alpha": 8.0}, "rank 4 and scaling 2.0, but this run has rank 8 and scaling 1.0"),
        (LORA, {**LORA, "lora_targets": ("attn",)}, "with adapters on other modules; set the same --lora-target-m"),
        ({**LORA, "lora_targets": ("attn",)}, LORA, r"on other modules; .*: it has no model.*_proj.lora_A"),
    ],
)
def test_another_kind_of_checkpoint_is_refused(
    model: Path, tmp_path: Path, saved: dict[str, Any], flags: dict[str, Any], said: str
) -> None:
    with one_rank(tiny_args(model, **saved)) as trainer:
        trainer.save(str(tmp_path), 0)
    with one_rank(tiny_args(model, **flags)) as trainer, pytest.raises(ValueError, match=said):
        trainer.load(str(tmp_path))


def test_adapters_on_another_base_are_warned_of(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with one_rank(tiny_args(model, **LORA)) as trainer:
        trainer.save(str(tmp_path), 0)
    other = save_tiny_model(tmp_path / "other", tie_word_embeddings=False)
    with one_rank(tiny_args(other, **LORA)) as trainer, caplog.at_level(logging.WARNING):
        trainer.load(str(tmp_path))
    assert f"trained on the model {model}, but the model of this run is {other}" in caplog.text


KL = {"use_reference": True, "use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.mark.parametrize("adapted", [False, True])
def test_the_reference_is_the_policy_as_it_started(model: Path, tmp_path: Path, adapted: bool) -> None:
    """In a run that trained before: KL 0 in the first step, and then the log-probs of another process's start."""
    flags: dict[str, Any] = LORA | KL
    if adapted:
        flags["lora_adapter_path"] = str(saved_run(model, tmp_path / "start")[0])
    with one_rank(tiny_args(model, **flags)) as trainer:
        start = trainer.log_probs(random_table())
        parameters = sum(1 for _ in trainer.model.parameters())
        first = trainer.train(0, random_table())
        second = trainer.train(1, random_table())
        assert first["train/kl_loss"] == pytest.approx(0, abs=1e-9)
        assert second["train/kl_loss"] > 1e-4
        assert trainer.reference is not None
        assert trainer.reference.model is trainer.model, "there is no second model"
        with trainer.reference.weights():
            np.testing.assert_array_equal(trainer.log_probs(random_table()), start)
        assert np.abs(trainer.log_probs(random_table()) - start).max() > 1e-3
        assert sum(1 for _ in trainer.model.parameters()) == parameters
    # the same numbers with a reference in memory of its own
    if not adapted:
        flags["ref_load"] = str(save_copy(model, tmp_path / "copy"))
        with one_rank(tiny_args(model, **flags)) as trainer:
            assert trainer.reference.model is not trainer.model
            trainer.train(0, random_table())
            assert trainer.train(1, random_table())["train/kl_loss"] == pytest.approx(second["train/kl_loss"], rel=1e-6)


def save_copy(model: Path, folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    return folder


def test_the_reference_follows_the_adapter_and_is_resumed(model: Path, tmp_path: Path) -> None:
    args = tiny_args(model, **LORA, **KL, ref_update_interval=2)
    with one_rank(args) as trainer:
        for step in range(3):
            trainer.train(step, random_table(seed=step))
        trainer.save(str(tmp_path), 2)
        straight = trainer.train(3, random_table(seed=3))
    with one_rank(args) as trainer:
        trainer.load(str(tmp_path))
        resumed = trainer.train(3, random_table(seed=3))
    assert resumed["train/kl_loss"] == straight["train/kl_loss"] > 0


def two_ranks(trainer: Trainer, folder: str) -> dict[str, Any]:
    for step in range(2):
        trainer.train(step, random_table(seed=step))
    sink = Recorder()
    trainer.push_weights(sink, 1)
    trainer.save_hf(folder)
    return {"trained": trained(trainer), "sent": sink.tensors}


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.newest), {"dp_replicate_size": 2}])
def test_two_ranks_are_one(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    args = tiny_args(model, **LORA, **KL)
    alone = on_ranks(1, two_ranks, args, str(tmp_path / "one"))
    both = on_ranks(2, two_ranks, tiny_args(model, **LORA, **KL, **changes), str(tmp_path / "two"))
    for part, tensors in alone.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(both[part][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert load_file(tmp_path / "two/adapter_model.safetensors").keys() == {
        *load_file(tmp_path / "one/adapter_model.safetensors")
    }


def test_what_is_sent_is_merged_afresh(model: Path) -> None:
    """After many updates an engine has, to the bit, base + scaling · B A, and the frozen weights as they were."""
    base = AutoModelForCausalLM.from_pretrained(model).state_dict()
    with one_rank(tiny_args(model, **LORA)) as trainer:
        trainer.train(0, random_table())
        sink = Recorder()
        for version in range(20):
            sink.tensors.clear()
            trainer.push_weights(sink, version)
        parts = trained(trainer)
        for name, sent in sink.tensors.items():
            stem = name.removesuffix(".weight")
            expected = base[name]
            if f"{stem}.lora_A" in parts:
                expected = torch.add(expected, parts[f"{stem}.lora_B"] @ parts[f"{stem}.lora_A"], alpha=2.0)
            assert torch.equal(sent, expected), name
        assert sink.tensors.keys() == base.keys()
        assert dict(trainer.model.named_weights()).keys() == base.keys()


def test_frozen_weights_are_bf16_where_training_computes_in_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: FSDP gathers frozen bf16 and trained fp32 parameters together."""
    monkeypatch.setattr(World, "compute_dtype", property(lambda world: torch.bfloat16))
    with one_rank(tiny_args(model, **LORA, **KL)) as trainer:
        first, second = (trainer.train(step, random_table()) for step in range(2))
        kinds = {parameter.requires_grad: parameter.dtype for parameter in trainer.model.parameters()}
        assert kinds == {True: torch.float32, False: torch.bfloat16}
        assert first["train/kl_loss"] == 0 < second["train/kl_loss"]
        moments = [v for o in trainer.optimizers.all for state in o.state.values() for v in state.values()]
        assert {moment.dtype for moment in moments} == {torch.float32}
        sink = Recorder()
        trainer.push_weights(sink, 0)
        assert {tensor.dtype for tensor in sink.tensors.values()} == {torch.bfloat16}


def test_a_critic_may_have_adapters(model: Path, tmp_path: Path) -> None:
    args = tiny_args(
        model, **LORA, critic_lora_rank=2, use_critic=True, advantage_estimator="ppo", critic_lr=1e-2, num_rollout=4
    )
    with one_rank(args) as trainer:
        assert trainer.critic is not None
        names = trainer.critic.model.trained().keys()
        assert {n for n in names if "lora_" not in n} == {"lm_head.weight", "lm_head.bias"}
        trainer.train(0, random_table())
        trainer.save(str(tmp_path), 0)
        straight = trainer.train(1, random_table(seed=1))
    with one_rank(args) as trainer:
        trainer.load(str(tmp_path))
        resumed = trainer.train(1, random_table(seed=1))
    assert resumed["train/critic-value_loss"] == straight["train/critic-value_loss"]
    assert resumed["train/critic-grad_norm"] == straight["train/critic-grad_norm"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lora_targets": ("q_prj",)}, "q_prj: no module of qwen2 has this name; did you mean q_proj"),
        ({"lora_targets": ("zz",)}, "there are down_proj, embed_tokens, gate_proj, k_proj, lm_head, .*, all-linear"),
        ({"lora_excluded": (ALL_LINEAR,)}, "excludes all modules"),
    ],
)
def test_names_that_fit_nothing(model: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        inspect_model(tiny_args(model, **LORA, **flags), str(model), trained=True)


@pytest.mark.newest
def test_tied_embeddings_have_no_adapter(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    for name in ("embed_tokens", "lm_head"):
        with pytest.raises(ValueError, match=f"{name}: embedding and LM head of this model share one weight"):
            inspect_model(tiny_args(model, **LORA, lora_targets=(name,)), str(model), trained=True)


@pytest.mark.newest
def test_fused_experts_stay_frozen(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **experts
    )
    hf = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="the experts of qwen3_moe are one fused weight"):
        add_adapters(hf, Args(**LORA, lora_targets=("experts",)), seed=0)
    add_adapters(hf, Args(**LORA), seed=0)
    assert {name.split(".")[-3] for name, _ in peft_weights(hf)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_wrong_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    folder, _ = saved_run(model, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    for changes, said in (
        ({"use_dora": True}, "only plain LoRA adapters are supported, not use_dora"),
        ({"bias": "all"}, "not bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "not init_lora_weights pissa"),
        ({"peft_type": "IA3"}, "not IA3"),
        ({"target_modules": ".*_proj"}, "must be lists of names, not patterns"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=said):
            read_adapter(str(folder))
    with pytest.raises(ValueError, match=r"no adapter: .* cannot be read"):
        read_adapter(str(model))
    weights = load_file(folder / "adapter_model.safetensors")
    first = min(weights)
    save_file({n: w for n, w in weights.items() if n != first}, folder / "adapter_model.safetensors")
    args = tiny_args(model, **LORA, lora_adapter_path=str(folder))
    with pytest.raises(ValueError, match=f"adapter in .* lacks {first}, so it does not fit"):
        inspect_model(args, str(model), trained=True)
    save_file(weights | {first: weights[first][:2]}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"{first} is \[2, 64\] in .* and \[4, 64\]"):
        inspect_model(args, str(model), trained=True)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_adapter_of_nan_is_refused(model: Path, tmp_path: Path, broken: float) -> None:
    folder, _ = saved_run(model, tmp_path / "adapter")
    weights = load_file(folder / "adapter_model.safetensors")
    weights[max(weights)][0, 0] = broken
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"{max(weights)} in .* contains NaN or infinity; use an"):
        inspect_model(tiny_args(model, **LORA, lora_adapter_path=str(folder)), str(model), trained=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": broken}))
    with pytest.raises(
        ValueError, match=rf"not the config of a peft adapter \(ValueError\('lora_alpha is {broken}'\)\)"
    ):
        read_adapter(str(folder))


@pytest.mark.parametrize("flag", ["lora_rank", "critic_lora_rank"])
def test_a_rank_above_that_of_the_matrices_is_refused(model: Path, flag: str) -> None:
    """The widest has 32 rows and 64 columns."""
    inspect_model(tiny_args(model, **{flag: 32}), str(model), trained=True)
    option = "--" + flag.replace("_", "-")
    with pytest.raises(ValueError, match=f"{option} 33: the matrices that get an adapter have at most rank 32"):
        inspect_model(tiny_args(model, **{flag: 33}), str(model), trained=True)


@pytest.mark.newest
def test_an_adapter_is_all_that_training_changes(model: Path) -> None:
    with one_rank(tiny_args(model, **LORA, weight_decay=0.1)) as trainer:
        before = {n: whole(p.detach()).clone() for n, p in trainer.model.named_parameters()}
        metrics = trainer.train(0, random_table())
        assert metrics["train/grad_norm"] > 0
        changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(whole(p.detach()), before[n])}
        # B starts at 0, so that A has no gradient yet, but weight decay
        assert changed == {f"hf.{name}" for name in trainer.model.trained()}
        assert {id(p) for o in trainer.optimizers.all for p in o.state} == {
            id(p) for p in trainer.model.trained().values()
        }


DISTILLATION = {"use_opd": True, "opd_type": "trainer", "opd_kl_coef": 0.5}


@pytest.mark.parametrize("name", ["grpo, every term", "sft, token mean", "dpo", "ppo", "distillation"])
def test_every_loss_trains_adapters(model: Path, tmp_path: Path, name: str) -> None:
    """At B = 0 the gradient of B is scaling · G Aᵀ, where G is that of the weight in full training."""
    other = str(save_tiny_model(tmp_path / "other", seed=1))
    flags = {**CASES.get(name, DISTILLATION | {"opd_teacher_load": other}), "ref_load": other, "global_batch_size": 100}
    table = pairs(0) if name == "dpo" else random_table()
    found: list[dict[str, Tensor]] = []
    for lora in ({}, LORA):
        with one_rank(tiny_args(model, **flags, **lora)) as trainer:
            step = trainer.optimizers.step

            def watched(*given: Any, step: Any = step, trainer: Trainer = trainer) -> tuple[float, bool]:
                found.append({n: whole(p.grad).clone() for n, p in trainer.model.trained().items()})
                found[-1] |= {f"{n} itself": p for n, p in trained(trainer).items()}
                return step(*given)

            trainer.optimizers.step = watched  # type: ignore[method-assign]
            trainer.train(0, table)
    full, low = found
    modules = {name.rpartition(".")[0] for name in low if name.endswith("lora_B")}
    assert len(modules) == 14
    for module in modules:
        expected = 2.0 * full[f"{module}.weight"] @ low[f"{module}.lora_A itself"].T
        assert expected.abs().max() > 1e-6
        torch.testing.assert_close(low[f"{module}.lora_B"], expected, rtol=1e-3, atol=1e-6)
        assert not low[f"{module}.lora_A"].any()


def test_selective_recomputation_gives_the_same_gradient(model: Path) -> None:
    norms = []
    for flags in ({}, {"gradient_checkpointing": True}, SELECTIVE):
        with one_rank(tiny_args(model, **LORA | flags)) as trainer:
            norms.append(trainer.train(0, random_table())["train/grad_norm"])
    assert norms[0] > 0
    assert norms == [norms[0]] * 3
