"""``slimelite eval``: the scores of models on tasks as a table, with standard errors and paired tests."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from slimelite.apps.compare import Row, print_table, score_text, test_text
from slimelite.apps.comparison import TEST, Facts, against
from slimelite.apps.eval_run import Results, check, evaluate, evaluation_args
from slimelite.apps.runnable import Source, merged, resolve_models
from slimelite.apps.runs import read_runs
from slimelite.arguments import Args
from slimelite.arguments.evaluation import shipped_tasks
from slimelite.base.lifecycle import StopSignals
from slimelite.plan.devices import this_machine

# flag of train.py -> the option that means it
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
    """Run the command; returns the exit status, 2 if something is wrong before the first model is loaded.

    Raises:
        ValueError: a model or a task is not there, or an evaluation failed.
    """
    try:
        return _main(list(argv))
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from error


def _with_options(problem: str) -> str:
    """``problem`` with the options of this command in place of train.py's flags."""
    for flag, name in OPTIONS.items():
        problem = problem.replace(flag, f"--{name.replace('_', '-')}")
    return problem


def _main(words: list[str]) -> int:
    own, more = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = _parser().parse_args(own)
    if not options.tasks.strip(" ,"):
        raise ValueError(f"--tasks names no task: take some of {', '.join(shipped_tasks())}, or YAML files")
    targets = [(source, *_places(source, options.output)) for source in resolve_models(options.models, options.base)]
    folders = [folder for _, folder, _ in targets]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise ValueError(f"two models would have the folder {twice[0]}: evaluate them apart, each with its --output")
    flags = [*_flags(options), *more]
    plan = partial(evaluation_args, engine=options.engine, chat=options.chat)
    # what is wrong with the tasks is said before an adapter or a checkpoint is merged with its base
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
    """The run folder of what is evaluated, and the model that is run."""
    folder = Path(output, *[part for part in Path(source.path).parts[-2:] if part.strip("./")])
    return folder, source.path if source.base is None else str(folder / "model")


def _tokenizer(source: Source) -> list[str]:
    """The flag for an adapter with a tokenizer of its own, which its base may lack."""
    own = source.base is not None and (Path(source.path) / "tokenizer.json").is_file()
    return ["--tokenizer", source.path] if own else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slimelite eval",
        description="Score models on tasks. Answers, settings and scores of each model are in a run folder below "
        "--output, which `slimelite view` and `slimelite compare` read; a task that is done is not done again.",
        epilog=f"tasks: {', '.join(shipped_tasks())}, or YAML files (docs/evaluation.md). After -- come flags "
        "of train.py, such as -- --rollout-num-gpus 8 --launcher ray.",
    )
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="Hugging Face folder, hub id, adapter, checkpoint of --save or run folder; tests are against the first",
    )
    add("--base", metavar="MODEL", help="the model that adapters and checkpoints change, where they do not name it")
    add("--tasks", required=True, metavar="A,B", help="names or files of tasks")
    add("--data", metavar="DIR", help="the rows are files in this folder; without it they come from the hub")
    add("--fewshot", type=int, default=0, metavar="N", help="examples before each question")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the chat template; by default where the tokenizer has one",
    )
    add("--samples", type=int, default=1, metavar="K", help="responses to a prompt, for pass@k; needs a temperature")
    add("--temperature", type=float, metavar="T", help="0, greedy, by default")
    add("--max-tokens", type=int, metavar="N", help="most tokens of a response, in place of each task's own")
    add("--limit", type=int, metavar="N", help="read the first N rows of each task alone")
    add("--seed", type=int, metavar="N", help="seed of the samples")
    add("--engine", default="embedded", help="what samples and scores: embedded, sglang or vllm")
    add("--output", default="runs/eval", metavar="DIR", help="a run folder for each model is made here (%(default)s)")
    add("--again", action="store_true", help="evaluate also what is known")
    add("--json", action="store_true", help="every number as JSON, in place of the table")
    return parser


def _flags(options: argparse.Namespace) -> list[str]:
    """The flags of train.py that the options mean."""
    values = {flag: getattr(options, name) for flag, name in OPTIONS.items() if name != "engine"}
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def _facts(names: Sequence[str], folders: Sequence[str], results: Sequence[Results], tasks: Sequence[str]) -> Facts:
    """``test``: what p is. ``models``: a dict for each, with ``name``, ``folder`` and ``tasks``, whose values have
    ``settings``, ``metrics`` and, from the second model on, ``against_first``.
    """
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
    rows = [row for task in models[0]["tasks"] for row in _rows(models, task)]
    print_table([model["name"] for model in models], [rows], notes)


def _rows(models: Sequence[Facts], task: str) -> Iterator[Row]:
    """The score on a task, pass@k, what was cut off or is missing in it, and the difference to the first model."""
    metrics = [model["tasks"][task]["metrics"] for model in models]
    score = f"eval/{task}"
    powers = [name for name in metrics[0] if name.startswith(f"{score}-pass@") and not name.endswith("-stderr")]
    for name in [score, *powers]:
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
