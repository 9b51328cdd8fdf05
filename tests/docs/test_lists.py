"""Lists on pages name what the code has."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from slimelite.models.families import FAMILIES
from slimelite.rollout import filters
from slimelite.samples.sample import Sample, Status

DOCS = Path(__file__).parents[2] / "docs"


def test_every_filter_is_in_the_table() -> None:
    expected = {}
    for name, function in vars(filters).items():
        if name.startswith("check_") and inspect.getmodule(function) is filters:
            about = (inspect.getdoc(function) or "").splitlines()[0].replace("``", "`")
            given = [p for p in inspect.signature(function).parameters.values() if p.default is not p.empty]
            defaults = ", ".join(f"`{p.name}` is {p.default}" for p in given)
            expected[name] = about + (f" ({defaults})" if defaults else "")
    assert len(expected) >= 7
    rows = re.findall(r"^\| `(check_\w+)` \| (.+) \|$", (DOCS / "extending.md").read_text(), re.MULTILINE)
    assert dict(rows) == expected


def test_the_families_of_the_embedded_engines_fast_path_are_named() -> None:
    page = (DOCS / "faq.md").read_text()
    (sentence,) = re.findall(r"The embedded engine has a fast path for (.+?)\s\(the `model_type`", page)
    assert re.findall(r"`(\w+)`", sentence) == [name for name, family in FAMILIES.items() if family.embedded]


def test_the_fields_of_a_sample_have_their_types() -> None:
    section = (DOCS / "extending.md").read_text().partition("## A sample\n")[2].partition("\n## ")[0]
    named = dict(re.findall(r"^\| `(\w+)` \| (`.+?) \| ", section, re.MULTILINE))
    types = {f.name: re.sub(r"^Listed\[(.+)\]$", r"\1", str(f.type)).lstrip("_") for f in fields(Sample)}
    assert len(named) >= 10
    assert {name: text.replace("`", "").replace(" or ", " | ") for name, text in named.items()} == {
        name: types[name] for name in named
    }
    states = re.search(r"^\| `status` .+\| (.+) \|$", section, re.MULTILINE)
    assert states is not None
    assert set(re.findall(r"[A-Z]{4,}", states[1])) == {status.name for status in Status}
