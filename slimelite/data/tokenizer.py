"""Loads tokenizers, and finds the token ids that end a response.

A tokenizer with a ``tokenizer.json`` is loaded without importing torch, because the processes of train.py and of the
rollout side do not import torch. Importing transformers takes a second. So this module imports transformers only inside
the functions that need it, and most mistakes of the user are reported before this import.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.models import BPE

from slimelite.base.files import write_text
from slimelite.models.checkpoints import may_be_hub_id, read_json, why_not_from_hub
from slimelite.models.families import text_config

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# a module of transformers that reads GGUF files and imports torch, and the module of fast tokenizers, which imports it
GGUF, FAST = "transformers.modeling_gguf_pytorch_utils", "transformers.tokenization_utils_tokenizers"

# key of the `fingerprint` in a checkpoint's rollout state
TOKENIZER = "tokenizer"
# the probe texts contain digits, operators, newlines, runs of spaces, code, accents, another script and an emoji
PROBES = (
    "3+5+2+9=?\n3+5=8 8+2=10 10+9=19\n#### 19",
    "Hello, world! It's 1,234.50 dollars -- isn't it?",
    "  def f(x):\n\treturn {'a': [x ** 2]}  # two  spaces\n\n",
    "émigré ½ 你好 😀 \\boxed{\\frac{1}{2}}",
)
# a letter and a separate accent, which NFC joins; it is not in PROBES, because checkpoints have the ids of PROBES
JOINED_BY_NFC = "e\u0301"


# names of tokenizer files, as different libraries write them
FILES = ("*token*", "vocab.*", "merges.txt", "*.model", "*.spm", "tekken.json")
# further files of a model folder (not config or weights); they are copied unchanged to keep the same token ids
GENERATION = "generation_config.json"
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "*.spm",
    "tekken.json",
    "chat_template*",
    GENERATION,
)


def check_files(path: str) -> None:
    """Check whether ``path`` can be a tokenizer. Only the names of files are checked, not their contents.

    Raises:
        ValueError: ``path`` is neither a folder with tokenizer files nor a hub id.
    """
    folder, wrong = Path(path), None
    if folder.is_dir():
        if not any(file for name in FILES for file in folder.glob(name)):
            wrong = "it has none: copy tokenizer.json and tokenizer_config.json from the model that it came from"
    elif folder.exists():
        wrong = "it is a file"
    elif not may_be_hub_id(path):
        wrong = "no such folder"
    if wrong is not None:
        raise ValueError(f"no tokenizer at {path!r}, which must be a folder with tokenizer.json, or a hub id ({wrong})")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id. The loaded tokenizer gives the same token ids as the folder's
    ``tokenizer.json``.

    The file ``tokenizer_config.json`` names the tokenizer's class. If ``tokenizer_config.json`` names no class,
    `AutoTokenizer` chooses a class by the model's ``model_type``; this imports torch and torch.compile. Some classes
    rebuild the tokenizer from its vocabulary, and silently drop the pre-tokenizer and the decoder of
    ``tokenizer.json``. This happens, for example, for a Qwen2 model with a word-level tokenizer. So the token ids of
    the texts `PROBES` are compared with those from ``tokenizer.json``. If the ids differ, ``tokenizer.json`` is loaded
    directly.

    Raises:
        ValueError: there is no tokenizer at ``path``, or no tokenizer class gives the same ids as ``tokenizer.json``.
    """
    check_files(path)
    import transformers
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        kind = _named_class(path) if file is not None else None
        tokenizer = (kind or transformers.AutoTokenizer).from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds of errors for malformed files
        why = _short(error) if Path(path).exists() else why_not_from_hub(error)
        raise ValueError(
            f"no tokenizer at {path!r}, which must be a folder with tokenizer.json, or a hub id ({why})"
        ) from error
    if file is None:
        if not tokenizer(PROBES[1], add_special_tokens=False)["input_ids"]:
            raise ValueError(f"the tokenizer at {path!r} has no vocabulary: its tokenizer.json is missing")
        return tokenizer
    truth = Tokenizer.from_file(file)
    if not _agrees(tokenizer, truth):
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        if not _agrees(tokenizer, truth):
            raise ValueError(
                f"{file} does not load correctly, because transformers returns other ids than the file defines; save "
                "the tokenizer again"
            )
    if isinstance(truth.model, BPE):
        # transformers ignores this setting for BPE, but warns of it at length
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes of the parts of ``tokenizer`` that turn texts and messages into tokens. Each checkpoint stores these
    hashes, so a resumed run can check its tokenizer.

    For a large vocabulary, computing the hashes takes a few tenths of a second.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    # the pickled model does not contain settings that calls change, such as padding
    model = {"vocab": tokenizer.get_vocab()} if fast is None else json.loads(fast.model.__getstate__())
    words = model.get("vocab")
    parts = {
        "vocabulary": sorted(words.items()) if isinstance(words, dict) else words,
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()],
        "special tokens": [sorted(tokenizer.get_added_vocab().items()), tokenizer.bos_token_id, tokenizer.eos_token_id],
        "way of splitting text": [tokenizer(probe)["input_ids"] for probe in PROBES],
        "chat template": tokenizer.chat_template,
    }
    return {
        part: hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
        for part, content in parts.items()
    }


