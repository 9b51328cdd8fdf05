"""A model's weights are whole and its own, or one message says what is not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from slimelite.arguments import Args
from slimelite.engines.embedded.model import DecoderShape, DecoderWeights
from slimelite.models.files import has_weights, load_weights
from slimelite.tracking.card import base_of
from slimelite.training.loading import inspect_model, load_model, read_config

NAME = "model.layers.1.mlp.down_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def save_model(folder: Path, family: str = "qwen2", *, shards: bool = False, **changes: Any) -> Path:
    config = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    } | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    model.save_pretrained(folder, max_shard_size="30KB" if shards else "5GB")
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def said_by_each(folder: Path) -> str:
    """What pre-flight check, trainer and embedded engine say of the model, which is the same."""
    config = read_config(str(folder))
    said = []
    for look in (
        lambda: inspect_model(Args(hf_checkpoint=str(folder)), str(folder)),
        lambda: load_model(str(folder), config, seed=0, attention="sdpa", empty=False),
        lambda: DecoderWeights(DecoderShape.from_config(config), torch.device("cpu"), torch.float32).load(
            str(folder), config, 0
        ),
    ):
        with pytest.raises(ValueError, match="copy or save the model again") as caught:
            look()
        said.append(str(caught.value))
    assert len(set(said)) == 1, said
    assert "\n" not in said[0]
    return said[0]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda w: w.pop(NAME), f"missing: {NAME}"),
        (lambda w: w.update({NAME + "s": w.pop(NAME)}), f"missing: {NAME}; unknown to this model: {NAME}s"),
        (lambda w: w.update({NAME: w[NAME][:31].clone()}), f"with another shape: {NAME} is [31, 48] and not [32, 48]"),
        (lambda w: w.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda w: [w.pop(n) for n in list(w) if "layers.1" in n], "and 8 more"),
    ],
)
def test_weights_of_another_model(
    change: Callable[[dict[str, torch.Tensor]], Any], answer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    rewrite(tmp_path, change)
    said = said_by_each(tmp_path)
    assert said.startswith(f"the weights in {tmp_path} do not fit its config.json; ")
    assert answer in said
    assert "LOAD REPORT" not in capfd.readouterr().err


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "answer"),
    [
        (lambda f: cut(f / "model.safetensors", 0), "model.safetensors is empty"),
        (lambda f: cut(f / "model.safetensors", 5), "with 5 bytes is cut short or not a safetensors file"),
        (lambda f: cut(f / "model.safetensors", 300), "with 300 bytes is cut short or not a safetensors file"),
        (lambda f: cut(f / "model.safetensors", 9000), "model.safetensors with 9,000 bytes is cut short"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk " * 999), "is cut short or not a safetensors file"),
        (lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"), "weights.safetensors, but neither"),
    ],
)
def test_damaged_files(damage: Callable[[Path], Any], answer: str, tmp_path: Path) -> None:
    damage(save_model(tmp_path))
    assert answer in said_by_each(tmp_path)


def test_damaged_shards(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "whole", shards=True)
    index, shards = folder / "model.safetensors.index.json", sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    load_model(str(folder), read_config(str(folder)), seed=0, attention="sdpa", empty=False)
    shutil.copytree(folder, missing := tmp_path / "missing")
    (missing / shards[1].name).unlink()
    assert f"index.json names {shards[1].name}, but this folder does not contain them" in said_by_each(missing)
    cut(shards[2], 100)
    assert shards[2].name in said_by_each(folder)
    index.write_text("{}")
    assert "index.json is not an index of weights" in said_by_each(folder)
    index.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in said_by_each(folder)


def test_old_pickles_are_read_and_refused_likewise(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    config = read_config(str(folder))
    inspect_model(Args(hf_checkpoint=str(folder)), str(folder))
    model = load_model(str(folder), config, seed=0, attention="sdpa", empty=False)
    assert torch.equal(model.state_dict()[NAME], weights[NAME])
    torch.save({name: weight for name, weight in weights.items() if name != NAME}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"missing: {NAME}"):
        load_weights(AutoModelForCausalLM, str(folder), config)
    cut(folder / "pytorch_model.bin", 3000)
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read .*: copy or save the model again"):
        load_weights(AutoModelForCausalLM, str(folder), config)


def test_experts_are_matched_as_transformers_does(tmp_path: Path) -> None:
    """The files of a mixture have a weight an expert, the model one for all of them."""
    folder = save_model(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    inspect_model(args := Args(hf_checkpoint=str(folder)), str(folder))
    rewrite(folder, lambda w: w.pop(EXPERT))
    with pytest.raises(ValueError, match=r"experts.down_proj is \[3, 32, 16\] and not \[4, 32, 16\]"):
        inspect_model(args, str(folder))


def test_what_may_be_missing(tmp_path: Path) -> None:
    tied = save_model(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_model(str(tied), read_config(str(tied)), seed=0, attention="sdpa", empty=False)
    folder = save_model(tmp_path / "headless")
    rewrite(folder, lambda w: w.pop("lm_head.weight"))
    args = Args(hf_checkpoint=str(folder))
    inspect_model(args, str(folder), new_head=True)  # of a critic
    load_model(str(folder), read_config(str(folder)), seed=0, attention="sdpa", empty=False, new_head=True)


def test_a_look_before_a_start_draws_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(save_model(tmp_path))
    bars = logging.is_progress_bar_enabled()
    capfd.readouterr()
    inspect_model(Args(hf_checkpoint=folder), folder)
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled() is bars


def test_a_folder_of_other_files_has_no_weights(tmp_path: Path) -> None:
    """A training_args.bin once made one check promise random weights and the next one load them."""
    folder = save_model(tmp_path)
    assert has_weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "training_args.bin")
    assert not has_weights(folder)
    config = read_config(str(folder))
    inspect_model(Args(hf_checkpoint=str(folder)), str(folder))
    load_model(str(folder), config, seed=0, attention="sdpa", empty=False)
    DecoderWeights(DecoderShape.from_config(config), torch.device("cpu"), torch.float32).load(str(folder), config, 0)
    assert has_weights("Qwen/Qwen2.5-0.5B-Instruct"), "of the hub"


def test_inconsistent_config(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    assert "missing: model.layers.2." in said_by_each(folder)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert "with another shape: model.layers.0.mlp.down_proj.weight is [32, 48] and not [32, 64]" in said_by_each(
        folder
    )


def test_the_script_of_smollm2_saves_a_card_and_files_that_all_may_read(tmp_path: Path) -> None:
    """With the usual umask they get the usual file mode, though safetensors itself makes its files private."""
    path = Path(__file__).parents[2] / "scripts" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = os.umask(0o022)
    try:
        script.save(AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "model")), tmp_path / "saved")
    finally:
        os.umask(before)
    modes = {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in (tmp_path / "saved").iterdir()}
    assert modes.keys() >= {"model.safetensors", "config.json"}
    assert set(modes.values()) == {"0o644"}
    made_of = {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}
    assert base_of(str(tmp_path / "saved")) == made_of, "cards of models trained from it name them"
