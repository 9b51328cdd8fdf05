"""The pre-flight checks that need neither torch nor transformers, whose imports take seconds: a mistake that these find
is answered at once.

They look at plugins, the files of models, the columns of data, and the reward of a row by a rule of ours.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slimelite.arguments import Args, EvalDataset
from slimelite.arguments.parse import plugin_paths
from slimelite.base.files import in_units
from slimelite.data.prompts import deal, load_prompts
from slimelite.data.tokenizer import check_files
from slimelite.models.checkpoints import STATE_FILE, damage, read_config
from slimelite.models.files import check_architecture, has_weights, shape_problems, weight_shapes
from slimelite.preflight.environments import check_program
from slimelite.preflight.findings import Findings, fill, one_line
from slimelite.rewards.grader import check_reward
from slimelite.rewards.rules import RULES
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.slime.plugins import load_function

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# name -> shape of each weight of a model
Shapes = Mapping[str, tuple[int, ...]]

# a real start checks this many rows of each file; the data source then reads all of them
ROWS_AT_START = 64


class Rows(NamedTuple):
    """Prompt files of training or of one evaluation ``dataset``; ``name``: how messages refer to them; ``rollout`` and
    ``generate``: the plugins that make their responses.
    """

    name: str
    paths: list[str]
    max_prompt_len: int | None
    rollout: str | None
    generate: str | None
    dataset: EvalDataset | None = None


class FileChecks:
    """The checks of one run's inputs that need no tokenizer."""

    def __init__(self, args: Args, findings: Findings) -> None:
        self.args = args
        self.findings = findings
        # plugins and rules that failed a check, so that they are not called, and flags of models that did
        self.broken: set[str] = set()
        # config of each model whose files are sound, and the shapes of its weights if they are known
        self.models: list[tuple[dict[str, object], Shapes | None]] = []
        # config of the model; empty if it cannot be read
        self.config: dict[str, object] = {}
        self.teacher: dict[str, object] = {}
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def read_files(self) -> None:
        """Check everything that the arguments name, as far as that is possible without torch and transformers."""
        args = self.args
        self.load_plugins()
        self.read_models()
        if args.agent_command is not None:
            with self.findings.blaming("--agent-command"):
                check_program(args.agent_command)
        self.read_saved_rollout()
        if args.tokenizer is not None and (args.tokenizer != args.hf_checkpoint or self.config):
            with self.blaming_tokenizer():
                check_files(args.tokenizer)
        if args.job.engines and not args.rollout_function_path:  # else no rule is called
            self.find_rules()
        for rows in self.rows():
            prompts = self.load_rows(rows, logger.debug, trial=True)  # who reads them with the tokenizer warns
            if prompts and self.are_text(rows, prompts):
                self.check_reward(rows, prompts[0], rendered=False)

    def blaming_tokenizer(self) -> AbstractContextManager[None]:
        """`Findings.blaming` the flag that names the tokenizer."""
        own = self.args.tokenizer == self.args.hf_checkpoint
        return self.findings.blaming("--hf-checkpoint" if own else "--tokenizer")

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
            if not args.job.trains:
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

    def _read_model(self, option: str, path: str) -> dict[str, object]:
        """The config of the model at ``path`` that ``option`` names; {} and a problem if its files make no model."""
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
        """Check that a checkpoint fits the disk of ``--save``: with Adam it takes 12 bytes for each number in
        ``shapes``, in fp32 the weight and its two means.
        """
        args = self.args
        if args.save is None or not args.job.trains or args.lora_rank or args.optimizer == "muon":
            return
        size = sum(map(math.prod, shapes.values())) * (4 if args.no_save_optim else 12)
        there = next(place for place in (Path(args.save), *Path(args.save).absolute().parents) if place.is_dir())
        disk = shutil.disk_usage(there)
        if disk.total and size > disk.free:  # /proc has no size
            self.findings.problems.append(
                f"--save {args.save}: a checkpoint takes about {in_units(size)}, and {in_units(disk.free)} are free "
                "there: make room, or name another folder"
            )

    def read_saved_rollout(self) -> None:
        """Check the first rollout that ``--load-debug-rollout-data`` replays."""
        option, template = "--load-debug-rollout-data", self.args.job.saved
        if template is None:
            return
        try:
            path = fill(option, template, self.args.start_rollout_id or 0)
        except ValueError as error:
            self.findings.problems.append(str(error))
            return
        with self.findings.blaming(option):
            SampleTable.from_parquet(path)

    def rows(self) -> list[Rows]:
        """The files of training and of every evaluation dataset."""
        args, rows = self.args, list[Rows]()
        if args.rollout_global_dataset and args.prompt_data and not args.job.saved:
            plugins = args.rollout_function_path, args.custom_generate_function_path
            rows.append(Rows("--prompt-data", args.prompt_data, args.rollout_max_prompt_len, *plugins))
        if args.job.evaluates:
            for d in args.eval_datasets:
                plugins = args.eval_function_path, d.custom_generate_function_path
                rows.append(Rows(f"eval dataset {d.name}", [d.path], d.max_prompt_len, *plugins, d))
        return rows

    def paired(self, rows: Rows) -> bool:
        return rows.dataset is None and self.args.job.loss == "paired"

    def load_rows(self, rows: Rows, warn: Callable[[str], None], *, trial: bool = False) -> list[Sample]:
        """The prompts of the first rows, in a dry run of all; none if they cannot be read, which becomes a problem.

        ``warn``: called with a message about rows that are left out. ``trial``: of a dry run, too, only the first rows.
        """
        args = self.args
        every = args.dry_run and not trial
        paths = [path if every or "@[" in path else f"{path}@[:{ROWS_AT_START}]" for path in rows.paths]
        with self.findings.blaming(rows.name):
            load = partial(
                load_prompts,
                rows.dataset or args,
                self.tokenizer,
                replies=(args.chosen_key, args.rejected_key) if self.paired(rows) else None,
                max_prompt_len=rows.max_prompt_len,
                skip_bad_rows=args.skip_bad_rows,
                keep_messages=True,
                warn=lambda text: warn(f"{rows.name}: {text}"),
            )
            # where none of the first rows is kept, others decide
            return load(paths, whole=paths == rows.paths and not trial) or load(rows.paths)
        return []

    def are_text(self, rows: Rows, prompts: list[Sample]) -> bool:
        """Whether our own loop can send the prompts to an engine; code of the user's may take prompts of any form."""
        columns = rows.dataset or self.args
        if self.takes_any(rows) or columns.apply_chat_template or all(isinstance(p.prompt, str) for p in prompts):
            return True
        self.findings.problems.append(
            f"{rows.name}: column {columns.input_key!r} holds messages: add --apply-chat-template, which makes text of "
            "them, or name a column of text with --input-key"
        )
        return False

    def takes_any(self, rows: Rows) -> bool:
        """Whether what reads the prompts is the user's code, or a trainer without an engine."""
        return bool(rows.rollout or rows.generate or not self.args.job.engines)

    def check_reward(self, rows: Rows, prompt: Sample, *, rendered: bool) -> None:
        """Score the first row, with a right answer as the response if the rule can make one from the label.

        Rules of ours see no prompt; only what sees it, such as a function of the user's, is called with a ``rendered``
        one, and then they are not.
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
        if settings.custom_rm_path is None:  # the author of a reward plugin wants its log lines as well
            log.setLevel(logging.CRITICAL)
        try:
            with self.findings.blaming(rows.name):
                reward, response = check_reward(settings, sample, group_size)
                key, option = (args.reward_key, "--reward-key") if dataset is None else (None, "")
                if dataset is not None and args.eval_reward_key != args.reward_key:
                    key, option = args.eval_reward_key, "--eval-reward-key"
                if key is not None and args.environment is None and not isinstance(reward, dict):
                    self.findings.warnings.append(
                        f"{option} {key}: the reward of the first row of {rows.name} is {reward}, a number without "
                        "entries, so that the flag has no effect"
                    )
                label = f"{prompt.label!r:.60}"
                self.findings.facts.append(
                    f"{rows.name}: {response} as the response to the first prompt gets {reward} (label {label})"
                )
        finally:
            log.setLevel(logging.NOTSET)
