"""Masks of SFT by the chat templates of real models, with TRL's own marks in them as the judge."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slimelite.data.conversations import MARKS, ChatReader
from tests.support import templates

pytestmark = pytest.mark.newest

END_MARKS = re.compile(r"\{%-?\+?\s*endgeneration\s*-?\+?%\}")
# tokens that TRL does not train on, and that a model has to learn: with this one Gemma 4 ends its calls
MISSED = {"diffusion_gemma": "<|tool_response>"}
# Gemma's header, which its later templates leave out of the prompt after a tool's answer
REPEATED = "<|turn>model\n"


def unmarked(template: str) -> str:
    """The same text without a word of what the model writes: a mark becomes a block that is always taken."""
    template = MARKS.sub(lambda mark: mark[0].replace("generation", "if true"), template)
    return END_MARKS.sub(lambda mark: mark[0].replace("endgeneration", "endif"), template)


def compared(name: str, template: str) -> PreTrainedTokenizerFast:
    """With ``template`` of the model ``name``, so that masks are found by comparing."""
    return templates.tokenizer(name, unmarked(template))


def masks(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    return ChatReader(tokenizer).tokens(messages, templates.tools(messages))


def prompts(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[str]:
    """What each reply answers, by the template."""
    chat, tools = ChatReader(tokenizer), templates.tools(messages)
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [chat.render(messages[:i], tools, generation_prompt=True) for i in replies]


def offsets(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of ids, and where each is in it."""
    text = tokenizer.decode(ids)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert places["input_ids"] == ids
    return text, places["offset_mapping"]


def not_given(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], marked: list[int]) -> list[int]:
    """TRL's mask without the tokens that the prompt of a reply ends with: the model is given them."""
    mask = list(marked)
    text, places = offsets(tokenizer, masks(tokenizer, messages)[0])
    # a template may show the thinking in a prompt and drop it from the conversation that goes on
    thoughtless = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
    others = [prompt for prompt in prompts(tokenizer, thoughtless) if text.startswith(prompt)]
    for prompt in prompts(tokenizer, messages) + others:
        end = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
        place = sum(right <= end for _, right in places)
        while place < len(mask) and marked[place] and mask[place - 1]:
            place -= 1
            mask[place] = 0
    return mask


MARKED = {name: templates.twin(name) or templates.source(name) for name in templates.names()}
MARKED = {name: template for name, template in MARKED.items() if MARKS.search(template)}


@pytest.mark.parametrize("name", MARKED)
def test_masks_are_those_of_marks(name: str) -> None:
    """In the text of TRL's marked twin, and in the model's own where that is the same, or has marks itself."""
    marked = templates.tokenizer(name, MARKED[name])
    missed = marked.convert_tokens_to_ids(MISSED.get(name, "<|endoftext|>"))
    judged = 0
    for template in {templates.source(name), MARKED[name]}:
        tokenizer = compared(name, template)
        for talk in templates.TALKS:
            messages = templates.talk(tokenizer, talk)
            if messages is None or (name, talk) in templates.REFUSED:
                continue
            ids, mask = masks(tokenizer, messages)
            marked_ids, marks = masks(marked, messages)
            if template == MARKED[name]:
                assert ids == marked_ids
            if ids == marked_ids:
                wanted = not_given(tokenizer, messages, marks)
                wrong = [i for i, value in enumerate(mask) if value != wanted[i] and ids[i] != missed]
                assert not wrong, f"{talk}: {[tokenizer.decode(ids[max(i - 5, 0) : i + 1]) for i in wrong]}"
                judged += 1
    assert judged >= 5


@pytest.mark.parametrize("name", templates.names())
def test_all_that_a_model_says_is_trained_on_and_nothing_that_others_say(name: str) -> None:
    tokenizer = compared(name, templates.source(name))
    for talk in templates.TALKS:
        messages = templates.talk(tokenizer, talk)
        if messages is None:
            continue
        if (name, talk) in templates.REFUSED:
            with pytest.raises(ValueError, match="does not show assistant message 3 as a reply"):
                masks(tokenizer, messages)
            continue
        ids, mask = masks(tokenizer, messages)
        text, places = offsets(tokenizer, ids)
        trained = [range(left, right) for (left, right), value in zip(places, mask, strict=True) if value]
        learnt = {character for span in trained for character in span}

        def said(words: str, text: str = text, learnt: set[int] = learnt) -> list[float]:
            """The part of each place of ``words`` that is trained on."""
            found = [range(at.start(), at.end()) for at in re.finditer(re.escape(words), text)]
            return [len(learnt.intersection(place)) / len(place) for place in found]

        if talk == "same":
            assert said(templates.SAME) == [0, 1, 0, 1]
            continue
        for words in templates.texts(templates.TALKS[talk], ["assistant"]):
            assert said(words) == [1], (talk, words)
        for words in templates.texts(templates.TALKS[talk], ["system", "user", "tool"]):
            assert said(words) == [0], (talk, words)
        if templates.tools(messages):
            assert not any(said("shown")), talk
        for prompt in prompts(tokenizer, messages):
            if text.startswith(prompt):
                opened = len(prompt) + len(REPEATED) * text.startswith(REPEATED, len(prompt))
                assert opened in learnt, (talk, text[opened - 30 : opened + 10])
