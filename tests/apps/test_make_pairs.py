"""`slimelite make-pairs`: which responses of saved rollouts become pairs; an end-to-end test trains on some."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from slimelite.apps.command import main
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable


def save(path: Path, *groups: list[tuple[str, float] | Sample]) -> str:
    """A saved rollout whose groups have these responses, each a text and its reward or a whole sample."""
    made: list[list[Sample]] = []
    for number, group in enumerate(groups):
        made.append([])
        for each in group:
            sample = each if isinstance(each, Sample) else response(*each)
            sample.group_index, sample.index, sample.prompt = number, sum(map(len, made)), f"prompt {number}:"
            made[-1].append(sample)
    SampleTable.from_samples(made).to_parquet(path)
    return str(path)


def response(text: str, reward: float, **changes: object) -> Sample:
    sample = Sample(tokens=[1], reward=reward, status=Status.COMPLETED)
    sample.append_response_tokens([5] * len(text), [-0.5] * len(text), text=text)
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def pairs(path: Path) -> list[tuple[str, str, str]]:
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in pq.read_table(path).to_pylist()]


def test_the_best_of_a_group_over_its_worst(tmp_path: Path) -> None:
    ranked = [("c</s>", 0.5), ("a</s>", 1.0), ("d</s>", 0.0), ("b</s>", 0.75), ("e</s>", -1.0)]
    file = save(tmp_path / "0.parquet", ranked, [("x", 1.0), ("y", 1.0)], [("z", 0.25), ("w", 0.0)])
    out = tmp_path / "pairs.parquet"
    best, second, other = ("a</s>", "e</s>"), ("b</s>", "d</s>"), ("prompt 2:", "z", "w")
    for flags, expected in (
        ((), [("prompt 0:", *best), other]),
        (("--max-pairs-per-group", "9"), [("prompt 0:", *best), ("prompt 0:", *second), other]),
        (("--max-pairs-per-group", "9", "--margin", "0.75"), [("prompt 0:", *best), ("prompt 0:", *second)]),
        (("--max-pairs-per-group", "9", "--margin", "0.8"), [("prompt 0:", *best)]),
    ):
        assert main(["make-pairs", file, file, "-o", str(out), *flags]) == 0
        assert pairs(out) == expected, flags
    assert pq.read_table(out).to_pylist()[0]["score_chosen"] == 1.0
    assert pq.read_table(out).to_pylist()[0]["score_rejected"] == -1.0


def test_responses_that_dpo_should_not_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = [
        response("cut", 1.0, status=Status.TRUNCATED),
        response("gone", -1.0, remove_sample=True),
        response("", -1.0),
        response("used a tool", 1.0, loss_mask=[1] * 5 + [0] * 6),
    ]
    file = save(tmp_path / "0.parquet", [*odd, ("good", 0.5), ("bad", 0.0)], [("same", 1.0), ("same", 0.0)])
    assert main(["make-pairs", file, "-o", str(tmp_path / "pairs.parquet")]) == 0
    assert pairs(tmp_path / "pairs.parquet") == [("prompt 0:", "good", "bad")]
    said = capsys.readouterr().out
    for reason in (
        "1 responses that are truncated",
        "1 responses that were removed or have no reward",
        "2 responses that are empty or have masked tokens, such as a tool's",
        "1 groups without two responses that differ by the margin",
    ):
        assert reason in said


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    equal = save(tmp_path / "0.parquet", [("x", 1.0), ("y", 1.0)])
    unequal = save(tmp_path / "2.parquet", [("x", 1.0), ("y", 0.0)])
    out = str(tmp_path / "pairs.parquet")
    for words, says in (
        ([equal, "-o", out], "there are no pairs: 1 groups without two responses that differ by the margin; lower"),
        ([str(tmp_path / "1.parquet"), "-o", out], "no saved rollout at"),
        ([str(tmp_path), "-o", out], "is not a run folder: it has no metrics.jsonl"),
        ([unequal, "-o", f"{equal}/pairs.parquet"], "0.parquet/pairs.parquet: cannot be written: "),
    ):
        assert main(["make-pairs", *words]) == 1
        assert says in capsys.readouterr().err
    for words, says in (
        ([equal, "-o", "pairs.jsonl"], "-o pairs.jsonl: name a file that ends with .parquet"),
        ([equal, "-o", out, "--margin", "nan"], "--margin at least 0"),
    ):
        with pytest.raises(SystemExit):
            main(["make-pairs", *words])
        assert says in capsys.readouterr().err
    assert not Path(out).exists()
