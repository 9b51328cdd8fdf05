"""The generic decoder of the embedded engine: the contract for a kind of each, and what its caches allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.embedded.generic import SCAN_TOKENS, GenericDecoder
from slimelite.engines.embedded.passes import Passes
from slimelite.engines.embedded.ways import Rows, ways_of
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.models.small import small_config
from tests.engines.test_embedded_engine import EmbeddedContract, check, group, run, serve
from tests.engines.tiny_models import build_model, greedy

SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 7, "final_logit_softcapping": 20.0},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen3_5_text": {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 64,
    },
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
}


class TestSlidingWindows(EmbeddedContract):
    """Windows, and capped logits."""

    family = "gemma3_text"
    shape: ClassVar[dict[str, Any]] = SHAPES["gemma3_text"]


class TestStates(EmbeddedContract):
    """A convolution beside attention, whose states take one token at a time."""

    family = "lfm2"
    shape: ClassVar[dict[str, Any]] = SHAPES["lfm2"]


@pytest.mark.slow
class TestLatentAttention(EmbeddedContract):
    """Keys and values of all heads from one small vector, and experts."""

    family = "deepseek_v3"
    shape: ClassVar[dict[str, Any]] = SHAPES["deepseek_v3"]


@pytest.mark.slow
class TestStatesAlone(EmbeddedContract):
    """No attention: there is nothing of a row but its states."""

    family = "mamba"
    shape: ClassVar[dict[str, Any]] = SHAPES["mamba"]


@pytest.mark.slow
class TestWholePasses(EmbeddedContract):
    """No cache."""

    family = "openai-gpt"
    shape: ClassVar[dict[str, Any]] = SHAPES["openai-gpt"]


@pytest.mark.newest
@pytest.mark.parametrize("family", [*SHAPES])
def test_rows_of_all_lengths_come_and_go_and_have_the_models_log_probs(tmp_path: Path, family: str) -> None:
    model = build_model(tmp_path, family, **SHAPES[family])
    model.set_attn_implementation("eager")  # transformers' sdpa leaves out the caps of scores
    prompts = [tuple(range(4, 4 + length)) for length in (3, 40, 1, 21, 40)]
    requests = [
        GenerateRequest(f"{i}", prompts[i % 5], SamplingParams(5 + 4 * i % 17, ignore_eos=True, seed=i))
        for i in range(10)
    ]
    limits = {"max_running_requests": 4, "kv_cache_tokens": 170, "max_context_len": 100}
    check(model, requests, serve(tmp_path, requests, **limits), 1e-4)
    requests = [GenerateRequest(f"{i}", prompts[i], SamplingParams(12, temperature=0.0)) for i in range(5)]
    for request, result in zip(requests, serve(tmp_path, requests, eos_token_ids=[]), strict=True):
        assert result.output_ids == greedy(model, request.input_ids, 12)


class Largest(TorchDispatchMode):
    """``elements`` of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, out.numel() if isinstance(out, Tensor) else 0)
        return out


@torch.inference_mode()
def test_layers_of_mamba_2_compute_in_chunks_that_need_little_memory(tmp_path: Path) -> None:
    model = build_model(tmp_path, "bamba", **SHAPES["bamba"] | {"mamba_chunk_size": 256})
    config = AutoConfig.from_pretrained(tmp_path)
    decoder = GenericDecoder(str(tmp_path), config, torch.device("cpu"), torch.float32, 0)
    assert decoder.prefill_tokens == SCAN_TOKENS
    ids = torch.arange(4, 84)[None]
    with Largest() as own:
        expected = model(input_ids=ids).logits[:, -1]
    with Largest() as ours:
        logits, _ = decoder.passes.extend(ids, None, 0)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert ours.elements <= own.elements / 8, "two chunks of 64 tokens, instead of one of 256"


