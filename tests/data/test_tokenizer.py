from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from scripts.arithmetic import write_model_folder
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids

from .tokenizers import byte_tokenizer

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


def test_no_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"which is to be a folder with tokenizer\.json or a hub id"):
        load_tokenizer(str(tmp_path))


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
