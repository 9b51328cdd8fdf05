"""Documents become shards of token ids, once; what cannot be trained on is counted and named."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slimelite.data import shards
from slimelite.data.shards import Shard, TextCoder, tokenize

from .tokenizers import byte_tokenizer

TEXTS = ["Hello, world!\n", "émigré 你好 <|im_end|> 😀", "x" * 50 + "\n"]


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> TextCoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return TextCoder(str(folder))


def write_all(folder: Path) -> list[Path]:
    """``TEXTS`` as a file of each kind."""
    rows = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    files = [folder / name for name in ("a.parquet", "b.jsonl", "c.jsonl.gz", "d.txt")]
    pq.write_table(pa.table({"text": TEXTS, "id": [1, 2, 3]}), files[0])
    files[1].write_text("".join(rows))
    files[2].write_bytes(gzip.compress("".join(rows).encode()))
    files[3].write_text(TEXTS[1])
    return files


def documents(shard: Shard) -> list[list[int]]:
    ends = [0, *shard.ends.tolist()]
    return [shard.tokens[a:b].tolist() for a, b in pairwise(ends)]


def make(
    path: Path | list[Path], coder: TextCoder, cache: Path, *, skip: bool = False, workers: int = 1
) -> list[Shard]:
    paths = [str(each) for each in path] if isinstance(path, list) else [str(path)]
    parts = tokenize(paths, coder, "text", cache, workers=workers, skip=skip)
    return [shard for part in parts for shard in part]


def test_every_kind_of_file_gives_the_tokens_of_its_texts(coder: TextCoder, tmp_path: Path) -> None:
    files = write_all(tmp_path)
    tokenizer = byte_tokenizer()
    # special tokens that a text spells are text: nobody can end a document by writing so
    expected = [
        [tokenizer.convert_tokens_to_ids(t) for t in tokenizer.tokenize(x, split_special_tokens=True)] for x in TEXTS
    ]
    end = tokenizer.eos_token_id
    for shard in make(files[:3], coder, tmp_path / "cache"):
        assert documents(shard) == [[*ids, end] for ids in expected]
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in shard.tokens
        assert shard.facts.bytes == sum(len(text.encode()) for text in TEXTS)
    (text,) = make(files[3], coder, tmp_path / "cache")
    assert documents(text) == [[*expected[1], end]]
    assert [len(part) for part in tokenize([str(tmp_path)], coder, "text", tmp_path / "cache", workers=1)] == [4]
    assert len(make(Path(f"{tmp_path}/[ab].*"), coder, tmp_path / "cache")) == 2


def test_a_shard_is_made_once_and_again_when_it_is_damaged_or_its_file_changes(
    coder: TextCoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, cache = write_all(tmp_path)[1], tmp_path / "cache"
    make(file, coder, cache)
    (tokens,) = cache.glob("*.tokens")
    first = os.stat(tokens)
    moved = file.rename(tmp_path / "moved.jsonl")  # it is known by its content
    make(moved, coder, cache)
    assert os.stat(tokens).st_mtime_ns == first.st_mtime_ns
    content = tokens.read_bytes()
    tokens.write_bytes(b"\1" + content[1:])
    make(moved, coder, cache)
    assert tokens.read_bytes() == content
    assert "is damaged" in caplog.text
    next(cache.glob("*.json")).unlink()  # as after a kill: the description is written last
    make(moved, coder, cache)
    assert tokens.read_bytes() == content
    moved.write_text(json.dumps({"text": "other"}) + "\n")
    (other,) = make(moved, coder, cache)
    assert other.facts.documents == 1
    assert f"{moved} has changed since it was last tokenised" in caplog.text


def test_workers_make_the_same_shards(coder: TextCoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_all(tmp_path)
    alone = make(files, coder, tmp_path / "alone")
    monkeypatch.setattr(shards, "FEW_BYTES", 0)
    together = make(files, coder, tmp_path / "together", workers=2)
    assert [shard.facts for shard in together] == [shard.facts for shard in alone]
    assert [documents(shard) for shard in together] == [documents(shard) for shard in alone]
    pq.write_table(pa.table({"other": TEXTS}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"no column 'text'.*--text-key"):
        make(tmp_path / "other.parquet", coder, tmp_path / "together")


def test_what_cannot_be_trained_on_is_counted_and_named(
    coder: TextCoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [
        json.dumps({"text": "good"}).encode(),
        json.dumps({"text": " \n"}).encode(),
        json.dumps({"text": "a\0b"}).encode(),
        b'{"text": "caf\xe9"}',
        json.dumps({"text": "\ud800"}).encode(),
        b'{"text": "cut',
        b"[1]",
        json.dumps({"other": "x"}).encode(),
        json.dumps({"text": ""}).encode(),
    ]
    bad, cache = tmp_path / "bad.jsonl", tmp_path / "cache"
    bad.write_bytes(b"\n".join(lines))
    message = (
        r"bad.jsonl: 8 of 9 documents cannot be trained on: 2 empty \(first: line 2\), 1 with a NUL \(first: line 3\)"
    )
    message += r", 2 not UTF-8 \(first: line 4\), 2 malformed \(first: line 6\)"
    with pytest.raises(ValueError, match=message + r", 1 without a column 'text' \(--text-key\) \(first: line 8\)"):
        make(bad, coder, cache)
    for _ in range(2):  # also when the shard is found again
        caplog.clear()
        (shard,) = make(bad, coder, cache, skip=True)
        assert shard.facts.documents == 1
        assert "8 of 9 documents cannot be trained on" in caplog.text

    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(
        gzip.compress(b"".join(json.dumps({"text": os.urandom(99).hex()}).encode() + b"\n" for _ in range(99)))[:-50]
    )
    parquet = tmp_path / "broken.parquet"
    parquet.write_bytes(b"PAR1 nothing")
    text = tmp_path / "latin.txt"
    text.write_bytes("café".encode("utf-16"))
    for file, kind in {broken: "cut short", parquet: "cut short or unreadable", text: "not UTF-8"}.items():
        with pytest.raises(ValueError, match=f"{file.name}.*{kind}.*--skip-bad-rows"):
            make(file, coder, cache)
    with pytest.raises(ValueError, match=r"no documents in .*latin.txt"):
        make(text, coder, cache, skip=True)


def test_what_a_kill_left_behind_is_removed(coder: TextCoder, tmp_path: Path) -> None:
    files, cache = write_all(tmp_path), tmp_path / "cache"
    (whole,) = make(files[0], coder, cache)
    (tokens,) = cache.glob("*.tokens")
    old, young, other = Path(f"{tokens}.4711"), Path(f"{tokens}.4712"), cache / "notes.2024"
    for path in (old, young, other, *cache.iterdir()):
        path.touch()
        os.utime(path, (0, 0))
    young.touch()  # somebody may be writing it
    (again,) = make(files[0], coder, cache)
    assert documents(again) == documents(whole)
    assert [path.exists() for path in (old, young, other)] == [False, True, True]


def test_a_kill_leaves_the_shards_that_were_made(coder: TextCoder, tmp_path: Path) -> None:
    """The program of a worker, killed after its first answer; the next start makes the other shard alone."""
    files, cache = write_all(tmp_path), tmp_path / "cache"
    cache.mkdir()
    command = [sys.executable, "-m", "slimelite.data.shards", coder.path, "text", str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(str(files[0])) + "\n")
        worker.stdin.flush()
        assert "key" in json.loads(worker.stdout.readline())
        worker.kill()
    (made,) = cache.glob("*.tokens")
    before = os.stat(made).st_mtime_ns
    assert len(make(files[:2], coder, cache)) == 2
    assert os.stat(made).st_mtime_ns == before


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub with the dataset owner/texts; the paths that were asked for."""
    asked: list[str] = []
    content = {
        "main/train-0.jsonl": json.dumps({"text": TEXTS[0]}),
        "main/test-0.jsonl": json.dumps({"text": "held out"}),
    }

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            name = self.path.partition("/resolve/abc/")[2]
            siblings = [{"rfilename": n, "size": len(t), "blobId": n.replace("/", "-")} for n, t in content.items()]
            body = content.get(name) or json.dumps({"id": "owner/texts", "sha": "abc", "siblings": siblings})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{name.replace("/", "-")}"')
            self.send_header("X-Repo-Commit", "abc")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.chdir(tmp_path)
    import huggingface_hub.constants as constants

    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    yield asked
    server.shutdown()


def test_a_dataset_of_the_hub_comes_file_by_file_and_once(coder: TextCoder, tmp_path: Path, hub: list[str]) -> None:
    cache = tmp_path / "cache"
    (shard,) = make(Path("owner/texts:train"), coder, cache)
    assert documents(shard)[0][:-1] == coder.encode(TEXTS[:1])[0]
    assert any("train-0.jsonl" in path for path in hub)
    assert not any("test-0.jsonl" in path for path in hub)
    assert not list(cache.rglob("*.jsonl"))  # the download is gone
    hub.clear()
    make(Path("owner/texts:train"), coder, cache)
    assert not any("resolve" in path for path in hub)  # the hub's digest says that it is there
    assert len(make(Path("owner/texts"), coder, cache)) == 2
