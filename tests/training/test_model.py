"""Loading policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny import one_rank, random_table, save_tiny_model, tiny_args, weights_of


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


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_of_transformers_gives_the_same_when_it_is_asked_for(tmp_path: Path, kind: str) -> None:
    save_tiny_model(tmp_path)
    table = random_table()
    with one_rank(tiny_args(tmp_path)) as trainer:
        ours = trainer.log_probs(table)
    with one_rank(tiny_args(tmp_path, attn_implementation=kind)) as trainer:
        assert trainer.model.hf.config._attn_implementation == kind
        torch.testing.assert_close(torch.from_numpy(trainer.log_probs(table)), torch.from_numpy(ours))


def test_logits_that_are_not_linear_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="final_logit_softcapping=30"), one_rank(tiny_args(tmp_path)):
        pass
