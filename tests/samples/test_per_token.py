"""Values of tokens are arrays until somebody looks at them as lists, and the table is the same either way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slimelite.engines.protocol import RESULT_TOKENS, GenerateResult
from slimelite.samples.sample import PER_TOKEN, Sample
from slimelite.samples.table import SampleTable
from tests.samples.test_sample_table import assert_equal

Kind = Callable[[list[Any]], Any]


def answer(number: int, kind: Kind) -> Sample:
    """A prompt of two tokens, four of the model, two of a tool as lists, and one more of the model."""
    sample = Sample(group_index=0, index=number, tokens=[5, 6], reward=1.0)
    logs = np.array([-0.1, -0.2, -0.3, -0.4], np.float32)
    versions = kind([3, 3, 4, 4])
    sample.append_response_tokens(kind([7, 8, 9, number]), kind(logs.tolist()), weight_versions=versions)
    if number:
        sample.append_response_tokens(tokens=[11, 12], trainable=False, text="tool")
        sample.append_response_tokens(kind([13]), kind([-1.5]), weight_versions=kind([4]))
    return sample


def array(values: list[Any]) -> np.ndarray:
    return np.array(values, np.float32 if isinstance(values[0], float) else np.int32)


@pytest.mark.parametrize(
    "way", [lambda s: s, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), replace, lambda s: _seen(s)]
)
def test_the_table_is_the_same_from_arrays_and_from_lists(way: Callable[[Sample], Sample]) -> None:
    mine, theirs = ([way(answer(n, kind)) for n in range(3)] for kind in (array, list))
    assert_equal(SampleTable.from_samples([mine]), SampleTable.from_samples([theirs]))
    assert [s.effective_response_length for s in mine] == [s.effective_response_length for s in theirs] == [4, 5, 5]
    assert [s.trained_versions.tolist() for s in mine] == [s.trained_versions.tolist() for s in theirs]
    assert [s.to_dict() for s in mine] == [s.to_dict() for s in theirs]
    assert mine == theirs


def _seen(sample: Sample) -> Sample:
    assert all(isinstance(getattr(sample, name), list | None) for name in PER_TOKEN)
    return sample


def test_an_array_becomes_a_list_when_it_is_read_and_remains_one() -> None:
    sample = answer(0, array)
    assert all(isinstance(vars(sample)[name], np.ndarray) for name in PER_TOKEN[:4])
    assert (sample.response_length, sample.total_length, sample.prompt_length) == (4, 6, 2)
    sample.check_aligned()
    assert all(isinstance(vars(sample)[name], np.ndarray) for name in PER_TOKEN[:4]), "counting does not look"
    assert sample.tokens == [5, 6, 7, 8, 9, 0]
    assert {type(token) for token in sample.tokens} == {int}
    assert sample.loss_mask == [1, 1, 1, 1]
    sample.loss_mask[1] = 0
    mask = sample.loss_mask
    assert sample.rollout_log_probs == np.array([-0.1, -0.2, -0.3, -0.4], np.float32).tolist()
    sample.append_response_tokens(array([1]), array([-0.5]), weight_versions=array([4]))
    assert sample.loss_mask is mask, "a list that a plugin holds grows with the sample"
    assert mask == [1, 0, 1, 1, 1]


def test_a_result_copies_what_it_packs() -> None:
    buffer = np.array([-0.25, -0.5], np.float32)
    result = GenerateResult("a", [1, 2], buffer, [0, 0], "stop").packed()
    buffer[:] = 0
    assert result.length == 2
    assert all(vars(result)[name].dtype == dtype for name, dtype in RESULT_TOKENS.items())
    assert result.log_probs == [-0.25, -0.5]


def test_a_result_travels_between_processes_in_one_piece() -> None:
    """A buffer for each array would cost Ray more than the bytes in them; a lone list stays one."""
    result = GenerateResult("a", [1, 2], [-0.25, -0.5], [3, 3], "stop", 7).packed()
    plain = GenerateResult("b", [1, 2], [-0.1, -0.2], [3, 3], "stop")
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps([result, plain], protocol=5, buffer_callback=buffers.append)
    assert not buffers
    received, other = pickle.loads(sent)
    for name, dtype in RESULT_TOKENS.items():
        assert vars(received)[name].dtype == dtype
    assert vars(other)["log_probs"] == [-0.1, -0.2]
    assert (received, other) == (result, plain)


def test_a_long_rollout_makes_no_python_list_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [answer(0, array) for _ in range(4)]
    monkeypatch.setattr("slimelite.samples.sample.Listed.__get__", None)  # reading a list would fail
    table = SampleTable.from_samples([samples])
    assert table.response_tokens.tolist() == [7, 8, 9, 0] * 4
