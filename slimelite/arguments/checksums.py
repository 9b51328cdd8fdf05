"""Whether the files of a checkpoint are whole: sizes and CRC-32, written with it and compared before it is read."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# in a checkpoint: {"files": {"__0_0.distcp": {"bytes": 4096, "crc32": "89abcdef"}, ...}}; written last
CHECKSUMS = "checksums.json"
BLOCK = 1 << 24
# bytes that take a while
SAID_ABOVE = 10**10
Checksums = dict[str, dict[str, Any]]
REMEDY = "go on from an earlier checkpoint with --ckpt-step"


def checksums(folder: Path, files: Iterable[Path]) -> Checksums:
    """Size and CRC-32 of ``files``, by their paths relative to ``folder``.

    About 4 GB/s a file, where the disk is as fast; files are read side by side.
    """
    paths = sorted(files)
    with ThreadPoolExecutor(8, "checksum") as threads:
        found = list(threads.map(_checksum, paths))
    return {str(path.relative_to(folder)): each for path, each in zip(paths, found, strict=True)}


def damage(folder: Path) -> str | None:
    """What is wrong with the files of the checkpoint at ``folder``; None: nothing.

    A part of a checkpoint, such as its critic, is looked up among the checksums of the whole one. Without any
    (older checkpoints have none) nothing is known, and nothing is wrong.
    """
    root = next((place for place in (folder, folder.parent) if (place / CHECKSUMS).is_file()), None)
    if root is None:
        return None
    try:
        expected: Checksums = read_json(root / CHECKSUMS)["files"]
        expected = {
            name: {"bytes": int(each["bytes"]), "crc32": str(each["crc32"])}
            for name, each in expected.items()
            if folder in (root / name).parents
        }
    except (KeyError, TypeError, AttributeError, ValueError):
        return f"{root / CHECKSUMS}: cannot be read"
    for name, each in expected.items():
        path = root / name
        if not path.is_file():
            return f"{path}: is missing"
        if (size := path.stat().st_size) != each["bytes"]:
            return f"{path}: has {size:,} bytes, not the {each['bytes']:,} that were written"
    if (size := sum(each["bytes"] for each in expected.values())) > SAID_ABOVE:
        print(f"comparing {size / 1e9:.0f} GB of {root} with its checksums", file=sys.stderr, flush=True)
    found = checksums(root, (root / name for name in expected))
    changed = [name for name, each in expected.items() if each != found[name]]
    return f"{root / changed[0]}: its contents have changed since it was written (CRC-32)" if changed else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint or a model.

    Raises:
        ValueError: it is not there, cut short, or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged or cut short: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: is damaged: holds no JSON object")
    return found


def _checksum(path: Path) -> dict[str, Any]:
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}
