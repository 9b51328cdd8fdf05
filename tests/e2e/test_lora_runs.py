"""Whole runs that train adapters: SFT, then DPO from its merged model against another reference, in two stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from .conftest import TrainPy, metrics

pytestmark = pytest.mark.e2e


def test_stages_of_adapters_end_with_merged_models(task: Path, tmp_path: Path, train_py: TrainPy) -> None:
    """SFT moves the model's touched matrices; DPO starts from them, its margins grow, and its reference is another."""
    common = {"input_key": "messages", "rollout_batch_size": 64, "num_rollout": 2, "lora_rank": 8, "lr": 3e-3}
    stages = {
        "sft": {
            "hf_checkpoint": str(task / "model"),
            "prompt_data": [str(task / "sft.parquet")],
            "loss_type": "sft_loss",
        },
        "dpo": {"prompt_data": [str(task / "pairs.parquet")], "loss_type": "dpo_loss", "dpo_beta": 0.5}
        | {"ref_load": str(tmp_path / "out" / "0-sft" / "model"), "lora_target_modules": ["attn"]},
    }
    for name, flags in stages.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(common | flags))
    files = [str(tmp_path / f"{name}.yaml") for name in stages]
    flags = ["--launcher", "local", "--run-dir", str(tmp_path / "out")]
    done = train_py("--stages", *files, *flags)
    assert done.returncode == 0, done.stderr
    first, second = (load_file(tmp_path / "out" / name / "model" / "model.safetensors") for name in ("0-sft", "1-dpo"))
    changed = {name for name, weight in second.items() if not torch.equal(weight, first[name])}
    assert changed == {name for name in first if "self_attn" in name and name.endswith("_proj.weight")}
    losses = metrics(tmp_path / "out" / "0-sft", "train/loss")
    assert losses[-1] < losses[0]
    margins = metrics(tmp_path / "out" / "1-dpo", "train/rewards/margins")
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[-1] > 0
