"""``slimelite eval``: the scores of models on tasks as a table, with standard errors and paired tests.

Each model gets a run folder, with an evaluation "before training" and no rollout. ``results.json`` in the folder gets
each task's settings and scores as soon as the task is done. After an interruption, the same command runs only the tasks
that are not done yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from slimelite.apps.compare import TEST, Facts, against, test_text
from slimelite.apps.runnable import Source, merged, resolve_models
from slimelite.apps.runs import read_runs
from slimelite.apps.tables import Row, print_table, score_text
from slimelite.arguments import Args, EvalArgs, EvalDataset, ModelArgs, make_args
from slimelite.arguments.evaluation import SHIPPED, shipped_tasks
from slimelite.arguments.flags import group_flags
from slimelite.base.files import FORMAT, check_format, hold, write_text
from slimelite.base.lifecycle import StopSignals
from slimelite.data.reader import split_path
from slimelite.data.tokenizer import beginning, load_tokenizer
from slimelite.engines.registry import ENGINES
from slimelite.models.checkpoints import read_json
from slimelite.plan.devices import this_machine
from slimelite.preflight import inspect
from slimelite.tracking.run_folder import SOURCES, config_dict
from slimelite.tracking.tracker import Tracker

# flag of train.py -> the option of this command with the same meaning
OPTIONS = {
    "--eval-tasks": "tasks",
    "--eval-task-data": "data",
    "--eval-fewshot": "fewshot",
    "--eval-limit": "limit",
    "--n-samples-per-eval-prompt": "samples",
    "--eval-temperature": "temperature",
    "--eval-max-response-len": "max_tokens",
    "--rollout-seed": "seed",
    "--rollout-backend": "engine",
}


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status. The status is 2 if a problem is found before the first model is loaded.

    Raises:
        ValueError: a model or a task does not exist, or an evaluation failed.
    """
    try:
        return _main(list(argv))
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from error


def _with_options(problem: str) -> str:
    """Replace train.py's flags in ``problem`` with the options of this command."""
    for flag, name in OPTIONS.items():
        problem = problem.replace(flag, f"--{name.replace('_', '-')}")
    return problem


def _main(words: list[str]) -> int:
    own, more = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = _parser().parse_args(own)
    if not options.tasks.strip(" ,"):
        raise ValueError(f"--tasks names no task: choose from {', '.join(shipped_tasks())}, or YAML files")
    targets = [(source, *_places(source, options.output)) for source in resolve_models(options.models, options.base)]
    folders = [folder for _, folder, _ in targets]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ValueError(
            f"two models would use the folder {twice[0]}: evaluate them in two commands, each with its own --output"
        )
    flags = [*_flags(options), *more]
    plan = partial(evaluation_args, engine=options.engine, chat=options.chat)
    # report problems of the tasks before an adapter or a checkpoint is merged with its base
    drafts = [
        (plan(source.base or source.path, folder, [*_tokenizer(source), *flags]), model)
        for source, folder, model in targets
    ]
    plans = list[Args]()
    problems = list(dict.fromkeys(problem for draft in drafts for problem in check(*draft)))
    dtype = "bfloat16" if this_machine().gpus else "float32"
    for source, folder, model in targets if not problems else ():
        if source.base is not None:
            merged(source, Path(model), dtype)
        plans.append(plan(model, folder, flags))
        problems += check(plans[-1], model) if source.base is not None else []
    if problems:
        print("\n".join(f"slimelite eval: {_with_options(problem)}" for problem in problems), file=sys.stderr)
        return 2
    with StopSignals() as stop:
        results = [evaluate(args, again=options.again) for args in plans]
        tasks = [dataset.name for dataset in plans[0].eval_datasets]
        names = [str(folder.relative_to(options.output)) for folder in folders]
        facts = _facts(names, list(map(str, folders)), results, tasks)
        if options.json:
            print(json.dumps(facts, indent=1))
        else:
            _show(facts)
        return 0
    return stop.status


def _places(source: Source, output: str) -> tuple[Path, str]:
    """The run folder of an evaluation, and the model that is evaluated."""
    folder = Path(output, *[part for part in Path(source.path).parts[-2:] if part.strip("./")])
    return folder, source.path if source.base is None else str(folder / "model")


