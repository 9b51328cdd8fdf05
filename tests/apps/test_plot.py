from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from slimelite.apps.command import main
from slimelite.tracking.metrics_file import MetricsFile, eval_metrics
from slimelite.tracking.panels import unit
from slimelite.tracking.plot import COLORS, PHASE_COLORS, axis_range, band, draw_run, draw_runs, line_styles

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(run_dir: Path, scale: float, *, evals: bool = True) -> Path:
    run_dir.mkdir()
    file = MetricsFile(run_dir)
    for i in range(3):
        file.write("rollout", {"rollout/step": i, "rollout/raw_reward": scale * i, "rollout/response_len/mean": 9.0})
        file.write("train", {"rollout/step": i, "train/step": i, "train/loss": math.inf if i == 1 else math.nan})
        file.write("perf", {"rollout/step": i, "perf/step_time": 2.0, "perf/rollout_time": 1.0})
        if evals:
            file.write(
                "eval", {"eval/step": i, "eval/sums": scale, "eval/sums-pass@2": 1.0, "eval/sums/response_len/max": 3}
            )
    file.close(False)
    return run_dir


def width_and_height(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw.startswith(PNG)
    return int.from_bytes(raw[16:20], "big"), int.from_bytes(raw[20:24], "big")


def test_the_band_is_median_minimum_and_maximum_of_the_runs_at_each_step() -> None:
    curves = [([0.0, 1.0], [1.0, 5.0]), ([0.0, 1.0, 2.0], [2.0, 3.0, 7.0]), ([0.0], [9.0])]
    assert band(curves) == ([0.0, 1.0, 2.0], [2.0, 4.0, 7.0], [1.0, 3.0, 7.0], [9.0, 5.0, 7.0])


def test_other_bands_are_the_standard_error_of_the_mean_and_quartiles() -> None:
    curves = [([0.0, 1.0], [first, last]) for first, last in ((1.0, 2.0), (2.0, 2.0), (6.0, 2.0))]
    steps, mean, low, high = band([*curves, ([2.0], [5.0])], "mean-se")
    error = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2 / 3)
    assert (steps, mean) == ([0.0, 1.0, 2.0], [3.0, 2.0, 5.0])
    assert low == pytest.approx([3 - error, 2, 5])
    assert high == pytest.approx([3 + error, 2, 5])
    assert band(curves, "quantiles") == ([0.0, 1.0], [2.0, 2.0], [1.5, 2.0], [4.0, 2.0])


def test_the_kind_of_band_is_named_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [str(write_run(tmp_path / f"seed-{i}", i)) for i in range(1, 4)]
    filled: list[tuple[list[float], list[float]]] = []
    legends: list[str] = []
    monkeypatch.setattr(Axes, "fill_between", lambda self, x, low, high, **_: filled.append((low, high)))
    monkeypatch.setattr(
        Figure, "legend", lambda self, handles, **_: legends.extend(handle.get_label() for handle in handles)
    )
    for kind in ("minmax", "mean-se", "quantiles"):
        words = ["--band", kind, "--band", "x", *runs, "--metric", "eval/sums", "-o", str(tmp_path / f"{kind}.png")]
        assert main(["plot", *words]) == 0
    error = 1 / math.sqrt(3)
    expected = [([1.0] * 3, [3.0] * 3), ([2 - error] * 3, [2 + error] * 3), ([1.5] * 3, [2.5] * 3)]
    for (low, high), (least, most) in zip(filled, expected, strict=True):
        assert low == pytest.approx(least)
        assert high == pytest.approx(most)
    assert legends == [
        f"x ({words} of 3)" for words in ("median, minimum to maximum", "mean ± standard error", "median, quartiles")
    ]


def test_runs_that_are_one_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, scale)) for name, scale in (("a", 1.0), ("b", 2.0), ("c", 1.0))]
    assert main(["plot", "--band", "seeds", *runs, "--metric", "eval/sums", "-o", str(tmp_path / "x.png")]) == 0
    printed = capsys.readouterr().err
    assert printed.startswith("slimelite plot: runs a and c are the same to the last digit: same seeds")
    assert printed.count("\n") == 1


