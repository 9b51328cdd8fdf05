"""Weights that leave the trainer: to engines and to Hugging Face folders."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, Recorder, on_ranks, one_rank, random_table, save_tiny_model, tiny_args
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.training import weights
from slimelite.training.parallel import whole
from slimelite.training.trainer import Trainer
from slimelite.training.weights import buckets
from tests.data.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.newest
def test_push_delivers_every_weight_once_in_buckets(model: Path) -> None:
    sink = Recorder()
    with one_rank(tiny_args(model, update_weight_buffer_size=10_000)) as trainer:
        trainer.train(0, random_table())
        metrics = trainer.push_weights(sink, 3)
        assert trainer.progress.weight_version == 3
        expected = dict(trainer.model.hf.state_dict())
    assert sink.calls[0] == "begin 3"
    assert sink.calls[-1] == "end"
    assert set(sink.calls[1:-1]) == {"send"}
    # the head is the embedding, and comes as that alone
    assert sink.tensors.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in sink.tensors.items():
        assert torch.equal(tensor, whole(expected[name])), name
    largest = max(tensor.nbytes for tensor in sink.tensors.values())
    assert min(sink.bucket_bytes[:-1]) >= 10_000
    assert max(sink.bucket_bytes) < 10_000 + largest
    assert len(sink.bucket_bytes) > 5
    assert metrics["perf/update_weights_bytes"] == sum(sink.bucket_bytes)
    assert metrics["perf/update_weights_buckets"] == len(sink.bucket_bytes)


def test_matrices_of_more_than_half_a_bucket_share_one() -> None:
    """A 32B model in 512 MiB, on the meta device: 194 buckets if a tensor that does not fit waited for the next."""
    hidden, inner, layers, half = 5120, 27648, 64, torch.bfloat16
    layer = [hidden * hidden, 1024 * hidden, 1024 * hidden, hidden * hidden, *[inner * hidden] * 3, hidden, hidden]
    sizes = [152064 * hidden, *layer * layers, hidden, 152064 * hidden]
    weights = [(str(i), torch.empty(n, device="meta")) for i, n in enumerate(sizes)]
    found = list(buckets(weights, 2**29, half))
    assert [name for bucket in found for name in bucket.names] == [name for name, _ in weights]
    assert len(found) <= 100
    assert max(bucket.flat.nbytes for bucket in found[1:-1]) < 2**29 + 2 * inner * hidden


def test_a_tensor_larger_than_the_buffer_travels_alone(model: Path) -> None:
    sink = Recorder()
    with one_rank(tiny_args(model, update_weight_buffer_size=1)) as trainer:
        trainer.push_weights(sink, 0)
    assert len(sink.bucket_bytes) == len(sink.tensors) == 26


def test_a_tensor_that_travels_alone_is_not_copied() -> None:
    large, small = torch.randn(64, 8), torch.randn(3)
    alone, both = buckets([("large", large), ("small", small), ("other", small)], large.nbytes)
    assert alone.flat.data_ptr() == large.data_ptr()
    assert both.flat.data_ptr() != small.data_ptr()
    (cast,) = buckets([("large", large)], 1, torch.bfloat16)
    assert torch.equal(cast.tensors()[0][1], large.bfloat16())


def test_buckets_are_no_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA IPC cannot share those everywhere. Other tensors of the trainer go on being allocated in them."""
    told, seen, empty = torch._C._accelerator_getAllocatorSettings, [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (seen.append(told()), empty(*a, **k))[1])
    for settings, expected in (
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("expandable_segments: True", "expandable_segments: True,expandable_segments:False"),
    ):
        torch._C._accelerator_setAllocatorSettings(settings)
        list(buckets([("a", torch.ones(3)), ("b", torch.ones(3))], 100))
        assert (seen[-1], told()) == (expected, settings)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torch_2_11_takes_the_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv(variable, "expandable_segments:True")
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    list(buckets([("a", torch.ones(3)), ("b", torch.ones(3))], 100))
    assert given == ["expandable_segments:True,expandable_segments:False", "expandable_segments:True"]


def test_weights_of_several_dtypes_keep_them_in_buckets_of_their_own() -> None:
    given = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.arange(2), "d": torch.ones(1)}
    found = [tensor for bucket in buckets(given.items(), 1000) for tensor in bucket.tensors()]
    assert [name for name, _ in found] == [*given]
    assert all(tensor.dtype == given[name].dtype for name, tensor in found)


@pytest.mark.newest
def test_an_untied_head_is_sent(tmp_path: Path) -> None:
    sink = Recorder()
    with one_rank(tiny_args(save_tiny_model(tmp_path, tie_word_embeddings=False))) as trainer:
        trainer.push_weights(sink, 0)
    assert "lm_head.weight" in sink.tensors


