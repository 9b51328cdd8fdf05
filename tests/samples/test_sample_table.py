"""The currency: what goes into a table of samples comes out of it, on the wire and on disk."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from slimelite.samples.sample import Kept, Sample, Status
from slimelite.samples.table import SampleTable


def make_sample(index: int, group: int, prompt: int, response: int, **fields: object) -> Sample:
    sample = Sample(group_index=group, index=index, prompt=f"p{group}", tokens=list(range(prompt)), **fields)  # type: ignore[arg-type]
    sample.append_response_tokens(
        list(range(100, 100 + response)), [-0.5 * t for t in range(response)], text="r", weight_version=3
    )
    sample.status = Status.COMPLETED
    sample.reward = float(index)
    return sample


@pytest.fixture
def groups() -> list[list[Sample]]:
    first = [make_sample(0, 0, 4, 3, label="7"), make_sample(1, 0, 4, 0)]
    second = [make_sample(2, 1, 2, 5, metadata={"a": [1]}), make_sample(3, 1, 2, 1, remove_sample=True, rollout_id=2)]
    return [first, second]


def assert_equal(a: SampleTable, b: SampleTable) -> None:
    assert a.columns() == b.columns()
    for column in a.columns():
        mine, theirs = getattr(a, column.name), getattr(b, column.name)
        np.testing.assert_array_equal(mine, theirs, err_msg=column.name)
        assert type(mine) is type(theirs)
        assert column.dtype == "str" or mine.dtype == theirs.dtype == column.dtype, column.name
    for name in ("prompt_offsets", "response_offsets"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_columns_of_a_table(groups: list[list[Sample]]) -> None:
    table = SampleTable.from_samples(groups)
    assert table.response_lengths.tolist() == [3, 0, 5, 1]
    assert table.total_lengths.tolist() == [7, 4, 7, 3]
    assert table.mask_sums.tolist() == [3, 0, 5, 0]  # the last one is removed
    assert table.rollout_id.tolist() == [0, 1, 2, 2]  # siblings share one
    assert table.row_slice("response_tokens", 2).tolist() == [100, 101, 102, 103, 104]
    assert table.row_slice("weight_versions", 0).tolist() == [3, 3, 3]


@pytest.mark.parametrize("way", ["parquet", "pickle", "samples", "select"])
def test_round_trips(groups: list[list[Sample]], way: str, tmp_path: Path) -> None:
    table = SampleTable.from_samples(groups)
    if way == "parquet":
        table.to_parquet(tmp_path / "deep" / "t.parquet")
        again = SampleTable.from_parquet(tmp_path / "deep" / "t.parquet")
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(table))
    elif way == "samples":
        again = SampleTable.from_samples(table.to_samples())
    else:
        again = table.select([3, 1, 0, 2]).select([2, 1, 3, 0])
    assert_equal(table, again)


def test_advantages_of_tokens_take_the_place_of_the_rows(groups: list[list[Sample]], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    table = SampleTable.from_samples(groups)
    table.advantages = np.arange(len(table.response_tokens), dtype=np.float32)
    order = [3, 1, 0, 2]
    table.select(order).to_parquet(tmp_path / "t.parquet")
    column = pq.read_table(tmp_path / "t.parquet").column("advantages").to_pylist()
    ends = table.response_offsets
    assert column == [list(range(ends[row], ends[row + 1])) for row in order]
    again = SampleTable.from_parquet(tmp_path / "t.parquet")
    assert again.advantages is not None
    assert again.advantages.tolist() == [value for row in column for value in row]
    assert np.isnan(again.advantage).all(), "a row has no advantage of its own"


def test_components_of_a_reward_are_numbers(groups: list[list[Sample]]) -> None:
    groups[0][0].reward = {"a": 0.0, "b": 1.0}
    table = SampleTable.from_samples(groups, "a")
    assert table.numeric_components() == [{"a": 0, "b": 1}, {}, {}, {}]
    assert table.without_text().numeric_components() == [{}] * 4


def test_a_table_of_another_format_is_refused(groups: list[list[Sample]], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found, file = SampleTable.from_samples(groups).to_arrow(), tmp_path / "t.parquet"
    assert found.schema.metadata == {b"slimelite.samples": b"1"}
    pq.write_table(found.replace_schema_metadata(None), file)
    assert len(SampleTable.from_parquet(file)) == 4, "another program wrote it, and it says nothing"
    pq.write_table(found.replace_schema_metadata({"slimelite.samples": "2"}), file)
    with pytest.raises(ValueError, match=r"t\.parquet: has format 2, but this slimelite reads format 1: use the slime"):
        SampleTable.from_parquet(file)


def test_a_table_of_no_rows(tmp_path: Path) -> None:
    table = SampleTable.from_samples([])
    table.to_parquet(tmp_path / "t.parquet")
    again = SampleTable.from_parquet(tmp_path / "t.parquet")
    assert len(again) == 0
    assert again.response_offsets.tolist() == [0]
    assert table.numeric_components() == again.numeric_components() == []


def test_a_parquet_that_is_no_table(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"messages": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="sample_id"):
        SampleTable.from_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="no saved rollout"):
        SampleTable.from_parquet(tmp_path / "absent.parquet")


def test_kept_ids_stay_with_their_tokens(groups: list[list[Sample]], tmp_path: Path) -> None:
    """Ragged twice: by row and by token. A tool's tokens, and samples of an engine that tells none, have none."""
    sample = groups[0][0]
    sample.append_response_tokens([7, 8], [-1.0, -2.0], kept=Kept.of([[7, 9, 5], [8]]))
    sample.append_response_tokens([1], trainable=False)
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_sampling_mask": [[4, 3], None, [5]],
        "output_token_sampling_logprobs": [-0.25, None, 0.0],
    }
    sample.append_response_tokens([4, 6], [-9.0, -8.0], meta_info=meta)
    rows = [[], [], [], [7, 9, 5], [8], [], [4, 3], []]
    assert sample.kept is not None
    assert sample.kept.rows() == rows
    assert sample.rollout_log_probs[-2:] == [-0.25, -8.0]  # over the kept ids, where there are any
    assert sample.rollout_top_p_token_ids == [7, 9, 5, 8, 4, 3]
    assert sample.rollout_top_p_token_offsets == [0, 0, 0, 0, 3, 4, 4, 6, 6]
    table = SampleTable.from_samples(groups)
    table.to_parquet(tmp_path / "t.parquet")
    for each in (
        table.select([1, 0, 2]),
        SampleTable.from_parquet(tmp_path / "t.parquet"),
        pickle.loads(pickle.dumps(table)),
    ):
        (found,) = [s for group in each.to_samples() for s in group if s.index == 0]
        assert found.kept is not None
        assert found.kept.rows() == rows
        again = Sample.from_dict(json.loads(json.dumps(found.to_dict())))
        assert again.kept is not None
        assert again.kept.rows() == rows
    assert SampleTable.from_samples(groups[1:]).kept_ids is None
    assert table.without_kept().select([0]).kept_ids is None
    sample.rollout_top_p_token_offsets = [0, 0, 0, 0, 3, 4, 4, 6, 5]
    with pytest.raises(ValueError, match="must rise from 0 to 6, the number of ids"):
        sample.check_aligned()
    sample.rollout_top_p_token_offsets = [0, 6]
    with pytest.raises(ValueError, match="kept_counts has 1 entries but the response has 8"):
        sample.check_aligned()


