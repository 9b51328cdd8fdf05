"""The data source: hands out groups of samples, epoch after epoch, and can be saved and resumed at any position."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slimelite.arguments import Args, DataArgs
from slimelite.data.prompts import PAIR, deal, load_prompts
from slimelite.data.tokenizer import load_tokenizer
from slimelite.samples.sample import Sample, label_text, plain
from slimelite.slime.plugins import load_function

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class DataSource:
    """Hands out prompts as groups of ``--n-samples-per-prompt`` samples; groups that were returned come first.

    The order in epoch e is the file order or, with ``--rollout-shuffle``, a permutation that depends only on
    ``--rollout-seed`` + e. Several paths form one dataset; with ``--prompt-data-weights`` each path is a stream with
    its own epochs, and the next prompt comes from the stream that is furthest behind its share.
    """

    def __init__(self, args: Args, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """``tokenizer`` None: load that of ``args``, since subclasses written for slime are built from ``args`` alone.

        Raises:
            ValueError: --prompt-data is missing, or `load_prompts` raises.
        """
        self.args = args
        if tokenizer is None:
            tokenizer = load_tokenizer(str(args.tokenizer))
        self._weights = list(args.prompt_data_weights)
        assert not self._weights or len(self._weights) == len(args.prompt_data), "parsing checks the weights"
        if args.rollout_global_dataset and not args.prompt_data:
            raise ValueError("--prompt-data names no file; give one, or --disable-rollout-global-dataset")
        parts = [[path] for path in args.prompt_data] if self._weights else [args.prompt_data]
        datasets = [self._load(paths, tokenizer) for paths in parts if args.rollout_global_dataset]
        self._curriculum = (
            None if args.curriculum_threshold is None else Curriculum(args.curriculum_threshold, datasets[0])
        )
        if self._curriculum is not None:
            datasets = self._curriculum.parts
        self._streams = [_Stream(prompts, args) for prompts in datasets]
        self._returned: list[list[Sample]] = []
        self._pick = (
            load_function(args.buffer_filter_path, "--buffer-filter-path")
            if args.buffer_filter_path
            else _first_in_first_out
        )
        self._next_group = 0
        self._next_sample = 0

    def _load(self, paths: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        args = self.args
        return load_prompts(
            args,
            tokenizer,
            paths,
            replies=(args.chosen_key, args.rejected_key) if args.job.loss == "paired" else None,
            max_prompt_len=args.rollout_max_prompt_len,
            skip_bad_rows=args.skip_bad_rows,
            keep_messages=args.reward_model_path is not None,
        )

    def __len__(self) -> int:
        """Number of prompts, of all paths together."""
        return sum(len(stream.prompts) for stream in self._streams)

    def get_samples(self, n: int) -> list[list[Sample]]:
        """``n`` groups: returned ones first, then new ones with prompt tokens, label, metadata and indices."""
        groups = self._pick(self.args, None, self._returned, n) if self._returned else []
        return [*groups, *(self._fresh_group() for _ in range(n - len(groups)))]

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        """Take unfinished or surplus groups back; `get_samples` returns them first (see --buffer-filter-path)."""
        self._returned.extend(groups)

    def heed(self, groups: Sequence[list[Sample]], reward_key: str | None) -> dict[str, float]:
        """Let the levels of ``--curriculum-threshold`` rise by a rollout's finished ``groups``; metrics of them."""
        return {} if self._curriculum is None else self._curriculum.heed(groups, reward_key)

    def _fresh_group(self) -> list[Sample]:
        prompt = self._next_stream().next() if self._streams else Sample()
        first, size = self._next_sample, self.args.n_samples_per_prompt
        group = [deal(prompt, self._next_group, index) for index in range(first, first + size)]
        self._next_sample += size
        self._next_group += 1
        return group

    def _next_stream(self) -> _Stream:
        if self._curriculum is not None:
            return self._streams[self._curriculum.part(self._next_group)]
        if len(self._streams) == 1:
            return self._streams[0]
        dealt = 1 + sum(stream.drawn for stream in self._streams)
        shares = [weight / sum(self._weights) for weight in self._weights]
        behind = [share * dealt - stream.drawn for share, stream in zip(shares, self._streams, strict=True)]
        return self._streams[behind.index(max(behind))]

    def state_dict(self) -> dict[str, object]:
        """The state needed to resume, including the returned groups, as plain JSON values.

        Values that plugins put on a sample are converted too: numpy values to numbers and lists, others to text.
        """
        return {
            "drawn": [stream.drawn for stream in self._streams],
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "returned": [[plain(sample.to_dict()) for sample in group] for group in self._returned],
            "levels": {} if self._curriculum is None else self._curriculum.levels,
            "dataset": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position that `state_dict` saved.

        Raises:
            ValueError: the prompts, their order or their weights are not those of the saved state.
        """
        saved, now = state["dataset"], self._identity()
        if changed := [f"{key}: {saved[key]} when saved, {now[key]} now" for key in now if saved.get(key) != now[key]]:
            raise ValueError(
                f"cannot resume the data source, its data has changed ({'; '.join(changed)}); resume with the same "
                "data flags and files, or start a new run from the saved Hugging Face weights (--hf-checkpoint)"
            )
        for stream, drawn in zip(self._streams, state["drawn"], strict=True):
            stream.drawn = drawn
        if self._curriculum is not None:
            self._curriculum.levels = dict(state["levels"])
        self._next_group = state["next_group"]
        self._next_sample = state["next_sample"]
        self._returned = [[Sample.from_dict(values) for values in group] for group in state["returned"]]

    def _identity(self) -> dict[str, object]:
        """The settings and data that must be unchanged for a saved position to be valid."""
        return {
            "prompts": [len(stream.prompts) for stream in self._streams],
            "contents": [stream.digest for stream in self._streams],
            "--rollout-seed": self.args.rollout_seed if self.args.rollout_shuffle else None,
            "--rollout-shuffle": self.args.rollout_shuffle,
            "--prompt-data-weights": self._weights,
        }


class Curriculum:
    """``--curriculum-threshold``: prompts of a task become harder when enough of its answers are right.

    Rows have ``level``, and perhaps ``task``, in their metadata; each task is at one level, at first its lowest.

    A task rises to its next level when the mean reward of its groups at the present one, in a rollout, is at least the
    threshold. Tasks take turns.

    Attributes:
        parts: the prompts of each task at each level.
        levels: task -> its level, counted from 0 in the order of the levels that its rows have.
    """

    def __init__(self, threshold: float, prompts: Sequence[Sample]) -> None:
        """Sort ``prompts`` by task and level.

        Raises:
            ValueError: one of them has no level.
        """
        self._threshold = threshold
        by_task: dict[str, dict[float, list[Sample]]] = {}
        for prompt in prompts:
            level = prompt.metadata.get("level")
            if not isinstance(level, int | float):
                raise ValueError(
                    "--curriculum-threshold: rows need a number as level in their metadata, such as those of "
                    f"--environment 'reasoning-gym:gcd?levels=3' have; one has {level!r}"
                )
            by_task.setdefault(str(prompt.metadata.get("task", "")), {}).setdefault(level, []).append(prompt)
        self.parts: list[list[Sample]] = []
        self._places: dict[str, list[tuple[float, int]]] = {}  # task -> (level, index of its part)
        for task, by_level in by_task.items():
            for level in sorted(by_level):
                self._places.setdefault(task, []).append((level, len(self.parts)))
                self.parts.append(by_level[level])
        self.levels = dict.fromkeys(by_task, 0)

    def part(self, group: int) -> int:
        """The index of the part that group number ``group`` comes from."""
        task = list(self.levels)[group % len(self.levels)]
        return self._places[task][self.levels[task]][1]

    def heed(self, groups: Sequence[list[Sample]], reward_key: str | None) -> dict[str, float]:
        """Let tasks rise; returns ``rollout/level/TASK``, or ``rollout/level`` of the only one, of the next rollout."""
        for task, at in self.levels.items():
            level, last = self._places[task][at][0], at + 1 == len(self._places[task])
            rewards = [
                sample.reward_value(reward_key)
                for sample in (sample for group in groups for sample in group)
                if (str(sample.metadata.get("task", "")), sample.metadata.get("level")) == (task, level)
                and sample.reward is not None
            ]
            if rewards and not last and statistics.fmean(rewards) >= self._threshold:
                self.levels[task] = at + 1
        return {f"rollout/level/{task}".removesuffix("/"): float(at) for task, at in self.levels.items()}


class _Stream:
    """An endless sequence of prompts; its only state is ``drawn``, the number of prompts drawn so far."""

    def __init__(self, prompts: list[Sample], args: DataArgs) -> None:
        self.prompts = prompts
        self.drawn = 0
        self.digest = _digest(prompts)
        self._args = args
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> Sample:
        epoch, offset = divmod(self.drawn, len(self.prompts))
        if self._order[0] != epoch:
            order = list(range(len(self.prompts)))
            if self._args.rollout_shuffle:
                random.Random(self._args.rollout_seed + epoch).shuffle(order)
            self._order = (epoch, order)
        self.drawn += 1
        return self.prompts[self._order[1][offset]]


def _digest(prompts: list[Sample]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        text = isinstance(prompt.prompt, str)
        content = prompt.prompt if text else json.dumps(prompt.prompt, sort_keys=True, default=str)
        replies = [prompt.metadata[PAIR]] if PAIR in prompt.metadata else []
        label = None if prompt.label is None else label_text(prompt.label)
        state.update(json.dumps([content, label, *replies], default=str).encode())
    return state.hexdigest()


def _first_in_first_out(args: object, rollout_id: int | None, buffer: list[list[Sample]], n: int) -> list[list[Sample]]:  # noqa: ARG001
    """The default buffer filter, with slime's signature: takes the first ``n`` groups out of ``buffer``."""
    taken = buffer[:n]
    del buffer[:n]
    return taken