@pytest.mark.newest
@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_a_saved_model_opens_in_transformers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", shard_bytes)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_text(json.dumps({"file": name}))
    table = random_table()
    with one_rank(tiny_args(model, tokenizer=str(model))) as trainer:
        trainer.train(0, table)
        expected = trainer.log_probs(table)
        was = os.umask(0o027)
        trainer.save_hf(str(tmp_path / "hf"))
        os.umask(was)
    saved = tmp_path / "hf"
    # the group reads the weights as it reads the config, and nobody else does
    assert {oct(f.stat().st_mode & 0o777) for f in saved.glob("*.safetensors")} == {"0o640"}
    assert (saved / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    assert (saved / "chat_template.jinja").is_file()
    card = (saved / "README.md").read_text()
    assert f"| base | {model} |\n" in card
    assert "| method | grpo, adam lr " in card
    assert "base_model" not in card, "a folder is no model of the hub"
    assert "apply_chat_template" in card
    files = sorted(f.name for f in saved.glob("model*"))
    assert ("model.safetensors" in files) == (shard_bytes > 10**6)
    assert all(sum(t.nbytes for t in load_file(f).values()) <= shard_bytes for f in saved.glob("*.safetensors"))
    hf, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert hf.dtype == torch.float32
    with one_rank(tiny_args(saved)) as trainer:
        assert torch.equal(torch.from_numpy(trainer.log_probs(table)), torch.from_numpy(expected))
    ids = torch.tensor(table.row_slice("prompt_tokens", 0).tolist() + table.row_slice("response_tokens", 0).tolist())
    log_p = torch.log_softmax(hf(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
    n = len(table.row_slice("response_tokens", 0))
    torch.testing.assert_close(log_p[-n:], torch.from_numpy(expected[:n]), rtol=1e-5, atol=1e-5)


@pytest.mark.newest
def test_the_code_of_an_adapters_card_runs_where_the_base_is_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_tiny_model(tmp_path / "base", vocab_size=300)
    byte_tokenizer().save_pretrained(base)
    with one_rank(tiny_args(base, tokenizer=str(base), lora_rank=2, lora_alpha=4.0)) as trainer:
        trainer.train(0, random_table())
        trainer.save_hf(str(tmp_path / "adapter"))
    moved = base.rename(tmp_path / "moved")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "adapter" / "README.md").read_text(), re.DOTALL)
    code = code.replace(f'base = "{base}"', f'base = "{moved}"').replace("THIS FOLDER", str(tmp_path / "adapter"))
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(code, variables)
    assert any(name.endswith("lora_B.default.weight") for name, _ in variables["model"].named_parameters())


@pytest.mark.parametrize("flag", [None, "fp32", "fp16"])
def test_a_model_is_saved_in_the_dtype_that_it_came_in(flag: str | None, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    dtype = {None: torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[flag]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    with one_rank(tiny_args(model, save_hf_dtype=flag)) as trainer:
        trainer.train(0, random_table())
        trainer.save_hf(str(tmp_path / "hf"))
        exact = {name: weight.detach().clone() for name, weight in trainer.model.named_weights()}
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert saved.keys() == exact.keys()
    assert all(torch.equal(weight, exact[name].to(dtype)) for name, weight in saved.items())


def scored_and_saved(trainer: Trainer, folder: str) -> np.ndarray:
    trainer.save_hf(folder)
    return trainer.log_probs(random_table())


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_have_the_names_of_a_models_files(kind: str, tmp_path: Path) -> None:
    """transformers holds them as one weight a layer; an engine would pass over its name, and keep the old experts."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "eos_token_id": 1}
    experts = {"num_local_experts" if kind == "mixtral" else "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **heads, **experts, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    expected, sink = load_file(tmp_path / "model" / "model.safetensors"), Recorder()
    assert any(".experts.3." in name for name in expected)
    with one_rank(tiny_args(tmp_path / "model", update_weight_buffer_size=5000)) as trainer:
        trainer.push_weights(sink, 1)
        trainer.save_hf(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for found in (saved, sink.tensors):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.newest
def test_a_routers_biases_are_on_every_rank_and_in_the_saved_model(tmp_path: Path) -> None:
    """DeepSeek-V3 has them as buffers: the file has them, and no gradient changes them."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    dims = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}
    config = AutoConfig.for_model("deepseek_v3", **sizes, **experts, **heads, **dims, initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    for bias in biases.values():
        bias.copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path / "model")
    args = tiny_args(tmp_path / "model")
    with one_rank(args) as trainer:
        file = tmp_path / "model" / "model.safetensors"
        held = file.read_bytes()
        with file.open("r+b") as written:  # by another program, meanwhile
            written.seek(len(held) // 2)
            written.write(bytes(len(held) // 2))
        alone = scored_and_saved(trainer, str(tmp_path / "saved"))
    file.write_bytes(held)
    found = on_ranks(2, scored_and_saved, args, str(tmp_path / "of-two"))
    np.testing.assert_allclose(found, alone, atol=1e-5)
    for folder in ("saved", "of-two"):
        assert load_file(tmp_path / folder / "model.safetensors").keys() == load_file(file).keys()
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert biases
        assert all(torch.equal(saved[name], bias) for name, bias in biases.items())
