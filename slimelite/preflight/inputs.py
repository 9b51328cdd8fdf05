"""The pre-flight checks that read the inputs of a run: plugins, models, tokenizers, rows, one reward."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import cached_file

from slimelite.arguments import Args, EvalDataset
from slimelite.arguments.environments import EPISODE
from slimelite.arguments.user_code import plugin_paths
from slimelite.checkpoints import STATE_FILE, damage, read_json
from slimelite.data.conversations import ChatReader
from slimelite.data.prompts import PAIR, deal, load_prompts
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids
from slimelite.families import FAMILIES, text_config
from slimelite.model_files import check_architecture, has_weights, looks_sound, shape_problems, weight_shapes
from slimelite.plugins import load_function
from slimelite.preflight.environments import check_environment, check_program
from slimelite.preflight.findings import Findings, fill, one_line
from slimelite.rewards.grader import check_reward
from slimelite.rewards.rules import RULES
from slimelite.rollout.teacher import Teacher
from slimelite.sample import Sample
from slimelite.table import SampleTable

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# a real start checks this many rows of each file; the data source then reads all of them
ROWS_AT_START = 64


class Rows(NamedTuple):
    """Prompt files of training or of one evaluation ``dataset``; ``name``: how messages refer to them."""

    name: str
    paths: list[str]
    max_prompt_len: int | None
    dataset: EvalDataset | None = None


class InputChecks:
    """The checks of one run's inputs; later ones in `run` use what earlier ones found."""

    def __init__(self, args: Args, findings: Findings) -> None:
        self.args = args
        self.findings = findings
        # plugins and rules that failed a check, so that they are not called, and flags of models that did
        self.broken: set[str] = set()
        # whether a model may be one that cannot be built, or that the engine does not compute
        self.doubtful = False
        # config of the model; empty if it cannot be read
        self.config: dict[str, Any] = {}
        self.teacher: dict[str, Any] = {}
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def run(self) -> None:
        """Check everything that the arguments name, as far as that is possible without loading a model."""
        self.load_plugins()
        self.read_models()
        args = self.args
        if args.dry_run or args.debug_rollout_only or args.launcher == "local" or self.doubtful:
            from slimelite.training.inspection import inspect_models  # it needs torch

            problems, facts = inspect_models(args, self.broken)
            self.findings.problems += problems
            self.findings.facts += facts
            if any(problem.startswith("--hf-checkpoint ") for problem in problems):
                self.config = {}  # its tokenizer would be blamed for the same
        # else the first trainer does it, when it starts: this process imports no torch for a model that looks sound
        if args.agent_command is not None:
            with self.findings.blaming("--agent-command"):
                check_program(args.agent_command)
        self.read_saved_rollout()
        self.read_tokenizer()
        self.ask_teacher()
        if not (self.args.rollout_function_path or self.args.debug_train_only):  # else no rule is called
            self.find_rules()
        for rows in self.rows():
            self.check_rows(rows)

    def load_plugins(self) -> None:
        """Check that every plugin can be loaded."""
        for flag, path in plugin_paths(self.args):
            try:
                if isinstance(load_function(path), type) and flag != "--data-source-path":
                    raise ValueError(f"{path!r} is a class, not a function")
            except Exception as error:  # a plugin's module may raise anything when it is imported
                self.broken.add(path)
                self.findings.problems.append(f"{flag}: {one_line(error)}")

    def find_rules(self) -> None:
        """Check that every reward rule exists."""
        args = self.args
        named = [(args.rm_type, args.custom_rm_path), *((d.rm_type, d.custom_rm_path) for d in args.eval_datasets)]
        for rule in dict.fromkeys(rule for rule, plugin in named if rule and not plugin):
            try:
                _ = RULES[rule]
            except ValueError as error:
                self.broken.add(rule)
                self.findings.problems.append(one_line(error))

    def read_models(self) -> None:
        """Check the configs of all models, and the policy's against the architecture flags."""
        args, findings, path = self.args, self.findings, self.args.hf_checkpoint
        if args.use_opd and args.opd_type == "trainer" and args.opd_teacher_load:
            self.teacher = self._read_model("--opd-teacher-load", args.opd_teacher_load)
        if args.model_config is not None:
            self.config = args.model_config
            findings.facts.append(
                f"a new {self.config['model_type']} model of {args.num_layers} layers, random weights"
            )
        if args.model_config is not None or path is None:
            return
        self.config = self._read_model("--hf-checkpoint", path)
        if self.config:
            findings.problems += check_architecture(args, self.config)
        if self.config and not has_weights(path) and not args.resume_directory:
            what = f"training starts from random ones (--seed {args.seed})"
            if args.debug_rollout_only:
                what = f"the engines sample from random ones (--rollout-seed {args.rollout_seed})"
            findings.warnings.append(f"--hf-checkpoint {path} holds no weights: {what}")
        if self.config and not has_weights(path) and args.sends_adapter:
            (findings.warnings if args.dry_run else findings.problems).append(
                f"--lora-sync adapter: engines have the frozen weights from {path}, which holds none; take merged"
            )
        critic = args.critic_load if args.use_critic else None
        if critic and (Path(critic) / STATE_FILE).is_file():
            if wrong := damage(Path(critic)):
                findings.problems.append(f"--critic-load: {wrong}")
        elif critic:
            self._read_model("--critic-load", critic)
        reference = args.ref_load if args.use_reference else None
        if reference and reference != path:
            self._read_model("--ref-load", reference)
            if not has_weights(reference):
                findings.warnings.append(f"--ref-load {reference} holds no weights: the reference is random")

    def _read_model(self, option: str, path: str) -> dict[str, Any]:
        """The config of the model at ``path`` that ``option`` names; {} and a problem if its files make no model."""
        with self.findings.blaming(f"{option} {path}"):
            config = _read_config(path)
            if problems := list(shape_problems(config)):
                raise ValueError(f"config.json: {'; '.join(problems)}")
            folder = Path(path)
            shapes = weight_shapes(folder) if folder.is_dir() and has_weights(folder) else None
            self.doubtful |= not looks_sound(config, shapes)
            if option == "--hf-checkpoint" and self.args.engine_kind.check_config:
                self.doubtful |= not any(f.embedded and f.name == config.get("model_type") for _, f in FAMILIES.items())
            return config
        self.broken.add(option)
        return {}

    def read_saved_rollout(self) -> None:
        """Check the first rollout that ``--load-debug-rollout-data`` replays."""
        option, template = "--load-debug-rollout-data", self.args.load_debug_rollout_data
        if template is None:
            return
        try:
            path = fill(option, template, self.args.start_rollout_id or 0)
        except ValueError as error:
            self.findings.problems.append(str(error))
            return
        with self.findings.blaming(option):
            SampleTable.from_parquet(path)

    def read_tokenizer(self) -> None:
        """Check the tokenizer, and that the model's vocabulary has all its tokens and all stop tokens."""
        args, findings = self.args, self.findings
        if args.tokenizer is None or (args.tokenizer == args.hf_checkpoint and not self.config):
            return  # the model's problem is reported already
        with findings.blaming("--hf-checkpoint" if args.tokenizer == args.hf_checkpoint else "--tokenizer"):
            tokenizer = load_tokenizer(args.tokenizer)
            ends = [] if args.debug_train_only else stop_token_ids(args.tokenizer, tokenizer)
            self.tokenizer = tokenizer
        if self.tokenizer is None:
            return
        known, rows = len(tokenizer), text_config(self.config).get("vocab_size")
        if args.use_reference and args.ref_load and args.ref_load != args.hf_checkpoint:
            with suppress(OSError, ValueError):  # `read_models` reports it
                theirs = text_config(_read_config(args.ref_load)).get("vocab_size")
                if theirs is not None and theirs < known:
                    findings.problems.append(
                        f"--ref-load {args.ref_load}: its vocabulary has {theirs} tokens, the tokenizer {known}: "
                        "take a reference that reads the policy's tokens"
                    )
        if rows is not None and known > rows:
            findings.problems.append(f"the tokenizer has {known} tokens but the model's vocabulary has {rows}")
        size = rows or known
        stops = {"--rollout-stop-token-ids": args.rollout_stop_token_ids}
        stops["eos_token_id of generation_config.json, config.json or the tokenizer"] = ends
        stops |= {f"eval dataset {d.name}: stop_token_ids": d.stop_token_ids for d in args.eval_datasets}
        for name, ids in stops.items():
            if outside := [i for i in ids if not 0 <= i < size]:
                findings.problems.append(f"{name} {outside}: token ids are 0 to {size - 1}, by the model's vocabulary")

    def ask_teacher(self) -> None:
        """Check that the teacher's server answers, or that the teacher's model has the student's vocabulary."""
        args, server = self.args, Teacher.of(self.args)
        with self.findings.blaming("--rm-url" if server else f"--opd-teacher-load {args.opd_teacher_load}"):
            if server is not None and not args.debug_train_only:
                server.ask_once()
                self.findings.facts.append(f"the teacher at {server.url} scores prompts")
            elif self.teacher and args.opd_teacher_load:
                self._compare_vocabularies(args.opd_teacher_load)

    def _compare_vocabularies(self, teacher: str) -> None:
        """Raise ValueError unless teacher and student give a token the same id.

        Equal tokenizers suffice: models of one family pad their vocabularies to different sizes.
        """
        mine, size = (text_config(config).get("vocab_size") for config in (self.config, self.teacher))
        folder = Path(teacher)
        if not has_weights(teacher):
            self.findings.warnings.append(f"--opd-teacher-load {teacher} holds no weights: the teacher is random")
        if self.tokenizer is None or (folder.is_dir() and not (folder / "tokenizer.json").is_file()):
            if mine != size:
                raise ValueError(f"its vocabulary has {size} tokens, the student's {mine}; they must be the same")
            return
        ids, student_ids = load_tokenizer(teacher).get_vocab(), self.tokenizer.get_vocab()
        if differing := {token for token, _ in ids.items() ^ student_ids.items()}:
            raise ValueError(
                f"its tokenizer differs from the student's in {len(differing)} tokens, such as {min(differing)!r}: a "
                "teacher can only judge tokens of its own vocabulary"
            )
        if size is not None and size <= max(ids.values()):
            raise ValueError(f"its vocabulary has {size} tokens, fewer than its tokenizer")

    def rows(self) -> list[Rows]:
        """The files of training and of every evaluation dataset."""
        args, found = self.args, list[Rows]()
        if args.rollout_global_dataset and args.prompt_data and not args.load_debug_rollout_data:
            found.append(Rows("--prompt-data", args.prompt_data, args.rollout_max_prompt_len))
        if args.eval_interval is not None and not args.debug_train_only:
            found += [Rows(f"eval dataset {d.name}", [d.path], d.max_prompt_len, d) for d in args.eval_datasets]
        return found

    def check_rows(self, rows: Rows) -> None:
        """Check prompts, pairs or conversations and one reward; without a tokenizer, lengths are not checked."""
        name, findings = rows.name, self.findings
        prompts = self._load(rows)
        if not prompts or not self._are_text(rows, prompts):
            return
        longest = max(len(prompt.tokens) for prompt in prompts)
        measured = f", the longest of {longest} tokens" if longest else ""
        findings.facts.append(f"{name}: {len(prompts)} {'pairs' if self._paired(rows) else 'prompts'}{measured}")
        if rows.dataset is None and self.args.supervised:
            self._make_samples(rows, prompts)
            return
        self._check_lengths(rows, longest)
        if (rows.dataset or self.args).custom_generate_function_path == EPISODE:
            with findings.blaming(f"--environment {self.args.environment}"):
                findings.facts.append(f"{name}: {check_environment(self.args, self.tokenizer, prompts[0])}")
        rewarded = rows.dataset or self.args
        if not self.broken & {rewarded.custom_rm_path, rewarded.rm_type}:
            self._check_reward(rows, prompts[0])

    def _paired(self, rows: Rows) -> bool:
        return rows.dataset is None and self.args.loss.paired

    def _load(self, rows: Rows) -> list[Sample]:
        """The prompts of the rows; none if they cannot be read, which becomes a problem."""
        args, left_out = self.args, list[str]()
        paths = [path if args.dry_run or "@[" in path else f"{path}@[:{ROWS_AT_START}]" for path in rows.paths]
        with self.findings.blaming(rows.name):
            prompts = load_prompts(
                rows.dataset or args,
                self.tokenizer,
                paths,
                replies=(args.chosen_key, args.rejected_key) if self._paired(rows) else None,
                max_prompt_len=rows.max_prompt_len,
                skip_bad_rows=args.skip_bad_rows,
                keep_messages=True,
                warn=left_out.append,
                whole=paths == rows.paths,
            )
            self.findings.warnings += [f"{rows.name}: {text}" for text in left_out]
            return prompts
        return []

    def _are_text(self, rows: Rows, prompts: list[Sample]) -> bool:
        """Whether our own loop can send the prompts to an engine; code of the user's may take prompts of any form."""
        args, dataset = self.args, rows.dataset
        own = [args.rollout_function_path, args.custom_generate_function_path, args.debug_train_only]
        if dataset is not None:
            own = [args.eval_function_path, dataset.custom_generate_function_path]
        if any(own):
            return True
        column = f"column {(dataset or args).input_key!r}"
        if self.tokenizer and not all(isinstance(prompt.prompt, str) for prompt in prompts):
            self.findings.problems.append(
                f"{rows.name}: {column} holds messages: add --apply-chat-template, which makes text of them, or name a "
                "column of text with --input-key"
            )
            return False
        asked = [prompt.metadata.get("messages", [{"role": "user"}]) for prompt in prompts]
        if any(messages[-1]["role"] == "assistant" for messages in asked):
            self.findings.warnings.append(
                f"{rows.name}: conversations in {column} end with an answer of the assistant, which the model sees "
                "before it writes its own: leave it out of the prompts"
            )
        return True

    def _make_samples(self, rows: Rows, prompts: list[Sample]) -> None:
        """Make the samples of the first pair, or of some conversations, as training will: mistakes in them show now."""
        args, findings, name = self.args, self.findings, rows.name
        ours = str(args.rollout_function_path).startswith(("slime.", "miles.", "slimelite."))
        if self.tokenizer is None or not (ours or args.loss.paired):
            return
        settings = (args.loss_mask_type, args.apply_chat_template_kwargs, args.rollout_max_context_len)
        chat = ChatReader(self.tokenizer, *settings)
        with findings.blaming(name):
            if args.loss.paired:
                pair = chat.pair(deal(prompts[0], 0, 0))
                shown = (
                    f"{side.label} {side.response!r:.60} ({side.effective_response_length} tokens)" for side in pair
                )
                findings.facts.append(f"{name}: the first pair: {', '.join(shown)}")
                self._warn_of_hidden(chat, name, prompts)
                return
            samples = [deal(prompt, i, i) for i, prompt in enumerate(prompts[:ROWS_AT_START])]
            for sample in samples:
                chat.fill(sample)
            empty = sum(sample.remove_sample for sample in samples)
            what = (
                f"{name}: {empty} of the first {len(samples)} conversations have no token of an assistant to train on"
            )
            if empty == len(samples):
                findings.problems.append(f"{what}; --input-key names the column of whole conversations")
            elif empty:
                findings.warnings.append(what)
            self._warn_of_hidden(chat, name, prompts)

    def _warn_of_hidden(self, chat: ChatReader, name: str, prompts: list[Sample]) -> None:
        """Warn of what the first rows say and the chat template does not show, so that nothing learns it."""
        found, first = Counter[str](), prompts[:ROWS_AT_START]
        for prompt in first:
            conversations = [c for c in prompt.metadata.get(PAIR, [prompt.prompt]) if isinstance(c, list)]
            found.update({key for c in conversations for key in chat.left_out(c, prompt.metadata.get("tools"))})
        self.findings.warnings += [
            f"{name}: the chat template leaves {key} out of {count} of the first {len(first)} rows: nothing learns it; "
            "put a chat_template.jinja that shows it into the --hf-checkpoint folder, or write it into the content"
            for key, count in found.items()
        ]

    def _check_lengths(self, rows: Rows, longest: int) -> None:
        """Check that prompt and response fit the model's context and a micro-batch."""
        args, dataset, name = self.args, rows.dataset, rows.name
        response = (args.rollout_max_response_len if dataset is None else dataset.max_response_len) or 0
        context = args.rollout_max_context_len if dataset is None else dataset.max_context_len
        whole = longest + response if context is None else min(longest + response, context)
        limit = text_config(self.config).get("max_position_embeddings")
        if limit is not None and longest >= limit:
            self.findings.problems.append(f"{name}: a prompt of {longest} tokens fills the model's context of {limit}")
        elif limit is not None and whole > limit:
            self.findings.warnings.append(
                f"{name}: {longest} prompt and {response} response tokens exceed the model's context of {limit}"
            )
        if dataset is None and args.max_tokens_per_gpu is not None and whole > args.max_tokens_per_gpu:
            self.findings.warnings.append(
                f"{name}: a sample may have {whole} tokens, more than --max-tokens-per-gpu {args.max_tokens_per_gpu}; "
                "such a one is trained in a pass of its own"
            )

    def _check_reward(self, rows: Rows, prompt: Sample) -> None:
        """Score the first row, with a right answer as the response if the rule can make one from the label."""
        args, dataset = self.args, rows.dataset
        settings, group_size, own_rollout = args, args.n_samples_per_prompt, args.rollout_function_path
        if dataset is not None:
            group_size, own_rollout = dataset.n_samples_per_eval_prompt, args.eval_function_path
            rule, path = dataset.rm_type, dataset.custom_rm_path
            settings = replace(args, rm_type=rule, custom_rm_path=path, reward_key=args.eval_reward_key)
        scored = settings.custom_rm_path or settings.rm_type or prompt.metadata.get("rm_type")
        own_generate = (dataset or args).custom_generate_function_path
        if own_rollout or args.debug_train_only or (own_generate and not scored):
            return  # the user's code sets the rewards
        sample = deal(prompt, 0, 0)
        if settings.reward_model_path is None:
            sample.metadata.pop("messages", None)
        sample.status = Sample.Status.COMPLETED
        log = logging.getLogger("slimelite.rewards")
        if settings.custom_rm_path is None:  # the author of a reward plugin wants its log lines as well
            log.setLevel(logging.CRITICAL)
        try:
            with self.findings.blaming(rows.name):
                reward, response = check_reward(settings, sample, group_size)
                label = f"{prompt.label!r:.60}"
                self.findings.facts.append(
                    f"{rows.name}: {response} as the response to the first prompt gets {reward} (label {label})"
                )
        finally:
            log.setLevel(logging.NOTSET)


def _read_config(path: str) -> dict[str, Any]:
    if Path(path).is_dir():
        return read_json(Path(path) / "config.json")
    if path.startswith((".", "/", "~")):
        raise ValueError("no such folder")
    try:
        return read_json(Path(cached_file(path, "config.json")))
    except OSError as error:
        raise ValueError(f"no such folder, and as a name on the Hugging Face hub: {error}") from error
