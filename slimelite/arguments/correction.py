"""Corrections where the engine that sampled and the trainer disagree; the formulas are in docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slimelite.arguments.base import flag

if TYPE_CHECKING:
    from slimelite.arguments.args import Args
    from slimelite.arguments.derive import Draft

Level = Literal["token", "sequence", "geometric"]

# functions of slime, as --custom-tis-function-path names them, that are corrections of ours
SLIME_FUNCTIONS = {
    "slime.backends.megatron_utils.loss.vanilla_tis_function": "tis",
    "slime.backends.megatron_utils.loss.icepop_function": "icepop",
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": "mis",
}


@dataclass(frozen=True)
class CorrectionArgs:
    """Train/inference mismatch.

    The ratio is the trainer's probability of a token over the engine's; its metrics are logged whatever is chosen.
    """

    correction: Literal["none", "tis", "icepop", "mis", "custom"] = flag(
        "none", "weight or drop tokens by that ratio: truncate it, mask outliers, or one of the --mis-... family"
    )
    use_tis: bool = flag(False, "--correction tis")
    tis_clip: float = flag(2.0, "tis, icepop: upper bound of the ratio")
    tis_clip_low: float = flag(0.0, "tis, icepop: lower bound of the ratio")
    mis_level: Level = flag(
        "token", "ratio of a token, or of its response as the product or geometric mean", aliases=("--tis-level",)
    )
    mis_mode: Literal["truncate", "mask", "clip", "none"] = flag(
        "truncate",
        "weight: min(ratio, upper), the ratio inside the bounds else 0, clamped into them, or always 1",
        aliases=("--tis-mode",),
    )
    mis_upper_bound: float = flag(2.0, "largest ratio", aliases=("--tis-upper-bound",))
    mis_lower_bound: float | None = flag(
        None,
        "smallest ratio of the modes mask and clip",
        auto="1 / --mis-upper-bound",
        aliases=("--tis-lower-bound",),
    )
    mis_batch_normalize: bool = flag(
        False,
        "divide the weights of --correction mis by their mean over the whole optimizer step",
        aliases=("--tis-batch-normalize",),
    )
    mis_rejection_level: Level | None = flag(
        None, "also drop what is outside the rejection bounds at this level", aliases=("--rs-level",)
    )
    mis_rejection_upper_bound: float | None = flag(
        None, "largest ratio that is kept", auto="--mis-upper-bound", aliases=("--rs-upper-bound",)
    )
    mis_rejection_lower_bound: float | None = flag(
        None,
        "smallest ratio that is kept",
        auto="--mis-lower-bound where that is given, else 1 / --mis-rejection-upper-bound",
        aliases=("--rs-lower-bound",),
    )
    mis_veto_threshold: float | None = flag(
        None, "drop a response that has a token with a ratio below this", aliases=("--rs-veto-threshold",)
    )
    use_rs: bool | None = flag(
        None, "slime's switch: on rejects at --mis-rejection-level (token, if none is given), off rejects nothing"
    )
    custom_tis_function_path: str | None = flag(None, "plugin: a correction of your own", metavar="PLUGIN")
    use_opsm: bool = flag(False, "drop off-policy responses with a negative advantage")
    opsm_delta: float = flag(1e-4, "mean log-ratio above which a response is off-policy")


def derive_correction(draft: Draft) -> None:
    """slime's ways to choose a correction, and bounds that follow from others."""
    args = draft.args
    if args.custom_tis_function_path is not None:
        _resolve_plugin(draft, args.custom_tis_function_path)
    elif args.use_tis and args.correction == "none" and "correction" not in draft.given:
        draft.set("correction", "tis", "--use-tis")
    if draft.args.correction != "mis":
        return
    if args.use_rs:
        draft.default("mis_rejection_level", "token", "--use-rs")
    elif args.use_rs is False and args.mis_rejection_level is not None:
        draft.set("mis_rejection_level", None, "--no-use-rs")
    args = draft.args
    if args.mis_mode in ("mask", "clip"):
        draft.default("mis_lower_bound", _inverse(args.mis_upper_bound), "1 / --mis-upper-bound")
    if args.mis_rejection_level is not None:
        if args.mis_rejection_upper_bound is None and "mis_lower_bound" in draft.given:
            draft.default("mis_rejection_lower_bound", args.mis_lower_bound, "as --mis-lower-bound")
        draft.default("mis_rejection_upper_bound", args.mis_upper_bound, "as --mis-upper-bound")
        upper = draft.args.mis_rejection_upper_bound
        draft.default("mis_rejection_lower_bound", _inverse(upper), "1 / --mis-rejection-upper-bound")


def _inverse(upper: float | None) -> float:
    return 1 / upper if upper is not None and upper > 0 else 0.0


def _resolve_plugin(draft: Draft, path: str) -> None:
    ours = SLIME_FUNCTIONS.get(path.replace("/", ".").replace(".py:", ".").replace(":", "."))
    if "correction" not in draft.given:
        draft.set("correction", ours or "custom", "--custom-tis-function-path")
    if ours == draft.args.correction:
        draft.set("custom_tis_function_path", None, f"slime's function is --correction {ours}")
        if draft.args.use_tis and ours != "tis":
            draft.set("use_tis", False, f"slime's switch, with --correction {ours}")


def correction_problems(args: Args) -> Iterator[str]:
    """What contradicts itself, one line each."""
    chosen = args.correction
    if args.use_tis and chosen not in ("tis", "custom"):
        yield f"--use-tis is --correction tis, not {chosen}; take one"
    if args.custom_tis_function_path is not None and chosen != "custom":
        yield f"--custom-tis-function-path is a correction of its own, not --correction {chosen}; take one"
    if args.custom_tis_function_path is None and chosen == "custom":
        yield "--correction custom needs --custom-tis-function-path"
    weighs = chosen != "none" and (chosen, args.mis_mode) != ("mis", "none")
    if args.use_rollout_logprobs and weighs:
        yield (
            f"--use-rollout-logprobs and --correction {chosen}: the engine's log-probs leave no mismatch to weigh; "
            "take one (--correction mis --mis-mode none may reject)"
        )
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}"
    if chosen == "mis":
        yield from _mis_problems(args)


def _mis_problems(args: Args) -> Iterator[str]:
    for kind in ("", "rejection_"):
        low, high = getattr(args, f"mis_{kind}lower_bound"), getattr(args, f"mis_{kind}upper_bound")
        name = f"--mis-{kind.replace('_', '-')}"
        if high is not None and high <= 0:
            yield f"{name}upper-bound {high}: must be above 0"
        elif low is not None and high is not None and low > high:
            yield f"{name}lower-bound {low} is above {name}upper-bound {high}"
    veto = args.mis_veto_threshold
    if veto is not None and not 0 < veto < 1:
        yield f"--mis-veto-threshold {veto}: must be above 0 and below 1"
    if args.mis_mode == "none" and args.mis_rejection_level is None and veto is None:
        yield "--mis-mode none corrects nothing by itself: give --mis-rejection-level or --mis-veto-threshold"
