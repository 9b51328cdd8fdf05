from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.lib.arithmetic import (
    all_questions,
    build_tokenizer,
    conversation_row,
    guessed_answer,
    prompt_row,
    question,
    worked_answer,
    write_model_folder,
)
from slimelite.data.conversations import ChatReader
from slimelite.data.tokenizer import load_tokenizer, stop_token_ids

TOKENIZER = build_tokenizer()
digits = st.tuples(*[st.integers(0, 9)] * 4)


def test_the_example_of_the_description() -> None:
    assert question((3, 5, 2, 9)) == "3+5+2+9=?"
    assert worked_answer((3, 5, 2, 9)) == "3+5=8 8+2=10 10+9=19\n#### 19"
    assert prompt_row((3, 5, 2, 9)) == {"messages": [{"role": "user", "content": "3+5+2+9=?"}], "label": "19"}
    assert len(set(all_questions())) == 10_000


@given(digits, st.integers(0, 2**32))
def test_every_working_is_true_and_every_guess_is_near(numbers: tuple[int, ...], seed: int) -> None:
    steps, _, answer = worked_answer(numbers).partition("\n#### ")
    assert int(answer) == sum(numbers)
    for step in steps.split():
        a, b, c = map(int, re.fullmatch(r"(\d+)\+(\d+)=(\d+)", step).groups())
        assert a + b == c
    guess = guessed_answer(numbers, random.Random(seed)).removeprefix("#### ")
    assert abs(int(guess) - sum(numbers)) <= 5


@given(digits, st.booleans())
def test_text_survives_the_tokenizer_in_few_tokens(numbers: tuple[int, ...], worked: bool) -> None:
    row = conversation_row(numbers, random.Random(0), float(worked))
    text = TOKENIZER.apply_chat_template(row["messages"], tokenize=False)
    ids, mask = ChatReader(TOKENIZER).tokens(row["messages"])
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.unk_token_id not in ids
    assert len(ids) == (37 if worked else 19)
    trained = TOKENIZER.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained == row["messages"][1]["content"] + "<|im_end|>"


def test_the_mix_has_the_share_asked_for() -> None:
    rng = random.Random(0)
    rows = [conversation_row((1, 2, 3, 4), rng, 0.3) for _ in range(2000)]
    answers = Counter("=" in row["messages"][1]["content"] for row in rows)
    assert 0.26 < answers[True] / 2000 < 0.34


def test_the_folder_defines_a_model(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer(question((1, 2, 3, 4)))["input_ids"] == TOKENIZER(question((1, 2, 3, 4)))["input_ids"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert model.config.vocab_size == len(tokenizer)
    assert 100_000 < model.num_parameters() < 130_000
    assert stop_token_ids(str(tmp_path), tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
