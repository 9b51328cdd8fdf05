"""Draws the curves of runs from their ``metrics.jsonl``. The command is ``slimelite plot``.

``python -m slimelite.tracking.plot FOLDER`` draws ``curves.png`` of one run folder. A run starts this command for its
own folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, sqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from slimelite.base.files import whole
from slimelite.tracking.metrics_file import Record, axis_of, eval_metrics, read_metrics, series, unknown_metrics
from slimelite.tracking.panels import GROUPS, LABELS, least, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# title -> metrics; a panel draws the first of them that a run has
PANELS = {panel.title: panel.metrics for panels in GROUPS.values() for panel in panels if panel.picture}
AXIS_LABELS = {
    "rollout/step": "rollout",
    "train/step": "optimizer step",
    "eval/step": "after rollout (−1: at the start)",
}
COLORS = ("#3b6fb6", "#d1495b", "#2e8b57", "#e39c37", "#7a5195", "#4fa3a5", "#8c564b", "#9aa0a6")
DASHES = ("-", "--", ":")  # the ninth run has the colour of the first one, and a dashed line
# a phase has the same colour in every run
PHASE_COLORS = dict(zip(LABELS.values(), COLORS, strict=False))
TOGETHER = 4  # with more runs, each run has its own panel for each of the named metrics

# kind of band for several runs under one name -> its description
BANDS = {
    "minmax": "median, minimum to maximum",
    "mean-se": "mean ± standard error",
    "quantiles": "median, quartiles",
}

Points = tuple[list[float], list[float]]  # steps, values
Runs = Mapping[str, Sequence[Sequence[Record]]]  # label -> the records of one run, or of several seeds


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot. ``lines``: label -> one curve, or several curves that are drawn as a line and a band.

    ``focus``: the label of the only line that has a colour; the others are grey. If ``focus`` is None, all lines have
    colours.
    """

    title: str
    metric: str
    lines: dict[str, list[Points]]
    focus: str | None = None


def draw_run(records: Sequence[Record], out: str | Path) -> None:
    """Draw the standard panels of one run and its time for each phase as a PNG. Panels without data are left out."""
    panels = [p for title, names in PANELS.items() if (p := _panel(title, names, {"": [records]})).lines]
    if scores := eval_metrics(records):
        lines = {name.removeprefix("eval/"): [series(records, name)] for name in scores}
        panels.insert(1, Panel("evaluation", scores[0], lines))
    times = series(records, "perf/step_time")
    figure, axes = _grid(len(panels) + bool(times[0]))
    for ax, panel in zip(axes, panels, strict=False):
        _draw(ax, panel, line_styles(panel.lines))
        if panel.title == "evaluation":
            ax.legend(fontsize=8, frameon=False)
    if times[0]:
        _draw_times(axes[-1], records, times)
    _save(figure, out)


def draw_runs(runs: Runs, out: str | Path, metrics: Sequence[str] = (), kind: str = "minmax") -> None:
    """Draw several runs in the same panels: one panel for each of ``metrics``, or the standard panels and every eval
    score.

    ``kind``: the kind of band for several seeds, see `band`. A run has one colour in all panels. If there are
    more than four runs, each run has its own panel for each of ``metrics``.

    Raises:
        ValueError: no run has a metric of ``metrics``, or there is nothing to draw.
    """
    everything = [r for group in runs.values() for records in group for r in records]
    standard = {m: (m,) for m in eval_metrics(everything)} | PANELS
    wanted = {m: (m,) for m in metrics} if metrics else standard
    panels = [_panel(title, names, runs) for title, names in wanted.items()]
    if missing := [p.title for p in panels if not p.lines and (metrics or not any(q.lines for q in panels))]:
        raise ValueError(unknown_metrics(missing, [everything]))
    panels = [p for p in panels if p.lines]
    styles, apart = line_styles(runs), bool(metrics) and len(runs) > TOGETHER
    if apart:
        panels = [replace(p, title=run, focus=run) for p in panels for run in p.lines]
    figure, axes = _grid(len(panels), columns=4 if apart else 0)
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, styles, kind)
    if not apart and (len(runs) > 1 or any(len(group) > 1 for group in runs.values())):
        from matplotlib.lines import Line2D

        seeds = {run: f" ({BANDS[kind]} of {len(group)})" if len(group) > 1 else "" for run, group in runs.items()}
        names = {run: run + words for run, words in seeds.items()}
        handles = [
            Line2D([], [], color=color, linestyle=dash, label=names[run]) for run, (color, dash) in styles.items()
        ]
        fitting = int(figure.get_figwidth() / (0.6 + 0.08 * max(map(len, names.values()))))  # inches
        figure.legend(handles=handles, loc="outside upper left", fontsize=8, frameon=False, ncols=max(fitting, 1))
    _save(figure, out)


