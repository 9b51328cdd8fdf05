"""Write docs/algorithms.md's table of model families: python scripts/dev/check_families.py

Every causal language model of the installed transformers, in the small copy that a run looks at before it trains
(slimelite/training/packing.py). ``python scripts/dev/check_families.py qwen3_5_text lfm2`` prints what is seen of some.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slimelite.training.attention import ATTENTION
from slimelite.training.packing import NoSmallModel, NotTrainable, may_pack, why_alone

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- families: written by scripts/dev/check_families.py -->\n", "<!-- end of families -->\n"
SECONDS = 240  # for one family

PACKED, ALONE, REFUSED, UNSEEN = "packed", "alone", "refused", "alone, not compared"
EAGER_PACKED, EAGER_ALONE = (f"refused; with `--attn-implementation eager` {how}" for how in (PACKED, ALONE))
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


def config_of(family: str) -> PretrainedConfig:
    """The config of ``family`` with its defaults, or with every kind of its layers where they have not."""
    fields = FIELDS.get(family, {})
    if "layer_types" in fields or "attn_layer_indices" in fields:
        fields = fields | {"num_hidden_layers": LAYERS}
    config: PretrainedConfig = AutoConfig.for_model(family, **fields)
    return config


def verdict(family: str) -> tuple[str, str]:
    """Which of `VERDICTS` holds for ``family`` with the defaults of its config, and the reason if it is not packed."""
    try:
        config = config_of(family)
        return (PACKED, "") if may_pack(config, ATTENTION) else (ALONE, why_alone(config, ATTENTION))
    except NotTrainable as error:
        reason = error.reason.partition(": its log-probs differ by")[0]  # by how much is rounding's affair
        if not error.eager:
            return REFUSED, reason
        if may_pack(config, "eager"):
            return EAGER_PACKED, reason
        return EAGER_ALONE, f"{reason}; {why_alone(config, 'eager')}"
    except NoSmallModel as error:
        return UNSEEN, str(error.__cause__)
    except Exception as error:  # a config that its own defaults do not make
        return UNSEEN, str(error)


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
    found: dict[str, tuple[str, str]] = {}
    for family in names or FAMILIES:
        try:
            with at_most(SECONDS):
                which, reason = verdict(family)
        except TimeoutError as error:
            which, reason = UNSEEN, str(error)
        # a table's cell: one line of a few words
        found[family] = which, textwrap.shorten(re.sub(r"[|<>`*\[\]]", " ", reason), 220)
        print(f"{family}: {': '.join(filter(None, found[family]))}")
    if names:
        return
    counts = Counter(which for which, _ in found.values())
    rows = [f"| {', '.join(name for name in found if found[name][0] == PACKED)} | {PACKED} | |\n"]
    for which in VERDICTS[1:]:
        rows += [f"| {name} | {which} | {reason} |\n" for name, (other, reason) in found.items() if other == which]
    head = "| family | trained | why |\n|---|---|---|\n"
    total = "; ".join(f"{counts[which]} {which}" for which in VERDICTS)
    table = f"transformers {transformers.__version__}: {total}.\n\n{head}{''.join(rows)}"
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table}{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    main(sys.argv[1:])
