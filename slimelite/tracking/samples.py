"""A few samples of a rollout, to read: is the model saying what the curves suggest?"""

from __future__ import annotations

import logging

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from slimelite.sample import label_text
from slimelite.table import SampleTable

logger = logging.getLogger("slimelite.console")

PROMPT_CHARS = 160
RESPONSE_CHARS = 360


def spread(rewards: np.ndarray, count: int) -> list[int]:
    """Rows from the highest reward to the lowest, evenly over the ranks. ``rewards``: [rows]."""
    order = np.argsort(-rewards, kind="stable")
    picks = np.linspace(0, len(order) - 1, min(count, len(order)))
    return [int(order[round(p)]) for p in picks]


def samples_table(title: str, table: SampleTable, count: int = 4) -> Table:
    """Prompt (its end), response, reward, its components and label of ``count`` rows; they go to the log too."""
    shown = Table(title="\n" + title, box=box.SIMPLE, title_justify="left", title_style="bold", show_edge=False)
    shown.add_column("reward", justify="right", no_wrap=True)
    shown.add_column("label", max_width=20)
    shown.add_column("prompt", ratio=2, style="dim")
    shown.add_column("response", ratio=3)
    components = table.numeric_components()
    for row in spread(table.reward, count):
        prompt, response = tail(one_line(table.prompt[row])), middle_out(one_line(table.response[row]))
        label = one_line(label_text(table.label[row]))
        parts = "".join(f"\n{one_line(name)[:16]} {value:.3g}" for name, value in list(components[row].items())[:8])
        shown.add_row(Text(f"{table.reward[row]:.3g}{parts}"), Text(label[:60]), Text(prompt), Text(response))
        named = f"{table.reward[row]:.4g}" + "".join(f", {one_line(n)} {v:.4g}" for n, v in components[row].items())
        logger.info("%s: reward %s, label %s\n  %s\n  -> %s", title, named, label, prompt, response)
    return shown


def one_line(text: str) -> str:
    """``text`` with line breaks as ↵ and other control characters, terminal escapes among them, spelled out."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else repr(c)[1:-1] for c in text.strip())


def tail(text: str) -> str:
    """The end of a prompt: the question stands there."""
    return text if len(text) <= PROMPT_CHARS else "…" + text[-PROMPT_CHARS:]


def middle_out(text: str) -> str:
    """Beginning and end of a response."""
    half = RESPONSE_CHARS // 2
    return text if len(text) <= RESPONSE_CHARS else f"{text[:half]} … {text[-half:]}"