def _tokenizer(source: Source) -> list[str]:
    """The flag for an adapter that has its own tokenizer, because the adapter's base model may have none."""
    own = source.base is not None and (Path(source.path) / "tokenizer.json").is_file()
    return ["--tokenizer", source.path] if own else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slimelite eval",
        description="Score models on tasks. Each model gets a run folder below --output, with its answers, settings "
        "and scores. `slimelite view` and `slimelite compare` read these folders. A task that already has results is "
        "skipped.",
        epilog=f"tasks: {', '.join(shipped_tasks())}, or YAML files (docs/evaluation.md). After -- write flags "
        "of train.py, such as -- --rollout-num-gpus 8 --launcher ray.",
    )
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="Hugging Face folder, hub id, adapter, checkpoint of --save or run folder; the tests compare each model "
        "with the first one",
    )
    add("--base", metavar="MODEL", help="use this base model instead of the one that an adapter or checkpoint names")
    add("--tasks", required=True, metavar="A,B", help="names or YAML files of tasks")
    add(
        "--data",
        metavar="DIR",
        help="the rows are read from files in this folder; without this flag they come from the hub",
    )
    add("--fewshot", type=int, default=0, metavar="N", help="examples before each question")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the chat template (default: only if the tokenizer has one)",
    )
    add("--samples", type=int, default=1, metavar="K", help="responses to a prompt, for pass@k; needs --temperature")
    add("--temperature", type=float, metavar="T", help="sampling temperature (default: 0, greedy decoding)")
    add("--max-tokens", type=int, metavar="N", help="maximum tokens of a response, instead of each task's own limit")
    add("--limit", type=int, metavar="N", help="read only the first N rows of each task")
    add("--seed", type=int, metavar="N", help="seed of the samples")
    add("--engine", default="embedded", help="inference engine: embedded, sglang or vllm")
    add(
        "--output",
        default="runs/eval",
        metavar="DIR",
        help="folder for the run folders of the models (default: %(default)s)",
    )
    add("--again", action="store_true", help="also evaluate the tasks that already have results")
    add("--json", action="store_true", help="print every number as JSON, instead of the table")
    return parser


def _flags(options: argparse.Namespace) -> list[str]:
    """The flags of train.py that correspond to the options."""
    values = {flag: getattr(options, name) for flag, name in OPTIONS.items() if name != "engine"}
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def _facts(names: Sequence[str], folders: Sequence[str], results: Sequence[Results], tasks: Sequence[str]) -> Facts:
    """The dict that ``--json`` prints. ``test``: the meaning of the p-values. ``models``: a dict for each model, with
    ``name``, ``folder`` and ``tasks``. The values of ``tasks`` have ``settings``, ``metrics`` and, from the second
    model on, ``against_first``."""
    runs, models = read_runs(folders), list[Facts]()
    for name, run, known in zip(names, runs, results, strict=True):
        by_task: dict[str, Facts] = {}
        for task in tasks:
            by_task[task] = {"settings": known[task]["dataset"], "metrics": known[task]["metrics"]}
            if models:
                by_task[task]["against_first"] = against(runs[0], run, task)
        models.append({"name": name, "folder": str(run.folder), "tasks": by_task})
    return {"test": TEST, "models": models}


def _show(facts: Facts) -> None:
    models = facts["models"]
    tests = f" p: {facts['test']}." if len(models) > 1 else ""
    notes = [
        f"±: standard error, clustered by prompt.{tests}",
        "look at the answers: slimelite view " + " ".join(model["folder"] for model in models),
    ]
    rows = [row for task in models[0]["tasks"] for row in _rows(models, task)] + _core(models)
    print_table([model["name"] for model in models], [rows], notes)


def _core(models: Sequence[Facts]) -> list[Row]:
    """The mean of the centred scores over tasks, as in CORE: 0 is random guessing. The result is empty if fewer than
    two tasks have answer choices."""
    scores = [
        {task: facts["metrics"].get(f"eval/{task}-centred") for task, facts in model["tasks"].items()}
        for model in models
    ]
    named = [task for task, score in scores[0].items() if score is not None]
    means = [statistics.fmean(each[task] for task in named) for each in scores] if len(named) > 1 else []
    return [(f"mean of {len(named)} centred", [score_text(mean, None) for mean in means])] if means else []


def _rows(models: Sequence[Facts], task: str) -> Iterator[Row]:
    """The table rows of a task: the score, pass@k, answers that were cut off or are missing, and the difference from
    the first model."""
    metrics = [model["tasks"][task]["metrics"] for model in models]
    score = f"eval/{task}"
    powers = [name for name in metrics[0] if name.startswith(f"{score}-pass@") and not name.endswith("-stderr")]
    centred = [f"{score}-centred"] if f"{score}-centred" in metrics[0] else []
    for name in [score, *centred, *powers]:
        values = [score_text(each[name], each.get(f"{name}-stderr")) for each in metrics]
        yield name.removeprefix("eval/"), values
    cut = [each[f"{score}-truncated_ratio"] for each in metrics]
    if any(cut):
        yield "  cut off", [f"{share:.0%}" for share in cut]
    failed = [each.get(f"{score}/failed_prompts", 0.0) for each in metrics]
    if any(failed):
        yield "  prompts without an answer", [f"{number:g}" for number in failed]
    if len(models) > 1:
        tests = [test_text(model["tasks"][task]["against_first"]) for model in models[1:]]
        yield f"  − {models[0]['name']}", ["", *tests]