def test_text_stays_off_the_wire(groups: list[list[Sample]]) -> None:
    table = SampleTable.from_samples(groups)
    lean = table.without_text()
    assert lean.response == [""] * 4
    assert table.response == ["r"] * 4
    assert lean.response_tokens is table.response_tokens


def test_append_keeps_lists_aligned() -> None:
    sample = Sample(tokens=[1, 2], index=5)
    sample.append_response_tokens([3, 4], [-1.0, -2.0], text="ab", weight_versions=[0, 1])
    sample.append_response_tokens([9], trainable=False, text="tool", weight_version=1)
    assert sample.tokens == [1, 2, 3, 4, 9]
    assert sample.loss_mask == [1, 1, 0]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0]
    assert sample.weight_versions == [0, 1, 1]
    assert (sample.prompt_length, sample.response_length, sample.effective_response_length) == (2, 3, 2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s: s.append_response_tokens([1, 2], [-1.0]), "2 response tokens but 1 log_probs"),
        (lambda s: s.append_response_tokens([1, 2]), "have no log-probs"),
        (lambda s: s.append_response_tokens([1], [0.0], weight_versions=[1, 2]), "2 weight_versions"),
    ],
)
def test_append_refuses(fault: object, message: str) -> None:
    sample = Sample(tokens=[1])
    with pytest.raises(ValueError, match=message):
        fault(sample)  # type: ignore[operator]
    assert sample.tokens == [1]


