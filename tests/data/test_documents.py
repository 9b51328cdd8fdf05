"""Documents packed into sequences: all of each epoch, once, from any position, whatever a rollout's size."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.arguments import Args
from slimelite.data import documents
from slimelite.data.documents import Documents
from slimelite.samples.table import SampleTable

from .tokenizers import byte_tokenizer

LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Two files of documents of 1 to 60 bytes, none of which is there twice."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        texts = [f"{name}{i:03}" + "x" * int(rng.integers(0, 57)) for i in range(80)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def source(tokenizer: str, paths: list[str], tmp_path: Path, **changes: Any) -> Documents:
    flags = {"prompt_data": paths, "loss_type": "pretrain_loss", "seq_length": LENGTH, "tokenizer_workers": 1}
    flags |= {"token_cache": str(tmp_path / "cache"), "rollout_shuffle": True}
    return Documents(Args(**(flags | changes)), tokenizer)


def rows(table: SampleTable) -> list[list[int]]:
    return [
        [*table.row_slice("prompt_tokens", row).tolist(), *table.row_slice("response_tokens", row).tolist()]
        for row in range(len(table))
    ]


def epoch(given: Documents, count: int = 7) -> list[list[int]]:
    """All rows of an epoch, in rollouts of ``count`` sequences; of the last rollout only what belongs to it."""
    size, drawn, found = sum(stream.size for stream in given._streams), 0, []
    while drawn < size:
        table, _ = given.take(1 if size - drawn < count * LENGTH else count)
        found += rows(table)
        drawn += int(table.loss_mask.sum())
    assert drawn == size
    return found


@pytest.mark.parametrize("window", [2, 1024])
def test_an_epoch_has_each_token_once(
    tokenizer: str, corpora: list[str], tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "WINDOW", window)
    data = source(tokenizer, corpora, tmp_path)
    expected: Counter[tuple[int, ...]] = Counter()
    coder = byte_tokenizer()
    for path in corpora:
        for line in Path(path).read_text().splitlines():
            ids = [coder.bos_token_id, *coder(json.loads(line)["text"])["input_ids"], coder.eos_token_id]
            expected.update(tuple(ids[i : i + LENGTH]) for i in range(0, len(ids) - 1, LENGTH - 1))
    first, second = epoch(data), epoch(data)
    assert Counter(map(tuple, first)) == expected == Counter(map(tuple, second))
    assert first != second  # another order
    assert max(map(len, first)) <= LENGTH


def test_sequences_are_nearly_full_and_the_same_whatever_a_rollout_takes(
    tokenizer: str, corpora: list[str], tmp_path: Path
) -> None:
    one, other = source(tokenizer, corpora, tmp_path), source(tokenizer, corpora, tmp_path)
    table, metrics = one.take(60)
    assert metrics["rollout/packed_share"] > 0.98
    assert np.bincount(table.rollout_id, table.total_lengths).max() <= LENGTH
    parts = [rows(other.take(count)[0]) for count in (1, 20, 39)]
    assert rows(table) == [row for part in parts for row in part]
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize("weights", [[], [3.0, 1.0]])
def test_a_run_goes_on_from_any_step(
    tokenizer: str, corpora: list[str], tmp_path: Path, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "WINDOW", 8)
    straight = source(tokenizer, corpora, tmp_path, prompt_data_weights=weights)
    for _ in range(50):  # several epochs
        state = json.loads(json.dumps(straight.state_dict()))
        resumed = source(tokenizer, corpora, tmp_path, prompt_data_weights=weights)
        resumed.load_state_dict(state)
        table, metrics = straight.take(20)
        again, of_again = resumed.take(20)
        assert rows(table) == rows(again)
        assert table.sample_id.tolist() == again.sample_id.tolist()
        assert metrics == of_again
    assert metrics["rollout/epoch"] > 2


def test_streams_are_weighted_by_their_tokens(tokenizer: str, corpora: list[str], tmp_path: Path) -> None:
    data = source(tokenizer, corpora, tmp_path, prompt_data_weights=[3.0, 1.0])
    tables = [data.take(10)[0] for _ in range(40)]
    tokens = [stream.tokens for stream in data._streams]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.01)
    assert sum(tokens) == sum(int(table.loss_mask.sum()) for table in tables)


def test_other_documents_are_refused_on_resume(tokenizer: str, corpora: list[str], tmp_path: Path) -> None:
    data = source(tokenizer, corpora, tmp_path)
    data.take(3)
    state = data.state_dict()
    with pytest.raises(ValueError, match="--seq-length changed"):
        source(tokenizer, corpora, tmp_path, seq_length=32).load_state_dict(state)
    text = Path(corpora[1]).read_text()
    Path(corpora[1]).write_text(text.replace("xx", "yy"))
    with pytest.raises(ValueError, match="the content of path 0 of --prompt-data changed"):
        source(tokenizer, corpora, tmp_path).load_state_dict(state)


def test_attention_across_documents_trains_the_same_tokens(tokenizer: str, corpora: list[str], tmp_path: Path) -> None:
    apart, _ = source(tokenizer, corpora, tmp_path).take(20)
    across, _ = source(tokenizer, corpora, tmp_path, cross_document_attention=True).take(20)
    assert len(across) == 20
    assert [id for row in rows(apart) for id in row] == [id for row in rows(across) for id in row]
    assert apart.response_tokens[apart.loss_mask].tolist() == across.response_tokens[across.loss_mask].tolist()
    assert len(across.response_tokens) == len(apart.response_tokens) + len(apart) - 20  # starts inside are masked


def test_held_out_documents_are_whole_and_in_order(
    tokenizer: str, corpora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "HELD_OUT", 200)
    held = tmp_path / "held"
    held.mkdir()
    for name in ("first", "third"):
        (held / f"{name}.jsonl").write_text("")  # an empty file among others holds nothing up
    shutil.copy(corpora[1], held / "second.jsonl")
    data = source(tokenizer, corpora[:1], tmp_path, eval_bpb=[str(held)])
    tables, sizes = zip(*data.held_out(), strict=True)
    assert len(tables) > 2
    assert sum(sizes) == sum(len(json.loads(line)["text"]) for line in Path(corpora[1]).read_text().splitlines())
    tokens = [id for table in tables for id in table.response_tokens.tolist()]
    end = byte_tokenizer().eos_token_id
    decoded = byte_tokenizer().decode(tokens).split(byte_tokenizer().decode([end]))[:-1]
    assert decoded == [json.loads(line)["text"] for line in Path(corpora[1]).read_text().splitlines()]
