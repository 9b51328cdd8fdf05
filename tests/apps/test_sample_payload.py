"""The samples of a run as the page gets them, decoded again and compared with the parquet files."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sampled_run import byte_level, sample, save, save_stats, write_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slimelite.apps.pieces import Pieces
from slimelite.apps.runs import Run
from slimelite.apps.view_samples import pack, samples
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable

TEXT = "12 + 7 = 19, naïve 你好 😀👩‍👩‍👧 \x00 \\boxed{19}<|im_end|>"


def unpack(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inverse of `pack`, as samples.js does it."""
    raw = zlib.decompress(b64decode(text))
    size = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + size], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    columns, at = {}, 4 + size
    for name, dtype, count in header["columns"]:
        kind = np.dtype(dtype)
        planes = np.frombuffer(raw, np.uint8, count * kind.itemsize, at).reshape(kind.itemsize, count)
        columns[name] = np.ascontiguousarray(planes.T).view(kind).reshape(-1)
        at += count * kind.itemsize
    assert at == len(raw)
    return header, columns


def spaced(folder: Path) -> Tokenizer:
    """A tokenizer as SentencePiece's: spaces are ▁, the first one is dropped, other bytes are <0x..>."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁so", "▁the", "answer", "n", "a", "ï"]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def one_table(prompt: list[int], ids: list[list[int]], responses: list[str]) -> SampleTable:
    found = []
    for i, (tokens, response) in enumerate(zip(ids, responses, strict=True)):
        made = Sample(group_index=0, index=i, prompt="p", tokens=prompt, reward=0.0)
        made.append_response_tokens(tokens, [-0.5] * len(tokens), text=response)
        found.append(made)
    return SampleTable.from_samples([found])


@pytest.mark.parametrize("make", [byte_level, spaced])
def test_pieces_joined_are_the_response_wherever_it_begins_and_ends(tmp_path: Path, make: Any) -> None:
    tokenizer = make(tmp_path)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > len("12 + 7 = 19, naïve 你好 😀")  # characters beyond ASCII take several tokens
    cuts = [ids[start:end] for start in range(0, len(ids), 3) for end in range(start, len(ids) + 1, 2)]
    table = one_table([1], cuts, [tokenizer.decode(cut, skip_special_tokens=False) for cut in cuts])
    pieces = Pieces(tmp_path / "tokenizer.json")
    entries, fits = pieces.encode(table)
    _, columns = pieces.columns()
    ends = np.cumsum(columns["lengths"])
    texts = [columns["bytes"][end - size : end].tobytes() for end, size in zip(ends, columns["lengths"], strict=True)]
    assert all(fits)
    assert columns["ids"][entries].tolist() == table.response_tokens.tolist()
    for row, response in enumerate(table.response):
        own = entries[table.response_offsets[row] : table.response_offsets[row + 1]]
        assert b"".join(texts[i] for i in own).decode(errors="replace") == response
    assert "�" in "".join(table.response)  # some cuts went through a character


def test_responses_without_special_tokens_or_with_a_cut_end_keep_their_pieces(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("it's 19\nUser: 你<|im_end|>", add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    responses = [whole, whole[:-1], "it's 19", "", "something else"]
    pieces = Pieces(tmp_path / "tokenizer.json")
    entries, fits = pieces.encode(one_table([1], [ids] * 5, responses))
    assert fits == [True] * 4 + [False]
    _, columns = pieces.columns()
    texts = np.split(columns["bytes"], np.cumsum(columns["lengths"])[:-1])
    for row, response in enumerate(responses[:4]):
        own = entries[row * len(ids) : (row + 1) * len(ids)]
        assert b"".join(texts[i].tobytes() for i in own).decode() == response


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tokenizer = byte_level(tmp_path / "model")
    folder = write_run(tmp_path / "run", tmp_path / "model")
    first = [
        sample(tokenizer, 4, 40 + i, "What is 12 + 7?", f"it is {i}9", {"score": i / 2, "form": 1.0}, label="19")
        for i in range(3)
    ]
    turns = sample(tokenizer, 5, 50, [{"role": "user", "content": "naïve \ud800"}], "so", {"score": 0.5}, version=7)
    turns.append_response_tokens(tokens=tokenizer.encode("tool says 3").ids, text="tool says 3", trainable=False)
    turns.append_response_tokens(tokenizer.encode(" 你").ids, [-40.0] * 4, text=" 你", weight_version=9)
    turns.status, turns.remove_sample, turns.metadata = Sample.Status.TRUNCATED, True, {"turns": 2, "bad": "\ud800"}
    turns.label = [2, float("nan")]
    table = save(folder / "rollouts" / "0000000.parquet", [first, [turns]], "score")
    save_stats(folder / "token_stats" / "0000000.parquet", table, lambda row: row != 1)
    lost = sample(tokenizer, 9, 90, "x", "nothing", float("nan"), metadata={"dropped": "stale: 3 weight updates old"})
    save(folder / "dropped" / "0000000.parquet", [[lost]])
    save(folder / "eval" / "sums-start.parquet", [[sample(tokenizer, 0, 0, "What is 12 + 7?", "19", 1.0)]])
    return folder


def test_numbers_are_those_of_the_parquet_files(run: Path) -> None:
    data = samples(Run.read(run))
    table = SampleTable.from_parquet(run / "rollouts" / "0000000.parquet")
    header, index = unpack(data["index"])
    assert data["notes"] == []
    assert [(s["kind"], s["name"], s["number"]) for s in data["sources"]] == [
        ("rollout", "", 0),
        ("dropped", "", 0),
        ("eval", "sums", -1),
    ]
    assert index["chunk"].tolist() == [0, 0, 0, 0, 1, 2]
    assert index["group"].tolist() == [0, 0, 0, 1, 2, 3]
    assert index["reward"].tolist() == pytest.approx([0, 0.5, 1, 0.5, np.nan, 1], nan_ok=True)
    assert index["component form"].tolist() == pytest.approx([1, 1, 1, *[np.nan] * 3], nan_ok=True)
    assert header["components"] == ["form", "score"]
    assert [header["statuses"][i] for i in index["status"]] == ["completed"] * 3 + ["truncated"] + ["completed"] * 2
    assert [header["reasons"][i] for i in index["reason"]] == [*[""] * 4, "stale: 3 weight updates old", ""]
    # the metrics say that the oldest token, of version 0, is 9 updates old; an evaluation has no age
    assert index["stale"].tolist() == pytest.approx([9, 9, 9, 2, 9, np.nan], nan_ok=True)
    assert index["advantage"].tolist()[:4] == [-0.5, 0, 0.5, 0]
    assert index["removed"].tolist() == [0, 0, 0, 1, 0, 0]
    texts = unpack(data["prompts"])[0]["texts"]
    assert [texts[i] for i in index["prompt"]] == [*table.prompt, "x", "What is 12 + 7?"]

    header, chunk = unpack(data["chunks"][0])
    assert header["responses"] == [None] * 4
    assert header["labels"] == ["19"] * 3 + ["[2, NaN]"]
    assert json.loads(header["metadata"][3]) == {"turns": 2, "bad": "\ud800"}
    tool = ~table.loss_mask
    assert chunk["mask"].tolist() == table.loss_mask.tolist()
    engine = np.where(tool, np.nan, table.rollout_log_probs)
    computed = np.repeat(np.arange(4) != 1, table.response_lengths)
    for name, step, truth in (
        ("engine", 1e-3, engine),
        ("difference", 1e-4, np.where(computed & ~tool, -0.0123, np.nan)),
        ("entropy", 1e-3, np.where(computed, 0.5, np.nan)),
        ("version", 1, np.where(tool, np.nan, table.weight_versions)),
    ):
        codes = chunk[name].astype(np.float64)
        codes[chunk[name] == np.iinfo(chunk[name].dtype).min] = np.nan
        assert codes * step == pytest.approx(truth, abs=0.51 * step, nan_ok=True), name
    assert chunk["engine"].dtype == np.int32  # a log-prob of -40 needs it
    assert chunk["entropy"].dtype == np.int16
    assert "difference" not in unpack(data["chunks"][2])[1]


def test_without_the_tokenizer_there_are_responses_and_a_sentence(run: Path) -> None:
    (run.parent / "model" / "tokenizer.json").unlink()
    data = samples(Run.read(run))
    assert "tokenizer does not exist any more" in data["notes"][0]
    header, columns = unpack(data["chunks"][0])
    assert header["responses"] == SampleTable.from_parquet(run / "rollouts" / "0000000.parquet").response
    assert columns.keys() == {"lengths"}


def test_the_tokenizer_of_a_relative_folder_is_found_from_the_run(run: Path) -> None:
    config = run / "config.json"
    config.write_text(json.dumps({"hf_checkpoint": "model"}))
    assert samples(Run.read(run))["notes"] == []


def test_advantages_and_weights_of_tokens_are_kept_and_a_sample_has_the_mean_advantage(run: Path) -> None:
    path = run / "rollouts" / "0000000.parquet"
    table = SampleTable.from_parquet(path)
    table.advantages = np.linspace(-1, 1, len(table.response_tokens), dtype=np.float32)
    table.loss_weights = np.linspace(0, 1, len(table.response_tokens), dtype=np.float32)
    table.to_parquet(path)
    data = samples(Run.read(run))
    found = unpack(data["index"])[1]["advantage"]
    for row in range(4):
        trained = table.row_slice("advantages", row)[table.row_slice("loss_mask", row)]
        assert found[row] == pytest.approx(trained.mean())
    chunk = unpack(data["chunks"][0])[1]
    assert chunk["advantages"].tolist() == table.advantages.tolist()
    assert chunk["loss_weights"].tolist() == table.loss_weights.tolist()


def test_a_broken_file_is_named_and_the_others_are_shown(run: Path) -> None:
    (run / "dropped" / "0000000.parquet").write_bytes(b"PAR1")
    data = samples(Run.read(run))
    assert [source["kind"] for source in data["sources"]] == ["rollout", "eval"]
    assert data["notes"][0].startswith("0000000.parquet of dropped could not be read: ")


def test_a_file_of_others_is_named_and_the_others_are_shown(run: Path) -> None:
    path = run / "dropped" / "0000000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["response"]), path)
    data = samples(Run.read(run))
    assert [source["kind"] for source in data["sources"]] == ["rollout", "eval"]
    assert data["notes"][0].startswith("0000000.parquet of dropped could not be read: not a table of samples")


def test_a_long_run_is_sampled_down_to_whole_groups_of_the_same_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "model")
    run = write_run(tmp_path / "run", tmp_path / "model", 12)
    tables = []
    for i in range(12):
        groups = [
            [sample(tokenizer, g, 4 * g + k, f"prompt {g}", "it is " * 20, float((g + i) % 16)) for k in range(4)]
            for g in range(16)
        ]
        tables.append(save(run / "rollouts" / f"{i:07d}.parquet", groups))
    lost = sample(tokenizer, 99, 99, "lost", "x", 0.0, metadata={"dropped": "zero_std_0"})
    save(run / "dropped" / "0000003.parquet", [[lost]])
    budget = 100_000
    assert samples(Run.read(run), 10**9)["notes"] == []
    data = samples(Run.read(run), budget)
    header, index = unpack(data["index"])
    kept = len(index["chunk"])
    assert f"This page has {kept:,} of the run's {12 * 64 + 1:,} saved samples" in data["notes"][0]
    assert len(json.dumps(data)) < budget
    sizes = np.bincount(index["group"])
    assert {*sizes.tolist()} == {1, 4}
    assert 200 < kept < 400
    assert "zero_std_0" in header["reasons"]
    texts = np.array(unpack(data["prompts"])[0]["texts"])[index["prompt"]]
    by_rollout = [{*texts[index["chunk"] == i].tolist()} for i in range(12)]
    best_and_worst = [{f"prompt {(15 - i) % 16}", f"prompt {-i % 16}"} for i in range(12)]
    assert all(found >= ends for found, ends in zip(by_rollout, best_and_worst, strict=True))
    through = set.intersection(*by_rollout)
    assert through
    chosen = [found - ends for found, ends in zip(by_rollout, best_and_worst, strict=True)]
    assert len(set.union(*chosen) - through) <= 1  # the cut can go through one prompt
    for source, table in zip(data["sources"], tables, strict=False):
        assert source["samples"] == 64
        assert source["reward"] == pytest.approx(table.reward.mean(), abs=1e-5)


def test_pack_keeps_every_type() -> None:
    columns = {"a": np.array([-(2**31), 5], np.int32), "b": np.array([0.1, np.nan], np.float32), "c": np.zeros(0)}
    header, found = unpack(pack({"x": "</script>"}, columns))
    assert header["x"] == "</script>"
    for name, values in columns.items():
        np.testing.assert_array_equal(found[name], values)
