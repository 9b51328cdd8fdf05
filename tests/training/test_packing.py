"""A model whose packed sequences would see each other is trained on one at a time; one that is not right is refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrids import SIZES
from tiny import VOCAB, one_rank, random_table, save_tiny_model, tiny_args
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slimelite.samples.table import SampleTable
from slimelite.training import packing, recurrent
from slimelite.training.attention import ATTENTION, register_attention
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.loading import inspect_model
from slimelite.training.model import PolicyModel
from slimelite.training.packing import NoSmallModel, Packing, may_pack

pytestmark = pytest.mark.newest

LEAKING: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
}
# one row above 4,096 tokens changes the frequencies of the short ones beside it, packed or padded
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
    "original_max_position_embeddings": 4096,
}
# its logits come from hidden states that predict n-grams, and not from its last ones
REFUSED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
}


@pytest.fixture
def unknown_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers with a state are those of a family that nobody has seen: they are left as they are."""
    monkeypatch.setattr(recurrent, "KINDS", ())
    packing._may_pack.cache_clear()
    yield
    packing._may_pack.cache_clear()


def build(family: str, changes: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **changes)).save_pretrained(folder)
    return folder


def transformers_own(model: PreTrainedModel, table: SampleTable) -> Tensor:
    """Log-probs of every response of ``table``, each row alone."""
    found = []
    for row in range(len(table)):
        prompt, response = (table.row_slice(name, row) for name in ("prompt_tokens", "response_tokens"))
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(-1, ids[1:, None])[len(prompt) - 1 :, 0])
    return torch.cat(found)


@pytest.mark.usefixtures("unknown_layers")
@pytest.mark.parametrize("family", LEAKING)
def test_a_leaking_family_is_trained_on_one_sequence_at_a_time(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, table = build(family, LEAKING[family], tmp_path), random_table(groups=2)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = transformers_own(own, table)
    lengths: list[list[int]] = []
    with caplog.at_level(logging.WARNING), one_rank(tiny_args(folder, optimizer="sgd", lr=1.0)) as trainer:
        trainer.model.register_forward_pre_hook(lambda _, given: lengths.append(given[0].lengths))
        torch.testing.assert_close(torch.from_numpy(trainer.log_probs(table)), right.detach(), rtol=1e-4, atol=1e-5)
    assert len(lengths) == len(table)
    assert all(len(parts) == 1 for parts in lengths)
    assert [r.message for r in caplog.records if "one sequence per forward pass" in r.message][1:] == []
    assert "one sequence per forward pass" in caplog.text


@pytest.mark.usefixtures("unknown_layers")
@pytest.mark.parametrize("family", LEAKING)
def test_rows_that_belong_together_are_padded_and_not_packed(family: str, tmp_path: Path) -> None:
    """The two replies of a pair share a forward pass, whose log-probs and gradients are those of each alone."""
    register_attention()
    folder, table = build(family, LEAKING[family], tmp_path), random_table(groups=1, longest=12)
    own, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        for attention in ("eager", ATTENTION)
    )
    policy, device = PolicyModel(ours), torch.device("cpu")
    batch = MicroBatch(TokenColumns.from_table(table), np.arange(len(table)), device)
    right = transformers_own(own, table)
    probe = torch.randn_like(right)
    (right * probe).sum().backward()
    leaks = (policy(batch, 1.0)[0] - right).abs().max()
    assert leaks > 1e-3, "packed, this family is wrong"
    policy.packed = False
    apart = policy(batch, 1.0)[0]
    torch.testing.assert_close(apart, right, rtol=1e-4, atol=1e-5)
    (apart * probe).sum().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    empty = MicroBatch(TokenColumns.from_table(table), np.zeros(0, np.int64), device)  # of a rank with less to do
    assert policy(empty, 1.0)[0].shape == (0,)


def test_dense_models_stay_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    with caplog.at_level(logging.WARNING), one_rank(tiny_args(save_tiny_model(tmp_path))) as trainer:
        trainer.model.register_forward_pre_hook(lambda _, given: calls.append(len(given[0].lengths)))
        trainer.log_probs(random_table())
    assert sum(calls) == 16
    assert len(calls) < 8
    assert "one sequence" not in caplog.text


@pytest.mark.parametrize(
    ("family", "changes", "packing"),
    [
        ("qwen2", {}, Packing.SHARED),
        ("qwen3", {}, Packing.SHARED),
        ("llama", {}, Packing.SHARED),
        ("mistral", {}, Packing.SHARED),
        ("gemma3_text", {}, Packing.SHARED),
        ("qwen3_moe", {"num_hidden_layers": 4}, Packing.SHARED),
        ("nemotron_h", {}, Packing.SHARED),
        ("qwen3_next", {"num_hidden_layers": 4}, Packing.SHARED),
        ("phi3", {"rope_parameters": LONG_ROPE}, Packing.ALONE),
    ],
)
def test_families_at_their_own_depth(family: str, changes: dict[str, Any], packing: Packing) -> None:
    assert may_pack(AutoConfig.for_model(family, **changes), ATTENTION) is packing