def test_a_plugin_that_forgot_the_mask_is_told() -> None:
    sample = Sample(index=4, group_index=0, tokens=[1, 2, 3], response_length=2, loss_mask=[1], reward=1.0)
    with pytest.raises(ValueError, match="loss_mask has 1 entries but the response has 2"):
        SampleTable.from_samples([[sample]])


def test_rewards_by_key() -> None:
    sample = Sample(index=1, group_index=0, reward={"score": 0.5, "acc": 1})
    assert sample.reward_value("score") == 0.5
    with pytest.raises(ValueError, match="--reward-key"):
        sample.reward_value(None)
    with pytest.raises(ValueError, match="no reward"):
        Sample(index=1, group_index=0).reward_value(None)


def test_sample_dict_round_trip() -> None:
    sample = make_sample(3, 1, 2, 4, metadata={"k": 1})
    assert Sample.from_dict(sample.to_dict()) == sample
    assert Sample.from_dict({"spam": 1}).spam == 1  # type: ignore[attr-defined]


LABELS = ["42", None, 42, 0.5, True, {"ground_truth": {"target": ["a", "b"]}}, ["1", 2], "", '{"a": 1}']


def test_labels_keep_their_type(tmp_path: Path) -> None:
    table = SampleTable.from_samples([[make_sample(i, i, 1, 1, label=label) for i, label in enumerate(LABELS)]])
    table.to_parquet(tmp_path / "t.parquet")
    back = SampleTable.from_parquet(tmp_path / "t.parquet")
    assert back.label == LABELS
    assert [type(label) for label in back.label] == [type(label) for label in LABELS]
    assert [group[0].label for group in back.to_samples()] == LABELS
    texts = pq.read_table(tmp_path / "t.parquet").column("label").to_pylist()
    assert texts[2:6] == ["42", "0.5", "True", '{"ground_truth": {"target": ["a", "b"]}}']
    plain = SampleTable.from_samples([[make_sample(0, 0, 1, 1, label="7")]])
    assert "label_value" not in plain.to_arrow().column_names, "a file of text labels is as it was"


def test_metadata_of_plugins_is_kept_as_plain_values() -> None:
    metadata = {
        "score": np.float32(0.5),
        "counts": np.array([[1, 2]]),
        3: (np.int64(4), None, {"deep": np.True_}),
        "p": Path("x"),
    }
    table = SampleTable.from_samples([[make_sample(0, 0, 1, 1, metadata=metadata)]])
    assert json.loads(table.metadata[0]) == {"score": 0.5, "counts": [[1, 2]], "3": [4, None, {"deep": True}], "p": "x"}


def test_text_that_is_no_unicode_is_written_escaped(groups: list[list[Sample]], tmp_path: Path) -> None:
    """A lone surrogate, which a plugin's text can have and UTF-8 cannot, ends no run."""
    groups[0][0].response, groups[0][0].label = "a\ud800b", "\udfff"
    SampleTable.from_samples(groups).to_parquet(tmp_path / "t.parquet")
    again = SampleTable.from_parquet(tmp_path / "t.parquet")
    assert (again.response[0], again.label[0]) == ("a\\ud800b", "\\udfff")
    assert again.label[1] is None
