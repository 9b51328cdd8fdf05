"""The checks of a run's inputs.

`InputChecks.read_files` reports mistakes at once, because it imports neither torch nor transformers, which would take
seconds. `read_files` checks plugins, the files of models, the columns of data, and the reward of one row by a built-in
rule. Afterwards `InputChecks.load` checks models and the tokens of the rows.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimelite.arguments import Args, DataArgs, EvalDataset
from slimelite.arguments.parse import plugin_paths
from slimelite.arguments.rollout import EPISODE
from slimelite.arguments.secret import masked
from slimelite.base.files import in_units
from slimelite.data.messages import render, try_template
from slimelite.data.prompts import PAIR, Curriculum, deal, how_to_convert, load_prompts
from slimelite.data.shards import TextCoder, check_documents
from slimelite.data.tokenizer import TOKENIZER, check_files, check_same, end_of_reply, load_tokenizer, stop_token_ids
from slimelite.engines.params import SamplingParams
from slimelite.models.checkpoints import ROLLOUT_STATE, STATE_FILE, damage, read_config, read_json
from slimelite.models.families import FAMILIES, text_config
from slimelite.models.files import (
    check_architecture,
    check_quantized,
    has_weights,
    looks_sound,
    shape_problems,
    weight_shapes,
)
from slimelite.preflight.agents import check_environment, check_program
from slimelite.preflight.findings import Findings, fill, one_line
from slimelite.preflight.learning import conversations_as_seen, first_prompt, unknown_tokens, without_template
from slimelite.rewards.grader import check_reward
from slimelite.rewards.rules import RULES
from slimelite.samples.sample import Sample
from slimelite.sandbox.registry import cautions, is_container
from slimelite.slime.plugins import load_function

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.data.conversations import ChatReader

logger = logging.getLogger(__name__)

# name -> shape of each weight of a model
Shapes = Mapping[str, tuple[int, ...]]

# a real start checks this many rows of each file; the data source then reads all rows
ROWS_AT_START = 64


class Rows(NamedTuple):
    """Prompt files of training or of one evaluation ``dataset``. ``name``: what messages call these files. ``rollout``
    and ``generate``: the plugins that make the responses. ``paired``: the rows are preference pairs. ``any_form``:
    prompts may have any form, because the user's code, or a trainer without an engine, reads them."""

    name: str
    paths: list[str]
    max_prompt_len: int | None
    rollout: str | None
    generate: str | None
    paired: bool
    any_form: bool
    dataset: EvalDataset | None = None


def _where(columns: Args | EvalDataset, what: str) -> str:
    """The column of ``what``, if the user named one; otherwise ``what``, because several names are possible."""
    return what if columns.input_key == DataArgs.input_key else f"column {columns.input_key!r}"


