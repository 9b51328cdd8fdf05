"""The table of model families in docs/algorithms.md is what its script sees."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slimelite.models.files import has_experts
from slimelite.models.small import small_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_families", ROOT / "scripts" / "dev" / "check_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page: Path, script: ModuleType) -> dict[str, tuple[str, ...]]:
    """How each family in the table of ``page`` is trained, and why; how the engine computes it, and why."""
    table = page.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if line.startswith("| ")]
    return {family: tuple(rest) for names, *rest in cells[1:] for family in names.split(", ")}


@pytest.mark.pinned
def test_the_page_names_every_family_once_and_says_why(script: ModuleType) -> None:
    found = rows(ROOT / "docs" / "algorithms.md", script)
    assert set(found) == set(script.FAMILIES)
    assert {trained for trained, *_ in found.values()} == set(script.VERDICTS)
    assert [family for family, (trained, why, *_) in found.items() if bool(why) == (trained == script.PACKED)] == []
    assert {family for family, cells in found.items() if cells[2] == script.FAST} == {
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
    assert [family for family, cells in found.items() if cells[2] == script.REFUSED and not cells[3]] == []


@pytest.mark.pinned
def test_the_script_writes_what_it_sees(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        "qwen2": (script.PACKED, ""),
        "lfm2": (script.PACKED, ""),
        "gpt_oss": (script.PACKED, ""),
        "phi": (script.PACKED, ""),
        "bart": (
            script.ALONE,
            "in a pack, the output of BartLearnedPositionalEmbedding depends on the place of the sequence",
        ),
        "bloom": (
            script.EAGER_ALONE,
            "its BloomAttention computes something different without mask tensors; in a pack, BloomAttention "
            "reads the preceding sequence",
        ),
        "gptj": (script.EAGER_PACKED, "it has its own attention code, which cannot be replaced"),
        "recurrent_gemma": (
            script.EAGER_PACKED,
            "its RecurrentGemmaSdpaAttention computes something different without mask tensors",
        ),
        "bert": (script.REFUSED, "its tokens attend to later tokens"),
        "openai-gpt": (script.ALONE, "in a pack, OpenAIGPTModel reads the preceding sequence"),
        "moshi": (script.REFUSED, "its tokens attend to later tokens"),
        "musicgen": (script.UNSEEN, script.AUDIO),
    }
    sampled = {
        "qwen2": (script.FAST, ""),
        "lfm2": (script.GENERIC, script.WHOLE_PREFIXES),
        "recurrent_gemma": (script.GENERIC, script.WHOLE_PREFIXES),
        "openai-gpt": (script.GENERIC, script.NO_CACHE),
        "bart": (script.REFUSED, "it is an encoder–decoder"),
        "bert": (script.REFUSED, "its tokens attend to later tokens"),
        "moshi": (script.REFUSED, "its tokens attend to later tokens"),
        "musicgen": (script.REFUSED, script.AUDIO),
    }
    generic = {family: (*cells, *sampled.get(family, (script.GENERIC, ""))) for family, cells in expected.items()}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{script.BEGIN}old\n{script.END}after\n")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "FAMILIES", list(expected))
    script.main([])
    assert rows(page, script) == generic
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    committed = rows(ROOT / "docs" / "algorithms.md", script)
    assert {family: committed[family] for family in expected} == generic


@pytest.mark.slow
@pytest.mark.pinned
@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_each_row_of_the_table_is_what_the_script_sees(script: ModuleType, family: str) -> None:
    """How each family is trained and sampled, or why not. The trained ones are run in tests/e2e/test_families.py."""
    assert script.row(family) == rows(ROOT / "docs" / "algorithms.md", script)[family]


def test_every_family_with_experts_is_known_as_one(script: ModuleType) -> None:
    """Its parameters tell; the fields of configs have many names. Code without the word is not built."""
    named = {}
    for family in script.FAMILIES:
        with contextlib.suppress(Exception), torch.device("meta"):  # some cannot be built from a config's defaults
            own = AutoConfig.for_model(family, **script.FIELDS.get(family, {}))
            code = Path(inspect.getfile(type(own))).parent.glob("modeling_*.py")
            if not any("experts" in file.read_text() for file in code):
                continue
            config = small_config(own)
            hf = AutoModelForCausalLM.from_config(config)
            if any("experts" in name for name, _ in hf.named_parameters()):
                named[family] = has_experts(hf)
    assert {"aria_text", "deepseek_v3", "mixtral", "qwen3_moe"} <= named.keys()
    assert [family for family, known in named.items() if not known] == []