def test_equal_runs_are_named_in_different_bands_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "a" / "seed-0", tmp_path / "a" / "seed-1", tmp_path / "b" / "seed-0"]
    for folder, score in zip(folders, (1.0, 2.0, 1.0), strict=True):
        folder.parent.mkdir(exist_ok=True)
        write_run(folder, score)
    a, other, b = map(str, folders)
    words = ["--band", "a", a, other, "--band", "b", b, "--metric", "eval/sums", "-o", str(tmp_path / "x.png")]
    assert main(["plot", *words]) == 0
    assert "runs a/seed-0 and b/seed-0 are the same to the last digit" in capsys.readouterr().err
    assert main(["plot", other, *words]) == 0, "a run may also have a line of its own"
    assert capsys.readouterr().err.count("the same to the last digit") == 1


def test_a_band_that_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, 1.0)) for name in "ab"]
    with pytest.raises(SystemExit):
        main(["plot", "--band", "x", runs[0], "--band", "x", runs[1], "-o", str(tmp_path / "x.png")])
    assert "--band x is given twice" in capsys.readouterr().err


def test_a_kind_of_band_is_no_name_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plot", "--band", "mean-se", str(write_run(tmp_path / "a", 1.0)), "-o", str(tmp_path / "x.png")])
    assert "--band mean-se chooses the kind of bands" in capsys.readouterr().err


def test_scores_are_told_from_what_stands_beside_them() -> None:
    records = [
        {"eval/step": 1, "eval/a": 1, "eval/a-pass@8": 1, "eval/a-truncated_ratio": 0, "eval/a/response_len/mean": 3}
    ]
    assert eval_metrics(records) == ["eval/a"]


def test_one_run_gets_every_panel_it_has_data_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", 1.0)
    assert main(["plot", str(run), "--out", str(tmp_path / "new" / "a.png")]) == 0
    few = write_run(tmp_path / "b", 1.0, evals=False)
    assert main(["plot", str(few), "--out", str(tmp_path / "b.png")]) == 0
    # reward, evaluation, length, loss (not a number anywhere) and times: 3 x 2; without the evaluation 2 x 2
    wide, narrow = width_and_height(tmp_path / "new" / "a.png"), width_and_height(tmp_path / "b.png")
    assert wide[0] == pytest.approx(1.5 * narrow[0], rel=0.02)
    assert wide[1] == narrow[1]


def test_runs_and_bands_over_one_another(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / f"seed-{i}", i)) for i in range(4)]
    out = tmp_path / "x.png"
    assert main(["plot", runs[0], "--band", "three seeds", *runs[1:], "--metric", "eval/sums", "--out", str(out)]) == 0
    assert width_and_height(out)[0] < 500, "one panel"
    assert main(["plot", *runs, "--out", str(out)]) == 0
    assert width_and_height(out)[0] > 500


def test_what_cannot_be_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "a", 1.0))
    assert main(["plot", run, "--metric", "eval/smus", "--out", str(tmp_path / "x.png")]) == 1
    assert "no run has eval/smus; did you mean eval/sums? other metrics are: " in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "missing")]) == 1
    assert "missing is not a run folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plot"])
    with pytest.raises(SystemExit):
        main(["plot", "--band", "name"])
    assert not (tmp_path / "x.png").exists()


