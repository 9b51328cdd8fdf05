"""The fast passes of hybrids of the gated delta rule against transformers' own, and the contract with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.engines.embedded.caches import is_cut, joined, tensors, with_rows
from slimelite.engines.embedded.gated_delta import HYBRIDS, HybridPasses
from slimelite.engines.embedded.model import PACK_ELEMENTS
from slimelite.engines.embedded.passes import Passes
from slimelite.models.small import VOCABULARY, small_config
from tests.engines.test_embedded_engine import EmbeddedContract, check, group, serve
from tests.engines.test_generic_decoder import SHAPES
from tests.engines.tiny_models import build_model

LENGTH = 90  # more than a chunk of the scan


class TestGatedDelta(EmbeddedContract):
    """A state for each head, a convolution's inputs, and keys and values."""

    family = "qwen3_5_text"
    shape: ClassVar[dict[str, Any]] = SHAPES["qwen3_5_text"]


class Pair:
    """A model, tokens [3, `LENGTH`], and transformers' log-probs after each."""

    def __init__(self, family: str, **fields: Any) -> None:
        config = small_config(AutoConfig.for_model(family, num_hidden_layers=4))
        config.update(fields)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
            self.ids = torch.randint(1, VOCABULARY, (3, LENGTH))
        self.model = model.eval().requires_grad_(False)
        self.right = Passes(self.model).whole(self.ids).log_softmax(-1)
        self.fast = HybridPasses(self.model)

    def is_right(self, logits: Tensor, rows: list[int], lengths: list[int]) -> None:
        """``logits`` [n, vocab] are those after so many tokens of these rows."""
        right = torch.stack([self.right[row, length - 1] for row, length in zip(rows, lengths, strict=True)])
        torch.testing.assert_close(logits.log_softmax(-1), right, atol=2e-5, rtol=0)

    def fed(self, rows: list[int], lengths: list[int]) -> Tensor:
        """[n, 1] tokens that come after so many."""
        return torch.stack([self.ids[row, length] for row, length in zip(rows, lengths, strict=True)])[:, None]


@pytest.mark.newest
@pytest.mark.parametrize("family", HYBRIDS)
def test_whole_passes_are_transformers(family: str) -> None:
    pair = Pair(family)
    torch.testing.assert_close(pair.fast.whole(pair.ids).log_softmax(-1), pair.right, atol=2e-5, rtol=0)
    last = pair.fast.whole(pair.ids, 5).log_softmax(-1)
    torch.testing.assert_close(last, pair.right[:, -5:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", HYBRIDS)
def test_prompts_in_pieces_and_rows_that_come_and_go_are_whole_passes(family: str) -> None:
    pair = Pair(family)
    logits, cache = pair.fast.extend(pair.ids[:, :2], None, 0)  # fewer tokens than the convolution takes
    pair.is_right(logits, [0, 1, 2], [2, 2, 2])
    for start, end in ((2, 70), (70, 71)):
        logits, cache = pair.fast.extend(pair.ids[:, start:end], cache, start)
        pair.is_right(logits, [0, 1, 2], [end] * 3)
    assert not is_cut(cache, 71)
    _, short = pair.fast.extend(pair.ids[:1, :7], None, 0)
    cache, rows, lengths = joined([cache, short]), [0, 1, 2, 0], [71, 71, 71, 7]
    for _ in range(10):
        logits, cache = pair.fast.decode(pair.fed(rows, lengths), cache, torch.tensor(lengths), max(lengths))
        lengths = [length + 1 for length in lengths]
        pair.is_right(logits, rows, lengths)
    cache = with_rows(cache, torch.tensor([3, 1, 3]), 81)
    rows, lengths = [0, 1, 0], [17, 81, 17]
    logits, cache = pair.fast.decode(pair.fed(rows, lengths), cache, torch.tensor(lengths), 81)
    pair.is_right(logits, rows, [18, 82, 18])
    alone = with_rows(cache, torch.tensor([0]), 18)
    logits, _ = pair.fast.decode(pair.fed([0], [18]), alone, torch.tensor([18]), 18)
    pair.is_right(logits, [0], [19])


def test_a_copy_of_a_cache_stays_as_it_was() -> None:
    pair = Pair("qwen3_5_text")
    _, cache = pair.fast.extend(pair.ids[:, :20], None, 0)
    kept = with_rows(cache, torch.tensor([1]))
    before = [tensor.clone() for _, tensor in tensors(kept)]
    for length in (20, 21, 22):
        _, cache = pair.fast.decode(pair.fed([0, 1, 2], [length] * 3), cache, torch.tensor([length] * 3), length)
    assert before
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(tensors(kept), before, strict=True))
    logits, _ = pair.fast.decode(pair.fed([1], [20]), kept, torch.tensor([20]), 20)
    pair.is_right(logits, [1], [21])


def test_biases_an_equal_number_of_heads_and_large_matrices() -> None:
    fields = {"attention_bias": True, "linear_num_value_heads": 2, "intermediate_size": 4096}
    pair = Pair("qwen3_5_text", **fields)
    assert pair.model.model.layers[0].mlp.up_proj.weight.numel() * 2 >= PACK_ELEMENTS
    torch.testing.assert_close(pair.fast.whole(pair.ids).log_softmax(-1), pair.right, atol=2e-5, rtol=0)


def test_every_weight_counts_after_a_change() -> None:
    """What is derived of weights follows them: parts of a matrix, norms, taps, rates."""
    pair = Pair("qwen3_5_text", attention_bias=True)
    pair.fast.whole(pair.ids)
    for weight in pair.model.parameters():
        weight.add_(0.03 * torch.sign(weight))
    right = Passes(pair.model).whole(pair.ids).log_softmax(-1)
    assert float((right - pair.right).abs().max()) > 0.01
    torch.testing.assert_close(pair.fast.whole(pair.ids).log_softmax(-1), right, atol=2e-5, rtol=1e-5)


def test_the_engine_computes_a_hybrid_without_transformers_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(tmp_path, "qwen3_5_text", **SHAPES["qwen3_5_text"])
    requests = group(tuple(range(10, 40)), 3)
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "extend", None)
        patch.setattr(Passes, "decode", None)
        results = serve(tmp_path, requests)
    check(model, requests, results, 1e-4)
