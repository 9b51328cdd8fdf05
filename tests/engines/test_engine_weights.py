"""Where weights lie, and that they survive being moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from slimelite.engines.embedded.model import PACK_ELEMENTS, DecoderShape, DecoderWeights, Linear, Mixture, MixtureShape
from slimelite.models.files import as_filed
from tests.engines.tiny_models import build_model

CPU = torch.device("cpu")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}


def load(folder: Path, family: str) -> tuple[DecoderWeights, dict[str, torch.Tensor]]:
    model = build_model(folder, family, **(EXPERTS if family == "qwen3_moe" else {}))
    weights = DecoderWeights(DecoderShape.from_config(AutoConfig.from_pretrained(folder)), CPU, torch.float32)
    weights.incoming.begin(1)
    filed = as_filed(model, model.state_dict())
    return weights, dict(sorted(filed.items(), key=lambda item: item[0] == HEAD))  # a tied head comes last


@pytest.mark.newest
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_every_name_of_the_checkpoint_has_a_place_of_its_own(tmp_path: Path, family: str) -> None:
    weights, state = load(tmp_path, family)
    assert set(weights.incoming.missing()) == set(state) - ({HEAD} if weights.shape.tied else set())
    for name, tensor in state.items():
        before = len(weights.incoming.missing())
        weights.update([(name, tensor)])
        assert before - len(weights.incoming.missing()) == (0 if weights.shape.tied and name == HEAD else 1)
    assert weights.incoming.missing() == []
    layer, prefix = weights.layers[1], "model.layers.1"
    qkv = [state[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(layer.qkv.weight, torch.cat(qkv))
    assert torch.equal(
        layer.mlp.gate_up.weight, torch.cat([state[f"{prefix}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    )
    weights.incoming.begin(2)
    assert len(weights.incoming.missing()) == len(state) - weights.shape.tied


@pytest.mark.newest
def test_a_tied_head_may_come_under_either_name(tmp_path: Path) -> None:
    weights, state = load(tmp_path, "qwen2")
    del state[EMBED]
    head = state[HEAD] + 1
    weights.update(list({**state, HEAD: head}.items()))
    assert weights.incoming.missing() == []
    assert torch.equal(weights.embed, head)
    assert weights.head.weight is weights.embed


def test_a_bad_bucket_changes_nothing(tmp_path: Path) -> None:
    weights, state = load(tmp_path, "llama")
    weights.update(list(state.items()))
    for bad, said in ((("nobody", torch.ones(1)), "nobody"), ((HEAD, torch.ones(2, 2)), r"\(2, 2\)")):
        with pytest.raises(ValueError, match=said):
            weights.update([(EMBED, state[EMBED] + 1), bad])
        assert torch.equal(weights.embed, state[EMBED])


@pytest.mark.parametrize("width", [24, PACK_ELEMENTS // 64])  # grouped products, and packed copies of each expert
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_computes_what_transformers_computes(width: int, dtype: torch.dtype) -> None:
    shape = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": width, "hidden_size": 32}
    config = AutoConfig.for_model("qwen3_moe", **shape, norm_topk_prob=True)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    block.to(dtype)
    mixture = MixtureShape.from_config(config)
    assert mixture is not None
    experts = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
    ours = Mixture(mixture, Linear(block.gate.weight.detach()), *experts)
    x, before = torch.randn(2, 33, 32, dtype=dtype)
    for rows in (33, 1):  # of one row some experts see nothing
        expected = before[:rows] + block(x[None, :rows])[0]
        with torch.inference_mode():
            found = ours.added_to(before[:rows].clone(), x[:rows])
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
        for part in experts:  # new weights, which are the block's too
            part.mul_(1.25)


def test_a_packed_copy_follows_its_weight() -> None:
    weight, x, bias = torch.randn(512, PACK_ELEMENTS // 512), torch.randn(9, PACK_ELEMENTS // 512), torch.randn(512)
    top, bottom = weight.split(256)
    product = Linear(weight, bias)
    with torch.inference_mode():
        for part in (None, top, bottom):
            if part is not None:
                part.copy_(torch.randn(part.shape))
            for rows in (1, 9):
                error = (product(x[:rows]) - (x[:rows] @ weight.T + bias)).abs()
                assert (error / (x[:rows].abs() @ weight.abs().T + bias.abs())).max() < 1e-6


@pytest.mark.parametrize("outputs", [8, PACK_ELEMENTS // 32])  # the second has a packed copy
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_to_what_was_there(outputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x, before = (torch.randn(*size, dtype=dtype) for size in ((outputs, 32), (9, 32), (9, outputs)))
    bias = torch.randn(outputs, dtype=dtype) if has_bias else None
    rounded = before + torch.nn.functional.linear(x, weight, bias)
    found = Linear(weight, bias).added_to(before.clone(), x)
    if dtype == torch.bfloat16:
        assert torch.equal(found, rounded), "the product is rounded before it is added, as a trainer's model does"
    else:
        torch.testing.assert_close(found, rounded, rtol=0, atol=2e-5)
