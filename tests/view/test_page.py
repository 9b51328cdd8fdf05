"""The page of ``slimelite view`` in a real browser, on runs that the real Tracker wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slimelite.tracking.metrics_file import MetricsFile
from slimelite.view.page import write_page
from slimelite.view.run import Run
from tests.tracking.fake_run import make_args, play
from tests.view.conftest import OpenPage

EVIL = "</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs, of 6 and 4 rollouts; the second has hostile text and numbers that are none."""
    runs = tmp_path_factory.mktemp("runs")
    play(make_args(runs / "long", num_rollout=6, lr=1e-3), range(6))
    play(make_args(runs / "short", num_rollout=4, lr=2e-3, hf_checkpoint=EVIL), range(4))
    writer = MetricsFile(runs / "short")
    writer.write("rollout", {"rollout/step": 3, f"rollout/{EVIL}": 1.25, "rollout/lost": float("nan")})
    writer.close(False)
    return [runs / "long", runs / "short"]


@pytest.fixture(scope="module")
def file(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "view.html"
    write_page([Run.read(folders[0]), Run.read(folders[1], f"short {EVIL}")], out)
    return out


def test_the_file_asks_for_nothing_and_its_data_cannot_end_the_script(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert re.search("default-src 'none'; script-src 'sha256-[^']+'; style-src 'sha256-[^']+'", text)
    assert "<img" not in text
    assert text.count("</script>") == 2
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    runs = json.loads(data[1])["runs"]
    assert [run["name"] for run in runs] == ["long", f"short {EVIL}"]
    assert [run["color"] for run in runs] == ["var(--run-0)", "var(--run-1)"]


@pytest.mark.browser
def test_hostile_text_is_shown_as_text(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "overview")
    assert page.locator(".run h2").nth(1).inner_text() == f"short {EVIL}"
    assert EVIL in page.locator(".run dl").nth(1).inner_text()
    page.goto(file.as_uri() + "#curves")
    page.get_by_role("searchbox").fill("onerror")
    assert page.locator(".chart h3:visible").all_inner_texts() == [f"rollout/{EVIL}"]
    page.goto(file.as_uri() + "#flags")
    assert EVIL in page.locator("table.flags").inner_text()
    assert page.locator("img").count() == 0
    assert page.title() == "slimelite"


@pytest.mark.browser
def test_tabs_follow_the_mouse_the_keyboard_and_the_address(file: Path, open_page: OpenPage) -> None:
    page = open_page(file)
    tabs = page.get_by_role("tab")
    assert tabs.all_inner_texts()[:2] == ["Overview", "Curves"]
    page.get_by_role("tab", name="Flags").click()
    assert page.get_by_role("tabpanel").inner_text().count("--lr") == 1
    page.keyboard.press("Home")
    assert page.url.endswith("#overview")
    page.keyboard.press("ArrowRight")
    assert page.locator(":focus").inner_text() == "Curves"
    assert page.locator("[role=tab][aria-selected=true]").all_inner_texts() == ["Curves"]
    page.go_back()
    assert page.locator("#panel-overview").is_visible()
