"""Checks of a run before anything expensive starts: files, columns, labels, one reward, lengths, devices.

A real start and ``--dry-run`` run the same checks. The dry run reads all rows. If this machine has too few GPUs, the
dry run only warns, because the run may start elsewhere. Checks that need neither torch nor transformers run first. If
one of them finds a problem, the checks that need torch or transformers are left out, because importing these two
packages would delay the answer by seconds.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from slimelite.arguments import Args, ArgumentError, ClusterArgs, ModelArgs, make_args
from slimelite.base.heap import loading
from slimelite.base.registry import function
from slimelite.engines.registry import ENGINES
from slimelite.loop import read_evaluations
from slimelite.models.checkpoints import MARKER, METADATA, STATE_FILE, model_folder, read_state, without_moments
from slimelite.models.hub import make_room, refusal
from slimelite.plan.cuda import described, generation_problems, torch_problems
from slimelite.plan.devices import Machine, generation, this_machine
from slimelite.preflight.findings import Findings, fill, format_report, one_line

PICKLE_END = b"."
# above this learning rate of AdamW, a run cannot learn; the highest rate that worked (docs/learning_rates.md) is 5e-3
HIGH_RATE = 0.1
UNCHECKED = "not checked until the problems are fixed: tokenizer, memory, and the prompts as the model sees them"


@loading()
def preflight(args: Args) -> int:
    """Run all checks of ``args``. Print the dry run's report, or warnings and problems. Returns the exit status."""
    machine = this_machine(args.plan_gpu)
    findings = inspect(args, machine)
    if args.dry_run:
        from slimelite.plan.report import plan_lines  # imported only here, because a real start does not need it

        planned = args
        if args.rollout_max_prompt_len is None and findings.longest_prompt:
            planned = replace(args, rollout_max_prompt_len=findings.longest_prompt)
        print(format_report(args, findings, plan_lines(planned, machine) if findings.complete else []))
    else:
        for note in findings.notes:
            print(f"train.py: {note}", file=sys.stderr)
        for warning in findings.warnings:
            print(f"train.py: warning: {warning}", file=sys.stderr)
        for problem in findings.problems:
            print(f"train.py: {problem}", file=sys.stderr)
    return 2 if findings.problems else 0


def problems(args: Args) -> list[str]:
    """The problems that the checks without torch find in ``args``. This function is called only after the parser has
    found other problems."""
    try:
        machine = this_machine(args.plan_gpu)
    except ValueError:  # --plan-gpu is wrong; the parser has already reported it
        machine = this_machine()
    return inspect(args, machine, files_only=True).problems


@loading()
def problems_of(argv: list[str]) -> list[str]:
    """The problems that a run with this command line would find before it loads a model."""
    try:
        args = make_args(argv)
    except ArgumentError as error:
        return error.problems
    return inspect(args, this_machine(args.plan_gpu)).problems


def inspect(args: Args, machine: Machine, *, files_only: bool = False) -> Findings:
    """Run every check that is possible without loading a model.

    The checks that need neither torch nor transformers come first. All these first checks run, even if one of them
    fails. The later checks run only if none of the first checks failed, and never with ``files_only``.
    """
    from slimelite.preflight.inputs import (
        InputChecks,
    )  # imported here because it needs Arrow, which the parser does not need

    findings = Findings()
    try:
        check_devices(args, machine, findings)
        _check_packages(args, findings)
        findings.problems += _output_problems(args)
        findings.warnings += _older_checkpoints(args)
        findings.problems += _without_moments(args)
        findings.warnings += _high_rates(args)
        if args.use_prometheus:
            findings.problems += _port_problems(args)
        try:
            read_evaluations(args)
        except ValueError as error:
            findings.problems.append(str(error))
        checks = InputChecks(args, findings)
        checks.read_files()
        if findings.problems or files_only:
            findings.warnings += [UNCHECKED] * args.dry_run
            return findings
        check_torch(args, machine, findings)
        checks.load()
        if args.dry_run and args.job.trains:
            _try_own(args, findings)
        if args.push_to_hub and not findings.problems:
            with findings.blaming("--push-to-hub"):
                make_room(args.push_to_hub, private=args.hub_private, create=not args.dry_run)
        if args.save_hf and args.hf_checkpoint and not args.dry_run:
            from slimelite.tracking.card import fetch_card

            fetch_card(args.hf_checkpoint)
        findings.complete = True
    except OSError as error:  # such as a folder that cannot be read; the error names the folder
        findings.problems.append(str(error))
    return findings


