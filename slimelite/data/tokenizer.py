"""Loads tokenizers, and finds the token ids that end a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import cached_file

from slimelite.checkpoints import read_json

# together they have digits, operators, newlines, runs of spaces, code, accents, another script and an emoji
PROBES = (
    "3+5+2+9=?\n3+5=8 8+2=10 10+9=19\n#### 19",
    "Hello, world! It's 1,234.50 dollars -- isn't it?",
    "  def f(x):\n\treturn {'a': [x ** 2]}  # two  spaces\n\n",
    "émigré ½ 你好 😀 \\boxed{\\frac{1}{2}}",
)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id; its ids are those of the folder's ``tokenizer.json``.

    `AutoTokenizer` picks a class by ``model_type``. Some of these classes rebuild the tokenizer from its vocabulary and
    silently drop the file's pre-tokenizer and decoder (for example of a Qwen2 model with a word-level tokenizer). If
    ids differ from the file's on the probe texts, the file is loaded directly.

    Raises:
        ValueError: there is no tokenizer at ``path``, or no class reproduces the file's ids.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds of errors for malformed files
        raise ValueError(
            f"no tokenizer at {path!r}, which is to be a folder with tokenizer.json or a hub id ({_short(error)})"
        ) from error
    file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        if not tokenizer(PROBES[1], add_special_tokens=False)["input_ids"]:
            raise ValueError(f"the tokenizer at {path!r} knows no words: its tokenizer.json is missing")
        return tokenizer
    truth = Tokenizer.from_file(file)
    if not _agrees(tokenizer, truth):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        if not _agrees(tokenizer, truth):
            raise ValueError(
                f"{file} does not load faithfully: transformers gives other ids than the file; save it anew"
            )
    return tokenizer


def _short(error: BaseException) -> str:
    """The beginning of an error's text, because some messages of transformers list every known model."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def _agrees(tokenizer: PreTrainedTokenizerBase, truth: Tokenizer) -> bool:
    """Whether both encode every probe to the same ids and decode these to the same text."""
    for probe in PROBES:
        ids = truth.encode(probe, add_special_tokens=False).ids
        if tokenizer(probe, add_special_tokens=False)["input_ids"] != ids:
            return False
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text != truth.decode(ids, skip_special_tokens=False):
            return False
    return True


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response: the ``eos_token_id`` of generation config, config and tokenizer together, sorted.

    Raises:
        ValueError: none of the three has one, or a value is not a token id.
    """
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            named = _eos_ids(read_json(Path(file)))
            if wrong := [i for i in named if not isinstance(i, int | None)]:
                raise ValueError(f"{file}: eos_token_id {wrong[0]!r} is no token id")
            found.update(named)
    ids = sorted(i for i in found if i is not None)
    if not ids:
        raise ValueError(f"{path!r} names no end-of-sequence token; add eos_token_id to its generation_config.json")
    return ids


def _eos_ids(config: dict[str, Any]) -> list[int | None]:
    eos = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return eos if isinstance(eos, list) else [eos]
