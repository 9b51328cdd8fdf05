"""The part of the pre-flight check that reads what a run is given: plugins, models, tokenizers, rows, one reward."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import cached_file

from slimelite.arguments import Args, EvalDataset
from slimelite.arguments.model import text_config
from slimelite.arguments.user_code import plugin_paths
from slimelite.checkpoints import STATE_FILE, damage, read_json
from slimelite.data.conversations import ChatReader
from slimelite.data.prompts import deal, load_prompts
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids
from slimelite.engines.registry import ENGINES
from slimelite.model_files import check_architecture, has_weights, shape_problems
from slimelite.plugins import load_function
from slimelite.preflight.findings import Findings, fill, one_line
from slimelite.registry import function
from slimelite.reward_rules import RULES
from slimelite.rewards.grader import check_reward
from slimelite.rollout.teacher import Teacher
from slimelite.sample import Sample
from slimelite.table import SampleTable
from slimelite.training.loading import inspect_model

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# rows of each file that a real start looks at; its data source reads the rest
ROWS_AT_START = 64


def check_inputs(args: Args, findings: Findings) -> None:
    """Everything that ``args`` name, as far as it can be read without loading a model."""
    broken = _check_plugins(args, findings)
    config = _check_model(args, findings)
    _check_saved_rollouts(args, findings)
    tokenizer = _check_tokenizer(args, config, findings)
    _check_teacher(args, config, tokenizer, findings)
    if not (args.rollout_function_path or args.debug_train_only):  # else rewards come from elsewhere
        broken |= _check_rules(args, findings)
    _check_data(args, tokenizer, config, broken, findings)


def _check_plugins(args: Args, findings: Findings) -> set[str]:
    """Load every plugin; returns the paths that cannot be."""
    broken: set[str] = set()
    for flag, path in plugin_paths(args):
        try:
            if isinstance(load_function(path), type) and flag != "--data-source-path":
                raise ValueError(f"{path!r} is a class, not a function")
        except Exception as error:  # a plugin's module may raise anything when it is imported
            broken.add(path)
            findings.problems.append(f"{flag}: {one_line(error)}")
    return broken


def _check_model(args: Args, findings: Findings) -> dict[str, Any]:
    """The model's config; empty when there is none to be had."""
    if args.model_config is not None:
        findings.facts.append(
            f"a new {args.model_config['model_type']} model of {args.num_layers} layers, random weights"
        )
        return args.model_config
    if args.hf_checkpoint is None:
        return {}
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
        check_config = ENGINES[args.rollout_backend].check_config
        if not args.debug_rollout_only or check_config:
            model_config, packed = inspect_model(args, path, new_head=option == "--critic-load")
            if not packed:
                findings.facts.append(f"{option}: {model_config.model_type} is trained on one sequence a forward pass")
            if option == "--hf-checkpoint" and not args.debug_train_only and check_config:
                function(check_config)(model_config)
    except (OSError, ValueError) as error:
        findings.problems.append(f"{option} {path}: {one_line(error)}")
        return {}
    return config


def _read_config(path: str) -> dict[str, Any]:
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

    try:
        SampleTable.from_parquet(path)
    except (OSError, ValueError) as error:
        findings.problems.append(f"--load-debug-rollout-data: {one_line(error)}")


def _check_tokenizer(args: Args, config: dict[str, Any], findings: Findings) -> PreTrainedTokenizerBase | None:
    if args.tokenizer is None or (args.tokenizer == args.hf_checkpoint and not config):
        return None  # what is wrong with the model is wrong with its tokenizer

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
    server = Teacher.of(args)
    try:
        if server is not None and not args.debug_train_only:
            server.ask_once()
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
    named = [(args.rm_type, args.custom_rm_path), *((d.rm_type, d.custom_rm_path) for d in args.eval_datasets)]
    missing: set[str] = set()
    for rule in dict.fromkeys(rule for rule, plugin in named if rule and not plugin):
        try:
            _ = RULES[rule]
        except ValueError as error:
            missing.add(rule)
            findings.problems.append(one_line(error))
    return missing


