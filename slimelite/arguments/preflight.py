"""What can be checked before anything expensive starts: files, columns, labels, one reward, lengths, devices.

A real start and ``--dry-run`` run the same checks; the dry run reads all rows and reports too few GPUs as a warning.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimelite.arguments.args import Args
from slimelite.arguments.checkpoint import STATE_FILE
from slimelite.arguments.checksums import damage
from slimelite.arguments.dry_run import Findings, format_report, one_line
from slimelite.arguments.flags import all_flags
from slimelite.arguments.machine import Machine, this_machine
from slimelite.arguments.model import check_architecture, shape_problems, text_config
from slimelite.arguments.outputs import fill, output_problems
from slimelite.arguments.preflight_data import check_data

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def preflight(args: Args) -> int:
    """Check ``args`` against the world; print the dry run's report, or warnings and problems; the exit status."""
    findings = inspect(args, this_machine())
    if args.dry_run:
        print(format_report(args, findings))
    else:
        said = [*(f"warning: {warning}" for warning in findings.warnings), *findings.problems]
        for line in said:
            print(f"train.py: {line}", file=sys.stderr)
    return 2 if findings.problems else 0


def inspect(args: Args, machine: Machine) -> Findings:
    """Every check that can be made without loading a model; one that fails does not hide the others."""
    findings = Findings()
    try:
        _check_all(args, machine, findings)
    except OSError as error:  # a folder of the user's that cannot be read, say: the text names it
        findings.problems.append(str(error))
    return findings


def _check_all(args: Args, machine: Machine, findings: Findings) -> None:
    _check_devices(args, machine, findings)
    _check_packages(args, findings)
    _check_run_folder(args, findings)
    broken = _check_plugins(args, findings)
    config = _check_model(args, findings)
    _check_saved_rollouts(args, findings)
    findings.problems += output_problems(args)
    tokenizer = _check_tokenizer(args, config, findings)
    _check_teacher(args, config, tokenizer, findings)
    if not (args.rollout_function_path or args.debug_train_only):  # else rewards come from elsewhere
        broken |= _check_rules(args, findings)
    check_data(args, tokenizer, config, broken, findings)


def _check_devices(args: Args, machine: Machine, findings: Findings) -> None:
    ranks = 0 if args.debug_rollout_only else args.actor_num_gpus_per_node * args.actor_num_nodes
    engines = 0 if args.debug_train_only else args.rollout_num_gpus
    needed = max(ranks, engines) if args.colocate else ranks + engines
    shared = "shared by" if args.colocate else "for"
    findings.facts.append(
        f"{needed} {args.device} device(s) {shared} {ranks} training rank(s) and {args.num_engines} engine(s)"
    )
    elsewhere = args.actor_num_nodes > 1 or "RAY_ADDRESS" in os.environ  # Ray counts the GPUs of all nodes
    if args.device != "cuda" or elsewhere:
        return
    if needed > machine.gpus:
        what = f"{needed} GPUs are needed ({ranks} for training, {engines} for engines, colocate={args.colocate})"
        message = f"{what}, and this machine has {machine.gpus}: lower --actor-num-gpus-per-node or --rollout-num-gpus"
        (findings.warnings if args.dry_run else findings.problems).append(message)
    elif not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            findings.problems.append(
                "--device cuda: torch cannot use the GPU here; install its CUDA build, or --device cpu"
            )


def _check_packages(args: Args, findings: Findings) -> None:
    engine = None if args.debug_train_only else args.rollout_backend
    servers = engine == "sglang" and not args.rollout_external_engine_addrs
    wanted = (
        ("ray", args.launcher == "ray", "use --launcher local"),
        ("sglang", servers, "docs/install.md says how; or take --rollout-backend embedded"),
        ("vllm", engine == "vllm", "docs/install.md says how; or take --rollout-backend embedded"),
        ("wandb", args.use_wandb, "pip install wandb"),
        ("tensorboard", args.use_tensorboard, "pip install tensorboard"),
    )
    for package, needed, remedy in wanted:
        if needed and importlib.util.find_spec(package) is None:
            findings.problems.append(f"{package} is not installed: {remedy}")
    if servers and args.device == "cuda":
        findings.warnings += _missing_for_kernels()