def small(family: str, layers: int, **fields: Any) -> PreTrainedModel:
    """A small copy with random weights, as the engine tries a family."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        config = small_config(AutoConfig.for_model(family, num_hidden_layers=layers, **fields))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


def test_a_family_whose_own_cache_fails_is_sampled(tmp_path: Path) -> None:
    model = small("xlstm", 2, hidden_size=96)
    with pytest.raises(ValueError, match="matC_old has wrong shape"):
        model(torch.tensor([[5, 6, 7]]), use_cache=True)
    model.save_pretrained(tmp_path)
    requests = [GenerateRequest("0", (5, 6, 7, 8), SamplingParams(6, ignore_eos=True, seed=0))]
    (result,) = serve(tmp_path, requests, max_context_len=64, eos_token_ids=[])
    ids = torch.tensor([[5, 6, 7, 8, *result.output_ids]])
    with torch.no_grad():
        right = model(ids, use_cache=False).logits.log_softmax(-1)[0, 3:-1].gather(1, ids[0, 4:, None])[:, 0]
    assert result.log_probs == pytest.approx(right.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "layers", "rows"),
    [
        ("deepseek_v4", 3, Rows.ALIKE),  # returns only a cache that it was given
        ("recurrent_gemma", 3, Rows.PADDED),  # keeps states in its modules
        ("xlstm", 2, Rows.PADDED),
        ("minimax", 2, Rows.PADDED),  # makes its own
        ("bamba", 2, Rows.PADDED),  # counts positions from 0 unless they are given
        ("openai-gpt", 2, Rows.WHOLE),  # has no cache
    ],
)
def test_each_kind_of_cache_is_used(family: str, layers: int, rows: Rows) -> None:
    fields = {"attn_layer_indices": [1]} if family == "bamba" else {}
    assert ways_of(AutoConfig.for_model(family, num_hidden_layers=layers, **fields)).rows is rows


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_small_copy_of_sparse_attention_chooses_the_same_tokens_in_rows_of_any_length(family: str) -> None:
    """Tokens with equal scores would be chosen by the length of the row, and caches would look wrong."""
    model, ids = small(family, 4), torch.arange(5, 23)[None]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0].log_softmax(-1)
        for length in range(6, ids.shape[1]):
            last = model(ids[:, :length], use_cache=False).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(last, whole[length - 1], atol=1e-4, rtol=0)


@pytest.mark.newest
@pytest.mark.parametrize(("family", "goes_on"), [("olmoe", True), ("gemma3_text", True), ("mamba", False)])
def test_a_prompt_is_computed_once_and_a_conversation_goes_on_where_the_cache_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, goes_on: bool
) -> None:
    model = build_model(tmp_path, family, **SHAPES[family])
    prefilled: list[int] = []
    extend = Passes.extend

    def counting(self: Passes, ids: torch.Tensor, cache: Any, start: int) -> Any:
        prefilled.append(ids.numel())
        return extend(self, ids, cache, start)

    monkeypatch.setattr(Passes, "extend", counting)
    first = group(tuple(range(10, 40)), 6, max_new_tokens=70)

    async def scenario() -> None:
        engine = EmbeddedEngine(str(tmp_path))
        prefilled.clear()
        results = await engine.generate(first)
        assert sum(prefilled) == 30
        assert [r.cached_tokens for r in results] == [0, *[29] * 5]
        prefilled.clear()
        again = await engine.generate(first)
        assert prefilled == []
        assert [r.output_ids for r in again] == [r.output_ids for r in results]
        turn = (*first[2].input_ids, *results[2].output_ids, 5, 6, 7)
        requests = group(turn, 2)
        check(model, requests, await engine.generate(requests), 1e-4)
        assert sum(prefilled) == (4 if goes_on else len(turn))
        await engine.close()

    run(scenario())


def test_a_response_that_was_aborted_goes_on_from_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tmp_path, "mamba", **SHAPES["mamba"])
    (request,) = group(tuple(range(10, 30)), 1, max_new_tokens=300)

    async def scenario() -> None:
        engine, count = EmbeddedEngine(str(tmp_path)), [0]
        step = engine._scheduler.step

        def counting() -> None:
            step()
            count[0] += 1
            if count[0] == 100:
                engine._scheduler.abort(None)

        engine._scheduler.step = counting  # type: ignore[method-assign]
        (part,) = await engine.generate([request])
        assert (len(part.output_ids), part.finish_reason) == (100, "abort")
        rest = group((*request.input_ids, *part.output_ids), 1)
        (result,) = await engine.generate(rest)
        assert result.cached_tokens == 119
        check(model, rest, [result], 1e-4)
        await engine.close()

    run(scenario())