class InputChecks:
    """The checks of one run's inputs. Later checks use the results of earlier checks."""

    def __init__(self, args: Args, findings: Findings) -> None:
        self.args = args
        self.findings = findings
        # plugins and rules that failed a check and are not called, and flags of models that failed a check
        self.broken: set[str] = set()
        # config of each model with correct files, and the shapes of its weights if they are known
        self.models: list[tuple[dict[str, object], Shapes | None]] = []
        # config of the model; empty if it cannot be read
        self.config: dict[str, object] = {}
        self.teacher: dict[str, object] = {}
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.tokenizer_flag = "--hf-checkpoint" if args.tokenizer == args.hf_checkpoint else "--tokenizer"

    def read_files(self) -> None:
        """Check all files, plugins and models in the arguments, as far as possible without torch and transformers."""
        args, findings = self.args, self.findings
        for flag, path in plugin_paths(args):
            try:
                if isinstance(load_function(path), type) and flag != "--data-source-path":
                    raise ValueError(f"{path!r} is a class, not a function")
            except Exception as error:  # a plugin's module may raise anything when it is imported
                self.broken.add(path)
                findings.problems.append(f"{flag}: {one_line(error)}")
        self.read_models()
        if args.agent_command is not None:
            with findings.blaming("--agent-command"):
                check_program(args.agent_command, in_image=is_container(args.agent_sandbox))
        with findings.blaming("--agent-sandbox"):
            findings.warnings += cautions(args.sandbox, programs=args.agent_command is not None)
        if args.job.saved:
            self.read_saved_rollout(args.job.saved)
        if args.tokenizer is not None and (args.tokenizer != args.hf_checkpoint or self.config):
            with findings.blaming(self.tokenizer_flag):
                check_files(args.tokenizer)
        if args.job.engines and not args.rollout_function_path:  # a user's rollout function calls no rule
            columns: tuple[Args | EvalDataset, ...] = (args, *args.eval_datasets)
            for rule in dict.fromkeys([c.rm_type for c in columns if not c.custom_rm_path]):
                try:
                    _ = rule and RULES[rule]
                except ValueError as error:
                    self.broken.add(str(rule))
                    findings.problems.append(one_line(error))
        for flag, spec in self.documents():
            with findings.blaming(flag):
                check_documents(spec, args.text_key, skip=args.skip_bad_rows)
        for rows in self.rows():
            prompts = self.load_rows(rows, logger.debug, trial=True)  # `check_rows` reads them again and warns
            if prompts and self.are_text(rows, prompts):
                self.check_reward(rows, prompts[0], rendered=False)

    def read_models(self) -> None:
        """Check the configs of all models, and compare the policy's config with the architecture flags."""
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
            findings.problems += check_quantized(args, self.config)
        if self.config and not has_weights(path) and not args.resume_directory:
            what = f"training starts from random weights (--seed {args.seed})"
            if not args.job.trains:
                what = f"the engines sample from random weights (--rollout-seed {args.rollout_seed})"
            findings.warnings.append(f"--hf-checkpoint {path} contains no weights: {what}")
        if self.config and not has_weights(path) and args.sends_adapter:
            (findings.warnings if args.dry_run else findings.problems).append(
                f"--lora-sync adapter: engines load the frozen weights from {path}, which has no weights; use merged"
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
                findings.warnings.append(f"--ref-load {reference} has no weights: the reference model is random")

    def _read_model(self, option: str, path: str) -> dict[str, object]:
        """The config of the model at ``path``, which ``option`` names. If it is not a model: {}, and a problem."""
        with self.findings.blaming(f"{option} {path}"):
            config = read_config(path)
            if problems := list(shape_problems(config)):
                raise ValueError(f"config.json: {'; '.join(problems)}")
            folder = Path(path)
            shapes = weight_shapes(folder) if folder.is_dir() and has_weights(folder) else None
            if option == "--hf-checkpoint":
                self._find_room(shapes or {})
            self.models.append((config, shapes))
            return config
        self.broken.add(option)
        return {}

    def _find_room(self, shapes: Shapes) -> None:
        """Check that the disk of ``--save`` has room for a checkpoint. With Adam, a checkpoint takes 12 bytes for each
        number in ``shapes``: the weight and two moments in fp32.
        """
        args = self.args
        if args.save is None or not args.job.trains or args.lora_rank or args.optimizer == "muon":
            return
        size = sum(map(math.prod, shapes.values())) * (4 if args.no_save_optim else 12)
        there = next(place for place in (Path(args.save), *Path(args.save).absolute().parents) if place.is_dir())
        disk = shutil.disk_usage(there)
        if disk.total and size > disk.free:  # special file systems such as /proc have the size 0
            self.findings.problems.append(
                f"--save {args.save}: a checkpoint takes about {in_units(size)}, but only {in_units(disk.free)} are "
                "free: make room, or name another folder"
            )

    def read_saved_rollout(self, template: str) -> None:
        """Check the first rollout that ``--load-debug-rollout-data`` replays."""
        from slimelite.samples.table import SampleTable

        option = "--load-debug-rollout-data"
        try:
            path = fill(option, template, self.args.start_rollout_id or 0)
        except ValueError as error:
            self.findings.problems.append(str(error))
            return
        with self.findings.blaming(option):
            SampleTable.from_parquet(path)

    def documents(self) -> list[tuple[str, str]]:
        """The flag and value of each set of documents that the run reads."""
        trained = self.args.prompt_data if self.args.job.documents else []
        return [*(("--prompt-data", spec) for spec in trained), *(("--eval-bpb", spec) for spec in self.args.eval_bpb)]

    def rows(self) -> list[Rows]:
        """The files of training and of every evaluation dataset."""
        args, job, rows = self.args, self.args.job, list[Rows]()
        rollout, generate = args.rollout_function_path, args.custom_generate_function_path
        if args.rollout_global_dataset and args.prompt_data and not (job.saved or job.documents):
            paired, any_form = job.loss == "paired", bool(rollout or generate or not job.engines)
            longest = args.rollout_max_prompt_len
            rows.append(Rows("--prompt-data", args.prompt_data, longest, rollout, generate, paired, any_form))
        if job.evaluates:
            rollout = args.eval_function_path
            for d in args.eval_datasets:
                name, generate = f"eval dataset {d.name}", d.custom_generate_function_path
                any_form = bool(rollout or generate)
                rows.append(Rows(name, [d.path], d.max_prompt_len, rollout, generate, False, any_form, d))
        return rows

    def load_rows(self, rows: Rows, warn: Callable[[str], None], *, trial: bool = False) -> list[Sample]:
        """The prompts of the first rows; in a dry run, of all rows. If the rows cannot be read, the list is empty and a
        problem is recorded.

        ``warn`` gets a message about rows that are left out. ``trial``: only the first rows, even in a dry run.
        """
        args = self.args
        every = not trial and (args.dry_run or all("@[" in path for path in rows.paths))
        with self.findings.blaming(rows.name):
            load = partial(
                load_prompts,
                rows.dataset or args,
                self.tokenizer,
                rows.paths,
                replies=(args.chosen_key, args.rejected_key) if rows.paired else None,
                max_prompt_len=rows.max_prompt_len,
                skip_bad_rows=args.skip_bad_rows,
                keep_messages=True,
                warn=lambda text: warn(f"{rows.name}: {text}"),
                note=logger.debug if trial else lambda text: self.findings.notes.append(f"{rows.name}: {text}"),
            )
            # if none of the first rows is kept, all rows are read
            return load(first=None if every else ROWS_AT_START) or load()
        return []

    def are_text(self, rows: Rows, prompts: list[Sample]) -> bool:
        """Whether the built-in loop can send the prompts to an engine. A user's code may accept prompts of any form."""
        columns = rows.dataset or self.args
        if rows.any_form or columns.apply_chat_template or all(isinstance(p.prompt, str) for p in prompts):
            return True
        flag = "--input-key" if rows.dataset is None else "--eval-input-key"
        self.findings.problems.append(
            f"{rows.name}: {_where(columns, 'the prompt')} contains messages: {self._applies_template(rows)} to turn "
            f"them into text, or name a column of text with {flag}"
        )
        return False

    def _applies_template(self, rows: Rows) -> str:
        """How the user can apply the chat template to ``rows``. In SFT, the flag would also turn the conversations to
        train on into text."""
        if rows.dataset is not None and self.args.job.loss == "supervised":
            return "set apply_chat_template: true in the file of --eval-config (docs/user_guide.md#sft)"
        return "add --apply-chat-template"

    def check_reward(self, rows: Rows, prompt: Sample, *, rendered: bool) -> None:
        """Score a response to the first prompt: a right answer, if the rule can make one from the label.

        This method is called twice for the same rows. Before the prompts are ``rendered``, the method calls only rules
        that do not read the prompt. After the prompts are rendered, the method calls only rules that read the prompt,
        and a user's function.
        """
        args, dataset = self.args, rows.dataset
        settings, group_size = args, args.n_samples_per_prompt
        if dataset is not None:
            group_size, rule, path = dataset.n_samples_per_eval_prompt, dataset.rm_type, dataset.custom_rm_path
            settings = replace(args, rm_type=rule, custom_rm_path=path, reward_key=args.eval_reward_key)
        scored = settings.custom_rm_path or settings.rm_type or prompt.metadata.get("rm_type")
        if rows.rollout or not args.job.engines or (rows.generate and not scored):
            return  # the user's code sets the rewards
        pure = settings.custom_rm_path is None and (scored not in RULES or RULES[str(scored)].scorer is None)
        if pure == rendered or self.broken & {settings.custom_rm_path, settings.rm_type}:
            return
        sample = deal(prompt, 0, 0)
        if settings.reward_model_path is None:
            sample.metadata.pop("messages", None)
        sample.status = Sample.Status.COMPLETED
        log = logging.getLogger("slimelite.rewards")
        if (
            settings.custom_rm_path is None
        ):  # the log lines of a reward plugin are shown, because its author may need them
            log.setLevel(logging.CRITICAL)
        try:
            with self.findings.blaming(rows.name):
                end = self._end_of_reply(rows)
                reward, response = check_reward(settings, sample, group_size, end)
                sample.reward = reward
                earned = sample.reward_value(settings.reward_key)
                key, option = (args.reward_key, "--reward-key") if dataset is None else (None, "")
                if dataset is not None and args.eval_reward_key != args.reward_key:
                    key, option = args.eval_reward_key, "--eval-reward-key"
                if key is not None and args.environment is None and not isinstance(reward, dict):
                    self.findings.warnings.append(
                        f"{option} {key}: the reward of the first row of {rows.name} is {reward}, a number and "
                        "not a dict, so the flag has no effect"
                    )
                label = f"{prompt.label!r:.60}"
                ending = f" followed by {end}, as in a run" if end else ""
                if settings.custom_rm_path and response == "the bare label" and earned <= 0:
                    self.findings.warnings.append(
                        f"{rows.name}: the custom reward gave {earned:g} to this response: the first prompt's label"
                        f"{ending} (label {label}). If this response should count as right, the reward function is "
                        "wrong, and the run cannot learn right answers"
                    )
                self.findings.facts.append(
                    f"{rows.name}: {response} as the response to the first prompt gets {reward} (label {label})"
                )
        finally:
            log.setLevel(logging.NOTSET)

    def _end_of_reply(self, rows: Rows) -> str:
        """The token at the end of a response, in the text that rewards get; empty if that text has no such token."""
        settings = SamplingParams.of(*((rows.dataset, "dataset") if rows.dataset else (self.args, "rollout")))
        tokenizer = self.args.tokenizer
        return "" if settings.skip_special_tokens or rows.generate or tokenizer is None else end_of_reply(tokenizer)

    def load(self) -> None:
        """Run the checks that `read_files` could not run, as far as possible without the weights of a model."""
        args = self.args
        if args.dry_run or not args.job.trains or args.launcher != "ray" or self._doubtful():
            from slimelite.training.loading import inspect_models  # it needs torch

            problems, facts = inspect_models(args, self.broken)
            self.findings.problems += problems
            self.findings.facts += facts
            if any(problem.startswith("--hf-checkpoint ") for problem in problems):
                self.config = {}  # otherwise its tokenizer would be reported for the same error
        # otherwise the first trainer checks the model when it starts, and this process need not import torch
        self.read_tokenizer()
        if args.use_opd:
            self.ask_teacher()
        for rows in self.rows():
            self.check_rows(rows)

    def _doubtful(self) -> bool:
        """Whether it is uncertain that the models can be built, or that the engine supports them."""
        own = self.args.engine_kind.check_config is not None and self.args.model_config is None
        computed = {family.name for _, family in FAMILIES.items() if family.embedded}
        unknown = own and bool(self.config) and self.config.get("model_type") not in computed
        return unknown or not all(looks_sound(config, shapes) for config, shapes in self.models)

    def read_tokenizer(self) -> None:
        """Check the tokenizer. The model's vocabulary must have all tokens of the tokenizer, and all stop tokens."""
        args, findings = self.args, self.findings
        if args.tokenizer is None or (args.tokenizer == args.hf_checkpoint and not self.config):
            return  # the model's problem is reported already
        with self.findings.blaming(self.tokenizer_flag):
            tokenizer = load_tokenizer(args.tokenizer)
            try_template(tokenizer)
            ends = stop_token_ids(args.tokenizer, tokenizer) if args.job.engines else []
            self.tokenizer = tokenizer
            if self.documents():
                TextCoder(args.tokenizer)
        if self.tokenizer is None:
            return
        if args.resume_directory is not None and args.job.trains and not args.finetune:
            with self.findings.blaming(f"--load {args.resume_directory}"):
                check_same(read_json(Path(args.resume_directory) / ROLLOUT_STATE).get(TOKENIZER, {}), tokenizer)
        known, rows = len(tokenizer), text_config(self.config).get("vocab_size")
        if args.use_reference and args.ref_load and args.ref_load != args.hf_checkpoint:
            with suppress(OSError, ValueError):  # `read_models` reports it
                theirs = text_config(read_config(args.ref_load)).get("vocab_size")
                if theirs is not None and theirs < known:
                    findings.problems.append(
                        f"--ref-load {args.ref_load}: the vocabulary has {theirs} tokens, but the tokenizer has "
                        f"{known}: use a reference model with the policy's vocabulary"
                    )
        if rows is not None and known > rows:
            findings.problems.append(f"the tokenizer has {known} tokens but the model's vocabulary has {rows}")
        size = rows or known
        stops: dict[str, Sequence[int]] = {
            "--rollout-stop-token-ids": SamplingParams.of(args, "rollout").stop_token_ids
        }
        stops["eos_token_id of generation_config.json, config.json or the tokenizer"] = ends
        for d in args.eval_datasets:
            stops[f"eval dataset {d.name}: stop_token_ids"] = SamplingParams.of(d, "dataset").stop_token_ids
        for name, ids in stops.items():
            if outside := [i for i in ids if not 0 <= i < size]:
                findings.problems.append(f"{name} {outside}: the model's vocabulary has the token ids 0 to {size - 1}")

    def ask_teacher(self) -> None:
        """Check that the teacher's server answers, or that the teacher's model has the student's vocabulary."""
        from slimelite.rollout.teacher import Teacher

        args, server = self.args, Teacher.of(self.args)
        with self.findings.blaming("--rm-url" if server else f"--opd-teacher-load {args.opd_teacher_load}"):
            if server is not None and args.job.engines:
                server.ask_once()
                self.findings.facts.append(f"the teacher at {server.url} scores prompts")
            elif self.teacher and args.opd_teacher_load:
                self._compare_vocabularies(args.opd_teacher_load)

    def _compare_vocabularies(self, teacher: str) -> None:
        """Raise ValueError unless teacher and student give a token the same id.

        Equal tokenizers suffice, because models of one family pad their vocabularies to different sizes.
        """
        mine, size = (text_config(config).get("vocab_size") for config in (self.config, self.teacher))
        folder = Path(teacher)
        if not has_weights(teacher):
            self.findings.warnings.append(f"--opd-teacher-load {teacher} has no weights: the teacher is random")
        if self.tokenizer is None or (folder.is_dir() and not (folder / "tokenizer.json").is_file()):
            if mine != size:
                raise ValueError(
                    f"the teacher's vocabulary has {size} tokens, but the student's has {mine}; both must be equal"
                )
            return
        ids, student_ids = load_tokenizer(teacher).get_vocab(), self.tokenizer.get_vocab()
        if differing := {token for token, _ in ids.items() ^ student_ids.items()}:
            raise ValueError(
                f"the teacher's tokenizer differs from the student's in {len(differing)} tokens, such as "
                f"{min(differing)!r}: a teacher can only score tokens of its own vocabulary"
            )
        if size is not None and size <= max(ids.values()):
            raise ValueError(f"the teacher's vocabulary has {size} tokens, fewer than the teacher's tokenizer")

    def check_rows(self, rows: Rows) -> None:
        """Check prompts, pairs or conversations, and one reward. Without a tokenizer, lengths are not checked."""
        name, findings = rows.name, self.findings
        columns = rows.dataset or self.args
        prompts = self.load_rows(rows, findings.warnings.append)
        if not prompts or not self.are_text(rows, prompts):
            return
        ends = {prompt.metadata.get("messages", [{"role": "user"}])[-1]["role"] for prompt in prompts}
        if not rows.any_form and "assistant" in ends:
            findings.warnings.append(
                f"{name}: {_where(columns, 'the prompt')} contains conversations that end with an answer of the "
                "assistant, so the model sees that answer before it writes its own: remove the answer from the prompts"
            )
        if rows.dataset is None and self.args.curriculum_threshold is not None:
            with findings.blaming("--curriculum-threshold"):
                Curriculum(self.args.curriculum_threshold, prompts)
        longest = max(len(prompt.tokens) for prompt in prompts)
        measured = f", the longest of {longest} tokens" if longest else ""
        findings.facts.append(f"{name}: {len(prompts)} {'pairs' if rows.paired else 'prompts'}{measured}")
        if rows.dataset is None and not self.args.job.sampled:
            self._make_samples(rows, prompts)
            return
        if rows.dataset is None and rows.generate is None:
            findings.longest_prompt = longest
        self._check_lengths(rows, longest)
        self._warn_of_hidden_tools(rows, prompts)
        if self.tokenizer is not None and rows.generate is None and prompts[0].tokens:
            if self.args.dry_run:
                findings.facts.append(f"{name}: {first_prompt(prompts[0], self.tokenizer)}")
            if not columns.apply_chat_template:
                self._warn_of_text(rows, prompts[0])
            first = prompts[:ROWS_AT_START]
            self._warn_of_unknown(name, first, f"{len(first)} prompts")
        if rows.generate == EPISODE:
            with findings.blaming(f"--environment {masked('environment', self.args.environment)}"):
                begins, length = check_environment(self.args, self.tokenizer, prompts[0])
                findings.facts.append(f"{name}: {begins}")
                self._check_lengths(rows, length, "an episode begins with")
        self.check_reward(rows, prompts[0], rendered=True)

    def _make_samples(self, rows: Rows, prompts: list[Sample]) -> None:
        """Make the samples of the first pair, or of some conversations, like training, to find mistakes now."""
        args, findings, name = self.args, self.findings, rows.name
        ours = str(args.rollout_function_path).startswith(("slime.", "miles.", "slimelite."))
        if self.tokenizer is None or not (ours or args.job.loss == "paired"):
            return
        from slimelite.data.conversations import TEXT_PROMPT, ChatReader

        settings = (args.loss_mask_type, args.apply_chat_template_kwargs, args.rollout_max_context_len)
        chat = ChatReader(self.tokenizer, *settings)
        with findings.blaming(name):
            if args.job.loss == "paired":
                pair = (chat.scored_pair if args.loss.scores else chat.pair)(deal(prompts[0], 0, 0))
                shown = (
                    f"{side.label} {side.prompt!r:.60} ({len(side.tokens) - 1} tokens)"
                    if args.loss.scores
                    else f"{side.label} {side.response!r:.60} ({side.effective_response_length} tokens)"
                    for side in pair
                )
                findings.facts.append(f"{name}: the first pair: {', '.join(shown)}")
                what = "preferred conversation" if args.loss.scores else "prompt"
                findings.facts.append(f"{name}: {first_prompt(pair[0], self.tokenizer, what)}")
                self._warn_of_unknown(name, pair, "pair")
                if isinstance(prompts[0].prompt, str) and not args.loss.scores:  # a reward model uses the template
                    self._warn_of_text(rows, prompts[0])
                self._warn_of_hidden(chat, name, prompts)
                return
            if isinstance(prompts[0].prompt, str):
                raise ValueError(f"{TEXT_PROMPT}; {how_to_convert(args, rows.paths[0])}")
            samples = [deal(prompt, i, i) for i, prompt in enumerate(prompts[:ROWS_AT_START])]
            for sample in samples:
                (chat.judge if args.loss.judged else chat.fill)(sample)
            empty = sum(sample.remove_sample for sample in samples)
            what = (
                f"{name}: {empty} of the first {len(samples)} conversations have no token of an assistant to train on"
            )
            if empty == len(samples):
                findings.problems.append(f"{what}; --input-key names the column of whole conversations")
            elif empty:
                findings.warnings.append(what)
            self._warn_of_hidden(chat, name, prompts)
            if empty < len(samples):
                findings.facts.append(f"{name}: {conversations_as_seen(samples, self.tokenizer)}")
            self._warn_of_unknown(name, samples, f"{len(samples)} conversations")

    def _warn_of_text(self, rows: Rows, prompt: Sample) -> None:
        """Warn if a chat model would see ``prompt`` without its chat template."""
        assert self.tokenizer is not None
        if warning := without_template(prompt, self.tokenizer, self._applies_template(rows)):
            self.findings.warnings.append(f"{rows.name}: {warning}")

    def _warn_of_unknown(self, name: str, samples: list[Sample], what: str) -> None:
        assert self.tokenizer is not None
        if warning := unknown_tokens(samples, self.tokenizer, what):
            self.findings.warnings.append(f"{name}: {warning}")

    def _warn_of_hidden(self, chat: ChatReader, name: str, prompts: list[Sample]) -> None:
        """Warn if the chat template leaves out content of the first rows. The model would not learn that content."""
        hidden, first = Counter[str](), prompts[:ROWS_AT_START]
        for prompt in first:
            conversations = [c for c in prompt.metadata.get(PAIR, [prompt.prompt]) if isinstance(c, list)]
            hidden.update({key for c in conversations for key in chat.left_out(c, prompt.metadata.get("tools"))})
        self.findings.warnings += [
            f"{name}: the chat template leaves {key} out of {count} of the first {len(first)} rows: the model cannot "
            f"learn {key}; put a chat_template.jinja that shows {key} into the --hf-checkpoint folder, or use content"
            for key, count in hidden.items()
        ]

    def _warn_of_hidden_tools(self, rows: Rows, prompts: list[Sample]) -> None:
        """Warn if the chat template does not show the tools of rows to the model."""
        columns = rows.dataset or self.args
        first = prompts[:ROWS_AT_START]
        with_tools = [prompt for prompt in first if prompt.metadata.get("tools")]
        if self.tokenizer is None or not (with_tools and columns.apply_chat_template):
            return
        messages, tools = with_tools[0].metadata["messages"], with_tools[0].metadata["tools"]
        from slimelite.data.replies import PROBE, renamed

        with self.findings.blaming(rows.name):
            if PROBE not in render(self.tokenizer, messages, renamed(tools), columns.apply_chat_template_kwargs):
                self.findings.warnings.append(
                    f"{rows.name}: {len(with_tools)} of the first {len(first)} rows have tools, and the chat "
                    "template does not show them: the model will not see them; put a chat_template.jinja that shows "
                    "tools into the --hf-checkpoint folder"
                )

    def _check_lengths(self, rows: Rows, longest: int, what: str = "a prompt of") -> None:
        """Check that a prompt of ``longest`` tokens with its response fits the context, the cache and a micro-batch."""
        args, dataset, name = self.args, rows.dataset, rows.name
        response = (args.rollout_max_response_len if dataset is None else dataset.max_response_len) or 0
        context = args.rollout_max_context_len if dataset is None else dataset.max_context_len
        whole = longest + response if context is None else min(longest + response, context)
        limit = text_config(self.config).get("max_position_embeddings")
        cache = args.kv_cache_tokens if args.job.engines and args.rollout_backend == "embedded" else None
        limits = {"the model's context": limit, "--rollout-max-context-len": context, "--kv-cache-tokens": cache}
        full = [f"{whose} of {most}" for whose, most in limits.items() if most is not None and longest >= most]
        if full:
            self.findings.problems.append(
                f"{name}: {what} {longest} tokens, which leaves no room for a response in {' and in '.join(full)}; "
                "shorten the prompts, or raise the limit"
            )
        elif cache is not None and whole > cache:
            lower = "--rollout-max-response-len" if dataset is None else "--eval-max-response-len"
            self.findings.problems.append(
                f"--kv-cache-tokens {cache} would cut responses short: {what} {longest} tokens ({name}); with a "
                f"response of {response}, there are {whole}; raise --kv-cache-tokens, or lower {lower}"
            )
        elif limit is not None and whole > limit:
            self.findings.warnings.append(
                f"{name}: {longest} prompt and {response} response tokens exceed the model's context of {limit}"
            )
        if dataset is None and args.max_tokens_per_gpu is not None and whole > args.max_tokens_per_gpu:
            self.findings.warnings.append(
                f"{name}: a sample may have {whole} tokens, more than --max-tokens-per-gpu "
                f"{args.max_tokens_per_gpu}; such a sample is trained in a separate pass"
            )