def _missing_for_kernels() -> Iterator[str]:
    """What SGLang's kernels need of this machine besides Python packages."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").partition(" ")
    if name != "glibc" or [int(part) for part in version.split(".")[:2]] < [2, 34]:
        yield f"SGLang's kernels need glibc 2.34 or newer, and this machine has {name} {version}: see docs/install.md"
    if shutil.which("nvcc") is None and not (Path(os.environ.get("CUDA_HOME", "")) / "bin" / "nvcc").is_file():
        yield (
            "no nvcc is found, with which SGLang compiles kernels when it first needs them: all of them on GPUs before "
            "Hopper (RTX 4090, L40S), top-k and top-p sampling (--eval-top-k 1) on any; install the CUDA toolkit, or "
            "set CUDA_HOME"
        )


def _check_run_folder(args: Args, findings: Findings) -> None:
    """Two runs in one folder would be read as one; with --load it is the same run, even before its first checkpoint."""
    from slimelite.tracking.metrics_file import FILE_NAME

    metrics = Path(args.run_dir) / FILE_NAME
    if (args.load and not args.finetune) or not metrics.is_file():
        return
    # one that failed before its first rollout left nothing to mix with
    if any('"kind": "start"' not in line for line in metrics.read_text(encoding="utf-8").splitlines() if line):
        findings.problems.append(
            f"--run-dir {args.run_dir} holds another run: name a new folder, or, if that run is over, remove this one; "
            "to go on with it, give its checkpoints as --load"
        )


def _check_plugins(args: Args, findings: Findings) -> set[str]:
    """Load every plugin; returns the paths that cannot be."""
    from slimelite.plugins import load_function

    broken: set[str] = set()
    for flag, path in plugin_paths(args):
        try:
            if isinstance(load_function(path), type) and flag != "--data-source-path":
                raise ValueError(f"{path!r} is a class, not a function")
        except Exception as error:  # a plugin's module may raise anything when it is imported
            broken.add(path)
            findings.problems.append(f"{flag}: {one_line(error)}")
    return broken


def plugin_paths(args: Args) -> Iterator[tuple[str, str]]:
    """(flag, path) of every plugin that is named."""
    for flag in all_flags(type(args)).values():
        if flag.metavar == "PLUGIN":
            value = getattr(args, flag.name)
            yield from ((flag.option, path) for path in (value if flag.many else [value]) if path)
    for dataset in args.eval_datasets:
        for path in (dataset.custom_rm_path, dataset.custom_generate_function_path):
            if path and path not in (args.custom_rm_path, args.custom_generate_function_path):
                yield f"eval dataset {dataset.name}", path


def _check_model(args: Args, findings: Findings) -> dict[str, Any]:
    """The model's config; empty when there is none to be had."""
    if args.model_config is not None:
        findings.facts.append(
            f"a new {args.model_config['model_type']} model of {args.num_layers} layers, random weights"
        )
        return args.model_config
    if args.hf_checkpoint is None:
        return {}
    from slimelite.model_files import has_weights

    path = args.hf_checkpoint
    config = _read_model(args, "--hf-checkpoint", path, findings)
    if config:
        findings.problems += check_architecture(args, config)
    if config and not has_weights(path) and not args.resume_directory:
        what = f"training starts from random ones (--seed {args.seed})"
        if args.debug_rollout_only:
            what = f"the engines sample from random ones (--rollout-seed {args.rollout_seed})"
        findings.warnings.append(f"--hf-checkpoint {path} holds no weights: {what}")
    if args.use_critic and args.critic_load and (Path(args.critic_load) / STATE_FILE).is_file():
        if wrong := damage(Path(args.critic_load)):
            findings.problems.append(f"--critic-load: {wrong}")
    elif args.use_critic and args.critic_load:
        _read_model(args, "--critic-load", args.critic_load, findings)
    reference = args.ref_load if args.use_reference else None
    if reference and reference != path:
        _read_model(args, "--ref-load", reference, findings)
        if not has_weights(reference):
            findings.warnings.append(f"--ref-load {reference} holds no weights: the reference is random")
    return config


def _read_model(args: Args, option: str, path: str, findings: Findings) -> dict[str, Any]:
    """The config of the model at ``path`` that ``option`` names; a problem, and empty, when it makes no model."""
    try:
        config = _read_config(path)
        if problems := list(shape_problems(config)):
            raise ValueError(f"config.json: {'; '.join(problems)}")
        if not args.debug_rollout_only or args.rollout_backend == "embedded":
            from slimelite.training.loading import inspect_model

            model_config, packed = inspect_model(args, path, new_head=option == "--critic-load")
            if not packed:
                findings.facts.append(f"{option}: {model_config.model_type} is trained on one sequence a forward pass")
            if option == "--hf-checkpoint" and not args.debug_train_only and args.rollout_backend == "embedded":
                from slimelite.engines.embedded.model import DecoderShape

                DecoderShape.from_config(model_config)
    except (OSError, ValueError) as error:
        findings.problems.append(f"{option} {path}: {one_line(error)}")
        return {}
    return config


def _read_config(path: str) -> dict[str, Any]:
    from transformers.utils import cached_file

    from slimelite.arguments.checksums import read_json

    if Path(path).is_dir():
        return read_json(Path(path) / "config.json")
    if path.startswith((".", "/", "~")):
        raise ValueError("no such folder")
    try:
        return read_json(Path(cached_file(path, "config.json")))
    except OSError as error:
        raise ValueError(f"no such folder, and as a name on the Hugging Face hub: {error}") from error


def _check_saved_rollouts(args: Args, findings: Findings) -> None:
    if args.load_debug_rollout_data is None:
        return
    try:
        path = fill("--load-debug-rollout-data", args.load_debug_rollout_data, args.start_rollout_id or 0)
    except ValueError as error:
        findings.problems.append(str(error))
        return
    from slimelite.table import SampleTable

    try:
        SampleTable.from_parquet(path)
    except (OSError, ValueError) as error:
        findings.problems.append(f"--load-debug-rollout-data: {one_line(error)}")


