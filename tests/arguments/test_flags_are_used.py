"""No flag is ignored in silence: each field is read somewhere, or is on a short list that says why not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from slimelite.arguments import ArchitectureArgs, Args, EvalDataset, make_args
from slimelite.arguments.flags import all_flags, group_flags, groups_of
from slimelite.engines.params import PREFIXED, names_at
from tests.arguments.conftest import COMPLETE, CPU

ROOT = Path(__file__).parents[2]
DECLARING = {"conditions.py", "problems.py"}
# read by checks alone
CHECKED = {
    "train_backend": "whichever is named, there is one",
    "allow_truncated_sampling": "a permission",
    "rollout_external": "rollout_external_engine_addrs says so too",
    **dict.fromkeys(["preset", "args_group", "import_file", "stages"], "read by name, before there are arguments"),
    "custom_config_path": "read by name, with config, before there are arguments",
    "sglang_mem_fraction_static": "listed under no effect while the embedded engine runs",
}


def _attributes_read() -> set[str]:
    """What the package reads; of files that declare, what their classes read, such as `Job`."""
    trees: list[ast.AST] = []
    for file in [*(ROOT / "slimelite").rglob("*.py"), ROOT / "train.py"]:
        tree = ast.parse(file.read_text())
        trees += [n for n in tree.body if isinstance(n, ast.ClassDef)] if file.name in DECLARING else [tree]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_flag_is_read() -> None:
    architecture = {f.name for f in group_flags(ArchitectureArgs)}  # tests/arguments/test_architecture.py has each
    # tests/arguments/test_sampling.py has each
    sampling = {f"{place}_{names[0]}" for place in PREFIXED for names in names_at(place).values()}
    unread = set(all_flags(Args)) - _attributes_read() - architecture - sampling
    assert sorted(unread - set(CHECKED)) == []


@pytest.mark.parametrize("group", [*groups_of(Args), EvalDataset], ids=lambda group: group.__name__)
def test_every_flag_says_when_it_has_an_effect(group: type) -> None:
    assert [flag.option for flag in group_flags(group) if flag.needs is None] == []


def test_what_a_flag_needs_is_known_of_complete_arguments() -> None:
    args = make_args(COMPLETE.split(), machine=CPU)
    for flag in all_flags(Args).values():
        for condition in flag.needs.conditions if flag.needs else ():
            assert condition.words
            condition.holds(args)
