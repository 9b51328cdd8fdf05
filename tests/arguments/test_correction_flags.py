"""--correction and the ways of slime to say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.arguments.conftest import Make, Problems

MIS_FILE = "examples/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp"
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


def test_the_keys_of_slimes_mis_yaml(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "mis.yaml"
    path.write_text(
        "use_tis: true\nuse_rs: true\ntis_level: sequence\nrs_level: geometric\ntis_mode: clip\n"
        "tis_lower_bound: 0.25\ntis_upper_bound: 3.0\nrs_lower_bound: null\nrs_upper_bound: null\n"
        "rs_veto_threshold: 1.0e-4\ntis_batch_normalize: true\nrs_trust_region: null\nrs_tr_threshold: 0.5\n"
    )
    words = f"--use-tis --custom-tis-function-path {MIS} --custom-config-path {path}"
    args = make(words)
    assert (args.correction, args.mis_level, args.mis_mode) == ("mis", "sequence", "clip")
    assert (args.mis_lower_bound, args.mis_upper_bound, args.mis_veto_threshold) == (0.25, 3.0, 1e-4)
    # without bounds of its own rejection has those of the weights, as in slime
    assert (args.mis_rejection_level, args.mis_rejection_lower_bound) == ("geometric", 0.25)
    assert args.mis_rejection_upper_bound == 3.0
    assert args.mis_batch_normalize
    assert args.custom_config == {}
    assert make(f"{words} --no-use-rs").mis_rejection_level is None
    path.write_text("use_rs: true\n")
    assert make(words).mis_rejection_level == "token"


@pytest.mark.parametrize(
    ("words", "correction", "plugin"),
    [
        (f"--custom-tis-function-path {MIS.replace('examples', 'examples.infra_features')}", "mis", None),  # miles'
        ("", "none", None),
        ("--use-tis", "tis", None),
        ("--correction tis", "tis", None),
        ("--use-tis --correction tis", "tis", None),
        (f"--use-tis --custom-tis-function-path {ICEPOP}", "icepop", None),
        (f"--custom-tis-function-path {MIS}", "mis", None),
        (
            f"--use-tis --custom-tis-function-path {MIS.replace('.', '/').replace('/compute', '.py:compute')}",
            "mis",
            None,
        ),
        (f"--correction mis --custom-tis-function-path {MIS}", "mis", None),
        ("--use-tis --custom-tis-function-path my.weights", "custom", "my.weights"),
        ("--custom-tis-function-path my.weights", "custom", "my.weights"),
        ("--preset seq-mis", "mis", None),
        ("--preset token-tis --use-tis", "tis", None),
        ("--preset seq-mis --correction none", "none", None),
    ],
)
def test_ways_to_choose(make: Make, words: str, correction: str, plugin: str | None) -> None:
    args = make(words)
    assert (args.correction, args.custom_tis_function_path) == (correction, plugin)


@pytest.mark.parametrize("words", ["--use-tis", f"--use-tis --custom-tis-function-path {MIS}", "--preset geo-rs"])
def test_what_was_resolved_resolves_to_itself(make: Make, words: str) -> None:
    first = make(words)
    names = [name for name in vars(first) if name.startswith(("mis_", "tis_"))] + ["correction", "use_tis"]
    said = [(f"--{name.replace('_', '-')}", getattr(first, name)) for name in names]
    spelled = " ".join(
        option if value is True else f"{option} {value}" for option, value in said if value not in (None, False)
    )
    again = make(spelled)
    assert {name: getattr(again, name) for name in names} == {name: getattr(first, name) for name in names}


def test_bounds_follow(make: Make) -> None:
    args = make("--correction mis --mis-mode clip --mis-upper-bound 4 --mis-rejection-level sequence")
    assert (args.mis_lower_bound, args.mis_rejection_lower_bound, args.mis_rejection_upper_bound) == (0.25, 0.25, 4.0)
    args = make("--correction mis --mis-rejection-level geometric --mis-rejection-upper-bound 1.25")
    assert (args.mis_lower_bound, args.mis_rejection_lower_bound) == (None, 0.8)
    assert {d.name for d in args.derivations} >= {"mis_rejection_lower_bound"}


RULES = [
    ("--use-tis --correction icepop", "--use-tis means --correction tis, not icepop", "--no-use-tis"),
    ("--use-tis --preset icepop", "--use-tis means --correction tis, not icepop", "--no-use-tis"),
    ("--use-tis --preset seq-mis", "--use-tis means --correction tis, not mis", "--correction tis"),
    ("--use-tis --tis-clip 0", "--tis-clip 0.0: must be above 0", "--tis-clip 1"),
    ("--use-tis --correction none", "--use-tis means --correction tis, not none", "--correction tis"),
    ("--correction tis --custom-tis-function-path my.fn", "replaces --correction tis", "--correction custom"),
    ("--correction custom", "needs --custom-tis-function-path", "--custom-tis-function-path my.fn"),
    ("--use-tis --use-rollout-logprobs", "there is no mismatch to correct; choose one", "--no-use-tis"),
    (
        "--correction mis --mis-rejection-level token --use-rollout-logprobs",
        "Only rejection, with --correction mis --mis-mode none, is possible",
        "--mis-mode none",
    ),
    ("--use-tis --tis-clip-low 3", "--tis-clip-low 3.0 is above --tis-clip 2.0", "--tis-clip 4"),
    ("--correction mis --mis-mode none", "corrects nothing by itself", "--mis-veto-threshold 1e-4"),
    ("--correction mis --mis-mode none", "corrects nothing by itself", "--mis-rejection-level geometric"),
    (
        "--correction mis --mis-mode mask --mis-lower-bound 3",
        "--mis-lower-bound 3.0 is above --mis-upper-bound 2.0",
        "--mis-upper-bound 4",
    ),
    (
        "--correction mis --mis-rejection-level token --mis-rejection-lower-bound 3",
        "--mis-rejection-lower-bound 3.0 is above --mis-rejection-upper-bound 2.0",
        "--mis-rejection-upper-bound 3",
    ),
    ("--correction mis --mis-mode clip --mis-upper-bound 0", "must be above 0", "--mis-upper-bound 2"),
    ("--correction mis --mis-veto-threshold 2", "must be above 0 and below 1", "--mis-veto-threshold 0.5"),
    ("--correction tis --opsm-delta -1", "--opsm-delta -1.0: must be at least 0", "--opsm-delta 0"),
]


@pytest.mark.parametrize(("breaks", "says", "mends"), RULES, ids=[f"{b} | {m}" for b, _, m in RULES])
def test_contradictions(problems: Problems, breaks: str, says: str, mends: str) -> None:
    (problem,) = problems(breaks)
    assert says in problem
    assert problem.startswith("--")
    assert problems(f"{breaks} {mends}") == []


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ("--tis-clip 3", "--correction tis, icepop or custom"),
        ("--mis-level sequence", "--correction mis"),
        ("--correction mis --tis-clip 3", "--correction tis, icepop or custom"),
        ("--correction mis --mis-lower-bound 0.5", "--mis-mode mask or clip"),
        ("--correction mis --mis-rejection-upper-bound 3", "--mis-rejection-level"),
        ("--correction icepop --loss-type sft_loss", "--loss-type policy_loss"),
        ("--custom-pg-loss-reducer-function-path my.fn --loss-type sft_loss", "--loss-type policy_loss"),
    ],
)
def test_flags_with_nothing_to_act_on_are_listed(make: Make, words: str, needs: str) -> None:
    assert [why for _, why in make(words).no_effect if needs in why]


def test_slimes_own_file_of_mis(make: Make, tmp_path: Any) -> None:
    """Its first edition; the later one is in `test_the_keys_of_slimes_mis_yaml`."""
    path = tmp_path / "mis.yaml"
    path.write_text(
        "use_tis: true\nmis_level: geometric\nmis_mode: mask\nmis_lower_bound: 0.5\nmis_upper_bound: 2.0\n"
        "mis_veto_threshold: 1.0e-4\n"
    )
    args = make(f"--custom-config-path {path} --custom-tis-function-path {MIS}")
    assert (args.correction, args.mis_level, args.mis_mode) == ("mis", "geometric", "mask")
    assert (args.mis_lower_bound, args.mis_upper_bound, args.mis_veto_threshold) == (0.5, 2.0, 1e-4)
