"""``slimelite report JOURNEY``: a report about the stages of ``train.py --stages``, as an HTML page and a Markdown
page."""

from __future__ import annotations

import argparse
import base64
import html
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from slimelite.apps.runs import Run
from slimelite.apps.tables import score_text
from slimelite.arguments.conditions import gpus_of
from slimelite.stages import RECORD

# the rollout of an evaluation before the first step
BEFORE_TRAINING = -1
# the folder of a journey with the results of `slimelite eval` for each stage; the task whose answers are shown
EVALUATIONS, ANSWERS = "eval", "answers"
PROMPTS = ("Who are you?", "Why is the sky blue?", "12 + 7 =", "The capital of France is")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}table{border-collapse:collapse;margin:1rem 0}th,td{border-bottom:1px solid #ddd;"
    "padding:.3rem .7rem;text-align:left;vertical-align:top;white-space:pre-wrap}img{max-width:100%}"
)

Rows = list[list[str]]


@dataclass(frozen=True)
class Part:
    """A part of the page: a heading, a text, a table whose first row is its header, and pictures."""

    title: str
    text: str = ""
    rows: Rows | None = None
    pictures: tuple[Path, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: there are no stages, or an evaluation failed.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite report",
        description="Write one page, in HTML and in Markdown, about a run of train.py --stages: stages, cost, bits per "
        "byte, evaluations and answers after every stage, curves, versions.",
        epilog="example: slimelite report runs/journey",
    )
    add = parser.add_argument
    add("journey", metavar="JOURNEY", type=Path, help="the --run-dir of train.py --stages")
    add(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="the HTML file; the Markdown file is written next to it (default: JOURNEY/report.html)",
    )
    add("--price", type=float, metavar="MONEY", help="price of an hour of one GPU, or of the machine if it has none")
    add("--tasks", metavar="A,B", help="first evaluate the model of every stage on these tasks, like slimelite eval")
    add("--data", metavar="DIR", help="the rows of the tasks are read from files in this folder")
    add("--limit", type=int, metavar="N", help="read only the first N rows of each task")
    add("--prompts", nargs="*", default=PROMPTS, metavar="TEXT", help="prompts that the model of every stage answers")
    add(
        "--max-tokens", type=int, default=64, metavar="N", help="maximum tokens of an answer to --prompts (%(default)s)"
    )
    args = parser.parse_args(argv)
    stages = read_stages(args.journey)
    _evaluate(args, stages)
    parts = list(_parts(args.journey, stages, args.price))
    out = args.out or args.journey / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_html(args.journey.resolve().name, parts), encoding="utf-8")
    page = out.with_suffix(".md")
    page.write_text(_markdown(args.journey.resolve().name, parts, page.parent), encoding="utf-8")
    print(f"{out}\n{page}")
    return 0


def read_stages(journey: Path) -> list[Run]:
    """The runs of the stages that have begun, in order. A run has the name of its folder.

    Raises:
        ValueError: no stage has begun.
    """
    folders = [file.parent for file in journey.glob(f"*/{RECORD}") if file.parent.name.split("-")[0].isdecimal()]
    if not folders:
        raise ValueError(f"{journey} has no stages: name the --run-dir of train.py --stages")
    return [Run.read(folder) for folder in sorted(folders, key=lambda folder: int(folder.name.split("-")[0]))]


def _model(run: Run) -> Path:
    """The folder of the stage's model. It may not exist."""
    return Path(str(run.config.get("save_hf") or run.folder / "model"))


