"""Console output of a run: plain aligned text, with colour on a terminal. The output has the facts of the run, phases
with time and progress, samples and the summary. All lines go to the log too."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

import numpy as np
import rich.console
from rich import box
from rich.table import Table
from rich.text import Text

from slimelite.algorithms.losses import LossType
from slimelite.arguments import AlgorithmArgs, Args, DataArgs, RolloutArgs
from slimelite.arguments.conditions import Job
from slimelite.arguments.derive import OFFLINE_ROLLOUT
from slimelite.arguments.evaluation import CHOOSE, CONTINUE
from slimelite.arguments.parse import FILE, GROUP, plugin_paths
from slimelite.arguments.rollout import EPISODE, PROGRAM
from slimelite.arguments.training import LoraArgs
from slimelite.samples.sample import label_text
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import Record, eval_metrics, series

logger = logging.getLogger("slimelite.console")

HEADER_EVERY = 20  # rows
FILE_WIDTH = 120  # width of a table without a terminal [characters]
BAR_AFTER = 0.5  # shorter phases draw no bar [s]
REDRAW_EVERY = 0.2
LINE_EVERY = 30.0
# phase name -> slime's name in the metric: the seconds of "generate" are perf/rollout_time
PERF_NAMES = {"generate": "rollout"}
SHOWN_SAMPLES = 4
# the summary of a run without evaluations shows the reward, or the measures of supervised training
SUPERVISED = {"train/loss": "loss", "train/rewards/accuracies": "accuracy", "train/rewards/margins": "margin"}
MEASURES = {"rollout/raw_reward": "reward", **SUPERVISED}
PLURALS = {"rollout": "rollouts", "batch": "batches"}  # of `unit_of`
PROMPT_CHARS = 160
RESPONSE_CHARS = 360


def duration(seconds: float) -> str:
    """A duration as text, such as ``0.35s``, ``7.1s``, ``42s``, ``3m05s`` or ``2h07m``."""
    if seconds < 10:
        return f"{seconds:.2f}s" if seconds < 1 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def small(value: float) -> str:
    """A loss or KL with four decimals. A value that is too small for four decimals has an exponent."""
    if abs(value) >= 100:
        return f"{value:.4g}"
    return f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def count(value: float) -> str:
    """A size or speed: ``7.3``, ``188``, ``12.3k``."""
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


def speed(value: float) -> str:
    """Tokens per second; ``-`` if none were generated."""
    return count(value) if value else "-"


def times(seconds: float, phases: Mapping[str, float], room: int) -> str:
    """Text such as ``4.5s: gen 3.0s, train 1.5s``, in at most ``room`` characters. Phases below 1 % of ``seconds`` are
    left out."""
    kept = {label: s for label, s in phases.items() if s >= 0.01 * seconds}
    while kept:
        text = f"{duration(seconds)}: " + ", ".join(f"{label} {duration(s)}" for label, s in kept.items())
        if len(text) <= room:
            return text
        kept.pop(min(kept, key=kept.__getitem__))
    return duration(seconds)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the rollout table. ``metrics``: the column shows the first of these metrics that exists. ``keep``: on
    a narrow terminal, the columns with the lowest ``keep`` are left out first."""

    title: str
    width: int
    metrics: tuple[str, ...]
    show: Callable[[float], str]
    keep: int


COLUMNS = (
    Column("errors", 6, ("errors",), "{:.0f}".format, 10),
    Column("reward", 6, ("rollout/raw_reward",), "{:.3f}".format, 9),
    Column("accuracy", 8, ("train/rewards/accuracies",), "{:.3f}".format, 9),
    Column("margin", 6, ("train/rewards/margins",), small, 9),
    Column("eval", 5, ("eval",), "{:.3f}".format, 8),
    Column("±", 5, ("eval-stderr",), "{:.3f}".format, 0),
    Column("length", 6, ("rollout/response_len/mean",), count, 7),
    Column("loss", 7, ("train/loss",), small, 5),
    Column("kl", 6, ("train/kl_loss", "rollout/kl"), small, 4),
    Column("entropy", 7, ("train/entropy_loss", "rollout/entropy"), "{:.3f}".format, 2),
    Column("grad", 6, ("train/grad_norm",), small, 1),
    Column("tok/s", 5, ("tokens_per_sec", "perf/actor_train_tok_per_s"), speed, 3),
    Column("eta", 5, ("eta",), duration, 6),
)
POSITION = 10  # characters of the first column
TIMES = 28  # characters kept free for the times of the phases


