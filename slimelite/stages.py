"""``train.py --stages sft.yaml rl.yaml``: several runs. Each run starts from the model of the previous run.

A stage is a YAML file of flags, as for ``--config``. The other flags of the command line apply to every stage and
override its file. With ``--run-dir out``, stage 0 from the file ``sft.yaml`` has the run folder ``out/0-sft``. Its
checkpoints and its model are in this folder, unless the file names other places.

After a crash, give the same command again. It does not repeat finished stages. The interrupted stage resumes from its
newest checkpoint if it has a ``save_interval``; otherwise it begins again. All remaining stages are checked before the
first of them begins. If the model of an earlier stage does not exist yet, a later stage is checked with the model that
the first stage starts from. If the first stage makes a new model, a temporary folder with its config and tokenizer
stands in for it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimelite.algorithms.losses import LOSSES, LossType
from slimelite.arguments.args import Args
from slimelite.arguments.flags import ArgumentError, all_flags, group_flags
from slimelite.arguments.help import is_asked
from slimelite.arguments.parse import args_type, make_args, merge_sources
from slimelite.arguments.secret import masked
from slimelite.arguments.sources import PATHS, Settings, Vocabulary, read_config, split_words
from slimelite.arguments.tracking import TrackingArgs
from slimelite.base.files import FORMAT, check_format, write_text
from slimelite.base.lifecycle import read_status
from slimelite.models.checkpoints import model_folder

# the file in the folder of a stage that has begun, with its flags, its id, and the id of the previous stage. It is
# written before the stage starts, so a stage that is killed right after its end has the file too
RECORD = "stage.json"
# flags that do not change what a stage computes
ASIDE = {*(flag.name for flag in group_flags(TrackingArgs)), "config", "stages", "dry_run", "plan_gpu"}
# flags that name a folder for only one run: two stages must not have the same folder
OF_ONE = ("save_hf", "push_to_hub", "save", "load")


@dataclass(frozen=True)
class Stage:
    """One run of ``--stages``. ``argv``: its command line, without the model that it starts from."""

    number: int
    file: str
    folder: Path
    settings: Settings
    argv: list[str]
    # the template of --save-hf; if another stage follows, this is the folder of the stage's model
    model: str
    # whether its file names the model of an earlier stage, which may not be the previous stage
    chooses: bool

    def __str__(self) -> str:
        return f"stage {self.number} ({self.file})"

    @property
    def dry(self) -> bool:
        """Whether the stage is only checked, because of ``--dry-run``."""
        return bool(self.settings.values.get("dry_run"))

    @property
    def loss(self) -> LossType | None:
        """The loss that the stage minimises; None if ``--loss-type`` is unknown."""
        name = self.settings.values.get("loss_type", Args.loss_type)
        return LOSSES.get(name)

    @property
    def chats(self) -> bool:
        """Whether a chat template renders the stage's prompts or conversations."""
        values, loss = self.settings.values, self.loss
        if values.get("apply_chat_template"):
            return True
        return bool(loss and loss.supervised and not loss.documents and not values.get("rollout_function_path"))

    @property
    def made(self) -> bool:
        """Whether the stage's model exists."""
        return Path(self.model).is_dir()

    @property
    def result(self) -> str:
        """The folder of the model that the next stage starts from. With ``save_best``, this is the model of the best
        evaluation."""
        best = model_folder(self.model, "best") if self.settings.values.get("save_best") else None
        return str(best) if best is not None and best.is_dir() else self.model

    @property
    def finished(self) -> bool:
        """Whether an earlier start of this command finished the stage."""
        return read_status(self.folder).get("status") == "finished" and (self.made or "{" in self.model)

    def new_record(self, after: object) -> dict[str, Any]:
        """The record of a stage that begins now. ``after``: the id of the previous stage."""
        return {"format": FORMAT, "flags": self._flags(), "id": secrets.token_hex(8), "after": after}

    def write_record(self, record: dict[str, Any]) -> None:
        """Write the record that `new_record` returned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / RECORD, json.dumps(record, indent=1))

    def record(self) -> dict[str, Any]:
        """The record that `write_record` wrote; empty if there is no record.

        Raises:
            ValueError: the record has another format.
        """
        file = self.folder / RECORD
        try:
            record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        check_format(file, record.get("format"))
        return record

    def changed(self, after: object) -> str | None:
        """A text that says how this stage differs from the finished stage in its folder; None if it does not.
        ``after``: the id of the stage before."""
        try:
            record = self.record()
        except ValueError as error:
            return str(error)
        if not record:
            return f"it has finished, but {RECORD}, the record of its flags, is missing"
        before, now = record["flags"], self._flags()
        differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if differ:
            changes = (
                f"{name} was {before.get(name, 'not given')} and is {now.get(name, 'not given')}" for name in differ
            )
            return f"it has finished with other flags: {', '.join(changes)}"
        return None if record["after"] == after else "it started from another model of the previous stage"

    def _flags(self) -> dict[str, Any]:
        """The flags that affect the results of the stage, by name. Values are as JSON returns them: a tuple is a
        list."""
        values = {**self.settings.values, **self.settings.sglang, **self.settings.custom}
        shown = {name: masked(name, value) for name, value in values.items() if name not in ASIDE}
        flags: dict[str, Any] = json.loads(json.dumps(shown, default=str))
        return flags


def run_stages(run: Callable[[list[str] | None], int], problems: Callable[[list[str]], list[str]]) -> int:
    """Call `run_all`. Under torchrun, only rank 0 calls it, and the other processes serve rank 0."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return run_all(run, problems)
    from slimelite.cluster.torchrun import follow, leave  # it needs torch

    if os.environ["RANK"] != "0":
        return follow()
    try:
        return run_all(run, problems)
    finally:
        leave()


