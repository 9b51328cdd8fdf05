"""The pre-flight checks of a run's inputs that need transformers, and some torch: models, tokenizers, what is made of
the rows. Those of `slimelite.preflight.files` come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slimelite.arguments.rollout import EPISODE
from slimelite.arguments.secret import masked
from slimelite.data.conversations import ChatReader
from slimelite.data.messages import render, try_template
from slimelite.data.prompts import PAIR, Curriculum, deal
from slimelite.data.replies import PROBE, renamed
from slimelite.data.tokenizer import TOKENIZER, check_same, load_tokenizer, stop_token_ids
from slimelite.engines.params import SamplingParams
from slimelite.models.checkpoints import ROLLOUT_STATE, read_config, read_json
from slimelite.models.families import FAMILIES, text_config
from slimelite.models.files import has_weights, looks_sound
from slimelite.preflight.environments import check_environment
from slimelite.preflight.files import ROWS_AT_START, FileChecks, Rows
from slimelite.rollout.teacher import Teacher
from slimelite.samples.sample import Sample


class InputChecks(FileChecks):
    """The checks of one run's inputs; later ones in `load` use what earlier ones found."""

    def load(self) -> None:
        """Check what `read_files` could not, as far as that is possible without the weights of a model."""
        args = self.args
        if args.dry_run or not args.job.trains or args.job.local or self._doubtful():
            from slimelite.training.loading import inspect_models  # it needs torch

            problems, facts = inspect_models(args, self.broken)
            self.findings.problems += problems
            self.findings.facts += facts
            if any(problem.startswith("--hf-checkpoint ") for problem in problems):
                self.config = {}  # its tokenizer would be blamed for the same
        # else the first trainer does it, when it starts: this process imports no torch for a model that looks sound
        self.read_tokenizer()
        self.ask_teacher()
        for rows in self.rows():
            self.check_rows(rows)

    def _doubtful(self) -> bool:
        """Whether a model may be one that cannot be built, or that the engine does not compute."""
        own = self.args.engine_kind.check_config is not None and self.args.model_config is None
        computed = {family.name for _, family in FAMILIES.items() if family.embedded}
        unknown = own and bool(self.config) and self.config.get("model_type") not in computed
        return unknown or not all(looks_sound(config, shapes) for config, shapes in self.models)

    def read_tokenizer(self) -> None:
        """Check the tokenizer, and that the model's vocabulary has all its tokens and all stop tokens."""
        args, findings = self.args, self.findings
        if args.tokenizer is None or (args.tokenizer == args.hf_checkpoint and not self.config):
            return  # the model's problem is reported already
        with self.blaming_tokenizer():
            tokenizer = load_tokenizer(args.tokenizer)
            try_template(tokenizer)
            ends = stop_token_ids(args.tokenizer, tokenizer) if args.job.engines else []
            self.tokenizer = tokenizer
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
                        f"--ref-load {args.ref_load}: its vocabulary has {theirs} tokens, the tokenizer {known}: "
                        "take a reference that reads the policy's tokens"
                    )
        if rows is not None and known > rows:
            findings.problems.append(f"the tokenizer has {known} tokens but the model's vocabulary has {rows}")
        size = rows or known
        stops: dict[str, Sequence[int]] = {
            "--rollout-stop-token-ids": SamplingParams.of(args, "rollout").stop_token_ids
        }
        stops["eos_token_id of generation_config.json, config.json or the tokenizer"] = ends
        stops |= {
            f"eval dataset {d.name}: stop_token_ids": SamplingParams.of(d, "dataset").stop_token_ids
            for d in args.eval_datasets
        }
        for name, ids in stops.items():
            if outside := [i for i in ids if not 0 <= i < size]:
                findings.problems.append(f"{name} {outside}: token ids are 0 to {size - 1}, by the model's vocabulary")

    def ask_teacher(self) -> None:
        """Check that the teacher's server answers, or that the teacher's model has the student's vocabulary."""
        args, server = self.args, Teacher.of(self.args)
        with self.findings.blaming("--rm-url" if server else f"--opd-teacher-load {args.opd_teacher_load}"):
            if server is not None and args.job.engines:
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

    def check_rows(self, rows: Rows) -> None:
        """Check prompts, pairs or conversations and one reward; without a tokenizer, lengths are not checked."""
        name, findings = rows.name, self.findings
        prompts = self.load_rows(rows, findings.warnings.append)
        if not prompts or not self.are_text(rows, prompts):
            return
        conversations = [prompt.metadata.get("messages", [{"role": "user"}]) for prompt in prompts]
        if not self.takes_any(rows) and any(messages[-1]["role"] == "assistant" for messages in conversations):
            column = (rows.dataset or self.args).input_key
            findings.warnings.append(
                f"{name}: conversations in column {column!r} end with an answer of the assistant, which the model sees "
                "before it writes its own: leave it out of the prompts"
            )
        if rows.dataset is None and self.args.curriculum_threshold is not None:
            with findings.blaming("--curriculum-threshold"):
                Curriculum(self.args.curriculum_threshold, prompts)
        longest = max(len(prompt.tokens) for prompt in prompts)
        measured = f", the longest of {longest} tokens" if longest else ""
        findings.facts.append(f"{name}: {len(prompts)} {'pairs' if self.paired(rows) else 'prompts'}{measured}")
        if rows.dataset is None and not self.args.job.sampled:
            self._make_samples(rows, prompts)
            return
        if rows.dataset is None and rows.generate is None:
            findings.longest_prompt = longest
        self._check_lengths(rows, longest)
        self._warn_of_hidden_tools(rows, prompts)
        if rows.generate == EPISODE:
            with findings.blaming(f"--environment {masked('environment', self.args.environment)}"):
                begins, length = check_environment(self.args, self.tokenizer, prompts[0])
                findings.facts.append(f"{name}: {begins}")
                self._check_lengths(rows, length, "an episode begins with")
        self.check_reward(rows, prompts[0], rendered=True)

    def _make_samples(self, rows: Rows, prompts: list[Sample]) -> None:
        """Make the samples of the first pair, or of some conversations, as training will: mistakes in them show now."""
        args, findings, name = self.args, self.findings, rows.name
        ours = str(args.rollout_function_path).startswith(("slime.", "miles.", "slimelite."))
        if self.tokenizer is None or not (ours or args.job.loss == "paired"):
            return
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
                self._warn_of_hidden(chat, name, prompts)
                return
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

    def _warn_of_hidden(self, chat: ChatReader, name: str, prompts: list[Sample]) -> None:
        """Warn of what the first rows say and the chat template does not show, so that nothing learns it."""
        hidden, first = Counter[str](), prompts[:ROWS_AT_START]
        for prompt in first:
            conversations = [c for c in prompt.metadata.get(PAIR, [prompt.prompt]) if isinstance(c, list)]
            hidden.update({key for c in conversations for key in chat.left_out(c, prompt.metadata.get("tools"))})
        self.findings.warnings += [
            f"{name}: the chat template leaves {key} out of {count} of the first {len(first)} rows: nothing learns it; "
            "put a chat_template.jinja that shows it into the --hf-checkpoint folder, or write it into the content"
            for key, count in hidden.items()
        ]

    def _warn_of_hidden_tools(self, rows: Rows, prompts: list[Sample]) -> None:
        """Warn where the chat template does not show the model the tools of rows."""
        columns = rows.dataset or self.args
        first = prompts[:ROWS_AT_START]
        with_tools = [prompt for prompt in first if prompt.metadata.get("tools")]
        if self.tokenizer is None or not (with_tools and columns.apply_chat_template):
            return
        messages, tools = with_tools[0].metadata["messages"], with_tools[0].metadata["tools"]
        with self.findings.blaming(rows.name):
            if PROBE not in render(self.tokenizer, messages, renamed(tools), columns.apply_chat_template_kwargs):
                self.findings.warnings.append(
                    f"{rows.name}: {len(with_tools)} of the first {len(first)} rows have tools, and the "
                    "chat template does not show them: the model will not know of them; put a chat_template.jinja that "
                    "does into the --hf-checkpoint folder"
                )

    def _check_lengths(self, rows: Rows, longest: int, what: str = "a prompt of") -> None:
        """Check that a prompt of ``longest`` tokens and its response fit the context, the cache and a micro-batch."""
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
                f"--kv-cache-tokens {cache} would cut responses short: {what} {longest} tokens ({name}), and with a "
                f"response of {response} it has {whole}; raise it, or lower {lower}"
            )
        elif limit is not None and whole > limit:
            self.findings.warnings.append(
                f"{name}: {longest} prompt and {response} response tokens exceed the model's context of {limit}"
            )
        if dataset is None and args.max_tokens_per_gpu is not None and whole > args.max_tokens_per_gpu:
            self.findings.warnings.append(
                f"{name}: a sample may have {whole} tokens, more than --max-tokens-per-gpu {args.max_tokens_per_gpu}; "
                "such a one is trained in a pass of its own"
            )