class Console:
    """Prints lines, rows of the rollout table and warnings.

    ``file``: standard output by default. ``always``: titles of the columns that are shown from the first row on. Other
    columns are added when they first have a value. ``unit``: what a row stands for.
    """

    def __init__(self, file: TextIO | None = None, always: Iterable[str] = (), unit: str = "rollout") -> None:
        self.rich = rich.console.Console(file=file, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.live = self.rich.is_terminal and not self.rich.is_dumb_terminal
        if not self.live:
            self.rich.width = FILE_WIDTH
        self._titles = set(always)
        self._unit = unit
        self._header = ""
        self._rows_since_header = 0

    def line(self, text: str, style: str = "") -> None:
        """Print a line and log it."""
        self.rich.print(Text(text, style))
        logger.info(text)

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Print the warnings and errors that slimelite logs inside this block."""
        handler = _WarningHandler(self)
        ours = logging.getLogger("slimelite")
        ours.addHandler(handler)
        try:
            yield
        finally:
            ours.removeHandler(handler)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print ``name  value`` lines, aligned, and log them."""
        width = max(map(len, facts))
        for name, value in facts.items():
            self.rich.print(Text.assemble((f"  {name:<{width}}  ", "dim"), value))
            logger.info("%s: %s", name, value)

    def block(self, renderable: rich.console.RenderableType) -> None:
        """Print a block of several lines. Before the next row of the table, the table's header is printed again."""
        self.rich.print(renderable, soft_wrap=isinstance(renderable, Text) and not self.live)
        self._header = ""

    def row(
        self,
        position: str,
        metrics: Mapping[str, float],
        seconds: float,
        phases: Mapping[str, float],
        *,
        best: bool = False,
    ) -> None:
        """Print a line of the rollout table and log it.

        ``position``: such as "4 of 40". ``metrics``: name in ``COLUMNS`` -> value. ``phases``: label of a phase -> the
        phase's part of ``seconds``. ``best``: whether the eval score is the best so far.
        """
        cells = {c.title: c.show(v) for c in COLUMNS if (v := _first(metrics, c.metrics)) is not None}
        self._titles |= cells.keys()
        columns, room = self._fit()
        self._print_header(columns)
        text = Text(f"{position:>{POSITION}}")
        for column in columns:
            style = "bold green" if best and column.title == "eval" else ""
            text.append("  ").append(f"{cells.get(column.title, ''):>{column.width}}", style)
        text.append("  " + times(seconds, phases, room), "dim")
        self.rich.print(text)
        logger.info(text.plain.strip())

    def _fit(self) -> tuple[list[Column], int]:
        """The columns that fit this terminal, and the number of characters left for the times."""
        columns = [c for c in COLUMNS if c.title in self._titles]
        room = self.rich.width if self.live else 10**6
        while True:
            left = room - POSITION - sum(2 + c.width for c in columns) - 2
            if left >= TIMES or not columns:
                return columns, left
            columns.remove(min(columns, key=lambda c: c.keep))

    def _print_header(self, columns: Sequence[Column]) -> None:
        header = "  ".join([f"{self._unit:>{POSITION}}", *(f"{c.title:>{c.width}}" for c in columns), "time"])
        if header != self._header or self._rows_since_header == HEADER_EVERY:
            self.rich.print(Text("\n" + header, "dim"))
            logger.info(header)
            self._header, self._rows_since_header = header, 0
        self._rows_since_header += 1


class Phase:
    """A running phase. A separate thread draws the progress of the phase, so `update` is cheap and the display never
    stops."""

    def __init__(self, console: Console, name: str, line_every: float = LINE_EVERY) -> None:
        self._console = console
        self._name = name
        self._done, self._note = 0, ""
        self._total: int | None = None
        self._line_every = line_every
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name=f"progress-{name}", daemon=True)

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Report that ``done`` of ``total`` units are finished. If ``total`` is None, the earlier total stays. Any
        thread may call this.

        ``note``: the name of the units, or the speed.
        """
        self._done, self._note = done, note
        self._total = self._total if total is None else total

    def __enter__(self) -> Phase:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def describe(self) -> str:
        """The progress as text, such as ``12/64 groups, 37s, about 2m40s left``."""
        elapsed = time.monotonic() - self._began
        counted = f"{self._done}/{self._total}" if self._total else ""
        parts = [" ".join(filter(None, (counted, self._note))), duration(elapsed)]
        if self._total and self._done:
            parts.append(f"about {duration(elapsed / self._done * max(self._total - self._done, 0))} left")
        return ", ".join(filter(None, parts))

    def _draw(self) -> None:
        if not self._console.live:
            while not self._over.wait(self._line_every):
                self._console.line(f"  {self._name}: {self.describe()}")
        elif not self._over.wait(BAR_AFTER):
            self._draw_bar()

    def _draw_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description:>9}"), BarColumn(30), TextColumn("{task.fields[text]}", style="dim"))
        # rich must not redirect standard error, which goes to a file (noise.py)
        bar = Progress(*columns, console=self._console.rich, transient=True, auto_refresh=False, redirect_stderr=False)
        with bar:
            task = bar.add_task(self._name, total=self._total, text="")
            while not self._over.wait(REDRAW_EVERY):
                bar.update(task, completed=self._done, total=self._total, text=self.describe(), refresh=True)


class _WarningHandler(logging.Handler):
    """Shows the messages of log records on a console. Only the log file has their tracebacks."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "bold red" if record.levelno >= logging.ERROR else "bold yellow"
        self._console.block(Text.assemble((f"{record.levelname.lower()}: ", style), record.getMessage()))


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