def run_all(run: Callable[[list[str] | None], int], problems: Callable[[list[str]], list[str]]) -> int:
    """Call ``run`` with the command line of this process, or with the command line of each stage in turn. Returns the
    exit status.

    ``problems`` returns the problems of a command line. It checks all stages before the first stage begins. If a stage
    fails or is stopped, the command ends with the status of this stage. A dry run reports on all stages.
    """
    argv = sys.argv[1:]
    if "--stages" not in dict(split_words(argv)[0]) or is_asked(argv):
        return run(None)
    with tempfile.TemporaryDirectory(prefix="new_model-", ignore_cleanup_errors=True) as folder:
        try:
            stages = read_stages(argv)
            base = _base_model(stages[0], folder)
            wrong = list(_problems(stages, base, problems))
        except ArgumentError as error:
            wrong = error.problems
        if wrong:
            print("\n".join(f"train.py: {problem}" for problem in dict.fromkeys(wrong)), file=sys.stderr)
            return 2
        return _run_each(stages, base, run)


def _run_each(stages: Sequence[Stage], base: str | None, run: Callable[[list[str] | None], int]) -> int:
    """Run the unfinished stages in turn, and return the exit status. ``base``: the result of `_base_model`."""
    after, worst = None, 0
    for stage in stages:
        if stage.finished:
            print(f"stage {stage.number} (of stages 0 to {len(stages) - 1}) is finished: {stage.model}")
        else:
            print(f"stage {stage.number} (of stages 0 to {len(stages) - 1}): {stage.folder}")
            record = stage.new_record(after)
            if not stage.dry:
                stage.write_record(record)
            start = base if stage.dry else stages[0].settings.values.get("hf_checkpoint")  # `base` has no weights
            worst = max(worst, run(_command_line(stage, stages[: stage.number], start)))
            if worst and not stage.dry:
                return worst
            if not stage.dry:
                stage.write_record(record)  # another command may have written, before it failed at the folder's lock
        after = stage.record().get("id")
    return worst


