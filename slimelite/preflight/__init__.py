"""Checks before anything expensive starts: files, columns, labels, one reward, lengths, devices.

A real start and ``--dry-run`` run the same checks; the dry run reads all rows and reports too few GPUs as a warning.
What needs neither torch nor transformers is checked first. If that finds a problem, the rest is left out, because the
imports alone would keep the answer waiting for seconds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slimelite.arguments import Args, ArgumentError, EvalArgs, ModelArgs, TrackingArgs, make_args
from slimelite.base.heap import loading
from slimelite.base.registry import function
from slimelite.engines.registry import ENGINES
from slimelite.loop import read_evaluations
from slimelite.models.checkpoints import model_folder
from slimelite.plan.devices import Machine, this_machine
from slimelite.plan.report import plan_lines
from slimelite.preflight.findings import Findings, fill, format_report
from slimelite.preflight.gpus import check_devices, check_torch

UNCHECKED = "the tokenizer, the prompts as the model sees them and the memory are checked once the problems are mended"


@loading()
def preflight(args: Args) -> int:
    """Run all checks of ``args`` and print the dry run's report, or warnings and problems; returns the exit status."""
    machine = this_machine(args.plan_gpu)
    findings = inspect(args, machine)
    if args.dry_run:
        planned = args
        if args.rollout_max_prompt_len is None and findings.longest_prompt:
            planned = replace(args, rollout_max_prompt_len=findings.longest_prompt)
        print(format_report(args, findings, plan_lines(planned, machine) if findings.complete else []))
    else:
        lines = [*(f"warning: {warning}" for warning in findings.warnings), *findings.problems]
        for line in lines:
            print(f"train.py: {line}", file=sys.stderr)
    return 2 if findings.problems else 0


def problems(args: Args) -> list[str]:
    """The problems of ``args``, which have others already, that the checks without torch find on this machine."""
    try:
        machine = this_machine(args.plan_gpu)
    except ValueError:  # of --plan-gpu, which the parser has said already
        machine = this_machine()
    return inspect(args, machine, files_only=True).problems


@loading()
def problems_of(argv: list[str]) -> list[str]:
    """The problems of a command line that a start with it would find before anything is loaded."""
    try:
        args = make_args(argv)
    except ArgumentError as error:
        return error.problems
    return inspect(args, this_machine(args.plan_gpu)).problems


def inspect(args: Args, machine: Machine, *, files_only: bool = False) -> Findings:
    """Every check that can be made without loading a model.

    Of those that need neither torch nor transformers, one that fails does not hide the others. The rest comes only if
    none of them failed, and never with ``files_only``.
    """
    from slimelite.preflight.inputs import InputChecks  # it needs Arrow, which the parser does without

    findings = Findings()
    try:
        check_devices(args, machine, findings)
        _check_packages(args, findings)
        _check_run_folder(args, findings)
        findings.problems += output_problems(args)
        _check_evaluations(args, findings)
        checks = InputChecks(args, findings)
        checks.read_files()
        if findings.problems or files_only:
            findings.warnings += [UNCHECKED] * args.dry_run
            return findings
        check_torch(args, machine, findings)
        checks.load()
        findings.complete = True
    except OSError as error:  # such as a folder that cannot be read; the text names it
        findings.problems.append(str(error))
    return findings


def _check_packages(args: Args, findings: Findings) -> None:
    engine = args.engine_kind
    runs_engine = args.job.engines == "own"
    wanted = (
        ("ray", not args.job.local, "use --launcher local"),
        (
            engine.package,
            runs_engine and not args.plan_gpu,
            "docs/install.md says how; or take --rollout-backend embedded",
        ),
        ("wandb", args.use_wandb, "pip install wandb"),
        ("tensorboard", args.use_tensorboard, "pip install tensorboard"),
    )
    for package, needed, remedy in wanted:
        if package and needed and importlib.util.find_spec(package) is None:
            findings.problems.append(f"{package} is not installed: {remedy}")
    if runs_engine and engine.lacking and args.job.gpus and not args.plan_gpu:
        findings.warnings += function(engine.lacking, ENGINES.option, engine.name)()
    kept_away = [name for name in engine.memory.unset if name in os.environ]
    if runs_engine and args.offload_rollout and kept_away:
        findings.warnings.append(
            f"{' and '.join(kept_away)} in the environment: trainers have it, and {engine.name} servers do not, as "
            "what they release their memory with (torch_memory_saver) cannot bear expandable segments"
        )


def _check_run_folder(args: TrackingArgs, findings: Findings) -> None:
    """Refuse a folder that holds another run's metrics; with --load it is the same run, even without a checkpoint."""
    from slimelite.tracking.metrics_file import FILE_NAME

    metrics = Path(args.run_dir) / FILE_NAME
    if (args.load and not args.finetune) or not metrics.is_file() or args.num_rollout == 0:  # `slimelite eval` goes on
        return
    # a run that failed before its first rollout left no metrics that could be mixed up
    if any('"kind": "start"' not in line for line in metrics.read_text(encoding="utf-8").splitlines() if line):
        findings.problems.append(
            f"--run-dir {args.run_dir} holds another run: name a new folder, or, if that run is over, remove this one; "
            "to go on with it, give its checkpoints as --load"
        )


def _check_evaluations(args: EvalArgs, findings: Findings) -> None:
    try:
        read_evaluations(args)
    except ValueError as error:
        findings.problems.append(str(error))


def output_problems(args: Args) -> Iterator[str]:
    """A message for each place that cannot be written to; a test folder is made and removed again."""
    folders = {
        "--run-dir": args.run_dir,
        "--save": args.save,
        "--update-weight-disk-dir": args.update_weight_disk_dir,
        "--tensorboard-dir": args.tensorboard_dir if args.use_tensorboard else None,
        "--wandb-dir": args.wandb_dir if args.use_wandb else None,
    }
    places = [(option, Path(folder).absolute()) for option, folder in folders.items() if folder]
    if args.ci_save_grad_norm:
        places.append(("--ci-save-grad-norm", Path(args.ci_save_grad_norm).absolute().parent))
    templates: list[tuple[str, str | None, int | str]] = [
        ("--save-hf", args.save_hf, 0),
        # an evaluation has a name instead of a number
        ("--save-debug-rollout-data", args.save_debug_rollout_data, "eval_0" if args.eval_interval else 0),
    ]
    for option, template, rollout_id in templates:
        try:
            target = fill(option, template, rollout_id).absolute() if template else None
        except ValueError as error:
            yield str(error)
            continue
        if target is not None:
            places.append((option, target.parent))
        if target is not None and template is not None and option == "--save-hf":
            yield from _in_the_way(args, target)
            if args.save_best:
                yield from _in_the_way(args, model_folder(template, "best"))
    for option, place in places:
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        try:
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            yield f"{option}: {place} cannot be written to: {error.strerror} ({there})"


def _in_the_way(args: ModelArgs, target: Path) -> Iterator[str]:
    """Problems where ``--save-hf`` would replace a file, or a model that the run reads."""
    if target.exists() and not target.is_dir():
        yield f"--save-hf: {target} is a file; name a folder"
    for option, model in (("--hf-checkpoint", args.hf_checkpoint), ("--tokenizer", args.tokenizer)):
        if target.is_dir() and model and Path(model).is_dir() and target.samefile(model):
            yield f"--save-hf: {target} is {option} itself, and would be written over; name another folder"
            return
