"""The page of ``slimelite view`` in a real browser, on runs that the real Tracker wrote."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from slimelite.apps.command import main
from slimelite.apps.runs import Run
from slimelite.apps.view import write_page
from slimelite.base.lifecycle import this_process
from slimelite.tracking.alarms import replay
from slimelite.tracking.metrics_file import MetricsFile, read_metrics
from slimelite.tracking.run_folder import RunFolder
from tests.apps.conftest import OpenPage
from tests.tracking.fake_run import make_args, make_table, play, play_pairs

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Position

EVIL = "</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs, of 6 and 4 rollouts; the second has hostile text and numbers that are none."""
    runs = tmp_path_factory.mktemp("runs")
    play(make_args(runs / "long", num_rollout=6, lr=1e-3), range(6))
    play(make_args(runs / "short", num_rollout=4, lr=2e-3, hf_checkpoint=EVIL), range(4))
    writer = MetricsFile(runs / "short")
    for i, value in enumerate((1.0, float("nan"), float("inf"), 2.0)):
        writer.write("rollout", {"rollout/step": i, f"rollout/{EVIL}": 1.25, "rollout/lost": value})
    writer.write("eval", {"eval/step": 3, "eval/sums": 0.625, "eval/sums-stderr": 0.05})
    writer.close(False)
    return [runs / "long", runs / "short"]


