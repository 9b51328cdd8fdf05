"""Write docs/algorithms.md's table of model families: python scripts/dev/check_families.py

It covers every causal language model of the installed transformers, as the small copy that a run examines before it
trains (slimelite/training/packing.py). ``python scripts/dev/check_families.py qwen3_5_text lfm2`` prints the results
for some families.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slimelite.base.version import answer_version
from slimelite.engines.embedded.gated_delta import is_fast_hybrid
from slimelite.engines.embedded.model import not_fast
from slimelite.engines.embedded.passes import CACHES
from slimelite.engines.embedded.ways import NotComputed, Rows, ways_of
from slimelite.training.attention import ATTENTION
from slimelite.training.packing import NoSmallModel, NotTrainable, may_pack, why_alone

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- families: written by scripts/dev/check_families.py -->\n", "<!-- end of families -->\n"
SECONDS = 240  # for one family

PACKED, ALONE, REFUSED, UNSEEN = "packed", "alone", "refused", "alone, not compared"
EAGER_PACKED, EAGER_ALONE = (f"{how}, with transformers' eager attention" for how in (PACKED, ALONE))
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
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"use_mamba_kernels": False},
}
# families that fail with an error of a layer or a config, and the property that is behind it
AUDIO = "it makes audio codes, and several of them at a time"
DRAFTS = "it drafts tokens from the hidden states of another model"
PROPERTIES = {
    "dbrx": "transformers 5.12 computes it only if its experts are as wide as its hidden states",
    "gemma3n": "its image encoder needs the package timm; gemma3n_text, which is its language model, needs no package",
    "gemma4_assistant": DRAFTS,
    "gemma4_unified_assistant": DRAFTS,
    "musicgen": AUDIO,
    "musicgen_melody": AUDIO,
    "prophetnet": "it is an encoder–decoder, and its logits come from hidden states that predict n-grams",
    "reformer": "its attention draws other hashes in each forward pass",
}


def config_of(family: str) -> PretrainedConfig:
    """The config of ``family`` with its defaults. If the defaults lack a kind of layer, the config has every kind."""
    fields = FIELDS.get(family, {})
    if "layer_types" in fields or "attn_layer_indices" in fields:
        fields = fields | {"num_hidden_layers": LAYERS}
    config: PretrainedConfig = AutoConfig.for_model(family, **fields)
    return config


FAST, GENERIC = "fast", "generic"
# what a family's cache does not allow
NO_CACHE = "the model has no cache, so each decode step computes all tokens, as in generate()"
WRONG_CACHE = "the cache fails or gives wrong results, also in generate(), so each decode step computes all tokens"
ALIKE = "only sequences of equal length are decoded together"
WHOLE_PREFIXES = "a cached prefix is used only if at most one prompt token follows it"


def engine(family: str) -> tuple[str, str]:
    """How the embedded engine computes ``family``, and what it does not support, or why it cannot compute it."""
    try:
        config = config_of(family)
        if not not_fast(config):
            return FAST, ""
        ways = ways_of(config)
        if is_fast_hybrid(config, torch.device("cpu"), torch.float32):
            return FAST, ""
    except NotComputed as error:
        return REFUSED, PROPERTIES.get(family, error.reason)
    except Exception as error:  # a config that its own defaults do not make
        return REFUSED, PROPERTIES.get(family, str(error))
    if ways.rows is Rows.WHOLE:
        takes = inspect.signature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].forward).parameters
        return GENERIC, WRONG_CACHE if any(name in takes for name in CACHES) else NO_CACHE
    return GENERIC, ALIKE if ways.rows is Rows.ALIKE else "" if ways.extends else WHOLE_PREFIXES


def verdict(family: str) -> tuple[str, str]:
    """The entry of `VERDICTS` for ``family`` with the defaults of its config, and the reason if it is not packed."""
    try:
        config = config_of(family)
        return (PACKED, "") if may_pack(config, ATTENTION) else (ALONE, why_alone(config, ATTENTION))
    except NotTrainable as error:
        reason = error.reason.partition(": its log-probs differ by")[0]  # by how much is rounding's affair
        if not error.eager:
            return REFUSED, PROPERTIES.get(family, reason)
        if may_pack(config, "eager"):
            return EAGER_PACKED, reason
        return EAGER_ALONE, f"{reason}; {why_alone(config, 'eager')}"
    except NoSmallModel as error:
        return UNSEEN, PROPERTIES.get(family, str(error.__cause__))
    except Exception as error:  # a config that its own defaults do not make
        return UNSEEN, PROPERTIES.get(family, str(error))


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after ``seconds``."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main(names: list[str]) -> None:
    """Examine ``names`` and print the results. Without names, examine all families and write the table."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    results: dict[str, tuple[str, str, str, str]] = {}
    for family in names or FAMILIES:
        results[family] = row(family)
        print(f"{family}: {': '.join(filter(None, results[family]))}")
    if not names:
        write(results)


def row(family: str) -> tuple[str, str, str, str]:
    """The cells of ``family``: how it is trained, and why; how the engine computes it, and why."""
    trained, why = looked_at(verdict, family, UNSEEN)
    sampled, limit = looked_at(engine, family, REFUSED)
    # a table's cell: one line of a few words
    why, limit = (textwrap.shorten(re.sub(r"[|<>`*\[\]]", " ", cell), 220) for cell in (why, limit))
    return trained, why, sampled, limit


def looked_at(look: Callable[[str], tuple[str, str]], family: str, otherwise: str) -> tuple[str, str]:
    """The result of ``look`` for a family; ``otherwise`` if that takes too long."""
    try:
        with at_most(SECONDS):
            return look(family)
    except TimeoutError as error:
        return otherwise, str(error)


def write(results: Mapping[str, tuple[str, str, str, str]]) -> None:
    """Write the table. Families with equal results share a row."""
    trained = Counter(cells[0] for cells in results.values())
    sampled = Counter(cells[2] for cells in results.values())
    rows = []
    for which in VERDICTS:
        alike: dict[tuple[str, ...], list[str]] = {}
        for family, cells in results.items():
            if cells[0] == which:
                alike.setdefault(cells, []).append(family)
        rows += [f"| {', '.join(families)} | {' | '.join(cells)} |\n" for cells, families in alike.items()]
    head = "| family | trained | why | embedded engine | why |\n|---|---|---|---|---|\n"
    total = "; ".join(f"{trained[which]} {which}" for which in VERDICTS)
    total += ". The embedded engine: " + "; ".join(f"{sampled[which]} {which}" for which in (FAST, GENERIC, REFUSED))
    begin = f"Numbers of families with transformers {transformers.__version__}. The trainer: "
    summary = textwrap.fill(f"{begin}{total}.", 120)
    table = f"{summary}\n\n{head}{''.join(rows)}"
    text = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}{table}{END}", text, flags=re.DOTALL))


if __name__ == "__main__":
    answer_version()
    main(sys.argv[1:])
