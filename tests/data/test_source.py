from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.data.prompts import DataSource
from slimelite.samples.sample import Sample

from .tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
Group = list[Sample]


def write(path: Path, inputs: Sequence[str]) -> str:
    path.write_text(
        "".join(json.dumps({"input": x, "y": i, "metadata": {"tags": [x]}}) + "\n" for i, x in enumerate(inputs))
    )
    return str(path)


def make(paths: list[str], n: int = 2, **settings: Any) -> DataSource:
    return DataSource(Args(prompt_data=paths, label_key="y", n_samples_per_prompt=n, **settings), TOKENIZER)


def deal(source: DataSource, n: int) -> str:
    return "".join(str(group[0].prompt) for group in source.get_samples(n))


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return write(tmp_path / "ten.jsonl", "0123456789")


def test_a_group_is_ready_to_generate(ten: str) -> None:
    groups = make([ten]).get_samples(2)
    assert [[s.index for s in g] for g in groups] == [[0, 1], [2, 3]]
    assert [[s.group_index for s in g] for g in groups] == [[0, 0], [1, 1]]
    sample = groups[1][1]
    assert (sample.prompt, sample.label, sample.metadata) == ("1", 1, {"tags": ["1"]})
    assert TOKENIZER.decode(sample.tokens) == "1"
    assert (sample.prompt_length, sample.response_length) == (1, 0)


def test_samples_share_nothing_that_can_be_changed(ten: str) -> None:
    source = make([ten])
    (first, second), *_ = source.get_samples(10)
    first.metadata["tags"].append("x")
    first.tokens.append(0)
    assert second.metadata == {"tags": ["0"]}
    assert source.get_samples(1)[0][0].metadata == {"tags": ["0"]}
    assert len(second.tokens) == 1


def test_a_call_may_wrap_any_number_of_epochs(ten: str) -> None:
    source = make([ten])
    assert len(source) == 10
    assert deal(source, 7) + deal(source, 28) == "0123456789" * 3 + "01234"


def test_each_epoch_is_slimes_permutation_of_the_file_order(ten: str) -> None:
    random.seed(0)
    before = random.getstate()
    dealt = deal(make([ten], rollout_shuffle=True, rollout_seed=7), 30)
    assert random.getstate() == before
    for epoch in range(3):
        order = list("0123456789")
        random.seed(7 + epoch)
        random.shuffle(order)
        assert dealt[10 * epoch : 10 * epoch + 10] == "".join(order)


def test_returned_groups_come_first_in_the_order_they_came(ten: str) -> None:
    source = make([ten])
    a, b, c = source.get_samples(3)
    source.add_samples([b])
    source.add_samples([c, a])
    again = source.get_samples(2)
    assert again[0] is b
    assert again[1] is c
    assert [g[0].prompt for g in source.get_samples(3)] == ["0", "3", "4"]


@pytest.mark.parametrize(
    "settings", [{}, {"rollout_shuffle": True}, {"rollout_shuffle": True, "prompt_data_weights": [1.0, 3.0]}]
)
def test_the_state_goes_on_exactly(ten: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = [ten, write(tmp_path / "abc.jsonl", "abc")]
    source = make(paths, **settings)
    groups = source.get_samples(17)
    groups[3][0].append_response_tokens([5, 6], [-0.5, -1.0], text="hm", weight_version=2)
    source.add_samples(groups[3:5])
    # through JSON: nothing in it but plain values
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make(paths, **settings)
    resumed.load_state_dict(state)
    assert resumed.get_samples(40) == source.get_samples(40)
    assert resumed.state_dict() == source.state_dict()


@pytest.mark.parametrize(
    ("inputs", "settings", "message"),
    [
        ("012345678", {}, "prompts: .*10.* when saved, .*9.* now"),
        ("012345678x", {}, "contents"),
        ("0123456789", {"rollout_seed": 1}, "--rollout-seed: 42 when saved, 1 now"),
        ("0123456789", {"rollout_shuffle": False}, "--rollout-shuffle: True when saved, False now"),
    ],
)
def test_changed_data_is_not_resumed(
    ten: str, tmp_path: Path, inputs: str, settings: dict[str, Any], message: str
) -> None:
    state = make([ten], rollout_shuffle=True).state_dict()
    other = make([write(tmp_path / "ten.jsonl", inputs)], **{"rollout_shuffle": True, **settings})
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)