def check_same(saved: Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that ``tokenizer`` gives the same tokens as the checkpoint's tokenizer. ``saved``: the `fingerprint` of the
    checkpoint's tokenizer.

    Raises:
        ValueError: the two tokenizers differ. The message names the parts that differ.
    """
    if differ := [part for part, digest in fingerprint(tokenizer).items() if saved.get(part) != digest]:
        raise ValueError(
            f"the checkpoint was saved with another tokenizer, which differs in its {' and its '.join(differ)}; name "
            "the original tokenizer with --tokenizer, or load only the weights with --finetune"
        )


def _named_class(path: str) -> type[PreTrainedTokenizerBase] | None:
    """The class that ``tokenizer_config.json`` names, or None if this class cannot load a ``tokenizer.json``."""
    import transformers
    from transformers.utils import cached_file

    file = cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    config = read_json(Path(file)) if file is not None else {}
    name = config.get("tokenizer_class")
    if not isinstance(name, str) or "auto_map" in config:
        return None
    _import_fast_tokenizers()
    base = transformers.PreTrainedTokenizerFast
    kind = getattr(transformers, name.removesuffix("Fast") if name != base.__name__ else name, base)
    return kind if isinstance(kind, type) and issubclass(kind, base) else None


def _import_fast_tokenizers() -> None:
    """Import transformers' fast tokenizers without importing torch. The fast tokenizers need torch only for a function
    that reads GGUF files.

    During the import, a stand-in module replaces the module with that function. The stand-in has a function of the same
    name, which imports the real module when it is called.
    """
    if "torch" in sys.modules or FAST in sys.modules:
        return
    stand_in = ModuleType(GGUF)

    def load_gguf_checkpoint(*args: object, **options: object) -> object:
        return importlib.import_module(GGUF).load_gguf_checkpoint(*args, **options)

    stand_in.load_gguf_checkpoint = load_gguf_checkpoint  # type: ignore[attr-defined]
    sys.modules[GGUF] = stand_in
    try:
        importlib.import_module(FAST)
    except ImportError:  # another version of transformers needs more functions of the module
        sys.modules.pop(FAST, None)
    finally:
        del sys.modules[GGUF]


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that the tokenizer adds before every text, such as the beginning-of-sequence token of Llama and
    Gemma."""
    plain, whole = (tokenizer("x", add_special_tokens=added)["input_ids"] for added in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])


