"""Presets: what they set, below every other source, and that the docs say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slimelite.arguments import Args
from slimelite.arguments.sources import PRESETS, Vocabulary, read_command_line
from tests.arguments.conftest import Make, Problems

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.mark.parametrize("name", PRESETS)
def test_each_is_valid_and_shown_with_its_name(make: Make, name: str) -> None:
    """Rollouts only: no critic is needed."""
    args = make(f"--preset {name} --debug-rollout-only")
    said = read_command_line(PRESETS[name].flags.split(), Vocabulary(Args))
    assert said.problems == []
    shown = {d.name: (d.value, d.reason) for d in args.derivations}
    for field, value in said.values.items():
        assert getattr(args, field) == value
        assert shown[field] == (value, f"--preset {name}")
    assert not [option for option, _ in args.no_effect if option[2:].replace("-", "_") in said.values]


def test_other_sources_win(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("preset: [dapo, seq-mis]\neps_clip: 0.1\nmis_upper_bound: 3\n")
    args = make(f"--config {path} --mis-upper-bound 4 --loss-aggregation rollout")
    assert (args.eps_clip, args.eps_clip_high) == (0.1, 0.28)
    assert (args.mis_upper_bound, args.loss_aggregation, args.correction) == (4.0, "rollout", "mis")
    assert "eps_clip" not in {d.name for d in args.derivations}
    assert make("--preset dr_grpo --calculate-per-token-loss").loss_aggregation == "token"
    assert make("--preset dr_grpo --grpo-std-normalization").grpo_std_normalization


def test_mistakes(problems: Problems) -> None:
    assert problems("--preset dr-grpo") == ["--preset dr-grpo: there is no such preset; did you mean dr_grpo?"]
    assert problems("--preset geo_rs") == ["--preset geo_rs: there is no such preset; did you mean geo-rs?"]
    (problem,) = problems("--preset 42")
    assert ", ".join(PRESETS) in problem
    (problem,) = problems("--preset dapo gspo --eps-clip 0.1 --eps-clip-high 0.1")
    assert problem == (
        "--preset dapo and gspo give --advantage-estimator different values: use one preset, or give the flag"
    )
    assert problems("--preset dapo gspo --eps-clip 0.1 --eps-clip-high 0.1 --advantage-estimator gspo") == []


def test_the_docs_list_them() -> None:
    section = DOCS.read_text().split("\n## Presets\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| \[.*?\]\((.*?)\) \| `(.*)` \|$", section, flags=re.MULTILINE)
    assert [(name, flags) for name, _, flags in rows] == [(name, p.flags) for name, p in PRESETS.items()]
    for (_, address, _), preset in zip(rows, PRESETS.values(), strict=True):
        arxiv = f"https://arxiv.org/abs/{preset.source}"
        assert address == (preset.source if preset.source.startswith("https") else arxiv)
