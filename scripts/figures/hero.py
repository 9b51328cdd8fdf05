"""README's picture of a run, light and dark. It shows the run's curves, and a guess next to the worked answer that
replaced it.

python scripts/figures/hero.py runs/quickstart/seed-0/grpo docs/quickstart   writes hero-{light,dark}.png there.
README's run: bash scripts/quickstart.sh --eval-interval 2
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimelite.apps.runs import Run
from slimelite.base.files import whole
from slimelite.base.version import answer_version
from slimelite.samples.table import SampleTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD, LENGTH = "rollout/raw_reward", "rollout/response_len/mean"
SPECIAL = re.compile(r"<\|im_start\|>\w+\n|<\|[^|]*\|>")
COLUMNS = 46  # of the text of a sample
PROMPT_LINES, RESPONSE_LINES = 1, 3
THEMES = {
    "light": {"page": "#ffffff", "text": "#22252a", "dim": "#6a6f78", "line": "#d9d9d4", "card": "#f7f7f5"}
    | {"reward": "#3268b0", "eval": "#2f8f5b", "guess": "#c8553d"},
    "dark": {"page": "#16181b", "text": "#e3e5e8", "dim": "#9aa1ab", "line": "#3d4249", "card": "#1e2125"}
    | {"reward": "#6fa3e8", "eval": "#63c48d", "guess": "#ee8a70"},
}


class Shown(NamedTuple):
    """A sample and its rollout."""

    rollout_id: int
    prompt: str
    response: str
    reward: float


def pair(run: Run) -> tuple[Shown, Shown]:
    """(A sample of the first rollout with its lowest reward, a sample of the last quarter of the rollouts with the
    highest reward).

    Of all such pairs it is the one whose prompts share the most characters. If several tie, it is the latest. The same
    prompt seldom appears twice.

    Raises:
        ValueError: the run has fewer than two rollouts' files.
    """
    numbers = list(run.rollouts)
    if len(numbers) < 2:
        raise ValueError(f"{run.folder} has too few files in rollouts/: {len(numbers)}")
    late = numbers[-max(len(numbers) // 4, 1) :]
    first = _by_prompt(run, numbers[0], best=False)
    last = [sample for number in late for sample in _by_prompt(run, number, best=True)]

    def unlike(samples: tuple[Shown, Shown]) -> tuple[int, bool, int]:
        a, b = (Counter(sample.prompt) for sample in samples)
        return ((a - b) + (b - a)).total(), samples[0].prompt != samples[1].prompt, -samples[1].rollout_id

    return min(((a, b) for a in first for b in last), key=unlike)


def draw(run: Run, out: Path, theme: dict[str, str]) -> None:
    """Draw curves and samples of ``run`` as a PNG, 1800 pixels wide."""
    from matplotlib.figure import Figure

    guess, steps = pair(run)
    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor=theme["page"])
    axes = figure.subplots(2, 2, height_ratios=(3, 1.25))
    for ax, metric, title, quantity in (
        (axes[0, 0], REWARD, "Is the answer right?", "mean reward (0 to 1)"),
        (axes[0, 1], LENGTH, "How long is it?", "mean length (tokens)"),
    ):
        x, y = run.series[metric]
        ax.plot(x, y, color=theme["reward"], linewidth=1.8, label="rollouts")
        if metric == REWARD:
            for score in run.scores:
                label = f"evaluation on {score.removeprefix('eval/')} (−1: before training)"
                ax.plot(*run.series[score], "o-", color=theme["eval"], linewidth=1, markersize=3.5, label=label)
            ax.legend(loc="lower right", fontsize=8.5, frameon=False, labelcolor=theme["text"])
        ax.set_ylim(0, max(y) * 1.08)
        _decorate(ax, theme, title, quantity)
    _text(axes[1, 0], theme, guess, theme["guess"])
    _text(axes[1, 1], theme, steps, theme["eval"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as partial:
        figure.savefig(partial, dpi=200, format="png")


def _by_prompt(run: Run, number: int, *, best: bool) -> list[Shown]:
    """For each prompt of a rollout, the first sample with the rollout's highest or lowest reward."""
    table = SampleTable.from_parquet(run.rollouts[number])
    extreme = max(table.reward) if best else min(table.reward)
    found: dict[str, Shown] = {}
    for prompt, response, reward in zip(table.prompt, table.response, table.reward, strict=True):
        if reward == extreme:
            found.setdefault(prompt, Shown(number, _plain(prompt), _plain(response), float(reward)))
    return list(found.values())


def _plain(text: str) -> str:
    """The text without the chat template's marks. Other characters that no font can draw become U+FFFD."""
    kept = SPECIAL.sub("", text).strip()
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in kept)


def _decorate(ax: Axes, theme: dict[str, str], title: str, quantity: str) -> None:
    ax.set_title(title, fontsize=11, loc="left", color=theme["text"])
    ax.set_xlabel("rollout", fontsize=9, color=theme["dim"])
    ax.set_ylabel(quantity, fontsize=9, color=theme["dim"])
    ax.tick_params(labelsize=8.5, colors=theme["dim"], length=0)
    ax.set_facecolor(theme["page"])
    ax.grid(color=theme["line"], alpha=0.5, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["bottom", "left"]].set_color(theme["line"])


def _text(ax: Axes, theme: dict[str, str], sample: Shown, color: str) -> None:
    """A box with the sample's rollout, reward, prompt and response."""
    ax.set(xticks=[], yticks=[], facecolor=theme["card"])
    ax.spines[:].set_color(theme["line"])
    title = f"A sample of rollout {sample.rollout_id}: reward {sample.reward:g}"
    ax.set_title(title, fontsize=11, loc="left", color=color)
    down = 10  # points
    for text, ink, most in (
        (sample.prompt, theme["dim"], PROMPT_LINES),
        (sample.response, theme["text"], RESPONSE_LINES),
    ):
        lines = [part for line in text.split("\n") for part in textwrap.wrap(line, COLUMNS) or [""]]
        shown = lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1][: COLUMNS - 2] + " …"]
        style = {"family": "monospace", "fontsize": 11, "va": "top", "linespacing": 1.4, "parse_math": False}
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "xytext": (12, -down)}
        ax.annotate("\n".join(shown), (0, 1), color=ink, **place, **style)
        down += 18 * len(shown) + 5


def main(folder: str, out: str) -> None:
    """Draw the run in ``folder`` into the folder ``out``, once for each theme."""
    for name, theme in THEMES.items():
        draw(Run.read(folder), Path(out) / f"hero-{name}.png", theme)


if __name__ == "__main__":
    answer_version()
    main(*sys.argv[1:])