def read_stages(argv: Sequence[str]) -> list[Stage]:
    """The stages of a command line that has ``--stages``.

    Raises:
        ArgumentError: no file is named, a file cannot be read, ``--run-dir`` is missing, or a flag cannot apply to
            every stage.
    """
    settings = merge_sources(argv, Vocabulary(args_type(argv))).values
    calls = [(option, words) for option, words in split_words(argv)[0] if option != "--stages"]
    # a value that begins with dashes must follow an equals sign
    common = [word for option, words in calls for word in ("=".join((option, *words[:1])), *words[1:])]
    files = settings.get("stages")
    if not files:
        raise ArgumentError(
            ["--stages names no file: give one file of flags for each stage, as in --stages sft.yaml rl.yaml"]
        )
    if "config" in settings:
        raise ArgumentError(["--config and --stages cannot be combined: put the flags into the files of --stages"])
    if "run_dir" not in settings:
        raise ArgumentError(["--stages needs --run-dir, the folder for the runs, checkpoints and models of the stages"])
    if every := ", ".join(f"--{name.replace('_', '-')}" for name in OF_ONE if name in settings):
        raise ArgumentError(
            [f"{every} with --stages: all stages would use the same folder: name a folder in the file of each stage"]
        )
    stages = [_stage(number, file, Path(settings["run_dir"]), common) for number, file in enumerate(files)]
    if wrong := [f"{each}: {wrong.removeprefix('--config ')}" for each in stages for wrong in each.settings.problems]:
        raise ArgumentError(wrong)
    return stages


def _stage(number: int, file: str, folder: Path, common: list[str]) -> Stage:
    argv = ["--config", file, *common]
    vocabulary = Vocabulary(args_type(argv))
    settings, own = merge_sources(argv, vocabulary), read_config(file, "--config", vocabulary).values
    values, place = settings.values, folder / f"{number}-{Path(file).stem}"
    if "run_dir" in own:
        settings.complain("--run-dir", f"{own['run_dir']}: the stage's folder is always {place}: leave this key out")
    checkpoints = values.get("save", str(place / "checkpoints"))
    model = values.get("save_hf", str(place / "model"))
    argv += ["--run-dir", str(place), "--save-hf", model, "--load", values.get("load", checkpoints)]
    if {"save_interval", "save_interval_minutes"} & values.keys():
        argv += ["--save", checkpoints]
    if values.get("lora_rank") or values.get("lora_adapter_path"):
        argv += ["--lora-merge"]  # the next stage needs a whole model
    return Stage(number, file, place, settings, argv, model, bool(number) and "hf_checkpoint" in own)


def _base_model(first: Stage, folder: str) -> str | None:
    """The model that the ``first`` stage starts from. If that stage makes a new model, this is ``folder``, which then
    has the config and the tokenizer of the new model, but no weights. None if the stage's flags define no model.
    """
    try:
        args = make_args(first.argv)
        if args.model_config is not None:
            from slimelite.data.tokenizer import write_new_model  # it needs transformers

            write_new_model(Path(folder), args.model_config, str(args.tokenizer))
            return folder
    except (OSError, ValueError):
        pass  # the checks of the first stage report it
    return first.settings.values.get("hf_checkpoint")


def _problems(stages: Sequence[Stage], base: str | None, problems: Callable[[list[str]], list[str]]) -> Iterator[str]:
    """The problems of finished stages, of the order of stages, and of the remaining stages. ``base``: the result of
    `_base_model`."""
    yield from _disorder(stages)
    after: object = None
    for stage in stages:
        before = stages[: stage.number]
        if stage.finished:
            if why := stage.changed(after):
                again = ", ".join(str(each.folder) for each in stages[stage.number :] if each.folder.exists())
                yield f"{stage}: {why}; to run the stage again, remove {again}; to keep it, give its earlier flags"
                return
            after = stage.record().get("id")
        elif not stage.dry and (not before or _newest(before, base)):  # else the first stage reports its mistake
            to_write = [str(each.folder) for each in before if not each.finished]
            to_write += [base] if base and base != stages[0].settings.values.get("hf_checkpoint") else []
            for problem in problems(_command_line(stage, before, base)):
                if not any(path in problem for path in to_write):  # earlier stages will write these files
                    yield f"{stage}: {problem}"