class Timer:
    """Adds up the seconds of named phases within a step, which is one turn of the training loop.

    ::

        with timer("train"):
            ...
        timer.finish_step()  # {"perf/train_time": ..., "perf/step_time": ..., ...}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase. The seconds of a repeated name add up. Phases may overlap or nest, and each counts in full."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def restart(self) -> None:
        """Begin a step now, and discard all times that were measured before."""
        self.seconds: dict[str, float] = {}
        self._step_began = self._clock()

    def finish_step(self) -> dict[str, float]:
        """End the step, return its times and begin the next one.

        Returns:
            ``perf/{phase}_time`` of every phase, and ``perf/step_time``, the wall-clock time of the step. A phase
            ``train`` adds ``perf/train_wait_time``, the time of the step outside this phase, and
            ``perf/wait_time_ratio``, which is ``perf/train_wait_time`` divided by ``perf/step_time``.
        """
        step = self._clock() - self._step_began
        times = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()} | {"perf/step_time": step}
        if "train" in self.seconds:
            wait = max(step - self.seconds["train"], 0.0)
            times |= {"perf/train_wait_time": wait, "perf/wait_time_ratio": wait / step if step else 0.0}
        self.restart()
        return times


def run_facts(args: Args) -> dict[str, str]:
    """Name -> value for the first lines on the console, in order. ``args`` must be complete (see `complete_args`)."""
    turns = PLURALS[unit_of(args.job)]
    facts = {
        "model": args.hf_checkpoint or "new, random weights",
        "data": ", ".join(args.prompt_data) or str(args.job.saved or args.data_source_path or "none"),
        "eval": ", ".join(f"{d.name} ({d.path})" for d in args.eval_datasets),
        "method": method(args),
        "plugins": ", ".join(plugins(args)),
        "device": _device(args),
        "batch": batch_identity(args),
        turns: f"{args.num_rollout}"
        + (f", numbered 0 to {args.num_rollout - 1} in files" if args.num_rollout else "")
        + (f", continuing at {args.start_rollout_id}" if args.start_rollout_id else ""),
    }
    of_rollouts = ("data", "method", "batch", turns) if args.num_rollout == 0 else ()
    return {name: value for name, value in facts.items() if value and name not in of_rollouts}


def progress(done: int | None, num_rollout: int | None, unit: str, first: int = 0) -> str:
    """The progress of a run as text: ``after 7 of 40 rollouts``. ``done``: the number of finished rollouts. ``unit``:
    see `unit_of`. ``first``: the number of the run's first rollout."""
    if done is None and first and num_rollout != 0:
        return f"before the end of {unit} {first}, the first {unit} after the newest checkpoint"
    if done is None:
        return f"before the end of its {'evaluation' if num_rollout == 0 else f'first {unit}'}"
    return f"after {done} of {num_rollout} {PLURALS[unit]}" if num_rollout else f"after {done} {PLURALS[unit]}"


def when(rollout_id: float, unit: str) -> str:
    """The time of an evaluation as text. Files number rollouts from 0, and the rows of the console from 1. ``unit``:
    see `unit_of`."""
    if rollout_id < 0:
        return "before training"
    counted = PLURALS[unit] if rollout_id else unit
    return f"after {rollout_id + 1:.0f} {counted} ({unit} {rollout_id:.0f} in files)"


