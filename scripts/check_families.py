"""Write docs/algorithms.md's table of model families: python scripts/check_families.py

Every causal language model of the installed transformers, in the small copy that a run looks at before it trains
(slimelite/training/packing.py). ``python scripts/check_families.py qwen3_5_text lfm2`` prints what is seen of some.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slimelite.training.attention import ATTENTION
from slimelite.training.packing import NoSmallModel, may_pack

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- families: written by scripts/check_families.py -->\n", "<!-- end of families -->\n"
SECONDS = 60  # for one family

PACKED, ALONE = "right packed", "right alone, trained on one sequence a forward pass"
EAGER_PACKED, EAGER_ALONE = (f"refused; {what} with `--attn-implementation eager`" for what in ("packed", "alone"))
REFUSED, UNSEEN = "refused", "no small config; not packed, with a warning"
VERDICTS = (PACKED, ALONE, EAGER_PACKED, EAGER_ALONE, REFUSED, UNSEEN)

# where the defaults of a config have not every kind of layer, or make no model
LAYERS = 4
FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron": {"num_key_value_heads": 8},
}


def verdict(family: str) -> str:
    """Which of `VERDICTS` holds for ``family`` with the defaults of its config."""
    fields = FIELDS.get(family, {})
    if "layer_types" in fields or "attn_layer_indices" in fields:
        fields = fields | {"num_hidden_layers": LAYERS}
    try:
        config = AutoConfig.for_model(family, **fields)
    except Exception as error:  # a config that its own defaults do not make
        print(f"{family}: {error!r:.200}", file=sys.stderr)
        return UNSEEN
    try:
        return PACKED if may_pack(config, ATTENTION) else ALONE
    except NoSmallModel as error:
        print(error, file=sys.stderr)
        return UNSEEN
    except ValueError as error:
        print(error, file=sys.stderr)
        if "--attn-implementation eager" not in str(error):
            return REFUSED
        return EAGER_PACKED if may_pack(config, "eager") else EAGER_ALONE


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """TimeoutError after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main(names: list[str]) -> None:
    """Look at ``names``, or at all families and write the table."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, list[str]] = {which: [] for which in VERDICTS}
    for family in names or FAMILIES:
        try:
            with at_most(SECONDS):
                which = verdict(family)
        except TimeoutError as error:
            print(f"{family}: {error}", file=sys.stderr)
            which = UNSEEN
        print(f"{family}: {which}")
        found[which].append(family)
    if names:
        return
    rows = "".join(f"| {which} | {len(found[which])} | {', '.join(found[which])} |\n" for which in VERDICTS)
    head = "| of the defaults of a config | families | which |\n|---|---|---|\n"
    table = f"transformers {transformers.__version__}:\n\n{head}{rows}"
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table}{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main(sys.argv[1:])