def _evaluate(args: argparse.Namespace, stages: Sequence[Run]) -> None:
    """Evaluate the model of each stage. The results go to the journey's folder `EVALUATIONS`. Known results are not
    computed again."""
    from slimelite.apps import eval as evaluation  # it needs transformers

    tasks = [task for task in (args.tasks or "").split(",") if task.strip()]
    folder = args.journey / EVALUATIONS
    if args.prompts:
        folder.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in args.prompts)
        task = {"name": ANSWERS, "data": f"{ANSWERS}.jsonl", "prompt": "{{ prompt }}", "label": "0"}
        # a task needs a scorer; the score has no meaning here and is not shown
        content = json.dumps({**task, "scorer": "last_number", "max_tokens": args.max_tokens})  # JSON is YAML
        for file, text in ((folder / f"{ANSWERS}.jsonl", rows), (folder / f"{ANSWERS}.yaml", content)):
            if not file.is_file() or file.read_text(encoding="utf-8") != text:  # a new file is evaluated again
                file.write_text(text, encoding="utf-8")
        tasks.append(str(folder / f"{ANSWERS}.yaml"))
    options = [
        word for name in ("data", "limit") if getattr(args, name) for word in (f"--{name}", str(getattr(args, name)))
    ]
    for run in stages:
        model = _model(run)
        if not tasks or not model.is_dir():
            continue
        words = [str(model), "--tasks", ",".join(tasks), "--output", str(folder / run.folder.name), "--json"]
        with redirect_stdout(StringIO()):  # the page shows all results, so the tables are not printed
            status = evaluation.main([*words, *options])
        if status:
            raise ValueError(f"{model} could not be evaluated on {','.join(tasks)}")


def evaluated(journey: Path, run: Run) -> Run | None:
    """The evaluation results of a stage, from `_evaluate` or from ``slimelite eval --output JOURNEY/eval/STAGE``. None
    if there are no results."""
    files = sorted((journey / EVALUATIONS / run.folder.name).rglob("results.json"))
    return Run.read(files[-1].parent) if files else None


def _parts(journey: Path, stages: Sequence[Run], price: float | None) -> Iterator[Part]:
    yield Part("Stages", rows=_stage_rows(stages, price))
    scores = {run.name: dict(_scores(journey, run, later)) for run, later in zip_longest(stages, stages[1:])}
    names = list(dict.fromkeys(name for each in scores.values() for name in each))
    if names:
        rows = [["after", *scores], *([name, *(each.get(name, "") for each in scores.values())] for name in names)]
        yield Part("Scores", "±: standard error, clustered by prompt. bpb: bits per byte of held-out text.", rows)
    answers = {run.name: dict(_answers(journey, run)) for run in stages}
    prompts = list(dict.fromkeys(prompt for each in answers.values() for prompt in each))
    if prompts:
        table = [[prompt, *(each.get(prompt, "") for each in answers.values())] for prompt in prompts]
        yield Part("The same prompts after each stage", "Greedy answers.", [["prompt", *answers], *table])
    pictures = tuple(file for run in stages if (file := run.folder / "curves.png").is_file())
    yield Part("Curves", " · ".join(file.parent.name for file in pictures), pictures=pictures)
    packages = ("slimelite", "commit", "python", "torch", "transformers")
    rows = [["stage", "seed", *packages, "command"]]
    for run in stages:
        shown = [str(run.versions.get(name, "")) for name in packages]
        rows.append([run.name, str(run.config.get("seed", "")), *shown, str(run.versions.get("command", ""))])
    yield Part("Versions and seeds", rows=rows)


def _stage_rows(stages: Sequence[Run], price: float | None) -> Rows:
    head = ["stage", "loss", "status", "rollouts", "optimizer steps", "tokens", "FLOPs", "hours"]
    totals, rows = [0.0, 0.0, 0.0, 0.0], [head + (["cost"] if price is not None else [])]
    for run in stages:
        tokens, flops, hours = spent(run)
        steps = len(run.series["train/grad_norm"][0]) if "train/grad_norm" in run.series else 0
        cost = hours * max(gpus_of(run.config), 1) * (price or 0.0)
        totals = [total + value for total, value in zip(totals, (tokens, flops, hours, cost), strict=True)]
        facts = [run.name, str(run.config.get("loss_type", "")), str(run.status.get("status", ""))]
        counts = [str(run.status.get("rollouts_done", "")), str(steps)]
        rows.append([*facts, *counts, *_amounts(tokens, flops, hours), *([f"{cost:.2f}"] if price is not None else [])])
    last = [f"{totals[3]:.2f}"] if price is not None else []
    return [*rows, ["together", "", "", "", "", *_amounts(*totals[:3]), *last]]


def _amounts(tokens: float, flops: float, hours: float) -> list[str]:
    return [f"{tokens:,.0f}", f"{flops:.3g}", f"{hours:.3g}"]