def _older_checkpoints(args: Args) -> Iterator[str]:
    """A warning if a new run saves into a folder that has checkpoints of another run."""
    marker = Path(args.save or "") / MARKER
    if args.save and args.job.trains and not args.resume_directory and marker.is_file():
        newest = marker.read_text(errors="replace").strip()
        yield (
            f"--save {args.save} has the checkpoint of rollout {newest:.20} of another run. This run starts from the "
            f"beginning, and will replace checkpoints with the same number. To continue the other run, add --load "
            f"{args.save}. Otherwise name another folder"
        )


def _high_rates(args: Args) -> Iterator[str]:
    """A warning for each learning rate of AdamW that no model survives, such as 3 for 3e-6."""
    rates = {"--lr": args.lr, **({"--critic-lr": args.critic_lr} if args.use_critic else {})}
    for flag, rate in rates.items() if args.job.trains else ():
        if rate > HIGH_RATE:
            yield (
                f"{flag} {rate:g} is very high: each optimizer step of AdamW changes each weight by about the learning "
                "rate, and most weights of a model are smaller than 0.1; docs/learning_rates.md lists rates that worked"
            )


def _without_moments(args: Args) -> Iterator[str]:
    """A message if the run should resume an optimizer that the checkpoint does not contain. The kind of the optimizer
    is checked when the checkpoint is read."""
    if args.resume_directory is None or not args.job.trains or args.no_load_optim or args.finetune:
        return
    folder = Path(args.resume_directory)
    for part in (folder, *([folder / "critic"] if args.use_critic else [])):
        if not ((part / METADATA).is_file() and (part / STATE_FILE).is_file()):
            continue  # the code that reads the checkpoint reports the error
        # the file has the names of all tensors as plain text, and an import of torch would take seconds
        with suppress(ValueError):  # a damaged file; the code that reads the checkpoint reports it
            metadata = (part / METADATA).read_bytes()
            whole = metadata.endswith(PICKLE_END)  # else the file is damaged
            if whole and read_state(part).get("steps") and b"optimizer." not in metadata:
                yield f"--load: {without_moments(part)}"


def _try_own(args: Args, findings: Findings) -> None:
    """Try the user's estimator and loss. A failing loss is only a warning, because made-up rows may lack data."""
    from slimelite.preflight.learning import try_estimator, try_loss  # they need numpy

    try:
        if args.job.loss == "policy":
            fact, warning = try_estimator(args) or (None, None)
            findings.facts += filter(None, [fact])
            findings.warnings += filter(None, [warning])
    except ValueError as error:
        findings.problems.append(one_line(error))
    try:
        findings.facts += filter(None, [try_loss(args)])
    except ValueError as error:
        findings.warnings.append(one_line(error))


def _check_packages(args: Args, findings: Findings) -> None:
    engine = args.engine_kind
    runs_engine = args.job.engines == "own"
    wanted = (
        ("ray", args.launcher == "ray", "use --launcher local"),
        (
            engine.package,
            runs_engine and not args.plan_gpu,
            "see docs/install.md, or use --rollout-backend embedded",
        ),
        ("wandb", args.use_wandb, "pip install wandb"),
        ("tensorboard", args.use_tensorboard, "pip install tensorboard"),
        ("prometheus_client", args.use_prometheus, "pip install prometheus_client"),
    )
    for package, needed, remedy in wanted:
        if package and needed and importlib.util.find_spec(package) is None:
            findings.problems.append(f"{package} is not installed: {remedy}")
    if runs_engine and engine.lacking and args.job.gpus and not args.plan_gpu:
        findings.warnings += function(engine.lacking, ENGINES.option, engine.name)()
    if not (runs_engine and args.offload_rollout):
        return
    if kept_away := [name for name in engine.memory.unset if name in os.environ]:
        findings.warnings.append(
            f"{' and '.join(kept_away)} in the environment is passed to trainers, but not to {engine.name} servers: "
            "torch_memory_saver, which releases their memory, does not work with expandable segments"
        )