def encode_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that are not rendered with a chat template. As in pretraining, the ids of each text begin with
    the tokenizer's `beginning`.

    If a text already begins with the text of `beginning`, `beginning` is not added a second time. Do not use this
    function for rendered chats, because chat templates write the beginning-of-sequence token themselves. Do not use it
    for the text prompts of a training run either: as in slime, nothing is added before them.
    """
    begin = beginning(tokenizer)
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [ids if ids[: len(begin)] == begin else [*begin, *ids] for ids in encoded]


def _short(error: BaseException) -> str:
    """The beginning of an error's text. Some error messages of transformers are long, because they list every known
    model."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


def _agrees(tokenizer: PreTrainedTokenizerBase, truth: Tokenizer) -> bool:
    """Whether both tokenizers encode every probe to the same ids, and decode these ids to the same text."""
    for probe in (*PROBES, JOINED_BY_NFC):
        ids = truth.encode(probe, add_special_tokens=False).ids
        if tokenizer(probe, add_special_tokens=False)["input_ids"] != ids:
            return False
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if text != truth.decode(ids, skip_special_tokens=False):
            return False
    return True


def end_texts(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The texts of the tokens that end a response, whose ids `stop_token_ids` returns."""
    return tuple(str(tokenizer.decode([i], skip_special_tokens=False)) for i in stop_token_ids(path, tokenizer))


def end_of_reply(path: str) -> str:
    """The text of the eos token in the tokenizer_config.json of the folder ``path``, or an empty text if the file names
    none."""
    file = Path(path) / "tokenizer_config.json"
    token = read_json(file).get("eos_token") if file.is_file() else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def copy_tokenizer(path: str, folder: Path, *, chats: bool = True) -> None:
    """Copy the tokenizer's files (`COMPANIONS`) from the folder or hub id ``path`` to ``folder``. ``chats``: whether to
    copy the chat template too."""
    source = Path(path)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(path, allow_patterns=list(COMPANIONS)))
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if chats or pattern != "chat_template*":
                shutil.copy(file, folder / file.name)


def write_new_model(folder: Path, config: Mapping[str, object], tokenizer: str) -> None:
    """Write a folder for a new model, without weights. The folder contains ``config`` and the files of ``tokenizer`` (a
    folder or hub id). The config also gets the ids of the tokens that begin, end and pad texts. With these ids,
    programs that load the trained model stop at the end of a reply.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (Path(tokenizer).is_dir() and folder.samefile(tokenizer)):
        copy_tokenizer(tokenizer, folder)
    loaded = load_tokenizer(tokenizer)
    ids = {f"{kind}_token_id": getattr(loaded, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    ids = {name: number for name, number in ids.items() if number is not None}
    # transformers does not train the input embedding of the config's pad token, which often also ends texts
    pads = ids.get("pad_token_id") not in (ids.get("bos_token_id"), ids.get("eos_token_id"))
    named = {name: number for name, number in ids.items() if pads or name != "pad_token_id"}
    write_text(folder / "config.json", json.dumps({**config, **named}, indent=2))
    if not (folder / GENERATION).is_file():
        write_text(folder / GENERATION, json.dumps(ids, indent=2))


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The sorted ids of the tokens that end a response: the ``eos_token_id`` values in the generation config, the model
    config and the tokenizer.

    Raises:
        ValueError: no ``eos_token_id`` exists in any of the three, or a value is not a token id.
    """
    from transformers.utils import cached_file

    eos_ids = {tokenizer.eos_token_id}
    for name in (GENERATION, "config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            config = read_json(Path(file))
            eos = config.get("eos_token_id", text_config(config).get("eos_token_id"))
            named = eos if isinstance(eos, list) else [eos]
            if wrong := [i for i in named if not isinstance(i, int | None)]:
                raise ValueError(f"{file}: eos_token_id {wrong[0]!r} is not a token id")
            eos_ids.update(named)
    eos_ids.discard(None)
    ids = sorted(eos_ids)
    if not ids:
        raise ValueError(f"{path!r} names no end-of-sequence token; add eos_token_id to its generation_config.json")
    return ids