def _disorder(stages: Sequence[Stage]) -> Iterator[str]:
    """Problems with folders that two stages would use, and with models that no earlier stage makes."""
    for stage in stages:
        before = stages[: stage.number]
        for name in OF_ONE:
            mine = stage.settings.values.get(name)
            if twice := [each for each in before if mine is not None and each.settings.values.get(name) == mine]:
                yield f"{stage}: --{name.replace('_', '-')} {mine} is also the folder of {twice[0]}: name another"
        if stage.chooses and not any(_is(stage.settings.values["hf_checkpoint"], each) for each in before):
            yield (
                f"{stage}: --hf-checkpoint {stage.settings.values['hf_checkpoint']}: a stage starts from the model of "
                f"the previous stage: leave the flag out, or name the model of an earlier stage, such as "
                f"{before[0].model}"
            )
        if stage.chats and (base := _base(stage, stages)) is not None:
            yield (
                f"{stage}: it needs a chat template, but the model of {base} will have none, because its --loss-type "
                "is pretrain_loss: give a tokenizer that has a chat template as --tokenizer"
            )
        if "{" in stage.model and stage is not stages[-1]:
            yield f"{stage}: --save-hf {stage.model}: the next stage starts from one folder: leave {{rollout_id}} out"


def _to_come(stage: Stage, stages: Sequence[Stage]) -> Iterator[Stage]:
    """The unfinished stages from which ``stage`` gets its tokenizer. The first is the stage from whose model it
    starts, the second is the stage from whose model the first one starts, and so on. The last one may name the
    tokenizer.
    """
    while "tokenizer" not in stage.settings.values and stage.number:
        before = stages[: stage.number]
        named = [each for each in before if _is(stage.settings.values.get("hf_checkpoint"), each)]
        stage = named[-1] if stage.chooses and named else before[-1]
        if stage.made:  # its files have the tokenizer
            return
        yield stage


def _base(stage: Stage, stages: Sequence[Stage]) -> Stage | None:
    """The unfinished stage because of which ``stage`` will have no chat template; None if there is none."""
    documents = (each for each in _to_come(stage, stages) if each.loss is not None and each.loss.documents)
    return next(documents, None)


def _command_line(stage: Stage, before: Sequence[Stage], base: str | None) -> list[str]:
    """The command line of ``stage``. If models of the stages ``before`` do not exist yet, it has the newest existing
    model in their place. ``base``: the result of `_base_model`."""
    words, newest = list(stage.argv), _newest(before, base)
    if newest is None:
        return words
    values = stage.settings.values
    for flag in all_flags(Args).values():
        if flag.metavar in PATHS and any(not each.made and _is(values.get(flag.name), each) for each in before):
            words += [flag.option, newest]
    # the newest model may have another tokenizer than the model that will exist
    named = [each.settings.values.get("tokenizer") for each in _to_come(stage, before)][-1:]
    if named and named[0] is not None and Path(named[0]).is_dir():
        words += ["--tokenizer", named[0]]
    return words if stage.chooses else [*words, "--hf-checkpoint", newest]


def _newest(before: Sequence[Stage], base: str | None) -> str | None:
    """The newest model that the stages ``before`` have made; ``base`` if they have made none; None for the first
    stage."""
    made = [each.result for each in before if each.made]
    return made[-1] if made else base if before else None


def _is(value: object, stage: Stage) -> bool:
    """Whether ``value``, given for a flag, is the folder of the model of ``stage``."""
    return isinstance(value, str) and Path(value).absolute() == Path(stage.model).absolute()
