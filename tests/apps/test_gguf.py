"""``slimelite gguf``: files that other readers of GGUF read to the same model and the same token ids."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from slimelite.apps.command import main
from slimelite.apps.gguf_file import rope_factors, splitting
from slimelite.data.tokenizer import PROBES, load_tokenizer
from slimelite.models.files import load_config

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])


def make_tokenizer(
    folder: Path,
    before: pre_tokenizers.PreTokenizer,
    *,
    begins: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> int:
    """Save a byte-level BPE trained on the probes; returns the number of its tokens."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator([*PROBES, Path(__file__).read_text()], trainer)
    if begins:
        begin = processors.TemplateProcessing(single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], 0)])
        tokenizer.post_processor = begin
    names = {"bos_token": SPECIALS[0], "eos_token": "<|im_end|>", "pad_token": SPECIALS[0], "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def make_model(folder: Path, kind: str, **changes: Any) -> torch.nn.Module:
    """Save a small random model in ``folder``, which has a tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 352, "initializer_range": 0.2}
    config = AutoConfig.for_model(kind, **(shape | {"eos_token_id": [2, 0], "bos_token_id": 0} | changes))
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits[0]


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-4}),
        # transformers reads no head_dim of Qwen3's, and takes 128, as all its models have
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_transformers_reads_the_file_to_the_same_logits(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    make_tokenizer(tmp_path, split(QWEN2))
    model = make_model(tmp_path, kind, **changes)
    assert main(["gguf", str(tmp_path), str(tmp_path / "out" / "it.gguf")]) == 0
    # transformers reads a model's shape from the file, but not that there are biases
    own = {"config": model.config} if "attention_bias" in changes else {}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="it.gguf", **own)
    torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-4)
    assert read.config.tie_word_embeddings == bool(changes.get("tie_word_embeddings"))


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-8), ("f16", 2**-11), ("q8_0", 1 / 127)])
def test_smaller_types_are_as_near_as_they_can_be(dtype: str, error: float, tmp_path: Path) -> None:
    make_tokenizer(tmp_path, split(QWEN2))
    make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    files = [tmp_path / "whole.gguf", tmp_path / "small.gguf"]
    for file, chosen in zip(files, ("f32", dtype), strict=True):
        assert main(["gguf", str(tmp_path), str(file), "--dtype", chosen]) == 0
    whole, small = ({t.name: t for t in gguf.GGUFReader(file).tensors} for file in files)
    for name, tensor in small.items():
        exact = whole[name].data
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(exact.shape)
        vector = exact.ndim == 1
        assert vector == (tensor.tensor_type == gguf.GGMLQuantizationType.F32)
        size = np.abs(exact)
        if dtype == "q8_0":  # blocks of 32 have one scale
            size = size.reshape(*exact.shape[:-1], -1, 32).max(-1).repeat(32, -1)
        assert (np.abs(values - exact) <= (0 if vector else error * size + 2**-25)).all(), name
    assert files[1].stat().st_size < files[0].stat().st_size


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("qwen2", split(QWEN2)),
        ("dbrx", split(LLAMA3)),
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
    ],
)
def test_the_tokenizer_in_the_file_gives_the_same_ids(
    name: str, before: pre_tokenizers.PreTokenizer, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path, before, begins=True)
    make_model(tmp_path, "llama")
    assert main(["gguf", str(tmp_path), str(tmp_path / "it.gguf"), "--name", "Mine"]) == 0
    there, original = fields(tmp_path / "it.gguf"), load_tokenizer(str(tmp_path))
    prefix = "tokenizer.ggml."
    tokens, types = there[prefix + "tokens"], there[prefix + "token_type"]
    vocab = {text: number for number, text in enumerate(tokens) if types[number] == gguf.TokenType.NORMAL}
    merges = [tuple(merge.split(" ")) for merge in there[prefix + "merges"]]
    read = Tokenizer(models.BPE(vocab | {s: i for i, s in enumerate(SPECIALS)}, merges))
    read.pre_tokenizer = before
    for probe in PROBES:
        assert read.encode(probe).ids == original(probe, add_special_tokens=False)["input_ids"]
    assert [tokens[i] for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL] == SPECIALS
    assert (len(tokens), tokens[-1], types[-1]) == (352, "[PAD351]", gguf.TokenType.UNUSED)
    assert (there[prefix + "pre"], there[prefix + "add_bos_token"], there["general.name"]) == (name, True, "Mine")
    ids = [there[f"{prefix}{token}_token_id"] for token in ("bos", "eos", "eot", "padding")]
    assert ids == [0, 2, 0, 0]
    assert there["tokenizer.chat_template"] == TEMPLATE


def test_a_file_names_up_to_three_tokens_that_end_a_reply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path, split(QWEN2))
    make_model(tmp_path, "llama")
    for ends in ([2, 0, 1], [2, 0, 1, 5]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        status = main(["gguf", str(tmp_path), str(tmp_path / f"{len(ends)}.gguf")])
        assert (status == 0) == (len(ends) == 3)
    there = fields(tmp_path / "3.gguf")
    assert [there[f"tokenizer.ggml.{token}_token_id"] for token in ("eos", "eot", "eom")] == [2, 0, 1]
    assert "4 tokens end a reply" in capsys.readouterr().err


def test_transformers_reads_the_tokenizer_of_qwen(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, split(QWEN2))
    make_model(tmp_path, "qwen2")
    assert main(["gguf", str(tmp_path), str(tmp_path / "it.gguf")]) == 0
    read, original = AutoTokenizer.from_pretrained(tmp_path, gguf_file="it.gguf"), load_tokenizer(str(tmp_path))
    for text in (*PROBES, "<|im_start|>user\nHi<|im_end|>"):
        assert read(text)["input_ids"] == original(text)["input_ids"]


@pytest.mark.parametrize("digits", [1, 3])
def test_a_splitting_is_known_in_the_writing_of_train_tokenizer(digits: int) -> None:
    script = (Path(__file__).parents[2] / "scripts" / "train_tokenizer.py").read_text()
    written = re.search(r"^SPLIT = (\(.*?^\))", script, re.MULTILINE | re.DOTALL)
    assert written is not None
    gpt4 = ast.literal_eval(written[1]).format(digits=digits)
    tokenizer = Tokenizer(models.BPE())
    for pattern, ignore in ((gpt4, False), (LLAMA3 if digits == 3 else QWEN2, True)):
        tokenizer.pre_tokenizer = split(pattern)
        content = json.loads(tokenizer.to_str())
        content["model"]["ignore_merges"] = ignore
        assert splitting(content) == ("qwen2" if digits == 1 else "llama-bpe" if ignore else "dbrx")


def test_llama_3s_positions_are_divided_as_transformers_divides_them(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    make_tokenizer(tmp_path, split(LLAMA3))
    positions = {"rope_parameters": rope | {"original_max_position_embeddings": 64}}
    model = make_model(tmp_path, "llama", head_dim=32, **positions)
    assert main(["gguf", str(tmp_path), str(tmp_path / "it.gguf")]) == 0
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "it.gguf").tensors}
    plain = 5e5 ** -(np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(plain / tensors["rope_freqs.weight"], model.model.rotary_emb.inv_freq, rtol=1e-5)
    assert tensors["rope_freqs.weight"].min() == pytest.approx(1)
    assert tensors["rope_freqs.weight"].max() == pytest.approx(8)
    assert rope_factors(AutoConfig.for_model("llama")) is None


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": None}, "a model of family mistral is not supported, only llama, qwen2, qwen3"),
        ("qwen3", {"attention_bias": True}, "this qwen3 model is not supported, because its attention has biases"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "this qwen2 model is not supported, because its rope_type is linear",
        ),
    ],
)
def test_other_models_are_refused_in_one_line(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(tmp_path, split(QWEN2))
    make_model(tmp_path, kind, **changes)
    capsys.readouterr()
    assert main(["gguf", str(tmp_path), str(tmp_path / "it.gguf")]) == 1
    printed = capsys.readouterr().err
    assert f"slimelite gguf: {message}" in printed
    assert "llama.cpp's convert_hf_to_gguf.py" in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_tokenizer_without_a_name_in_llama_cpp_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(tmp_path, split(LLAMA3.replace("{1,3}", "{1,2}")))
    model = make_model(tmp_path, "qwen2")
    command = ["gguf", str(tmp_path), str(tmp_path / "it.gguf")]
    assert main(command) == 1
    refused = "the tokenizer (Split and ByteLevel, BPE) has no name in llama.cpp: --no-tokenizer leaves the "
    assert refused in capsys.readouterr().err
    make_tokenizer(tmp_path, split(LLAMA3), normalizer=normalizers.Lowercase())
    assert main(command) == 1
    assert "the tokenizer's normalizer, Lowercase, has no name in llama.cpp" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf*"))
    assert main([*command, "--no-tokenizer"]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="it.gguf")
    torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=1e-4)


def test_settings_that_change_no_token_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of the tokenizer that scripts/fetch_smollm2.py writes; transformers reads it from a GGUF file."""
    make_tokenizer(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    make_model(tmp_path, "llama")
    plain = [load_tokenizer(str(tmp_path))(probe, add_special_tokens=False)["input_ids"] for probe in PROBES]
    file, command = tmp_path / "tokenizer.json", ["gguf", str(tmp_path), str(tmp_path / "it.gguf")]
    content = json.loads(file.read_text())
    content["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": SPECIALS[0]}

    def write(*steps: str) -> None:
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": step} for step in steps]}
        file.write_text(json.dumps(content))

    write()
    assert [load_tokenizer(str(tmp_path))(probe, add_special_tokens=False)["input_ids"] for probe in PROBES] == plain
    assert main(command) == 0
    assert fields(tmp_path / "it.gguf")["tokenizer.ggml.pre"] == "gpt-2"
    write("NFC", "Lowercase")
    assert main(command) == 1
    assert "the tokenizer's normalizer, Lowercase, has no name in llama.cpp" in capsys.readouterr().err
    content["model"]["vocab"]["<0x0A>"] = content["model"]["vocab"].pop("!")
    write()
    assert main(command) == 1
    assert "has no name in llama.cpp with byte_fallback" in capsys.readouterr().err


def test_numbers_that_f16_cannot_hold_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path, split(QWEN2))
    model = make_model(tmp_path, "qwen2")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1e5
    model.save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).dtype == torch.float32
    assert main(["gguf", str(tmp_path), str(tmp_path / "it.gguf"), "--dtype", "f16"]) == 1
    printed = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight has numbers that are too large for f16: use --dtype bf16" in printed
    assert not list(tmp_path.glob("*.gguf*"))


def test_an_adapter_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_tokenizer(base, split(QWEN2))
    tuned = get_peft_model(
        make_model(base, "qwen2", dtype="bfloat16"), LoraConfig(target_modules=["q_proj", "up_proj"])
    )
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    tuned.save_pretrained(adapter)
    command = ["gguf", str(adapter), str(tmp_path / "it.gguf"), "--base", str(base)]
    assert main([*command, "--dtype", "f32"]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="it.gguf")
    torch.testing.assert_close(logits(read), logits(tuned.float()), rtol=0, atol=1e-3)
    capsys.readouterr()
    assert main(command) == 0
    assert "it.gguf: it, bf16, " in capsys.readouterr().out
    make_tokenizer(adapter, split(QWEN2), normalizer=normalizers.Lowercase())
    assert main(command) == 1
    refused = capsys.readouterr().err
    assert "the tokenizer's normalizer, Lowercase, has no name in llama.cpp" in refused
    assert "merging" not in refused, "the merge of a large model takes minutes"
    assert main([*command, "--no-tokenizer"]) == 0
    assert "merging" in capsys.readouterr().err