def _check_data(
    args: Args, tokenizer: PreTrainedTokenizerBase | None, config: dict[str, Any], broken: set[str], findings: Findings
) -> None:
    """Prompts and rewards of training and of every evaluation dataset; without a tokenizer, all but their lengths.

    ``broken``: plugins and rules that are not tried again.
    """

    chat = None
    if tokenizer is not None:
        settings = (args.loss_mask_type, args.apply_chat_template_kwargs, args.rollout_max_context_len)
        chat = ChatReader(tokenizer, *settings)
    sources: list[tuple[str, Args | EvalDataset, list[str], int | None]] = []
    if args.rollout_global_dataset and args.prompt_data and not args.load_debug_rollout_data:
        sources.append(("--prompt-data", args, args.prompt_data, args.rollout_max_prompt_len))
    if args.eval_interval is not None and not args.debug_train_only:
        sources += [(f"eval dataset {d.name}", d, [d.path], d.max_prompt_len) for d in args.eval_datasets]
    for name, columns, paths, limit in sources:
        rows = paths if args.dry_run else [path if "@[" in path else f"{path}@[:{ROWS_AT_START}]" for path in paths]
        left_out: list[str] = []
        pairs = columns is args and args.loss.paired
        try:
            prompts = load_prompts(
                columns,
                tokenizer,
                rows,
                replies=(args.chosen_key, args.rejected_key) if pairs else None,
                max_prompt_len=limit,
                skip_bad_rows=args.skip_bad_rows,
                keep_messages=True,
                warn=left_out.append,
                whole=rows == paths,
            )
        except (OSError, ValueError) as error:
            findings.problems.append(f"{name}: {one_line(error)}")
            continue
        findings.warnings += [f"{name}: {text}" for text in left_out]
        if tokenizer and _generates(args, columns) and not all(isinstance(prompt.prompt, str) for prompt in prompts):
            findings.problems.append(
                f"{name}: column {columns.input_key!r} holds messages: add --apply-chat-template, which makes text of "
                "them, or name a column of text with --input-key"
            )
            continue
        asked = [prompt.metadata.get("messages", [{"role": "user"}]) for prompt in prompts]
        if _generates(args, columns) and any(messages[-1]["role"] == "assistant" for messages in asked):
            findings.warnings.append(
                f"{name}: conversations in column {columns.input_key!r} end with an answer of the assistant, which the "
                "model sees before it writes its own: leave it out of the prompts"
            )
        longest = max(len(prompt.tokens) for prompt in prompts)
        measured = f", the longest of {longest} tokens" if longest else ""
        findings.facts.append(f"{name}: {len(prompts)} {'pairs' if pairs else 'prompts'}{measured}")
        if pairs and chat is not None:
            _check_pair(chat, name, prompts[0], findings)
        if pairs:
            continue
        if args.supervised and columns is args:
            if chat is not None and str(args.rollout_function_path).startswith(("slime.", "miles.", "slimelite.")):
                _check_conversations(chat, name, prompts[:ROWS_AT_START], findings)
        else:
            dataset = None if isinstance(columns, Args) else columns
            _check_lengths(args, dataset, name, longest, config, findings)
            rewarded = args if dataset is None else dataset
            if not broken & {rewarded.custom_rm_path, rewarded.rm_type}:
                _check_reward(args, dataset, name, prompts[0], findings)


def _generates(args: Args, columns: Args | EvalDataset) -> bool:
    """Whether our own loop sends the prompts to an engine, so that they must be text."""
    if columns is args:
        own = args.rollout_function_path or args.custom_generate_function_path
    else:
        own = args.eval_function_path or columns.custom_generate_function_path
    return not own and not (columns is args and args.debug_train_only)