def _output_problems(args: Args) -> Iterator[str]:
    """A message if the run folder contains another run, and for each folder that cannot be written to. The check makes
    a test folder and removes it.
    """
    from slimelite.tracking.metrics_file import FILE_NAME

    if args.push_to_hub and (why := refusal(args.push_to_hub)) is not None:
        yield f"--push-to-hub: {why}"
    metrics = Path(args.run_dir) / FILE_NAME
    # with --load it is the same run, even without a checkpoint; `slimelite eval` adds to a run folder
    goes_on = (args.load and not args.finetune) or args.num_rollout == 0
    if not goes_on and metrics.is_file():
        lines = metrics.read_text(encoding="utf-8").splitlines()
        # a run that failed before its first rollout left no metrics that could be mixed up
        if any('"kind": "start"' not in line for line in lines if line):
            yield (
                f"--run-dir {args.run_dir} contains another run: name a new folder, or remove this folder if the other "
                "run has ended; to resume the other run, give its checkpoints as --load"
            )
    places: dict[str, str | Path | None] = {
        "--run-dir": args.run_dir,
        "--save": args.save,
        "--update-weight-disk-dir": args.update_weight_disk_dir,
        "--tensorboard-dir": args.tensorboard_dir if args.use_tensorboard else None,
        "--wandb-dir": args.wandb_dir if args.use_wandb else None,
        "--ci-save-grad-norm": Path(args.ci_save_grad_norm).absolute().parent if args.ci_save_grad_norm else None,
    }
    templates: list[tuple[str, str | None, int | str]] = [
        ("--save-hf", args.save_hf, 0),
        # an evaluation has a name instead of a number
        ("--save-debug-rollout-data", args.save_debug_rollout_data, "eval_0" if args.eval_interval else 0),
    ]
    for option, template, rollout_id in templates:
        if not template:
            continue
        try:
            target = fill(option, template, rollout_id).absolute()
        except ValueError as error:
            yield str(error)
            continue
        places[option] = target.parent
        if option == "--save-hf":
            yield from _in_the_way(args, target)
            if args.save_best:
                yield from _in_the_way(args, model_folder(template, "best"))
    for option, folder in places.items():
        if not folder:
            continue
        there = place = Path(folder).absolute()
        while not there.exists():
            there = there.parent
        try:
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            yield f"{option}: {place} cannot be written to: {error.strerror} ({there})"


def _port_problems(args: Args) -> Iterator[str]:
    """A message if ``/metrics`` cannot be served on ``--prometheus-port``."""
    from slimelite.tracking.writers import port_problem

    family = socket.AF_INET6 if ":" in args.prometheus_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # the server sets this option too: a closed port can be used again at once
        try:
            tried.bind((args.prometheus_host, args.prometheus_port))
        except OSError as error:
            yield port_problem(args, error)


def _in_the_way(args: ModelArgs, target: Path) -> Iterator[str]:
    """Problems if ``--save-hf`` would replace a file, or a model that the run reads."""
    if target.exists() and not target.is_dir():
        yield f"--save-hf: {target} is a file; name a folder"
    for option, model in (("--hf-checkpoint", args.hf_checkpoint), ("--tokenizer", args.tokenizer)):
        if target.is_dir() and model and Path(model).is_dir() and target.samefile(model):
            yield f"--save-hf: {target} is the folder of {option}, and would be overwritten; name another folder"
            return


