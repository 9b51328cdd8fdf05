"""Loading policies; the chunked head equals log_softmax of the full logits; counted operations are those of torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.model import ForwardFlops, PolicyModel, chunked_log_probs
from slimelite.training.parallel import World


@pytest.mark.newest
def test_a_folder_without_weights_is_a_new_model_of_its_seed(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        with one_rank(tiny_args(tmp_path, seed=seed)) as trainer:
            found.append(weights_of(trainer))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0][name], found[2][name])


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_of_transformers_gives_the_same_when_it_is_asked_for(tmp_path: Path, kind: str) -> None:
    save_tiny_model(tmp_path)
    table = random_table()
    with one_rank(tiny_args(tmp_path)) as trainer:
        ours = trainer.log_probs(table)
    with one_rank(tiny_args(tmp_path, attn_implementation=kind)) as trainer:
        assert trainer.model.hf.config._attn_implementation == kind
        torch.testing.assert_close(torch.from_numpy(trainer.log_probs(table)), torch.from_numpy(ours))


@pytest.mark.newest
def test_logits_that_are_not_transformers_own_are_refused(tmp_path: Path) -> None:
    """The config says that logits are capped, and Qwen2 of transformers does not read it."""
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="its logits are not the output of its LM head"), one_rank(tiny_args(tmp_path)):
        pass


TOKENS, WIDTH, VOCAB = 23, 8, 37


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = (3 * torch.randn(TOKENS, WIDTH)).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,))


def full(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(("scale", "cap"), [(0.3, None), (1.0, 2.5), (0.3, 2.5)])
def test_scaled_and_capped_logits_of_a_head_with_a_bias(scale: float, cap: float | None) -> None:
    hidden, weight, targets = inputs()
    bias, temperature = torch.randn(VOCAB, dtype=torch.float64).requires_grad_(), 0.7
    mine = chunked_log_probs(
        hidden, weight, targets, temperature, bias=bias, scale=scale, cap=cap, entropy_grad=True, chunk_size=5
    )
    logits = scale * (hidden @ weight.T + bias)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    log_p = (logits / temperature).log_softmax(-1)
    theirs = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    probe = torch.randn(2, TOKENS, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((a * probe[0] + b * probe[1]).sum(), (hidden, weight, bias)) for a, b in (mine, theirs)
    ]
    for one, two in zip((*mine, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 23, 100, -1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    mine = chunked_log_probs(hidden, weight, targets, temperature, entropy_grad=True, chunk_size=chunk)
    theirs = full(hidden, weight, targets, temperature)
    probes = torch.randn(2, TOKENS, dtype=torch.float64)
    grads = [
        torch.autograd.grad((log_probs * probes[0]).sum() + (entropy * probes[1]).sum(), (hidden, weight))
        for log_probs, entropy in (mine, theirs)
    ]
    for a, b in zip((*mine, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_without_entropy_gradient_the_log_prob_gradient_is_the_same() -> None:
    hidden, weight, targets = inputs()
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, chunk_size=5)
    assert not entropy.requires_grad
    expected, _ = full(hidden, weight, targets, 1.0)
    mine = torch.autograd.grad(log_probs.square().sum(), (hidden, weight))
    theirs = torch.autograd.grad(expected.square().sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_of_bf16_operands_are_not_rounded_to_bf16(temperature: float) -> None:
    """What is left is the rounding of the gradients themselves; logits rounded to bf16 are 20 times further off."""
    hidden, weight, targets = inputs(torch.bfloat16)
    log_probs, entropy = chunked_log_probs(hidden, weight, targets, temperature, entropy_grad=True, chunk_size=6)
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = full(exact_hidden, exact_weight, targets, temperature)
    for found, exact in zip((log_probs, entropy), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5)
    (log_probs + 0.1 * entropy).sum().backward()
    (expected[0] + 0.1 * expected[1]).sum().backward()
    for leaf, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert leaf.grad.dtype == torch.bfloat16
        assert (leaf.grad.double() - exact.grad).norm() < 4e-3 * exact.grad.norm()


def test_fsdp_casts_no_column_of_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It casts what it finds in a forward pass's arguments: of a long rollout that would be gigabytes, each time."""
    monkeypatch.setattr(World, "compute_dtype", torch.bfloat16)  # what a GPU's world computes in
    cast: list[torch.Size] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default and args[0].dtype in (torch.float32, torch.float64):
                cast.append(args[0].shape)
            return function(*args, **kwargs or {})

    with one_rank(tiny_args(save_tiny_model(tmp_path))) as trainer:
        columns = TokenColumns.from_table(random_table())
        with Seen(), torch.no_grad():
            trainer.model(MicroBatch(columns, np.arange(2)), 1.0)
    assert columns.weights.shape not in cast


def test_no_tokens() -> None:
    hidden, weight, _ = inputs()
    log_probs, entropy = chunked_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_nothing_of_the_size_of_the_logits_is_kept_or_made() -> None:
    kept: list[int] = []
    made: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend([out.numel()] if isinstance(out, Tensor) else [])
            return out

    hidden, weight, targets = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t), Watch():
        chunked_log_probs(hidden, weight, targets, chunk_size=4)
    assert kept
    assert made
    assert max(kept) < TOKENS * VOCAB
    assert max(made) < TOKENS * VOCAB


@pytest.mark.newest
@pytest.mark.parametrize("tied", [True, False])
def test_forward_operations_are_those_of_torch(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=tied, hidden_size=64, intermediate_size=128)
    hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    length = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hf(torch.ones(1, length, dtype=torch.int64))
    flops = ForwardFlops.of(PolicyModel(hf))
    # transformers computes logits everywhere, and scores that the causal mask hides
    seen = (flops.per_token + flops.per_target) * length + flops.per_pair * length**2
    assert seen == pytest.approx(counter.get_total_flops(), rel=0.01)
    two = flops.total(np.array([10, 30]), np.array([4, 5]), np.array([0, 0]))
    assert two == flops.per_token * 40 + flops.per_target * 9 + flops.per_pair * (55 + 465)
    shared = flops.total(np.array([10, 30]), np.array([4, 5]), np.array([0, 8]))
    assert two - shared == flops.per_token * 8 + flops.per_pair * 36


@pytest.mark.newest
def test_a_mixture_of_experts_is_not_counted(tmp_path: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path))
    hf.config.get_text_config = lambda: SimpleNamespace(num_experts=8)
    assert ForwardFlops.of(PolicyModel(hf)) is None


def test_speed_is_operations_over_seconds(tmp_path: Path) -> None:
    table, model = random_table(masked=0.0), save_tiny_model(tmp_path)
    given = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True, "num_steps_per_rollout": 2}
    with one_rank(tiny_args(model, **given, global_batch_size=8)) as trainer:
        metrics = trainer.train(0, table)
        flops = ForwardFlops.of(trainer.model)
    # the first of two steps computes its own old log-probs
    for name, passes, rows in (("actor_train", 3, 0), ("log_probs", 1, 8), ("ref_log_probs", 1, 0)):
        total = flops.total(table.total_lengths[rows:], table.response_lengths[rows:], np.zeros(len(table) - rows))
        counted = metrics[f"perf/{name}_tflops"] * metrics[f"perf/{name}_time"] * 1e12
        assert counted == pytest.approx(passes * total), name