def spent(run: Run) -> tuple[float, float, float]:
    """Three numbers: the tokens that were trained on (prompts included), the floating-point operations of training, and
    the hours. The hours of each process are counted from its first record to its last record. So neither the startup of
    a process nor the time between two processes counts.

    Work that a resume made invalid does not count in any of the three numbers.
    """
    tokens = flops = seconds = 0.0
    ranks = max(
        int(str(run.config.get("actor_num_nodes") or 1)) * int(str(run.config.get("actor_num_gpus_per_node") or 1)), 1
    )
    began = last = None
    for record in run.records:
        if record["kind"] == "start" or began is None:
            began = last = float(record["time"])
        seconds += float(record["time"]) - float(last or began)
        last = float(record["time"])
        time = float(record.get("perf/actor_train_time", 0.0))
        tokens += time * float(record.get("perf/actor_train_tok_per_s", 0.0))
        flops += time * float(record.get("perf/actor_train_tflops", 0.0)) * 1e12 * ranks
    return tokens, flops, seconds / 3600


def _scores(journey: Path, run: Run, later: Run | None) -> Iterator[tuple[str, str]]:
    """Yield (name, score with its error) for the model after the stage. If a name comes several times, use its last.

    There are three sources, in this order: the evaluation of the ``later`` stage before its first step (if that stage
    began with this stage's model), the stage's own last evaluation, and `EVALUATIONS`.
    """
    if later is not None and Path(str(later.config.get("hf_checkpoint"))) == _model(run):
        yield from _scores_of(later, 0, lambda steps: steps[0] == BEFORE_TRAINING)
    yield from _scores_of(run, -1, lambda steps: steps[-1] != BEFORE_TRAINING)
    if (source := evaluated(journey, run)) is not None:
        yield from _scores_of(source, -1)


def _scores_of(
    source: Run, place: int, counts: Callable[[np.ndarray], bool] = lambda _: True
) -> Iterator[tuple[str, str]]:
    """(name, score with its error) at ``place`` of each series whose steps ``counts`` accepts."""
    for name in source.scores:
        for each in (name, f"{name}-centred"):
            if each in source.series and name != f"eval/{ANSWERS}" and counts(source.series[each][0]):
                error = source.series.get(f"{each}-stderr")
                yield each.removeprefix("eval/"), score_text(source.series[each][1][place], error and error[1][place])


def _answers(journey: Path, run: Run) -> Iterator[tuple[str, str]]:
    """(prompt, answer of the stage's model) for the prompts of ``--prompts``."""
    from slimelite.samples.sample import ROW
    from slimelite.samples.table import SampleTable

    source = evaluated(journey, run)
    if source is None or ANSWERS not in source.evals:
        return
    rows = (journey / EVALUATIONS / f"{ANSWERS}.jsonl").read_text(encoding="utf-8").splitlines()
    table = SampleTable.from_parquet(max(source.evals[ANSWERS].items())[1])
    for metadata, answer in zip(table.metadata, table.response, strict=True):
        number = int(json.loads(metadata)[ROW].split()[1])  # "row 3 (line 4)"; the table may lack rows
        yield str(json.loads(rows[number])["prompt"]), answer


def _html(title: str, parts: Sequence[Part]) -> str:
    body = [f"<h1>{html.escape(title)}</h1>"]
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>")
        body += [f"<p>{html.escape(part.text)}</p>"] if part.text else []
        for i, row in enumerate(part.rows or ()):
            cells = "".join(f"<{'td' if i else 'th'}>{html.escape(cell)}</{'td' if i else 'th'}>" for cell in row)
            body.append(f"{'' if i else '<table>'}<tr>{cells}</tr>")
        body += ["</table>"] if part.rows else []
        for picture in part.pictures:
            data = base64.b64encode(picture.read_bytes()).decode()
            body.append(f'<p><img alt="{html.escape(picture.parent.name)}" src="data:image/png;base64,{data}"></p>')
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _markdown(title: str, parts: Sequence[Part], folder: Path) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), '<br>') for cell in cells)} |"

    blocks = [f"# {title}"]
    for part in parts:
        blocks += [f"## {part.title}", *([part.text] if part.text else [])]
        if part.rows:
            head, *rows = part.rows
            blocks.append("\n".join([line(head), "|---" * len(head) + "|", *map(line, rows)]))
        for picture in part.pictures:
            place: Any = picture.resolve()
            if place.is_relative_to(folder.resolve()):
                place = place.relative_to(folder.resolve())
            blocks.append(f"![{picture.parent.name}]({place})")
    return "\n\n".join(blocks) + "\n"