def test_it_runs_as_a_program_without_a_word_too_many(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slimelite.apps.command", "plot", str(write_run(tmp_path / "a", 1.0))]
    command += ["--metric", "eval/sums", "-o", str(tmp_path / "x.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'x.png'}\n", "")


def painted(path: Path, color: str, alpha: float = 1.0) -> np.ndarray:
    """[height, width]: whether the pixel has the colour, on white."""
    wanted = np.array(to_rgb(color)) * alpha + 1 - alpha
    found: np.ndarray = np.abs(imread(path)[..., :3] - wanted).max(axis=-1) < 0.012
    return found


def test_numbers_near_zero_are_a_flat_line_and_half_empty_axes_begin_at_zero() -> None:
    low, high = axis_range([-2e-8, 1e-9, math.nan, math.inf], 1e-4)  # a loss
    assert high - low == pytest.approx(1.08e-4)
    assert low < -2e-8
    assert axis_range([0.4, 0.9], 0.0) == (0.0, pytest.approx(0.936))
    assert axis_range([20.0, 21.0, 30.0], 1.0) == (pytest.approx(19.6), pytest.approx(30.4))
    assert axis_range([math.nan], 0.5) == (0.0, 0.52)


def test_a_run_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    axis = [{"kind": "rollout", "rollout/step": float(i)} for i in range(5)]
    first = [r | {"rollout/raw_reward": 1.0} for r in axis]
    second = [r | {"rollout/truncated_ratio": 1.0} for r in axis]
    draw_runs({"a": [first], "b": [second]}, tmp_path / "x.png", ["rollout/truncated_ratio"])
    below = slice(40, None)  # the legend is above
    assert painted(tmp_path / "x.png", COLORS[0])[:40].any(), "the legend names the run without the metric, too"
    assert not painted(tmp_path / "x.png", COLORS[0])[below].any()
    assert painted(tmp_path / "x.png", COLORS[1])[below].any()


def test_the_axis_is_that_of_the_metric_that_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    monkeypatch.setattr(Axes, "set_xlabel", lambda _, label, **__: labels.append(label))
    monkeypatch.setattr(Axes, "set_ylabel", lambda _, label, **__: labels.append(label))
    for record in (
        {"kind": "rollout", "rollout/step": 0.0, "rollout/kl": 1.0},
        {"kind": "train", "train/step": 0.0, "train/kl_loss": 1.0},
        {"kind": "eval", "eval/step": -1.0, "eval/sums": 1.0},
    ):
        draw_run([record], tmp_path / "x.png")
    assert labels == ["rollout", "nats", "optimizer step", "nats", "after rollout (−1: at the start)", "score"]


def test_more_runs_than_colours_still_differ() -> None:
    styles = line_styles(str(n) for n in range(3 * len(COLORS)))
    assert len(set(styles.values())) == 3 * len(COLORS)
    assert styles["0"] == (COLORS[0], "-")
    assert styles[str(len(COLORS))] == (COLORS[0], "--")


def test_more_than_four_runs_have_a_panel_each(tmp_path: Path) -> None:
    runs = {
        str(n): [[{"kind": "rollout", "rollout/step": i, "rollout/raw_reward": n} for i in (0.0, 1.0)]]
        for n in range(5)
    }
    draw_runs(runs, tmp_path / "x.png", ["rollout/raw_reward"])
    picture = {color: painted(tmp_path / "x.png", color).nonzero() for color in COLORS[:5]}
    rows = [(y.min(), y.max()) for y, _ in picture.values()]
    assert rows[4][0] > max(high for _, high in rows[:4]), "the fifth is in the second row"
    columns = [(x.min(), x.max()) for _, x in picture.values()]
    assert all(columns[i][1] < columns[i + 1][0] for i in range(3))


def test_an_evaluation_takes_the_time_of_its_own_rollout_alone(tmp_path: Path) -> None:
    def perf(i: float, **phases: float) -> dict[str, float | str]:
        times = {f"perf/{name}_time": seconds for name, seconds in phases.items()}
        return {"kind": "perf", "rollout/step": i, "perf/step_time": sum(phases.values()), **times}

    out = tmp_path / "x.png"
    draw_run([perf(float(i), train=1.0, **({"eval": 5.0} if i == 2 else {})) for i in range(5)], out)
    widths = painted(out, PHASE_COLORS["eval"], 0.85).sum(axis=1)
    bar = widths[
        np.flatnonzero(widths == 0)[np.flatnonzero(widths == 0) > np.argmax(widths > 0)][0] :
    ]  # below the legend
    assert len(set(bar[bar > 0])) == 1, "a bar, not a triangle"
    assert bar.max() == pytest.approx(painted(out, PHASE_COLORS["train"], 0.85).sum(axis=1).max() / 5, rel=0.1)
    draw_run([perf(float(i), train=1.0) for i in range(5)], out)
    assert painted(out, PHASE_COLORS["train"], 0.85).sum() > 1000, "a phase keeps its colour when others are missing"


def test_only_names_of_ours_have_a_unit() -> None:
    metrics = ["rollout/stale_groups", "rollout/zero_variance_groups", "train/critic-value_clipfrac", "eval/d-pass@4"]
    assert [unit(name) for name in metrics] == ["groups", "share of groups", "share of tokens", "share of prompts"]
    assert {unit(name) for name in ("rollout/mixed_groups", "train/bad_ratio", "rollout/think_time")} == {"value"}
