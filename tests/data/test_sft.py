from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimelite.arguments import Args
from slimelite.data.masks import conversation_tokens
from slimelite.data.sft import fill_conversation
from slimelite.data.source import DataSource
from slimelite.sample import Sample, Status
from slimelite.table import SampleTable

from .tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def test_the_response_starts_at_the_first_trained_token() -> None:
    sample = Sample(index=0, group_index=0, prompt=MESSAGES)
    fill_conversation(sample, TOKENIZER)
    ids, mask = conversation_tokens(TOKENIZER, MESSAGES)
    assert sample.tokens == ids
    assert [0] * sample.prompt_length + sample.loss_mask == mask
    assert sample.loss_mask[0] == 1
    assert sample.prompt == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert sample.response == "4<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert (sample.status, sample.reward, sample.remove_sample) == (Status.COMPLETED, 0.0, False)
    sample.check_aligned()


def test_a_long_conversation_loses_its_end() -> None:
    whole = Sample(index=0, prompt=MESSAGES)
    fill_conversation(whole, TOKENIZER)
    limit = whole.prompt_length + 4
    cut = Sample(index=0, prompt=MESSAGES)
    fill_conversation(cut, TOKENIZER, max_context_len=limit)
    assert cut.tokens == whole.tokens[:limit]
    assert cut.loss_mask == whole.loss_mask[:4]
    assert cut.status == Status.TRUNCATED
    cut.check_aligned()


def test_nothing_left_to_train_on_is_marked() -> None:
    for messages, limit in ((MESSAGES, 5), (MESSAGES[:1], None)):
        sample = Sample(index=0, group_index=0, prompt=messages)
        fill_conversation(sample, TOKENIZER, max_context_len=limit)
        assert sample.remove_sample
        assert (sample.response_length, sample.loss_mask, sample.response) == (0, [], "")


def test_rows_become_a_table_to_train_on(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    tool = {"type": "function", "function": {"name": "ls"}}
    path.write_text(
        json.dumps({"messages": MESSAGES, "tools": [tool]}) + "\n" + json.dumps({"messages": MESSAGES[:2]}) + "\n"
    )
    tokenizer = byte_tokenizer("{{ tools[0].function.name if tools }}" + TOKENIZER.chat_template)
    source = DataSource(Args(prompt_data=[str(path)], input_key="messages"), tokenizer)
    groups = source.get_samples(2)
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        fill_conversation(sample, tokenizer)
    table = SampleTable.from_samples(groups)
    assert table.response_lengths.tolist() == [s.response_length for s in samples]
    assert samples[0].prompt.startswith("ls<|im_start|>")
    assert table.loss_mask.sum() == sum(map(sum, (s.loss_mask for s in samples)))


def test_errors_name_the_flag_or_the_conversation() -> None:
    with pytest.raises(ValueError, match="--input-key"):
        fill_conversation(Sample(index=0, prompt="text"), TOKENIZER)
    with pytest.raises(ValueError, match=r"conversation 3 \('2\+2\?'\)"):
        fill_conversation(Sample(index=3, prompt=MESSAGES), byte_tokenizer("{{ raise_exception('no') }}"))
