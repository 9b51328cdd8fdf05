"""Models of many families in runs of train.py: the embedded engine samples what the trainer trains."""

from __future__ import annotations

import asyncio
import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, SamplingParams
from slimelite.models.small import small_config

from .conftest import ROOT, TrainPy, metrics

pytestmark = pytest.mark.e2e
# enough for every kind of layer
LAYERS = 6
# their layers as they are, or fields that give each kind of layer
FIELDS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 8,
    },
    "gpt_neo": {},
    "zamba2": {},
    **{name: {"text_config": {"num_hidden_layers": LAYERS}} for name in ("gemma3", "qwen3_5", "qwen3_5_moe")},
}
# transformers' cache fails, or gives other tokens than whole passes
NO_CACHE = {"blt", "git"}
# what is saved names their part that is a language model, which nothing loads
WHOLE_CONFIG = {"emu3", "mllama"}
# a kind of each: windows in a model that also reads images, experts, linear attention, convolutions
SAMPLED = ("gemma3", "qwen3_moe", "qwen3_5_text", "lfm2")
GRPO = """
    --launcher local --device cpu --hf-checkpoint model --prompt-data data/train.jsonl --input-key prompt
    --label-key label --custom-rm-path reward.py:digits --rollout-batch-size 2 --n-samples-per-prompt 4
    --rollout-max-response-len 12 --advantage-estimator grpo --lr 1e-3 --num-rollout 3 --rollout-backend embedded
    --run-dir run
"""


def config_of(family: str) -> PretrainedConfig:
    """A small config of the family, with every kind of its layers."""
    spec = importlib.util.spec_from_file_location("families", ROOT / "scripts" / "dev" / "check_families.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    own = family in script.FIELDS
    fields = FIELDS.get(family, {"num_hidden_layers": LAYERS})
    config = small_config(script.config_of(family) if own else AutoConfig.for_model(family, **fields))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.eos_token_id, part.pad_token_id, part.bos_token_id = 1, 0, 2
    return config


def save(folder: Path, family: str) -> PreTrainedModel:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        config = config_of(family)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    if family in WHOLE_CONFIG:
        config.save_pretrained(folder)
    return model.eval()


def greedy(model: PreTrainedModel, prompt: tuple[int, ...], cached: bool) -> list[int]:
    """12 tokens after ``prompt`` by generate(), or by 12 whole passes."""
    ids = torch.tensor([prompt])
    if cached:
        ids = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None)
    else:
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def follows(family: str, small: Path, train_py: TrainPy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens are those of generate(), and three rollouts train with the log-probs that the engine gave."""
    model = save(small / "model", family)
    prompts = [(5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 7), tuple(range(5, 20))]
    requests = [
        GenerateRequest(f"{i}", prompt, SamplingParams(12, temperature=0.0, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]

    async def answers() -> list[list[int]]:
        engine = EmbeddedEngine(str(small / "model"), max_context_len=64)
        results = await engine.generate(requests)
        await engine.close()
        return [result.output_ids for result in results]

    assert asyncio.run(answers()) == [greedy(model, prompt, family not in NO_CACHE) for prompt in prompts]
    monkeypatch.chdir(small)
    result = train_py(*shlex.split(GRPO))
    assert result.returncode == 0, result.stderr[-2000:]
    differences = metrics(small / "run", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 3
    assert max(differences) < 1e-5
    assert max(metrics(small / "run", "train/grad_norm")) > 0


@pytest.mark.parametrize("family", SAMPLED)
def test_a_family_trains_with_the_embedded_engine(
    family: str, small: Path, train_py: TrainPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows(family, small, train_py, monkeypatch)


def of_the_table() -> list[str]:
    """Families that the table in docs/algorithms.md calls trained and computed by the engine, without `SAMPLED`."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    table = page.partition("<!-- families:")[2].partition("<!-- end of families")[0]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if line.startswith("| ")]
    trained = (
        "packed",
        "alone",
        "packed, with transformers' eager attention",
        "alone, with transformers' eager attention",
    )
    rows = [row for row in cells if row[1] in trained and row[3] in ("fast", "generic")]
    assert len(rows) > 10, "the table in docs/algorithms.md has another form"
    return [family for row in rows for family in row[0].split(", ") if family not in SAMPLED]


@pytest.mark.slow
@pytest.mark.parametrize("family", of_the_table())
def test_every_family_of_the_table_trains_with_the_embedded_engine(
    family: str, small: Path, train_py: TrainPy, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows(family, small, train_py, monkeypatch)