def test_weights_are_kept_at_every_moment(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{c}.jsonl", c * n) for c, n in (("a", 3), ("b", 50), ("c", 1))]
    dealt = deal(make(paths, prompt_data_weights=[5.0, 3.0, 2.0]), 1000)
    assert Counter(dealt) == {"a": 500, "b": 300, "c": 200}
    for n in range(1, 1000):
        assert all(abs(dealt[:n].count(c) - w * n) <= 1 for c, w in (("a", 0.5), ("b", 0.3), ("c", 0.2)))


def test_each_weighted_path_has_epochs_of_its_own(ten: str, tmp_path: Path) -> None:
    letters = write(tmp_path / "letters.jsonl", "ab")
    dealt = deal(make([ten, letters], prompt_data_weights=[1.0, 1.0], rollout_shuffle=True), 20)
    assert sorted(c for c in dealt if c.isdigit()) == list("0123456789")
    assert Counter(c for c in dealt if not c.isdigit()) == {"a": 5, "b": 5}


def test_a_buffer_filter_picks_what_comes_back(ten: str, tmp_path: Path) -> None:
    (tmp_path / "pick.py").write_text(
        "def last(args, rollout_id, buffer, n):\n    return [buffer.pop() for _ in range(min(n, len(buffer), 1))]\n"
    )
    source = make([ten], buffer_filter_path=f"{tmp_path}/pick.py:last")
    source.add_samples(source.get_samples(3))
    assert deal(source, 2) == "23"
    assert deal(source, 1) == "1"


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    source = make([write(tmp_path / "a.jsonl", ["a", "bbbb", "c"])], rollout_max_prompt_len=3)
    assert deal(source, 4) == "acac"


def test_without_a_global_dataset_groups_are_blank() -> None:
    source = make([], rollout_global_dataset=False)
    assert len(source) == 0
    assert [[s.index for s in g] for g in source.get_samples(2)] == [[0, 1], [2, 3]]
    source.load_state_dict(source.state_dict())


def test_no_prompt_data_is_an_error() -> None:
    with pytest.raises(ValueError, match="--prompt-data"):
        make([])


def test_the_type_of_a_label_is_no_other_data(tmp_path: Path) -> None:
    """A position holds for 3 and [1] as for "3" and "[1]"."""
    sources = []
    for name, labels in (("typed", (3, [1])), ("text", ("3", "[1]"))):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"input": "a", "y": label}) + "\n" for label in labels))
        sources.append(make([str(file)]))
    typed, text = sources
    typed.load_state_dict(text.state_dict())
    labels = [group[0].label for group in typed.get_samples(4)]
    assert labels == [3, [1], 3, [1]]
    labels[1].append(2)
    assert typed.get_samples(2)[1][0].label == [1], "each sample has a label of its own"


def leveled(path: Path, rows: Sequence[tuple[str, str, int]]) -> str:
    path.write_text(
        "".join(
            json.dumps({"input": text, "y": 0, "metadata": {"task": task, "level": level}}) + "\n"
            for text, task, level in rows
        )
    )
    return str(path)


def test_a_task_rises_to_its_next_level_when_enough_is_right_and_a_resumed_one_is_there(tmp_path: Path) -> None:
    rows = [("a", "x", 0), ("b", "y", 3), ("c", "x", 2), ("d", "y", 5), ("e", "x", 7)]
    path = leveled(tmp_path / "rows.jsonl", rows)
    source = make([path], curriculum_threshold=0.75)
    assert source.heed([], None) == {"rollout/level/x": 0.0, "rollout/level/y": 0.0}
    groups = source.get_samples(4)
    assert [group[0].prompt for group in groups] == ["a", "b", "a", "b"]  # tasks take turns
    for group, right in zip(groups, ([1, 1], [1, 0], [1, 0], [0, 1]), strict=True):
        for sample, reward in zip(group, right, strict=True):
            sample.reward = float(reward)
    assert source.heed(groups, None) == {"rollout/level/x": 1.0, "rollout/level/y": 0.0}
    # groups of a level that the task has left say nothing about the next
    assert source.heed(groups, None) == {"rollout/level/x": 1.0, "rollout/level/y": 0.0}
    saved = json.loads(json.dumps(source.state_dict()))
    resumed = make([path], curriculum_threshold=0.75)
    resumed.load_state_dict(saved)
    assert deal(resumed, 4) == deal(source, 4) == "cbcb"


def test_a_curriculum_needs_levels(ten: str) -> None:
    with pytest.raises(ValueError, match="a number as level"):
        make([ten], curriculum_threshold=0.5)
