"""Checks of a run's models before it starts: can each be built, do its weights fit, does the engine compute it?

A run on Ray makes them in its first trainer's process, which needs torch anyway; train.py's own process does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from slimelite.arguments import Args
from slimelite.base.registry import function
from slimelite.engines.registry import ENGINES
from slimelite.models.checkpoints import STATE_FILE
from slimelite.training.loading import inspect_model


def inspect_models(args: Args, broken: Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Build policy, critic, reference and teacher without their weights.

    ``broken``: flags whose models are left out, since they have a problem already. Returns problems and facts, one
    line each.
    """
    problems, facts = list[str](), list[str]()
    check_config = args.engine_kind.check_config
    if not (args.job.trains or check_config):
        return problems, facts
    for option, path in _models(args):
        if option in broken:
            continue
        try:
            trained = option == "--hf-checkpoint" and args.job.trains
            model, packed = inspect_model(args, path, new_head=option == "--critic-load", trained=trained)
            if not packed:
                facts.append(f"{option}: {model.model_type} is trained on one sequence a forward pass")
            if option == "--hf-checkpoint" and args.job.engines and check_config:
                function(check_config, ENGINES.option, args.rollout_backend)(model)
        except (OSError, ValueError) as error:
            problems.append(f"{option} {path}: {' '.join(str(error).split())}")
    return problems, facts


def check_models(args: Args) -> None:
    """Raise ValueError for what `inspect_models` finds."""
    problems, _ = inspect_models(args)
    if problems:
        raise ValueError("\ntrain.py: ".join(problems))


def _models(args: Args) -> Iterator[tuple[str, str]]:
    if args.model_config is None and args.hf_checkpoint is not None:
        yield "--hf-checkpoint", args.hf_checkpoint
    if args.use_critic and args.critic_load and not (Path(args.critic_load) / STATE_FILE).is_file():
        yield "--critic-load", args.critic_load
    if args.use_reference and args.ref_load and args.ref_load != args.hf_checkpoint:
        yield "--ref-load", args.ref_load
    if args.use_opd and args.opd_type == "trainer" and args.opd_teacher_load:
        yield "--opd-teacher-load", args.opd_teacher_load
