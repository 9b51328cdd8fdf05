"""Models made of an adapter or a checkpoint: they have the very weights that the trainer had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimelite.apps.runnable import Source, merged, resolve_model
from slimelite.models.checkpoints import CHECKSUMS, ROLLOUT_SEED, ROLLOUT_STATE
from tests.training.tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of

pytestmark = pytest.mark.newest

LORA = {"lora_rank": 4, "lora_alpha": 8.0, "lora_type": "rslora", "lora_targets": ("q_proj", "down_proj")}


@pytest.mark.parametrize(
    ("saves", "flags"), [("save_hf", LORA), ("save", LORA), ("save", {})], ids=["adapter", "checkpoint of one", "whole"]
)
def test_the_merged_model_has_the_trainers_weights(saves: str, flags: dict[str, Any], tmp_path: Path) -> None:
    base, place, folder = save_tiny_model(tmp_path / "base"), str(tmp_path / "saved"), tmp_path / "merged"
    with one_rank(tiny_args(base, **flags)) as trainer:
        trainer.train(0, random_table())
        _ = trainer.save_hf(place) if saves == "save_hf" else trainer.save(place, 0)
        # a run's driver writes these
        (Path(place) / ROLLOUT_STATE).write_text(json.dumps({ROLLOUT_SEED: 42}))
        (Path(place) / CHECKSUMS).write_text(json.dumps({"files": {}}))
        expected = weights_of(trainer)
    source = Source(place, str(base))
    assert resolve_model(place) == source or saves == "save_hf"
    assert merged(source, folder, "float32") == str(folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    assert any(not torch.equal(weight, found[name]) for name, weight in load_file(base / "model.safetensors").items())
    AutoModelForCausalLM.from_pretrained(folder)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    merged(source, folder, "float32")
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "it was there already"
    merged(source, folder, "bfloat16")
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    other = save_tiny_model(tmp_path / "other", hidden_size=64)
    # an adapter says in its own words that it fits no matrix of the model
    with pytest.raises(ValueError, match=r"has another shape; name the checkpoint's model|in this model") as caught:
        merged(Source(place, str(other)), folder, "float32")
    assert "--lora" not in str(caught.value), "a flag of train.py"
    with pytest.raises(
        ValueError, match="belongs to the base model no/model, which does not exist: name the base with --base"
    ) as caught:
        merged(Source(place, "no/model"), folder, "float32")
    assert "\n" not in str(caught.value)
    if saves == "save":
        (Path(place) / ".metadata").write_bytes(b"")
        with pytest.raises(ValueError, match=r"damaged or cut short .*; name the folder of another checkpoint"):
            merged(source, tmp_path / "new", "float32")