def batch_identity(args: DataArgs) -> str:
    """The batch as text, such as ``32 prompts x 8 samples = 256 = 2 steps of 100 + 1 of 56``."""
    total = args.rollout_batch_size * args.n_samples_per_prompt
    full, rest = divmod(total, args.global_batch_size)
    steps = [f"{full} step{'s' if full > 1 else ''} of {args.global_batch_size}"] if full else []
    steps += [f"1 of {rest}" if full else f"1 step of {rest}"] if rest else []
    samples = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples = {total}"
    counted = f"{total} pairs" if args.job.loss == "paired" else samples
    return f"{counted} = {' + '.join(steps)}"


def _device(args: RolloutArgs) -> str:
    ranks = args.training_ranks
    parts: list[str] = [args.device]
    if args.job.trains:
        parts.append(f"{ranks} training rank{'s' if ranks > 1 else ''}")
    if args.job.engines:
        engines = args.num_engines
        parts.append(f"{engines} {args.rollout_backend} engine{'s' if engines > 1 else ''}")
    parts.append({"local": "in one process", "ray": "Ray"}.get(args.launcher, args.launcher))
    return ", ".join(parts)


def plugins(args: Args) -> Iterator[str]:
    """The user code that flags name. Our own functions are included, too, if the user named them. Functions that
    slimelite itself chose, as for a supervised loss, are not included."""
    yield from (f"{FILE} {path}" for path in args.import_file)
    yield from (f"{GROUP} {path}" for path in args.args_group)
    implied = (OFFLINE_ROLLOUT, CHOOSE, CONTINUE, EPISODE, PROGRAM)
    yield from (f"{flag} {path}" for flag, path in plugin_paths(args) if path not in implied)


def unit_of(job: Job) -> str:
    """The name of a turn of the loop: "rollout", or "batch" for supervised training."""
    return "rollout" if job.sampled else "batch"


def method(args: Args) -> str:
    """Method, adapters, optimizer and KL as text, such as ``DPO, beta 0.1, LoRA of rank 16, adam lr 1e-06``."""
    loss = args.loss
    parts = [loss.title or args.loss_type]
    if args.job.sampled:
        parts = [args.advantage_estimator]
        if args.custom_advantage_function_path:
            parts.append(f"advantages {args.custom_advantage_function_path}")
        if args.loss_type != "policy_loss":
            parts.append(f"loss {args.custom_loss_function_path or args.loss_type}")
    elif loss.paired and loss.compares and args.dpo_loss != "sigmoid":
        parts[0] += f" ({args.dpo_loss})"
    if loss.compares:
        parts.append(f"beta {args.dpo_beta:g}")
    if "orpo_lambda" in loss.reads:
        parts.append(f"lambda {args.orpo_lambda:g}")
    parts += [adapters(args), f"{args.optimizer} lr {args.lr:g}"]
    critic = f", critic lr {args.critic_lr:g}" if args.use_critic else ""
    return f"{', '.join(filter(None, parts))}{critic}{_kl(args)}"


def adapters(args: LoraArgs) -> str:
    """The adapters that are trained, such as ``QLoRA of rank 16``; "" if the model's weights are trained."""
    if args.lora_rank == 0:
        return ""
    return f"{'Q' * args.load_in_4bit}{'rs' * (args.lora_type == 'rslora')}LoRA of rank {args.lora_rank}"


def _kl(args: AlgorithmArgs) -> str:
    if not args.job.sampled:
        return ""
    if args.use_kl_loss and args.kl_loss_coef:
        return f", KL loss {args.kl_loss_coef:g} ({args.kl_loss_type})"
    return f", KL reward {args.kl_coef:g}" if args.kl_coef else ""


def eval_text(metrics: Mapping[str, float]) -> str:
    """Scores as text, such as ``gsm8k 0.412 ±0.014 (length 120, truncated 2%, pass@4 0.710 ±0.012), svamp 0.300``."""
    parts = []
    for name in eval_metrics([metrics]):
        details = []
        if (length := metrics.get(f"{name}/response_len/mean")) is not None:
            details.append(f"length {length:.0f}")
        if truncated := metrics.get(f"{name}-truncated_ratio"):
            details.append(f"truncated {truncated:.0%}")
        if at_k := [int(k) for key in metrics if (k := key.removeprefix(f"{name}-pass@")).isdigit()]:
            most = f"{name}-pass@{max(at_k)}"
            details.append(f"pass@{max(at_k)} {_score(metrics[most], metrics.get(f'{most}-stderr'))}")
        score = f"{name.removeprefix('eval/')} {_score(metrics[name], metrics.get(f'{name}-stderr'))}"
        parts.append(score + (f" ({', '.join(details)})" if details else ""))
    return ", ".join(parts)


