"""The table of model families in docs/algorithms.md is what its script sees."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_families", ROOT / "scripts" / "check_families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page: Path, script: ModuleType) -> dict[str, str]:
    """Verdict of each family in the table of ``page``."""
    table = page.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {family: verdict for verdict, _, names in cells[1:] for family in names.split(", ")}


def test_the_page_names_every_family_once(script: ModuleType) -> None:
    found = rows(ROOT / "docs" / "algorithms.md", script)
    assert set(found) == set(script.FAMILIES)
    assert set(found.values()) == set(script.VERDICTS)


def test_the_script_writes_what_it_sees(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        "qwen2": script.PACKED,
        "lfm2": script.ALONE,
        "gpt_oss": script.EAGER_ALONE,
        "stablelm": script.EAGER_PACKED,
        "phi": script.REFUSED,
        "musicgen": script.UNSEEN,
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{script.BEGIN}old\n{script.END}after\n")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "FAMILIES", list(expected))
    script.main([])
    assert rows(page, script) == expected
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    committed = rows(ROOT / "docs" / "algorithms.md", script)
    assert {family: committed[family] for family in expected} == expected
