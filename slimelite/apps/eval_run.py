"""Evaluates models without training them: each gets a run folder, with an evaluation "before training" and no rollout.

``results.json`` of the folder has each task's settings and scores as soon as it is done, so that the same command goes
on after it was interrupted, and asks a task only once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slimelite.arguments import Args, EvalArgs, EvalDataset, ModelArgs, make_args
from slimelite.arguments.evaluation import SHIPPED
from slimelite.arguments.flags import group_flags
from slimelite.base.files import FORMAT, check_format, hold, write_text
from slimelite.data.reader import split_path
from slimelite.data.tokenizer import beginning, load_tokenizer
from slimelite.engines.registry import ENGINES
from slimelite.models.checkpoints import read_json
from slimelite.plan.devices import this_machine
from slimelite.preflight import inspect
from slimelite.tracking.run_folder import SOURCES, config_dict
from slimelite.tracking.tracker import Tracker

RESULTS = "results.json"
Results = dict[str, dict[str, Any]]


def evaluation_args(
    model: str, folder: Path, flags: Sequence[str], engine: str = "embedded", chat: bool | None = None
) -> Args:
    """The arguments of a run that evaluates ``model`` and does nothing else; its run folder is ``folder``.

    ``flags``: more words of a command line, which win. ``engine``: ``--rollout-backend``. ``chat``: whether the chat
    template is applied; None: if there is one.

    Raises:
        ValueError: with every problem found, one line each.
    """
    # a task has a length of its own; the flag is for training
    fixed = "--debug-rollout-only --num-rollout 0 --rollout-batch-size 1 --eval-interval 1 --rollout-max-response-len 1"
    # on a GPU an engine that keeps its memory needs a process of its own
    launcher = "local" if ENGINES[engine].releases_memory else "ray"
    words = [*fixed.split(), "--rollout-backend", engine, "--launcher", launcher]
    words += [*flags, "--hf-checkpoint", model, "--run-dir", str(folder)]
    args = make_args(words)  # what is wrong with the flags is said before a tokenizer is loaded, which takes a second
    if chat is None:
        chat = bool(load_tokenizer(str(args.tokenizer)).chat_template)
    return make_args(["--apply-chat-template", *words]) if chat else args


def check(args: Args, model: str) -> list[str]:
    """What keeps an evaluation of ``model`` with ``args`` from starting; warnings are printed.

    ``args`` may be those of the base of a ``model`` that is merged later: what they warn of is not true of the model.
    """
    known = _written(args).get("model", model)
    if known != model:
        return [f"{args.run_dir} has the results of another model, {known}: give --output another folder"]
    findings = inspect(args, this_machine())
    for warning in findings.warnings if args.hf_checkpoint == model else ():
        print(f"slimelite eval: warning: {warning}", file=sys.stderr)
    return findings.problems


def evaluate(args: Args, *, again: bool = False) -> Results:
    """Evaluate the datasets of ``args`` that its run folder has no results of yet (or all, if ``again``).

    Returns:
        for each dataset ever evaluated with these settings ``dataset``, its settings, and ``metrics``.

    Raises:
        ValueError: a worker died, or a dataset cannot be evaluated.
    """
    results = {} if again else known_results(args)
    datasets = {d.name: _plain(dataclasses.asdict(d)) for d in args.eval_datasets}
    todo = [name for name, settings in datasets.items() if results.get(name, {}).get("dataset") != settings]
    if not todo:
        return results
    from slimelite.cluster import ClusterError, launch

    try:
        with hold({"--output": args.run_dir}), Tracker(args) as tracker, ExitStack() as stack:
            with tracker.phase("start") as phase:
                cluster = stack.enter_context(launch(args, phase.update))
            stack.push(tracker.record_failure)
            tracker.banner(cluster.args)
            for name in [name for name in results if name not in todo]:
                tracker.log_eval(-1, results[name]["metrics"], {})  # the banner began the metrics anew
            made_of = _made_of(args, {name: datasets[name] for name in todo})
            for name in todo:
                with tracker.phase("eval") as phase:
                    result = cluster.evaluate(-1, [name]).result(progress=phase.update)
                tracker.log_eval(-1, result.metrics, result.tables)
                results[name] = {"dataset": datasets[name], **made_of[name], "metrics": result.metrics}
                content = {"format": FORMAT, "model": args.hf_checkpoint, "run": _run_settings(args), "tasks": results}
                write_text(Path(args.run_dir) / RESULTS, json.dumps(content, indent=1))
    except ClusterError as error:
        raise ValueError(str(error)) from error
    return results


def known_results(args: Args) -> Results:
    """The results in the run folder that these settings gave, with the model, tasks and rows that are there now."""
    content = _written(args)
    if content.get("run") != _run_settings(args):
        return {}
    tasks: Results = content["tasks"]
    now = _made_of(args, {name: result["dataset"] for name, result in tasks.items()})
    return {name: result for name, result in tasks.items() if result == result | now[name]}


def _written(args: Args) -> dict[str, Any]:
    """The content of the run folder's file of results; empty where there is none."""
    file = Path(args.run_dir) / RESULTS
    content = read_json(file) if file.is_file() else {}
    check_format(file, content.get("format"))
    return content


def _made_of(args: ModelArgs, datasets: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the score of each dataset comes from, beside settings: ``files``, and the ids that its texts begin with."""
    plain = [name for name, dataset in datasets.items() if not dataset["apply_chat_template"]]
    begins = beginning(load_tokenizer(str(args.tokenizer))) if plain else []
    return {
        name: {"files": _files(args, dataset), "begins": begins if name in plain else []}
        for name, dataset in datasets.items()
    }


def _files(args: ModelArgs, dataset: Mapping[str, object]) -> dict[str, list[int]]:
    """Size and time of change [ns] of the files that a score comes from: the model's, the task's, its rows and scorer.

    Any other time counts as a change: a model that is moved to this place may be older than the results.
    """
    task, scorer = str(dataset["task"]), str(dataset["custom_rm_path"]).rpartition(":")[0]
    rows = [split_path(str(dataset[name]))[0] for name in ("path", "examples")]
    files = [*Path(str(args.hf_checkpoint)).glob("*"), *map(Path, [*rows, task, scorer]), SHIPPED / f"{task}.yaml"]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files) if file.is_file()}


def _run_settings(args: Args) -> dict[str, object]:
    """The arguments that are no dataset's: results are those of the same ones."""
    apart = {*SOURCES, "derivations", "notes", "no_effect", "eval_datasets", *(f.name for f in group_flags(EvalArgs))}
    return _plain({name: value for name, value in config_dict(args).items() if name not in apart})


def _plain(values: Mapping[str, object] | EvalDataset) -> dict[str, object]:
    """``values`` as JSON gives them back."""
    content: dict[str, object] = json.loads(json.dumps(values, default=str))
    return content