def test_pairs_that_padding_mixes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"phi3 cannot be trained: .*its log-probs"):
        may_pack(AutoConfig.for_model("phi3", rope_parameters=LONG_ROPE), ATTENTION, pairs=True)
    assert may_pack(AutoConfig.for_model("nemotron_h"), ATTENTION, pairs=True) is Packing.SHARED


def test_what_is_not_right_even_alone_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("prophetnet", **REFUSED)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder := tmp_path)
    said = "prophetnet cannot be trained: its logits are not the output of its LM head: its log-p"
    with pytest.raises(ValueError, match=said), one_rank(tiny_args(folder)):
        pass
    with pytest.raises(ValueError, match=said):  # the pre-flight check, before anything starts
        inspect_model(tiny_args(folder), str(folder))


MASKED: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_head": 4, "n_layer": 2, "initializer_range": 0.2},
    "recurrent_gemma": {
        **SIZES,
        "lru_width": 32,
        "attention_window_size": 5,
        "block_types": ["recurrent", "attention"],
        "logits_soft_cap": 0.5,
        "w_init_variance_scale": 1.0,
    },
}


@pytest.mark.parametrize("family", MASKED)
def test_what_only_transformers_attention_computes_right_is_trained_with_it(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bloom adds its distances to the mask, and RecurrentGemma needs one; nobody has to ask for the attention that has
    one. RecurrentGemma caps its logits as well."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **MASKED[family])
    own = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    own.save_pretrained(tmp_path)
    table = random_table(groups=1)
    with caplog.at_level(logging.WARNING), one_rank(tiny_args(tmp_path)) as trainer:
        eager = trainer.model.hf.config._attn_implementation == "eager"
        # since transformers 5.24 RecurrentGemma's attention can be replaced, and then it needs no mask
        assert eager or family == "recurrent_gemma"
        assert trainer.model.packed == (family != "bloom")
        found = torch.from_numpy(trainer.log_probs(table))
        right = transformers_own(own, table)
        if trainer.model.packed:
            probe = torch.randn_like(right)
            (right * probe).sum().backward()
            batch = MicroBatch(TokenColumns.from_table(table), np.arange(len(table)), torch.device("cpu"))
            (trainer.model(batch, 1.0)[0] * probe).sum().backward()
            for (name, mine), theirs in zip(trainer.model.named_parameters(), own.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    torch.testing.assert_close(found, right.detach(), rtol=1e-4, atol=1e-5)
    said = re.search(f"{family} is trained with --attn-implementation eager: its \\w+Attention", caplog.text)
    assert bool(said) == eager


def test_what_cannot_be_seen_is_not_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Any) -> Any:
        raise TypeError("no such config")

    save_tiny_model(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    monkeypatch.setattr(packing, "small_config", fails)
    with pytest.raises(NoSmallModel, match="TypeError: no such config"):
        may_pack(AutoConfig.from_pretrained(tmp_path), ATTENTION)
    with caplog.at_level(logging.WARNING), one_rank(tiny_args(tmp_path)) as trainer:
        assert not trainer.model.packed
    assert "no such config" in caplog.text


# what each family does in train() and not in eval(), where engines sample
NOISY: dict[str, dict[str, Any]] = {
    "phimoe": {**SIZES, "num_local_experts": 4, "input_jitter_noise": 0.3},  # draws experts at random
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.5},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5},
}


@pytest.mark.parametrize("family", NOISY)
def test_a_model_is_trained_as_it_is_sampled(family: str, tmp_path: Path) -> None:
    """Log-probs, gradients and the saved config are the untouched model's in eval(), layers recomputed or not."""
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **NOISY[family]), attn_implementation="eager")
    for parameter in own.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    own.eval().save_pretrained(tmp_path)
    table = random_table(groups=1)
    right = transformers_own(own, table)
    probe = torch.randn_like(right)
    (right * probe).sum().backward()
    for checkpointing in (False, True):
        with one_rank(tiny_args(tmp_path, gradient_checkpointing=checkpointing)) as trainer:
            batch = MicroBatch(TokenColumns.from_table(table), np.arange(len(table)), torch.device("cpu"))
            found = trainer.model(batch, 1.0)[0]
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
            (found * probe).sum().backward()
            for (name, mine), theirs in zip(trainer.model.named_parameters(), own.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
            trainer.save_hf(str(tmp_path / "saved"))
    given, saved = (AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path, tmp_path / "saved"))
    assert saved | {"_name_or_path": given["_name_or_path"]} == given


def test_tokens_that_see_later_ones_are_refused_even_where_log_probs_are_transformers_own() -> None:
    """Log-probs of a whole text are no probabilities to sample with, whatever they are equal to."""
    with pytest.raises(ValueError, match="xlnet cannot be trained: its tokens attend to later tokens"):
        may_pack(AutoConfig.for_model("xlnet", n_layer=2), ATTENTION)


def test_a_forward_pass_that_changes_the_weights_is_refused() -> None:
    """RWKV divides the weights of its deeper layers by 2 in eval(): a copy of them would be another model."""
    with pytest.raises(ValueError, match="rwkv cannot be trained: its forward pass changes its weights"):
        may_pack(AutoConfig.for_model("rwkv"), ATTENTION)