@pytest.fixture(scope="module")
def file(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "view.html"
    write_page([Run.read(folders[0]), Run.read(folders[1], f"short {EVIL}")], out)
    return out


def runs_of(file: Path) -> list[dict[str, Any]]:
    """What the page in ``file`` holds of each run."""
    data = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"), re.DOTALL)
    assert data is not None
    found: list[dict[str, Any]] = json.loads(data[1])["runs"]
    return found


def test_the_file_asks_for_nothing_and_its_data_cannot_end_the_script(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert re.search("default-src 'none'; script-src 'sha256-[^']+'; style-src 'sha256-[^']+'", text)
    assert "<img" not in text
    assert text.count("</script>") == 2
    runs = runs_of(file)
    assert [run["name"] for run in runs] == ["long", f"short {EVIL}"]
    assert [run["color"] for run in runs] == ["var(--run-0)", "var(--run-1)"]


def test_optimizer_steps_stand_between_the_rollouts_they_belong_to(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path)
    for step in range(6):  # four steps of rollout 0, and two of rollout 1
        writer.write("train", {"rollout/step": step // 4, "train/step": step, "train/loss": step / 8})
    writer.close(False)
    write_page([Run.read(tmp_path)], tmp_path / "view.html")
    (run,) = runs_of(tmp_path / "view.html")
    axis, values = run["series"]["train/loss"]
    assert run["axes"][axis] == [0, 0.25, 0.5, 0.75, 1, 1.5]
    assert values == [0, 0.125, 0.25, 0.375, 0.5, 0.625]


@pytest.mark.browser
def test_evaluations_have_their_standard_error(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "curves")
    scores = chart(page, "eval/sums")
    assert point_at(scores, 3)[-1] == "0.625 ± 0.05"
    # a whisker is as high as two standard errors: from the ticks' places, a tenth of the axis
    (low, high) = map(float, re.findall(r"[\d.]+", scores.locator(".whisker").get_attribute("d") or "")[1:])
    ticks = {
        float(text): float(place)
        for text, place in scores.locator(".tick[text-anchor=end]").evaluate_all(
            "all => all.map(tick => [tick.textContent, tick.getAttribute('y')])"
        )
    }
    (first, *_, last) = sorted(ticks)
    assert (low - high) / 0.1 == pytest.approx((ticks[first] - ticks[last]) / (last - first), rel=1e-3)


@pytest.mark.browser
def test_the_overview_has_the_curves_that_say_most(folders: list[Path], tmp_path: Path, open_page: OpenPage) -> None:
    (tmp_path / "agents").mkdir()
    writer = MetricsFile(tmp_path / "agents")
    for i in range(3):
        metrics = {"rollout/environment/turns": 2.5 + i, "rollout/environment/errors": i}
        writer.write("rollout", {"rollout/step": i, **metrics, "rollout/environment/untrained": 0})
    writer.close(False)
    write_page([Run.read(folder) for folder in (*folders, tmp_path / "agents")], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", "overview")
    charts = page.locator("#panel-overview .chart")
    charts.first.wait_for()
    titles = charts.locator("h3").all_inner_texts()
    agents = ["replies of an episode", "episodes that failed"]
    assert {"reward", "response length", "eval/sums", *agents} <= {*titles}
    assert charts.first.locator("path.line").count() == 2, "a line a run"
    for title, last in zip(agents, ("4.5", "2"), strict=True):
        curve = charts.filter(has=page.locator("h3", has_text=title))
        assert curve.locator("path.line").count() == 1, "the others have no agents"
        assert point_at(curve, 2)[-1] == last


@pytest.mark.browser
def test_a_run_of_preferences_shows_loss_accuracy_and_margin(tmp_path: Path, open_page: OpenPage) -> None:
    play_pairs(make_args(tmp_path / "dpo", loss_type="dpo_loss", num_rollout=2, eval_datasets=()), batches=2)
    write_page([Run.read(tmp_path / "dpo")], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", "overview")
    rows = page.locator("table.scores tr").all_inner_texts()
    assert rows[0].split() == ["first", "best", "at", "batch", "last"]
    assert [row.split("\t") for row in rows[1:]] == [
        ["loss", "0.75", "0.5", "1", "0.5"],
        ["accuracy", "0", "0.5", "1", "0.5"],
        ["margin", "0", "0.125", "1", "0.125"],
    ]
    facts = page.locator(".card.run dl").inner_text()
    assert "DPO, beta 0.1, adam lr 1e-06" in facts
    assert facts.split("\n")[:2] == ["batches", "2 of 2"]
    page.locator("#panel-overview .chart").first.wait_for()
    titles = page.locator("#panel-overview .chart h3").all_inner_texts()
    assert {"loss", "pairs ranked right", "reward margin"} <= {*titles}
    assert "reward" not in titles


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


def chart(page: Page, metric: str) -> Locator:
    """The chart of a metric on the open tab, in sight."""
    found = page.locator(f".chart:has(.detail[title='{metric}'])")
    found.scroll_into_view_if_needed()
    found.locator(".line").first.wait_for()
    return found


def place(shown: Locator, rollout: float, span: tuple[float, float] = (-1, 5)) -> Position:
    """Where a rollout is in a chart whose x goes over ``span``: the evaluation at the start to the last rollout."""
    box = shown.locator("svg").bounding_box()
    assert box is not None
    left, right = 56, 14  # MARGIN in chart.js
    return {"x": left + (rollout - span[0]) / (span[1] - span[0]) * (box["width"] - left - right), "y": 60}


def point_at(shown: Locator, rollout: float) -> list[str]:
    """The lines of the values under the pointer."""
    shown.locator("svg").hover(position=place(shown, rollout))
    return [line.strip() for line in shown.locator(".tip").inner_text().splitlines() if line.strip()]


@pytest.mark.browser
def test_the_values_of_all_runs_are_shown_under_the_pointer(
    file: Path, folders: list[Path], open_page: OpenPage
) -> None:
    page = open_page(file, "curves")
    reward = chart(page, "rollout/raw_reward")
    _, long = Run.read(folders[0]).series["rollout/raw_reward"]
    _, short = Run.read(folders[1]).series["rollout/raw_reward"]
    said = point_at(reward, 2)
    assert said == ["rollout 2", "long", f"{long[2]:.4g}", f"short {EVIL}", f"{short[2]:.4g}"]
    assert point_at(reward, 5)[-1] == f"{short[3]:.4g} at 3"
    # the crosshair stands in the charts beside it, too
    assert page.locator(".cross[visibility=visible]").count() > 1
    entropy = chart(page, "train/entropy_loss")
    assert point_at(entropy, 1)[:3] == ["rollout 1", "long", "1.4"]
    entropy.locator("svg").press("ArrowRight")
    assert entropy.locator(".tip b").inner_text() == "rollout 2"


@pytest.mark.browser
def test_runs_have_one_colour_everywhere_and_can_be_hidden(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "curves", color_scheme="light")
    strokes = "lines => [...new Set(lines.map(line => getComputedStyle(line).stroke))]"
    reward = chart(page, "rollout/raw_reward").locator(".line")
    colors = reward.evaluate_all(strokes)
    assert len(colors) == 2
    assert page.locator(".line").evaluate_all(strokes) == colors
    assert page.locator(".legend .dot").evaluate_all("all => all.map(dot => getComputedStyle(dot).background)") != []
    page.get_by_role("button", name="long").click()
    assert reward.evaluate_all(strokes) == colors[1:]
    page.get_by_role("button", name="Auto").click()
    page.get_by_role("button", name="Light").click()
    assert reward.evaluate_all(strokes) != colors[1:]
    assert page.locator("body").evaluate("body => getComputedStyle(body).colorScheme") == "dark"


@pytest.mark.browser
def test_curves_are_smoothed_and_logarithmic_at_choice(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "curves")
    norm = chart(page, "train/grad_norm")
    page.get_by_label("Smoothing").fill("0.5")
    assert norm.locator(".line.faint").count() == 2
    # 0.8, 0.9, 1.0: (0.8 / 4 + 0.9 / 2 + 1.0) / (1 / 4 + 1 / 2 + 1)
    assert "1 (smoothed 0.9429)" in point_at(norm, 2)
    loss = chart(page, "train/loss")
    assert loss.locator(".line").count() == 4
    page.get_by_label("log scale").check()
    assert "nothing to draw on this scale" in (loss.locator("svg").text_content() or "")  # a loss below zero
    ticks = norm.locator(".tick[text-anchor=end]").all_inner_texts()
    assert len(ticks) >= 2


@pytest.mark.browser
def test_drawing_across_a_chart_zooms_all_of_them(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "curves")
    reward, norm = chart(page, "rollout/raw_reward"), chart(page, "train/grad_norm")
    reward.locator("svg").hover(position=place(reward, 0.8))
    page.mouse.down()
    reward.locator("svg").hover(position=place(reward, 3.2))
    page.mouse.up()
    from playwright.sync_api import expect

    back = page.get_by_role("button", name="rollouts 1 to 3: show all")
    for shown in (reward, norm):
        shown.scroll_into_view_if_needed()  # a chart that is out of sight is drawn when it comes into sight
        expect(shown.locator(".line").first).to_have_attribute("d", re.compile("^M[^ML]+L[^ML]+L[^ML]+$"))
        shown.locator("svg").hover(position=place(shown, 1, (0.8, 3.2)))
        assert shown.locator(".tip b").inner_text() == "rollout 1"
    back.click()
    assert point_at(norm, 5)[0] == "rollout 5"


@pytest.mark.browser
def test_numbers_that_are_none_are_marked(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "curves")
    page.get_by_role("searchbox").fill("lost")
    lost = chart(page, "rollout/lost")
    assert page.locator(".chart:visible").count() == 1
    assert lost.locator(".lost title").all_text_contents() == ["NaN", "Infinity"]
    assert [point_at(lost, i)[-1] for i in range(4)] == ["1", "NaN", "∞", "2"]
    assert (lost.locator(".line").get_attribute("d") or "").count("M") == 2  # the line has a gap there


@pytest.mark.browser
def test_the_best_score_is_a_number_wherever_the_others_stand(tmp_path: Path, open_page: OpenPage) -> None:
    writer = MetricsFile(tmp_path)
    for step, score in enumerate((float("nan"), 0.25, 0.75, 0.5), -1):
        writer.write("eval", {"eval/step": step, "eval/sums": score})
    writer.close(False)
    assert main(["view", str(tmp_path), "-o", str(tmp_path / "new" / "view.html")]) == 0
    page = open_page(tmp_path / "new" / "view.html", "overview")
    assert page.locator(".scores tr").nth(1).locator("td").all_text_contents() == ["sums", "NaN", "0.75", "1", "0.5"]


@pytest.mark.browser
def test_long_names_of_runs_fit_on_a_narrow_screen(tmp_path: Path, folders: list[Path], open_page: OpenPage) -> None:
    write_page([Run.read(folder, f"{folder.name}/{'seed' * 20}") for folder in folders], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", "samples", viewport={"width": 380, "height": 700})
    page.locator(".rows .row").first.wait_for()
    for tab in ("overview", "curves", "samples", "time", "flags"):
        page.locator(f"#tab-{tab}").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 380, tab


@pytest.mark.browser
def test_the_time_of_a_resumed_run_is_that_of_all_its_processes(tmp_path: Path, open_page: OpenPage) -> None:
    lines = [("start", 0, 100.0), ("perf", 0, 130.0), ("start", 1, 900.0), ("perf", 1, 912.0)]
    records = [{"time": time, "kind": kind, "rollout/step": i, "rollout/x": i} for kind, i, time in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "status.json").write_text(json.dumps({"status": "finished", "began": 890.0, "updated": 912.0}))
    write_page([Run.read(tmp_path)], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", "overview")
    assert page.locator("dt", has_text="time").locator("+ dd").inner_text() == "42s"


@pytest.mark.browser
def test_a_run_that_failed_in_its_first_rollout_shows_what_it_dropped(tmp_path: Path, open_page: OpenPage) -> None:
    MetricsFile(tmp_path).write("start", {"rollout/step": 0, "eval/step": -1})
    make_table().to_parquet(tmp_path / "dropped" / "0000000.parquet")
    write_page([Run.read(tmp_path)], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html", "curves")
    page.get_by_role("tab", name="Samples").click()
    assert page.locator("[data-level=samples]").inner_text() == "Samples 8"
    assert main(["compare", str(tmp_path)]) == 0
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "x.png")]) == 1


@pytest.mark.browser
def test_bars_of_phases_are_as_high_as_their_seconds(file: Path, folders: list[Path], open_page: OpenPage) -> None:
    page = open_page(file, "time")
    bars = page.locator(".chart").first
    bars.locator("rect").first.wait_for()
    run = Run.read(folders[0])
    for phase in ("rollout", "train"):
        heights = bars.locator(f"rect.{phase}").evaluate_all(
            "all => all.map(bar => Number(bar.getAttribute('height')))"
        )
        _, seconds = run.series[f"perf/{phase}_time"]
        np.testing.assert_allclose(np.array(heights) / heights[0], seconds / seconds[0], rtol=1e-3)
    fills = [bars.locator(f"rect.{name}").first.evaluate("bar => bar.style.fill") for name in ("rollout", "train")]
    page.get_by_role("button", name="generate").click()
    assert bars.locator("rect.rollout").count() == 0
    assert bars.locator("rect.train").first.evaluate("bar => bar.style.fill") == fills[1]


@pytest.mark.browser
def test_flags_that_differ_come_first_and_all_can_be_searched(file: Path, open_page: OpenPage) -> None:
    page = open_page(file, "flags")
    rows = page.locator("table.flags tbody tr:visible")
    assert [row.split("\t") for row in rows.all_inner_texts()] == [
        ["--hf-checkpoint", "models/tiny", EVIL],
        ["--lr", "0.001", "0.002"],
        ["--num-rollout", "6", "4"],
    ]
    page.get_by_label("only where the runs differ").uncheck()
    assert rows.count() > 200
    page.get_by_role("searchbox").fill("eps-clip")
    assert 2 <= rows.count() < 10
    assert all("--eps-clip" in row for row in rows.all_inner_texts())


@pytest.mark.browser
def test_alarms_lead_to_their_rollout(tmp_path: Path, folders: list[Path], open_page: OpenPage) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders[0], run)
    writer = MetricsFile(run)
    writer.write("train", {"rollout/step": 3, "train/step": 3, "train/skipped_steps": 1.0})
    writer.close(False)
    (alarm,) = replay(read_metrics(run))
    assert alarm.rollout_id == 3
    RunFolder(run).save_alarms([alarm])
    write_page([Run.read(run)], tmp_path / "view.html")
    page = open_page(tmp_path / "view.html")
    assert page.locator(".alarms h2").inner_text() == "1 alarm"
    assert page.locator(".alarms p").all_inner_texts() == [f"{alarm.says}.", alarm.advice]
    page.get_by_role("link", name="in the curves").click()
    assert chart(page, "train/grad_norm").locator("line.mark").count() == 1
    page.go_back()
    page.get_by_role("link", name="rollout 3").click()
    assert page.locator("#panel-samples .chip").inner_text() == "rollout 3\n✕"
    assert page.locator("#panel-samples .rows .row").count() == 4


def test_a_run_that_goes_on_is_written_again_until_it_ends(
    tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "view.html"
    shutil.copytree(folders[0], run)
    status = json.loads((run / "status.json").read_text()) | this_process()
    seen = []

    def wait(_seconds: float) -> None:
        """What happens between two looks: nothing, then a rollout, then the end."""
        seen.append((out.stat().st_ino, '"live":10' in out.read_text()))
        if len(seen) == 2:
            writer = MetricsFile(run)
            writer.write("rollout", {"rollout/step": 6, "rollout/raw_reward": 0.123})
            writer.close(False)
        if len(seen) == 3:
            (run / "status.json").write_text(json.dumps(status | {"status": "finished"}))

    (run / "status.json").write_text(json.dumps(status | {"status": "running"}))
    monkeypatch.setattr("slimelite.apps.view.time.sleep", wait)
    assert main(["view", str(run), "-o", str(out), "--follow"]) == 0
    assert [live for _, live in seen] == [True] * 3
    assert seen[0][0] == seen[1][0] != seen[2][0]  # written again only with something new, as a new file
    assert "0.123" in out.read_text()
    assert '"live":0' in out.read_text()
