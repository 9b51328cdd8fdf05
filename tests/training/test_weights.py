"""Weights that leave the trainer: to engines and to Hugging Face folders."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import Recorder, one_rank, random_table, save_tiny_model, tiny_args
from transformers import AutoModelForCausalLM

from slimelite.training import weights
from slimelite.training.parallel import whole
from slimelite.training.weights import buckets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


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


def test_an_untied_head_is_sent(tmp_path: Path) -> None:
    sink = Recorder()
    with one_rank(tiny_args(save_tiny_model(tmp_path, tie_word_embeddings=False))) as trainer:
        trainer.push_weights(sink, 0)
    assert "lm_head.weight" in sink.tensors


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
    assert "up to rollout 0 " in card
    assert f"| model | {model} |\n" in card
    assert "| method | grpo, adam lr " in card
    assert "base_model" not in card, "a folder is no model of the hub"
    assert "base_model: owner/model\n" in weights.model_card(replace(trainer.args, hf_checkpoint="owner/model"), 3)
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