def check_devices(args: Args, machine: Machine, findings: Findings) -> None:
    """Check without torch whether this machine has enough GPUs, and whether the GPUs are new enough."""
    ranks = args.training_ranks if args.job.trains else 0
    engines = args.rollout_num_gpus if args.job.engines else 0
    needed = max(ranks, engines) if args.colocate else ranks + engines
    shared = "shared by" if args.colocate else "for"
    findings.facts.append(
        f"{needed} {args.device} device(s) {shared} {ranks} training rank(s) and {args.num_engines} engine(s)"
    )
    if not args.job.gpus:
        return
    if machine.capability and (args.plan_gpu or not _elsewhere(args)):
        _check_generation(args, machine.capability, findings)
    if args.plan_gpu:
        findings.problems += _planned_devices(args, machine, needed, ranks, engines)
        if needed < (named := machine.gpus * (nodes := machine.nodes or args.actor_num_nodes)):
            findings.warnings.append(
                f"--plan-gpu {args.plan_gpu}: {nodes} node(s) have {named} GPUs, but the run uses {needed}: raise "
                "--actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus, or name fewer GPUs"
            )
    elif needed > machine.gpus and not _elsewhere(args):
        what = f"{needed} GPUs are needed ({ranks} for training, {engines} for engines, colocate={args.colocate})"
        remedy = "lower --actor-num-gpus-per-node or --rollout-num-gpus" if machine.gpus else "use --device cpu"
        message = f"{what}, but this machine has {machine.gpus or 'none'}: {remedy}"
        (findings.warnings if args.dry_run else findings.problems).append(message)


def _planned_devices(args: Args, machine: Machine, needed: int, ranks: int, engines: int) -> Iterator[str]:
    """A message if the run needs more GPUs than the nodes of ``--plan-gpu`` have."""
    each, nodes = machine.gpus, machine.nodes or args.actor_num_nodes
    if ranks and args.actor_num_gpus_per_node > each:
        yield (
            f"--actor-num-gpus-per-node {args.actor_num_gpus_per_node}: a node of --plan-gpu {args.plan_gpu} has "
            f"{each} GPU(s): give at most {each}, or plan for a larger node"
        )
    elif ranks and args.actor_num_nodes > nodes:
        yield f"--actor-num-nodes {args.actor_num_nodes}: --plan-gpu {args.plan_gpu} has {nodes} node(s)"
    elif needed > each * nodes:
        colocate = "" if args.colocate or not (ranks and engines) else "give --colocate, or "
        name = str(args.plan_gpu).partition(":")[0]
        yield (
            f"{needed} GPUs are needed ({ranks} for training, {engines} for engines, "
            f"{'with' if args.colocate else 'without'} --colocate), and the {nodes} node(s) of --plan-gpu "
            f"{args.plan_gpu} have {each * nodes}: {colocate}lower --rollout-num-gpus or the GPUs of training, or name "
            f"more nodes: --plan-gpu {name}:{each}x{-(-needed // each)}"
        )


def check_torch(args: Args, machine: Machine, findings: Findings) -> None:
    """Check that torch can use the GPUs. If this machine joins a Ray cluster, nothing is checked here, because the
    GPUs may be in other machines. The processes on these machines check their own GPUs."""
    if args.job.gpus and not args.dry_run and not _elsewhere(args):
        findings.problems += torch_problems(machine.driver)


def _elsewhere(args: ClusterArgs) -> bool:
    """Whether Ray counts the GPUs of all nodes, instead of this check."""
    return args.actor_num_nodes > 1 or "RAY_ADDRESS" in os.environ


def _check_generation(args: Args, capability: tuple[int, int], findings: Findings) -> None:
    attention = generation(capability).attention
    if attention is None:
        findings.problems += generation_problems(capability)
    else:
        trainer, engine = attention
        own = f", {engine} in SGLang" if args.job.engines and args.rollout_backend == "sglang" else ""
        findings.facts.append(f"{described(capability)}: attention by {trainer} in the trainer{own}")
