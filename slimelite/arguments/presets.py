"""Named sets of flags, each with its source; docs/algorithms.md has the same table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from slimelite.arguments.sources import read_command_line
from slimelite.arguments.vocabulary import SIMILAR, Settings, Vocabulary


class Preset(NamedTuple):
    """``flags`` as on a command line; ``source``: an arXiv number or an address."""

    source: str
    flags: str


_NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_SPEED = "https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda"

PRESETS: dict[str, Preset] = {
    # algorithms
    "grpo": Preset("2402.03300", "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.04 --kl-loss-type k3"),
    "dr_grpo": Preset(
        "2503.20783", "--advantage-estimator grpo --disable-grpo-std-normalization --loss-aggregation constant"
    ),
    "dapo": Preset(
        "2503.14476",
        "--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --loss-aggregation token "
        f"--dynamic-sampling-filter-path {_NONZERO_STD}",
    ),
    "gspo": Preset("2507.18071", "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4"),
    "cispo": Preset(
        "2506.13585", "--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0 --loss-aggregation token"
    ),
    "rloo": Preset("2402.14740", "--advantage-estimator rloo --loss-aggregation constant"),
    "reinforce_plus_plus": Preset("2501.03262", "--advantage-estimator reinforce_plus_plus --normalize-advantages"),
    "reinforce_plus_plus_baseline": Preset(
        "2501.03262",
        "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
    ),
    "ppo": Preset(
        "2203.02155",
        "--advantage-estimator ppo --normalize-advantages --kl-coef 0.02 --gamma 1.0 --lambd 0.95 --eps-clip 0.2 "
        "--value-clip 0.2",
    ),
    # corrections
    "token-tis": Preset("https://fengyao.notion.site/off-policy-rl", "--correction tis --tis-clip 2.0"),
    "seq-tis": Preset(_SPEED, "--correction mis --mis-level sequence --mis-mode truncate --mis-upper-bound 2.0"),
    "seq-mis": Preset(
        _SPEED, "--correction mis --mis-level sequence --mis-mode mask --mis-upper-bound 2.0 --mis-lower-bound 0"
    ),
    "geo-rs": Preset(
        _SPEED,
        "--correction mis --mis-mode none --mis-rejection-level geometric --mis-rejection-upper-bound 1.001 "
        "--mis-rejection-lower-bound 0.999 --mis-veto-threshold 1e-4",
    ),
    "icepop": Preset("2510.18855", "--correction icepop --tis-clip 5.0 --tis-clip-low 0.5"),
}


def read_presets(
    names: Sequence[str], vocabulary: Vocabulary, given: Collection[str]
) -> tuple[Settings, dict[str, str]]:
    """Everything that the presets say, and the preset of each field.

    Two presets may not set a field to different values, unless it is in ``given``: what other sources say wins anyway.
    """
    settings, owner = Settings(), dict[str, str]()
    for name in names:
        if name not in PRESETS:
            near = get_close_matches(name.lower().replace("-", "_"), PRESETS, n=1, cutoff=SIMILAR)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(PRESETS)}"
            settings.complain("--preset", f"{name} is not known{hint}")
            continue
        found = read_command_line(PRESETS[name].flags.split(), vocabulary)
        for field, value in found.values.items():
            if field not in given and settings.values.setdefault(field, value) != value:
                option = "--" + field.replace("_", "-")
                settings.complain(
                    "--preset", f"{owner[field]} and {name} disagree about {option}: give it, or take one"
                )
            owner.setdefault(field, name)
        settings.problems += found.problems
    return settings, owner