def _check_pair(chat: ChatReader, name: str, prompt: Sample, findings: Findings) -> None:
    """Make the two samples of one pair."""
    try:
        pair = chat.pair(deal(prompt, 0, 0))
    except ValueError as error:
        findings.problems.append(f"{name}: {one_line(error)}")
        return
    shown = (f"{side.label} {side.response!r:.60} ({side.effective_response_length} tokens)" for side in pair)
    findings.facts.append(f"{name}: the first pair: {', '.join(shown)}")


def _check_conversations(chat: ChatReader, name: str, prompts: list[Sample], findings: Findings) -> None:
    """Make the samples of some conversations."""
    samples = [deal(prompt, i, i) for i, prompt in enumerate(prompts)]
    try:
        for sample in samples:
            chat.fill(sample)
    except ValueError as error:
        findings.problems.append(f"{name}: {one_line(error)}")
        return
    empty = sum(sample.remove_sample for sample in samples)
    message = f"{name}: {empty} of the first {len(samples)} conversations have no token of an assistant to train on"
    if empty == len(samples):
        findings.problems.append(f"{message}; --input-key names the column of whole conversations")
    elif empty:
        findings.warnings.append(message)


def _check_lengths(
    args: Args, dataset: EvalDataset | None, name: str, longest: int, config: dict[str, Any], findings: Findings
) -> None:
    """Whether prompt and response fit the context and the micro-batch."""
    response = args.rollout_max_response_len if dataset is None else dataset.max_response_len
    context = args.rollout_max_context_len if dataset is None else dataset.max_context_len
    response = response or 0
    whole = longest + response if context is None else min(longest + response, context)
    limit = text_config(config).get("max_position_embeddings")
    if limit is not None and longest >= limit:
        findings.problems.append(f"{name}: a prompt of {longest} tokens fills the model's context of {limit}")
    elif limit is not None and whole > limit:
        findings.warnings.append(
            f"{name}: {longest} prompt and {response} response tokens exceed the model's context of {limit}"
        )
    if dataset is None and args.max_tokens_per_gpu is not None and whole > args.max_tokens_per_gpu:
        findings.warnings.append(
            f"{name}: a sample may have {whole} tokens, more than --max-tokens-per-gpu {args.max_tokens_per_gpu}; "
            "such a one is trained in a pass of its own"
        )


def _check_reward(args: Args, dataset: EvalDataset | None, name: str, prompt: Sample, findings: Findings) -> None:
    """Score one real row, with the right answer where the rule knows what that looks like."""
    settings, group_size = args, args.n_samples_per_prompt
    if dataset is not None:
        rule, path, group_size = dataset.rm_type, dataset.custom_rm_path, dataset.n_samples_per_eval_prompt
        settings = replace(args, rm_type=rule, custom_rm_path=path, reward_key=args.eval_reward_key)
    own_rollout = args.rollout_function_path if dataset is None else args.eval_function_path
    scored = settings.custom_rm_path or settings.rm_type or prompt.metadata.get("rm_type")
    if own_rollout or args.debug_train_only or (args.custom_generate_function_path and not scored):
        return  # that code brings rewards of its own
    sample = deal(prompt, 0, 0)
    if settings.reward_model_path is None:
        sample.metadata.pop("messages", None)
    sample.status = Sample.Status.COMPLETED
    log = logging.getLogger("slimelite.rewards")
    if settings.custom_rm_path is None:  # the author of a plugin wants the lines as well
        log.setLevel(logging.CRITICAL)
    try:
        reward, response = check_reward(settings, sample, group_size)
    except ValueError as error:
        findings.problems.append(f"{name}: {one_line(error)}")
    else:
        findings.facts.append(
            f"{name}: {response} as the response to the first prompt gets {reward} (label {prompt.label!r:.60})"
        )
    finally:
        log.setLevel(logging.NOTSET)
