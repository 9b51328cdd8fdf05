from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer
from transformers.utils.logging import warning_once

from scripts.lib.arithmetic import write_model_folder
from slimelite.data.tokenizer import (
    PROBES,
    beginning,
    check_same,
    encode_text,
    fingerprint,
    load_tokenizer,
    stop_token_ids,
    write_new_model,
)

from .tokenizers import begin_with, byte_tokenizer

pytestmark = pytest.mark.newest

TEXT = "9+3=12\n#### 12"


def test_the_files_ids_win_over_the_class_that_transformers_picks(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    truth = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = truth.encode(TEXT).ids
    # the trap: a class chosen by model_type drops the file's pre-tokenizer (if this fails, transformers has mended it)
    assert AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"] != ids
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer(TEXT)["input_ids"] == ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eos_token == "<|im_end|>"
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT}], tokenize=False, add_generation_prompt=True
    )


def test_a_faithful_class_is_kept(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(tmp_path))
    assert tokenizer("émigré\n")["input_ids"] == byte_tokenizer()("émigré\n")["input_ids"]


def test_a_setting_that_transformers_ignores_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = byte_tokenizer()
    saved.clean_up_tokenization_spaces = True
    saved.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).clean_up_tokenization_spaces
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    warning_once.cache_clear()
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer("a . b")["input_ids"]) == "a . b"
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("Qwen2Tokenizer", "qwen2"),
        ("PreTrainedTokenizerFast", "qwen2"),
        ("PreTrainedTokenizerFast", "llama"),
        ("GPT2TokenizerFast", "llama"),
        ("Qwen2Tokenizer", "llama"),
        ("NoSuchTokenizer", "llama"),
        ("NoSuchTokenizer", "gpt2"),
    ],
)
def test_the_named_class_is_all_that_auto_tokenizer_would_give(name: str, model_type: str, tmp_path: Path) -> None:
    """`load_tokenizer` must not import `AutoTokenizer`, and so finds the class itself."""
    tokenizer = byte_tokenizer()
    if "wen2" in name + model_type:  # this class adds it, and the file's ids win over a class
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["<own>", "ab"])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    for attribute in ("special_tokens_map", "all_special_ids", "eos_token_id", "chat_template", "padding_side"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert {i: str(token) for i, token in ours.added_tokens_decoder.items()} == {
        i: str(token) for i, token in theirs.added_tokens_decoder.items()
    }
    assert ours.get_vocab() == theirs.get_vocab()
    for probe in (*PROBES, "<own>ab <s>x</s>"):
        ids = ours(probe)["input_ids"]
        assert ids == theirs(probe)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": TEXT}]
    shown = [t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
    assert shown[0] == shown[1]


def test_a_tokenizer_is_loaded_without_torch_and_can_still_read_gguf_files(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    program = (
        "import sys; from slimelite.data.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "assert t('a')['input_ids']; assert 'torch' not in sys.modules; import transformers as t;"
        "import transformers.tokenization_utils_tokenizers as fast\n"
        "load = getattr(fast, 'load_gguf_checkpoint', None) or sys.exit()\n"  # newer ones import it later
        "try: load(sys.argv[1] + '/none')\n"
        "except (ImportError, OSError, ValueError) as error: print(type(error).__name__)\n"
        "assert 'transformers.modeling_gguf_pytorch_utils' in sys.modules and 'torch' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_no_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"which must be a folder with tokenizer\.json, or a hub id"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("pad", "own"), [("</s>", False), ("<|end|>", True)])
def test_a_new_model_learns_the_token_that_ends_texts_also_if_it_pads_them(
    tmp_path: Path, pad: str, *, own: bool
) -> None:
    """transformers keeps the embedding of the config's pad token at 0, and gives it no gradient."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = {"model_type": "qwen2", "vocab_size": len(tokenizer)}
    write_new_model(tmp_path / "new", config, str(tmp_path / "tokenizer"))
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    of_pad = {"pad_token_id": tokenizer.pad_token_id}
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {**config, **ids, **(of_pad if own else {})}
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == ids | of_pad


def test_stop_ids_come_from_all_three_places(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {"eos_token_id": 7}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert stop_token_ids(str(tmp_path), tokenizer) == sorted({3, 7, 9, tokenizer.eos_token_id})
    tokenizer.eos_token = None
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        stop_token_ids(str(tmp_path), tokenizer)


def changed(folder: Path, change: str) -> None:
    """Change one thing of the tokenizer in ``folder``."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    if change == "vocabulary":
        model["vocab"] |= {"a": model["vocab"]["b"], "b": model["vocab"]["a"]}
    elif change == "merges":
        model["merges"].reverse()
    elif change == "special tokens":
        content["added_tokens"][0]["content"] = "<begin>"
    elif change == "way of splitting text":
        content["normalizer"] = {"type": "Lowercase"}
    elif change == "chat template":
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "part", ["vocabulary", "merges", "special tokens", "way of splitting text", "chat template", None]
)
def test_another_tokenizer_is_known_by_what_changes_its_tokens(tmp_path: Path, part: str | None) -> None:
    tokenizer = byte_tokenizer(merges=[("q", "z"), ("z", "q")])
    saved = json.loads(json.dumps(fingerprint(tokenizer)))
    tokenizer(["a", "bc"], truncation=True, max_length=1)  # the library keeps this for later calls
    tokenizer.save_pretrained(tmp_path)
    changed(tmp_path, str(part))
    found = AutoTokenizer.from_pretrained(tmp_path)
    if part is None:
        check_same(saved, found)
        return
    with pytest.raises(ValueError, match=f"another tokenizer, which differs in its (.* and its )?{part}(;| and)"):
        check_same(saved, found)


def test_a_text_that_is_no_chat_begins_as_the_tokenizer_says() -> None:
    tokenizer = byte_tokenizer()
    texts = ["x", " a", "<s>b"]
    assert beginning(tokenizer) == []
    assert encode_text(tokenizer, texts) == tokenizer(texts)["input_ids"]
    begin_with(tokenizer, "<s>")
    assert beginning(tokenizer) == [tokenizer.bos_token_id]
    assert encode_text(tokenizer, texts[:2]) == tokenizer(texts[:2])["input_ids"]
    assert tokenizer.decode(encode_text(tokenizer, texts)[2]) == "<s>b", "it has its own beginning"
    begin_with(tokenizer, "<s>", "<think>")
    assert tokenizer.decode(encode_text(tokenizer, ["a"])[0]) == "<s><think>a"