def band(curves: Sequence[Points], kind: str = "minmax") -> tuple[list[float], list[float], list[float], list[float]]:
    """(steps, middle, low, high) of several curves. The numbers at a step come from the curves that have a value at
    this step.

    ``kind``: one of `BANDS`. The standard error is that of the mean of n runs, s / sqrt(n), where s² divides by n − 1.
    A single run has no band.
    """
    import numpy as np

    at: dict[float, list[float]] = {}
    for steps, values in curves:
        for step, value in zip(steps, values, strict=True):
            at.setdefault(step, []).append(value)

    def points(values: list[float]) -> Sequence[float]:
        if kind == "mean-se":
            mean = np.mean(values)
            error = np.std(values, ddof=1) / sqrt(len(values)) if len(values) > 1 else 0.0
            return [float(mean), float(mean - error), float(mean + error)]
        if kind == "quantiles":
            return [float(value) for value in np.quantile(values, (0.5, 0.25, 0.75))]
        return [median(values), min(values), max(values)]

    with np.errstate(invalid="ignore"):  # a loss may be NaN
        rows = [[step, *points(at[step])] for step in sorted(at)]
    steps, middle, low, high = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
    return steps, middle, low, high


def axis_range(values: Sequence[float], span: float) -> tuple[float, float]:
    """(low, high) of the y-axis. The range contains all finite values and spans at least ``span``. If no value is
    negative, the range begins at 0, unless half of the axis would then be empty.

    >>> axis_range([3e-7, 4e-7], 1e-4)
    (0.0, 0.000104)
    """
    finite = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if 0 <= low < high / 2:
        low = 0.0
    missing = max(span, abs(high) * 0.05, 1e-12) - (high - low)
    if missing > 0:
        low, high = (0.0, span) if low >= 0 and high < span else (low - missing / 2, high + missing / 2)
    room = 0.04 * (high - low)
    return (low if low == 0 else low - room), high + room


def line_styles(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Label -> (colour, dashes) of its line. Both depend only on the label's position in ``labels``."""
    count = len(COLORS)
    return {label: (COLORS[i % count], DASHES[i // count % len(DASHES)]) for i, label in enumerate(labels)}


def _panel(title: str, metrics: Sequence[str], runs: Runs) -> Panel:
    """A panel that shows, for each run, the first of ``metrics`` that the run has."""
    lines: dict[str, list[Points]] = {}
    for label, group in runs.items():
        firsts = [next((p for m in metrics if (p := series(records, m))[0]), None) for records in group]
        if curves := [points for points in firsts if points is not None]:
            lines[label] = curves
    records = [record for group in runs.values() for some in group for record in some]
    # the axis of the drawn metric may differ from the axis of the first metric
    drawn = next((metric for metric in metrics if any(metric in record for record in records)), metrics[0])
    return Panel(title, drawn, lines)


def _grid(count: int, columns: int = 0) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes, square unless ``columns`` is given. The function avoids pyplot, which needs a
    display."""
    from matplotlib.figure import Figure

    width, height = (2.7, 2.1) if columns else (4.2, 3.0)  # inches
    columns = columns or max(ceil(sqrt(count)), 1)
    rows = max(ceil(count / columns), 1)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def _draw(ax: Axes, panel: Panel, styles: Mapping[str, tuple[str, str]], kind: str = "minmax") -> None:
    drawn: list[float] = []
    for label, curves in panel.lines.items():
        color, dash = styles[label]
        steps, middle, low, high = band(curves, kind)
        drawn += low + high
        if panel.focus not in (None, label):
            ax.plot(steps, middle, color="#d5d7da", linewidth=1)
            continue
        marker = "o" if len(steps) < 25 else ""
        ax.plot(steps, middle, dash, color=color, linewidth=1.6, marker=marker, markersize=3, label=label, zorder=3)
        if len(curves) > 1:
            ax.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    _decorate(ax, panel.title, AXIS_LABELS[axis_of(panel.metric)])
    ax.set_ylim(*axis_range(drawn, least(panel.metric)))
    quantity = "score" if panel.metric.startswith("eval/") else unit(panel.metric)
    ax.set_ylabel(f"{panel.metric}\n{quantity}" if panel.focus else quantity, fontsize=8)


def _draw_times(ax: Axes, records: Sequence[Record], whole: Points) -> None:
    """Draw the seconds per phase as a stacked bar for each rollout; "other" is time outside all phases."""
    steps, totals = whole
    layers: dict[str, list[float]] = {}
    for phase, label in LABELS.items():
        seconds = dict(zip(*series(records, f"perf/{phase}_time"), strict=True))
        if seconds:
            layers[label] = [seconds.get(step, 0.0) for step in steps]
    layers["other"] = [max(total - sum(parts), 0.0) for total, *parts in zip(totals, *layers.values(), strict=True)]
    # a stacked area with steps looks like bars without gaps, and is quick to draw for thousands of rollouts
    edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
    stacked = [[*values, values[-1]] for values in layers.values()]
    colors = [PHASE_COLORS.get(label, COLORS[-1]) for label in layers]
    ax.stackplot(edges, stacked, labels=list(layers), colors=colors, alpha=0.85, step="post", linewidth=0)
    _decorate(ax, "time of a rollout", "rollout")
    ax.set_ylabel("seconds", fontsize=8)
    ax.legend(fontsize=8, framealpha=0.8, edgecolor="none", loc="upper right", ncols=3)
    ax.set_ylim(0, 1.25 * max(totals))


def _decorate(ax: Axes, title: str, x_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(x_label, fontsize=8)
    ax.tick_params(labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # write 1e-8 at each tick, not above the plot
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, out: str | Path) -> None:
    """Write a PNG file, completely or not at all."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with whole(Path(out)) as partial:
        figure.savefig(partial, dpi=110, format="png")


if __name__ == "__main__":
    try:
        draw_run(read_metrics(Path(sys.argv[1])), Path(sys.argv[1]) / "curves.png")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