def _check_tokenizer(args: Args, config: dict[str, Any], findings: Findings) -> PreTrainedTokenizerBase | None:
    if args.tokenizer is None or (args.tokenizer == args.hf_checkpoint and not config):
        return None  # what is wrong with the model is wrong with its tokenizer
    from slimelite.data.tokenizer import load_tokenizer, stop_token_ids

    try:
        tokenizer = load_tokenizer(args.tokenizer)
        ends = [] if args.debug_train_only else stop_token_ids(args.tokenizer, tokenizer)
    except (OSError, ValueError) as error:
        option = "--hf-checkpoint" if args.tokenizer == args.hf_checkpoint else "--tokenizer"
        findings.problems.append(f"{option}: {one_line(error)}")
        return None
    rows = text_config(config).get("vocab_size")
    if args.use_reference and args.ref_load and args.ref_load != args.hf_checkpoint:
        with suppress(OSError, ValueError):  # said above
            theirs = text_config(_read_config(args.ref_load)).get("vocab_size")
            if theirs is not None and theirs < len(tokenizer):
                findings.problems.append(
                    f"--ref-load {args.ref_load}: its vocabulary has {theirs} tokens, the tokenizer {len(tokenizer)}: "
                    "take a reference that reads the policy's tokens"
                )
    if rows is not None and len(tokenizer) > rows:
        findings.problems.append(f"the tokenizer has {len(tokenizer)} tokens but the model's vocabulary has {rows}")
    size = rows or len(tokenizer)
    stops = {"--rollout-stop-token-ids": args.rollout_stop_token_ids}
    stops["eos_token_id of generation_config.json, config.json or the tokenizer"] = ends
    stops |= {f"eval dataset {d.name}: stop_token_ids": d.stop_token_ids for d in args.eval_datasets}
    for name, ids in stops.items():
        if outside := [i for i in ids if not 0 <= i < size]:
            findings.problems.append(f"{name} {outside}: token ids are 0 to {size - 1}, by the model's vocabulary")
    return tokenizer


def _check_teacher(
    args: Args, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, findings: Findings
) -> None:
    """Whether the teacher of distillation is there and reads the student's tokens."""
    from slimelite.rollout.teacher import Teacher, ask_once

    server = Teacher.of(args)
    try:
        if server is not None and not args.debug_train_only:
            ask_once(server)
            findings.facts.append(f"the teacher at {server.url} scores prompts")
        elif args.use_opd and args.opd_type == "trainer" and args.opd_teacher_load:
            _compare_vocabularies(args, args.opd_teacher_load, config, tokenizer, findings)
    except (OSError, ValueError) as error:
        where = "--rm-url" if server is not None else f"--opd-teacher-load {args.opd_teacher_load}"
        findings.problems.append(f"{where}: {one_line(error)}")


def _compare_vocabularies(
    args: Args, teacher: str, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, findings: Findings
) -> None:
    """Raise ValueError unless teacher and student give a token the same id.

    Equal tokenizers suffice: models of one family pad their vocabularies to different sizes.
    """
    from slimelite.data.tokenizer import load_tokenizer
    from slimelite.model_files import has_weights
    from slimelite.training.loading import inspect_model

    theirs = _read_config(teacher)
    mine, size = (text_config(c).get("vocab_size") for c in (config, theirs))
    folder = Path(teacher)
    inspect_model(args, teacher)
    if not has_weights(teacher):
        findings.warnings.append(f"--opd-teacher-load {teacher} holds no weights: the teacher is random")
    if tokenizer is None or (folder.is_dir() and not (folder / "tokenizer.json").is_file()):
        if mine != size:
            raise ValueError(f"its vocabulary has {size} tokens, the student's {mine}; they must be the same")
        return
    ids, student_ids = load_tokenizer(teacher).get_vocab(), tokenizer.get_vocab()
    if differing := {token for token, _ in ids.items() ^ student_ids.items()}:
        raise ValueError(
            f"its tokenizer differs from the student's in {len(differing)} tokens, such as {min(differing)!r}: a "
            "teacher can only judge tokens of its own vocabulary"
        )
    if size is not None and size <= max(ids.values()):
        raise ValueError(f"its vocabulary has {size} tokens, fewer than its tokenizer")


def _check_rules(args: Args, findings: Findings) -> set[str]:
    """Whether every reward rule exists; returns those that do not."""
    from slimelite.rewards.registry import find_rule

    named = [(args.rm_type, args.custom_rm_path), *((d.rm_type, d.custom_rm_path) for d in args.eval_datasets)]
    missing: set[str] = set()
    for rule in dict.fromkeys(rule for rule, plugin in named if rule and not plugin):
        try:
            find_rule(rule)
        except ValueError as error:
            missing.add(rule)
            findings.problems.append(one_line(error))
    return missing
