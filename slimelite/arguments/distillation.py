"""On-policy distillation: a teacher judges every token that the student sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slimelite.arguments.algorithm import GROUP_ESTIMATORS
from slimelite.arguments.base import flag

if TYPE_CHECKING:
    from slimelite.arguments.args import Args
    from slimelite.arguments.derive import Draft


@dataclass(frozen=True)
class DistillationArgs:
    """On-policy distillation."""

    use_opd: bool = flag(
        False, "subtract --opd-kl-coef x (student's - teacher's log-prob) from every token's advantage"
    )
    opd_type: Literal["trainer", "sglang", "megatron"] | None = flag(
        None, "teacher: a model beside the trainer (--opd-teacher-load) or a server (--rm-url); megatron means trainer"
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher")
    opd_teacher_load: str | None = flag(None, "Hugging Face folder or hub id of the teacher", metavar="DIR")


def derive_distillation(draft: Draft) -> None:
    """slime's name of the trainer's teacher, and what a run without task reward scores with."""
    args = draft.args
    if not args.use_opd:
        return
    if args.opd_type == "megatron":
        draft.set("opd_type", "trainer", "--opd-type megatron: the teacher is a Hugging Face model beside the trainer")
    if args.rm_type is None and args.custom_rm_path is None:
        draft.set("rm_type", "zero", "--use-opd without a reward: pure distillation")
    elif args.custom_rm_path is None and args.label_key is None:
        reason = "--use-opd without --label-key: where the reward needs a label it is 0, and the teacher alone trains"
        draft.set("unlabelled_is_zero", True, reason)
    if compares_groups_of_one(args):
        draft.notes.append(
            f"--use-opd with --n-samples-per-prompt 1: {args.advantage_estimator} has nothing to compare, so the "
            "reward is reported only and the teacher alone trains"
        )


def compares_groups_of_one(args: Args) -> bool:
    """Whether the advantage of every response is 0 because it is alone in its group."""
    compares = args.rewards_normalization and args.advantage_estimator in GROUP_ESTIMATORS
    return args.n_samples_per_prompt == 1 and compares


def distillation_problems(args: Args) -> Iterator[str]:
    """What does not fit together, one line each."""
    if not args.use_opd:
        if args.opd_teacher_load is not None:
            yield "--opd-teacher-load needs --use-opd --opd-type trainer"
        return
    if args.supervised or not args.compute_advantages_and_returns:
        why = f"--loss-type {args.loss_type}" if args.supervised else "--disable-compute-advantages-and-returns"
        yield f"--use-opd adds to the advantages, and {why} has none"
    if args.opd_kl_coef < 0:
        yield f"--opd-kl-coef {args.opd_kl_coef}: must be at least 0"
    if args.opd_type is None:
        yield "--use-opd needs --opd-type: trainer (with --opd-teacher-load) or sglang (with --rm-url)"
    elif args.opd_type == "sglang":
        yield from _server_problems(args)
    elif args.opd_teacher_load is None:
        yield "--opd-type trainer needs --opd-teacher-load: which model is the teacher?"


def _server_problems(args: Args) -> Iterator[str]:
    if args.opd_teacher_load is not None:
        yield "--opd-teacher-load with --opd-type sglang: the teacher is the server at --rm-url; take one"
    # code that makes whole samples may have asked a teacher of its own
    scored_elsewhere = args.load_debug_rollout_data or args.rollout_function_path or args.custom_generate_function_path
    if args.rm_url is None and not scored_elsewhere:
        yield "--opd-type sglang needs --rm-url, the address of the teacher's /generate"
    elif args.rm_url is not None and not args.rm_url.startswith(("http://", "https://")):
        yield f"--rm-url {args.rm_url}: an address starts with http:// or https://"
    if (args.rm_type or "").removeprefix("boxed_") == "remote_rm":
        yield "--rm-type remote_rm and --opd-type sglang both read --rm-url; write the reward as --custom-rm-path"
