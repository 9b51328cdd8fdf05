"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slimelite.base.files import in_units, whole, write_text
from slimelite.tracking.run_folder import RunFolder


def test_a_file_is_whole_or_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def break_off() -> None:
        with whole(path) as partial:
            partial.write_text("new, half of i")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert path.read_text() == "old"
    with whole(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_does_not_take_the_place_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(f"is a folder: name a file: '{tmp_path}'")):
        write_text(tmp_path, "new")


def test_a_full_disk_is_named_and_the_status_is_written_all_the_same(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_json("status.json", {"status": "running"})
    for name in ("status.json", "new.json"):
        (tmp_path / f"{name}.partial").symlink_to("/dev/full")
    folder.save_json("status.json", {"status": "failed"})
    assert json.loads((tmp_path / "status.json").read_text()) == {"status": "failed"}
    with pytest.raises(OSError, match=r"No space left on device; .*B are free there: free more space.*new\.json'"):
        folder.save_json("new.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(("size", "text"), [(12, "12 bytes"), (1234, "1.23 kB"), (5e6, "5 MB"), (84.3e9, "84.3 GB")])
def test_sizes_are_readable(size: float, text: str) -> None:
    assert in_units(size) == text
