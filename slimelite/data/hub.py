"""Lists the document files of a dataset on the Hugging Face hub with their hashes, and downloads the files one at a
time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset on the Hugging Face hub. ``digest``: the hash of the file's content, as the hub reports it.
    ``size``: the file's size in bytes."""

    dataset: str
    revision: str
    file: str
    digest: str
    size: int

    def __str__(self) -> str:
        return f"hub:{json.dumps(asdict(self))}"

    @classmethod
    def parse(cls, text: str) -> HubFile | None:
        """Convert ``text``, which `str` made from a `HubFile`, back to a `HubFile`. Returns None if ``text`` is a
        path."""
        return cls(**json.loads(text[4:])) if text.startswith("hub:{") else None

    @contextmanager
    def downloaded(self, folder: Path) -> Iterator[str]:
        """Download the file to a path below ``folder``, and yield this path. The downloaded copy is deleted at the end
        of the ``with`` block.

        Raises:
            ValueError: the hub does not provide the file.
        """
        from huggingface_hub import hf_hub_download

        with tempfile.TemporaryDirectory(dir=folder) as place:
            try:
                copy = hf_hub_download(
                    self.dataset, self.file, repo_type="dataset", revision=self.revision, local_dir=place
                )
            except OSError as error:
                raise ValueError(f"{self.dataset}: the hub does not provide {self.file}: {error}") from error
            yield copy


def hub_files(spec: str, endings: Sequence[str]) -> list[HubFile]:
    """The files of the dataset ``spec`` (``owner/name[:config][:split]``) whose names end with one of ``endings``,
    sorted by name.

    For example, the split ``train`` selects the files in a folder ``train``, and files with names such as
    ``train-1.parquet``. A config selects files in the same way.

    Raises:
        ValueError: the hub has no such dataset, or the dataset has no such files.
    """
    from huggingface_hub import HfApi

    dataset, *parts = spec.split(":")
    try:
        content = HfApi().dataset_info(dataset, files_metadata=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"no file {spec!r}, and the hub has no dataset {dataset}: {error}") from error
    files = [
        HubFile(dataset, str(content.sha), each.rfilename, (each.lfs and each.lfs.sha256) or str(each.blob_id), size)
        for each in sorted(content.siblings or (), key=lambda each: each.rfilename)
        if each.rfilename.endswith(tuple(endings)) and (size := int(each.size or 0)) and _is_of(each.rfilename, parts)
    ]
    if not files:
        raise ValueError(f"{spec}: the dataset has no matching file with the ending {', '.join(endings)}")
    return files


def _is_of(name: str, parts: Sequence[str]) -> bool:
    """Whether a file belongs to a config and a split."""
    *folders, file = name.split("/")
    return all(part in folders or file.startswith((f"{part}-", f"{part}.", f"{part}_")) for part in parts)