def summary(records: Sequence[Record], unit: str) -> dict[str, str]:
    """Eval dataset -> its first, best and last score in ``records``, ± standard error. Without evaluations, the values
    are those of the reward, or of the measures of supervised training. ``unit``: see `unit_of`."""
    lines = {}
    for name in eval_metrics(records) or MEASURES:
        steps, values = series(records, name)
        if not values:
            continue
        errors = dict(zip(*series(records, f"{name}-stderr"), strict=True))
        shown = [_score(value, errors.get(step)) for step, value in zip(steps, values, strict=True)]
        best = max(range(len(values)), key=values.__getitem__)
        at = (
            when(steps[best], unit)
            if name.startswith("eval/")
            else f"in rollout {steps[best] + 1:.0f} ({steps[best]:.0f} in files)"
        )
        reached = f", best {shown[best]} {at}" if name not in SUPERVISED else ""
        lines[MEASURES.get(name, name)] = f"first {shown[0]}{reached}, last {shown[-1]}"
        if name in MEASURES and name not in SUPERVISED:
            break
    return lines


def _score(value: float, error: float | None) -> str:
    """``0.412 ±0.014``. The number after ± is the standard error; it is left out if it is unknown."""
    return f"{value:.3f}" + ("" if error is None else f" ±{error:.3f}")


def spread(rewards: np.ndarray, count: int) -> list[int]:
    """``count`` row indices from the highest reward to the lowest, evenly spaced by rank. ``rewards``: [rows]."""
    order = np.argsort(-rewards, kind="stable")
    picks = np.linspace(0, len(order) - 1, min(count, len(order)))
    return [int(order[round(p)]) for p in picks]


def samples_table(title: str, table: SampleTable, loss: LossType | None = None) -> Table:
    """A table of some rows: reward and components, label, end of the prompt, response. The rows are logged too.

    ``loss``: the loss of supervised training. In supervised training, a row shows a word that comes from the data set,
    such as "chosen", instead of a reward.
    """
    shown = Table(title="\n" + title, box=box.SIMPLE, title_justify="left", title_style="bold", show_edge=False)
    words = verdicts(table, loss) if loss is not None and loss.supervised else None
    if words is None:
        shown.add_column("reward", justify="right", no_wrap=True)
        shown.add_column("label", max_width=20)
    elif any(words):
        shown.add_column("reply", no_wrap=True)
    shown.add_column("prompt", ratio=2, style="dim")
    shown.add_column("response", ratio=3)
    components = table.numeric_components()
    rows = spread(table.reward, SHOWN_SAMPLES) if words is None else list(range(min(len(table), SHOWN_SAMPLES)))
    for row in rows:
        prompt, response = tail(one_line(table.prompt[row])), middle_out(one_line(table.response[row]))
        if words is not None:
            shown.add_row(*([Text(words[row])] if any(words) else []), Text(prompt), Text(response))
            logger.info("%s: %s\n  %s\n  -> %s", title, words[row] or "reply", prompt, response)
            continue
        label = one_line(label_text(table.label[row]))
        parts = "".join(f"\n{one_line(name)[:16]} {value:.3g}" for name, value in list(components[row].items())[:8])
        shown.add_row(Text(f"{table.reward[row]:.3g}{parts}"), Text(label[:60]), Text(prompt), Text(response))
        named = f"{table.reward[row]:.4g}" + "".join(f", {one_line(n)} {v:.4g}" for n, v in components[row].items())
        logger.info("%s: reward %s, label %s\n  %s\n  -> %s", title, named, label, prompt, response)
    return shown


def verdicts(table: SampleTable, loss: LossType) -> list[str]:
    """The word of the data set about each reply, such as "chosen"; "" if there is none."""
    if loss.paired:
        return [one_line(label_text(label)) for label in table.label]  # chosen, rejected
    if loss.judged:
        return ["desirable" if reward > 0 else "undesirable" for reward in table.reward]
    return [""] * len(table)


def one_line(text: str) -> str:
    """``text`` with line breaks as ↵. Other control characters, such as terminal escapes, become Python escapes."""
    return "".join(c if c.isprintable() else "↵" if c == "\n" else repr(c)[1:-1] for c in text.strip())


def tail(text: str) -> str:
    """The end of a prompt, where the question usually is."""
    return text if len(text) <= PROMPT_CHARS else "…" + text[-PROMPT_CHARS:]


def middle_out(text: str) -> str:
    """A response without its middle, if it is long."""
    half = RESPONSE_CHARS // 2
    return text if len(text) <= RESPONSE_CHARS else f"{text[:half]} … {text[-half:]}"
