"""``--prompt-data owner/name`` reads a dataset of the hub. It needs the package `datasets`, of the extra `hub`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_hub import fake_hub

CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: hard
  data_files: [{split: train, path: hard.jsonl}]
---
"""
READ = """
import json, sys
from slimelite.data.reader import read_rows
rows, problems = {}, {}
for spec in sys.argv[1:]:
    try:
        rows[spec] = [row for _, row in read_rows(spec)]
    except ValueError as error:
        problems[spec] = str(error)
print("rows:" + json.dumps([rows, problems]))
"""


def written(*numbers: int) -> bytes:
    return "".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in numbers).encode()


@pytest.mark.hub
def test_a_dataset_of_the_hub_is_read_by_config_split_and_slice(tmp_path: Path) -> None:
    with fake_hub() as hub:
        files = {"README.md": CARD, "main/train-0.jsonl": written(1, 2), "main/test-0.jsonl": written(3)}
        hub.repos["me/sums"] = {"main": {**files, "hard.jsonl": written(40)}}
        hub.repos["me/one"] = {"main": {"train.jsonl": written(5)}}
        environment = {**os.environ, **hub.environment(str(tmp_path / "home"))}
        expected = {
            "me/sums:main:train": [1, 2],
            "me/sums:main:test": [3],
            "me/sums:hard:train": [40],
            "me/sums:main:train@[1:]": [2],
            "me/one": [5],
        }
        wrong = {"me/sums:soft:train": "soft", "me/one:test": "test", "me/none": "me/none"}
        command = [sys.executable, "-c", READ, *expected, *wrong]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        rows, problems = json.loads(done.stdout.rpartition("rows:")[2])
        for spec, numbers in expected.items():
            assert rows[spec] == [json.loads(line) for line in written(*numbers).splitlines()], spec
        for spec, word in wrong.items():
            assert f"no file {spec!r}, and the hub has no dataset" in problems[spec], problems
            assert word in problems[spec].rpartition("[:split]): ")[2]
        offline = {**environment, "HF_HUB_OFFLINE": "1"}  # what was read is in the cache
        again = subprocess.run(
            [*command[:4]], capture_output=True, text=True, env=offline, cwd=Path(__file__).parents[2]
        )
        assert json.loads(again.stdout.rpartition("rows:")[2])[0] == {"me/sums:main:train": rows["me/sums:main:train"]}
