from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimelite.data.reader import BadRows, read_rows, split_path

ROWS = [{"input": f"q{i}", "label": str(i), "other": i} for i in range(7)]


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n\n")
    return str(path)


def inputs(spec: str) -> list[str]:
    return [row["input"] for _, row in read_rows(spec, ["input"], [])]


@pytest.fixture(params=["rows.parquet", "rows.jsonl", "rows.json"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write(tmp_path / request.param, ROWS)


@pytest.mark.parametrize("part", ["", "@[2:4]", "@[-3:]", "@[:-5]", "@[1:-1]", "@[::3]", "@[-100:100]", "@[::-1]"])
def test_slices_are_pythons(file: str, part: str) -> None:
    numbers = list(range(7))
    expected = eval(f"numbers{part[1:]}") if part else numbers
    assert inputs(file + part) == [f"q{i}" for i in expected]


@given(st.tuples(*[st.none() | st.integers(-9, 9)] * 2))
def test_any_slice_is_read(bounds: tuple[int | None, int | None]) -> None:
    a, b = ("" if x is None else x for x in bounds)
    assert split_path(f"a.b/c@d.jsonl@[{a}:{b}]") == ("a.b/c@d.jsonl", slice(*bounds))


@pytest.mark.parametrize(
    "spec", ["a.jsonl@[3]", "a.jsonl@[1:2", "a.jsonl@[x:2]", "a.jsonl@[1.5:2]", "a.jsonl@[1:2:3:4]"]
)
def test_a_slice_that_cannot_be_read_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match=r"slice of 'a\.jsonl"):
        split_path(spec)


def test_an_empty_slice_is_an_error(file: str) -> None:
    with pytest.raises(ValueError, match="selects no rows"):
        inputs(file + "@[5:5]")


def test_parquet_reads_only_the_columns_it_was_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ROWS)
    assert set(next(read_rows(path, ["input"], ["label"]))[1]) == {"input", "label"}
    assert set(next(read_rows(path, ["input"]))[1]) == set(ROWS[0])


def test_keys_that_parquet_made_up_are_gone(tmp_path: Path) -> None:
    """All structs of a parquet column share one type; a key that this row does not have is not there."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "ls", "arguments": {"d": "."}}]}
    other = {"role": "assistant", "content": "x", "tool_calls": [{"name": "cat", "arguments": {"f": "y"}}]}
    rows = [{"m": [{"role": "user", "content": "hi"}, call]}, {"m": [other]}]
    read = [row["m"] for _, row in read_rows(write(tmp_path / "a.parquet", rows), ["m"], [])]
    assert read == [[rows[0]["m"][0], {k: v for k, v in call.items() if v is not None}], [other]]


def test_a_malformed_line_is_named_with_file_row_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ['{"input": "a"}', "", '{"input": ', "[1]", '{"label": 1}', '{"input": "b"}'])
    said: list[str] = []
    assert [row["input"] for _, row in read_rows(path, ["input"], [], BadRows(True, said.append))] == ["a", "b"]
    rows = (
        "3 of 5 rows are malformed{}: row 1 (line 3): not JSON (Expecting value: line 1 column 11 (char 10)); row 2 "
        "(line 4): a row must be an object with named columns, not list; row 3 "
        "(line 5): no column 'input'; the row has ['label']"
    )
    assert said == [f"{path}: {rows.format(' and left out')}"]
    with pytest.raises(ValueError, match=re.escape(f"{path}: {rows.format('')}; fix them, or leave such rows out")):
        inputs(path)


def test_many_bad_rows_are_counted_and_a_few_kinds_of_them_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f'{{"label{i // 100}": 1}}' for i in range(1000)])
    with pytest.raises(ValueError, match=r"1000 of 1000 rows are malformed: row 0 .*; row 100 .*; row 200 ") as caught:
        inputs(path)
    assert "row 300 " not in str(caught.value)


def test_wrong_columns_are_answered_with_those_there_are(file: str) -> None:
    with pytest.raises(ValueError, match=r"no column 'answer'.*'input', 'label', 'other'"):
        list(read_rows(file, ["input", "answer"], []))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "a.xml").write_text("x")
    (tmp_path / "one.json").write_text("{}")
    for name, message in {
        "nothing.parquet": r"no such file: \S+nothing\.parquet \(",
        "brokne.parquet": r"no such file: \S+; did you mean \S+broken\.parquet\?",
        "broken.parquet": "not a readable parquet file",
        "a.xml": r"not one of \.parquet, \.jsonl, \.json",
        "one.json": "must be a list of objects",
        "": r"is a folder; name one file or split of it: \['broken.parquet', 'one.json'\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            inputs(str(tmp_path / name))


def test_a_hub_dataset_needs_its_library_or_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"no file 'owner/no-such-dataset:main:train'.*hub"):
        inputs("owner/no-such-dataset:main:train")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("environment:zzz", "^environment:zzz: there is no such environment; the known names are calculator"),
        ("environment:python", "^environment:python: this environment has no rows; give a file$"),
    ],
)
def test_the_rows_of_an_environment_are_blamed_by_the_name_that_was_given(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list(read_rows(spec))