RESULTS = "results.json"
Results = dict[str, dict[str, Any]]


def evaluation_args(
    model: str, folder: Path, flags: Sequence[str], engine: str = "embedded", chat: bool | None = None
) -> Args:
    """The arguments of a run that only evaluates ``model`` and has the run folder ``folder``.

    ``flags``: additional flags of train.py, which override the flags that this function sets. ``engine``:
    ``--rollout-backend``. ``chat``: whether the chat template is applied. None: the template is applied if the model
    has one.

    Raises:
        ValueError: some arguments are wrong. The message has one line for each problem.
    """
    # each task has its own response length; this --rollout-max-response-len is only for training
    fixed = "--debug-rollout-only --num-rollout 0 --rollout-batch-size 1 --eval-interval 1 --rollout-max-response-len 1"
    # on a GPU, an engine that does not release its memory needs its own process
    launcher = "local" if ENGINES[engine].releases_memory else "ray"
    words = [*fixed.split(), "--rollout-backend", engine, "--launcher", launcher]
    words += [*flags, "--hf-checkpoint", model, "--run-dir", str(folder)]
    args = make_args(words)  # report wrong flags before a tokenizer is loaded, which takes a second
    if chat is None:
        chat = bool(load_tokenizer(str(args.tokenizer)).chat_template)
    return make_args(["--apply-chat-template", *words]) if chat else args


def check(args: Args, model: str) -> list[str]:
    """The problems that prevent an evaluation of ``model`` with ``args``. Warnings are printed.

    If ``model`` is merged only after this check, ``args`` names its base model. Warnings are then not printed, because
    they need not apply to the merged model.
    """
    known = _written(args.run_dir).get("model", model)
    if known != model:
        return [f"{args.run_dir} has the results of another model, {known}: name another folder with --output"]
    findings = inspect(args, this_machine())
    for warning in findings.warnings if args.hf_checkpoint == model else ():
        print(f"slimelite eval: warning: {warning}", file=sys.stderr)
    return findings.problems


def evaluate(args: Args, *, again: bool = False) -> Results:
    """Evaluate the datasets of ``args`` whose results are not in the run folder yet. ``again``: evaluate all datasets,
    even if their results are known.

    Returns:
        dataset -> result, for each dataset that was ever evaluated with these settings. A result has the fields
            ``metrics`` and ``dataset`` (the settings of the dataset).

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
                tracker.log_eval(-1, results[name]["metrics"], {})  # `banner` started the metrics anew
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
    """The results in the run folder for these settings, if the model, the tasks and their data rows are unchanged."""
    content = _written(args.run_dir)
    if content.get("run") != _run_settings(args):
        return {}
    tasks: Results = content["tasks"]
    now = _made_of(args, {name: result["dataset"] for name, result in tasks.items()})
    return {name: result for name, result in tasks.items() if result == result | now[name]}


def _written(run_dir: str) -> dict[str, Any]:
    """The content of ``results.json`` in the run folder; empty if the file does not exist."""
    file = Path(run_dir) / RESULTS
    content = read_json(file) if file.is_file() else {}
    check_format(file, content.get("format"))
    return content


def _made_of(args: ModelArgs, datasets: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The inputs of each dataset's score besides the settings: ``files``, and ``begins``, the token ids at the start
    of each text."""
    plain = [name for name, dataset in datasets.items() if not dataset["apply_chat_template"]]
    begins = beginning(load_tokenizer(str(args.tokenizer))) if plain else []
    return {
        name: {"files": _files(args, dataset), "begins": begins if name in plain else []}
        for name, dataset in datasets.items()
    }


def _files(args: ModelArgs, dataset: Mapping[str, object]) -> dict[str, list[int]]:
    """Size and modification time [ns] of the files that a score depends on: the files of the model, of the task, of the
    task's data rows and of the task's scorer.

    A different modification time counts as a change, even an earlier time: a model that was moved to this path may be
    older than the results.
    """
    task, scorer = str(dataset["task"]), str(dataset["custom_rm_path"]).rpartition(":")[0]
    rows = [split_path(str(dataset[name]))[0] for name in ("path", "examples")]
    files = [*Path(str(args.hf_checkpoint)).glob("*"), *map(Path, [*rows, task, scorer]), SHIPPED / f"{task}.yaml"]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files) if file.is_file()}


def _run_settings(args: Args) -> dict[str, object]:
    """The arguments that do not belong to a dataset. Results are valid only if these arguments are unchanged."""
    apart = {*SOURCES, "derivations", "notes", "no_effect", "eval_datasets", *(f.name for f in group_flags(EvalArgs))}
    return _plain({name: value for name, value in config_dict(args).items() if name not in apart})


def _plain(values: Mapping[str, object] | EvalDataset) -> dict[str, object]:
    """``values`` after a round trip through JSON."""
    content: dict[str, object] = json.loads(json.dumps(values, default=str))
    return content
