"""The chat page of ``slimelite serve --web`` in a real browser, on the real front; most engines say given texts."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens
from tests.serving.chat import build
from tests.serving.scripted import Scripted

pytestmark = pytest.mark.browser


def test_an_answer_comes_piece_by_piece(chats: Any) -> None:
    chat = chats(Scripted(["Hello there"], allowed=5))
    chat.ask("Hi")
    chat.says("Hello", 1)
    assert chat.page.get_by_role("button", name="Stop").is_visible()
    assert chat.engine.said == 5
    chat.engine.allowed = None
    chat.says("Hello there", 1)
    chat.done()
    assert chat.turns.nth(1).locator(".tools").inner_text().startswith("12 tokens, ")


def test_stop_ends_the_generation_on_the_server(chats: Any) -> None:
    chat = chats(Scripted(["Hello there", "Again"], allowed=5))
    chat.ask("Hi")
    chat.says("Hello", 1)
    chat.page.keyboard.press("Escape")
    chat.done()
    chat.engine.wait_for_cancel()
    assert (chat.engine.cancelled, chat.engine.said) == (1, 5)
    assert "stopped" in chat.turns.nth(1).inner_text()
    # what had come stays part of the conversation
    chat.engine.allowed = None
    chat.ask("And?")
    chat.says("Again", 3)
    assert "<|im_start|>assistant\nHello<|im_end|>" in chat.engine.prompts[1]


def test_regenerate_edit_and_a_new_chat(chats: Any) -> None:
    chat = chats(Scripted(["one", "two", "three", "four"]))
    chat.ask("first")
    chat.says("one", 1)
    chat.done()
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.says("two", 1)
    chat.done()
    assert chat.engine.prompts[0] == chat.engine.prompts[1]
    assert chat.turns.count() == 2
    chat.page.get_by_label("Message").press("ArrowUp")
    assert chat.turns.count() == 0
    chat.page.get_by_label("Message").press("End")
    chat.page.keyboard.type(" of all")
    chat.page.keyboard.press("Enter")
    chat.says("three", 1)
    chat.done()
    assert "first of all" in chat.engine.prompts[2]
    chat.page.get_by_role("button", name="New chat").click()
    chat.ask("afresh")
    chat.says("four", 1)
    assert "first" not in chat.engine.prompts[3]


def test_the_system_prompt_and_the_settings_are_sent(chats: Any) -> None:
    chat = chats(Scripted(["xyzwv"]))
    chat.page.get_by_label("System prompt").fill("Be brief.")
    for name, value in {"Temperature": "0.3", "Top-p": "0.9", "Max tokens": "3", "Seed": "7"}.items():
        chat.page.get_by_label(name).fill(value)
    chat.ask("Hi")
    chat.says("xyz", 1)
    chat.done()
    assert "cut off at max tokens" in chat.turns.nth(1).inner_text()
    assert chat.engine.prompts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    params = chat.engine.requests[0].params
    assert (params.temperature, params.top_p, params.max_new_tokens, params.seed) == (0.3, 0.9, 3, 7)


def test_the_pointer_and_the_arrow_keys_show_log_probs_and_alternatives(chats: Any) -> None:
    chat = chats(Scripted(["<think>\nhm\n</think>\n\nabé"]))
    chat.ask("Hi")
    chat.done()
    assert chat.turns.nth(1).locator(".thinking").inner_text() == "hm"
    body = chat.turns.nth(1).locator(".body")
    body.locator(".token:visible").first.hover()
    box = chat.page.locator(".token-box")
    box.get_by_text('"z"').wait_for()
    rows = [row.split("\t") for row in box.inner_text().split("\n")]
    drawn, *likely = ['"ab" as drawn', "60.7 %", "−0.500"], ['"ab"', "47.2 %", "−0.750"], ['"z"', "28.7 %", "−1.250"]
    assert rows[:3] == [drawn, *likely]
    # a character of two bytes is one piece of two tokens
    chat.page.locator(".answer").focus()
    chat.page.keyboard.press("ArrowRight")
    assert body.locator(".token.at").inner_text() == "é"
    assert box.locator("table").count() == 2
    # colours show which tokens were unlikely, and the tokens without text
    assert not chat.page.get_by_text("<|im_end|>", exact=True).is_visible()
    chat.page.get_by_label("colour tokens by probability").check()
    assert chat.page.get_by_text("<|im_end|>", exact=True).is_visible()
    painted = body.locator(".token").first.evaluate("node => getComputedStyle(node).backgroundColor")
    assert painted != "rgba(0, 0, 0, 0)"


def test_what_the_model_says_is_text(chats: Any) -> None:
    evil = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    chat = chats(Scripted([evil]))
    chat.ask("<b>Hi</b>")
    chat.says(evil, 1)
    chat.done()
    assert chat.turns.nth(0).locator(".body").inner_text() == "<b>Hi</b>"
    assert chat.page.locator("article img, article script").count() == 0
    assert "owned" not in chat.page.title()


def test_a_call_is_shown_as_the_model_wrote_it(chats: Any) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"Let me.\n{call}"
    chat = chats(Scripted([text]))
    chat.ask("1+1?")
    chat.says(text, 1)  # without tools nothing is a call, unless a parser is named
    chat = chats(Scripted([text]), parser="hermes")
    chat.ask("1+1?")
    chat.done()
    assert chat.turns.nth(1).locator(".calling").inner_text().strip() == call
    assert "calls tools" in chat.turns.nth(1).inner_text()


def test_a_server_with_a_key_asks_for_it_and_keeps_it_in_the_tab(chats: Any) -> None:
    chat = chats(Scripted(["yes"]), key="secret", quiet=False, rendered=True)
    dialog = chat.page.get_by_role("dialog")
    dialog.get_by_label("Key of the server").fill("wrong")
    dialog.get_by_label("Key of the server").press("Enter")
    dialog.get_by_label("The server refused this key").fill("secret")
    dialog.get_by_role("button", name="Use").click()
    chat.page.locator("header .model", has_text=re.compile(".")).wait_for()
    chat.ask("Hi")
    chat.says("yes", 1)
    chat.page.reload()
    chat.says("yes", 1)
    chat.ask("Hi")
    chat.says("yes", 3)
    assert "secret" not in chat.page.evaluate("JSON.stringify(localStorage)")
    assert "secret" not in chat.page.url


def test_errors_are_shown_and_can_be_tried_again(chats: Any) -> None:
    chat = chats(Scripted(["yes"]), quiet=False)
    chat.page.get_by_label("Max tokens").fill("0")
    chat.ask("Hi")
    alert = chat.page.get_by_role("alert")
    alert.filter(has_text="max_tokens: Input should be greater than or equal to 1").wait_for()
    chat.page.get_by_label("Max tokens").fill("9")
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.says("yes", 1)
    chat.done()
    assert not alert.is_visible()


def test_a_server_that_is_gone_is_said(chats: Any) -> None:
    chat = chats(Scripted(["Hello there"], allowed=5), quiet=False)
    chat.ask("Hi")
    chat.says("Hello", 1)
    chat.server.stop()
    chat.page.get_by_role("alert").filter(has_text="server").wait_for()
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.page.get_by_role("alert").filter(has_text="The server does not answer; is it still running?").wait_for()


def test_a_phone_is_wide_enough(chats: Any) -> None:
    chat = chats(Scripted(["a" * 300 + " b" * 100]), viewport={"width": 360, "height": 640}, has_touch=True)
    assert not chat.page.get_by_label("System prompt").is_visible()
    chat.ask("x" * 200)
    chat.done()
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 360
    chat.turns.nth(1).locator(".token:visible").last.tap()
    area = chat.page.locator(".token-box").bounding_box()
    assert area["x"] >= 0
    assert area["x"] + area["width"] <= 360
    chat.page.get_by_text("Settings").tap()
    assert chat.page.get_by_label("System prompt").is_visible()


WATCH = """() => {
  const button = document.querySelector(".compose .send");
  const scroll = window.scrollTo.bind(window);
  window.seen = { most: 0, places: [] };
  let scrolls = 0;
  window.scrollTo = (...to) => { scrolls += 1; scroll(...to); };
  const frame = () => {
    const { x, width } = button.getBoundingClientRect();
    seen.most = Math.max(seen.most, scrolls);
    seen.places.push([button.textContent, x, width]);
    scrolls = 0;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}"""


@pytest.mark.parametrize("rendered", [False, True], ids=["tokens", "rendered"])
def test_stop_can_be_pressed_while_tokens_come_fast(chats: Any, rendered: bool) -> None:
    """The page is laid out once a frame, not for each token, and the button has one place under both of its names."""
    chat = chats(Scripted(["one\n\n" * 100], allowed=5), rendered=rendered)
    chat.page.evaluate(WATCH)
    chat.ask("Hi")
    chat.page.get_by_role("button", name="Stop").wait_for()
    chat.engine.allowed = None
    chat.done()
    chat.page.wait_for_function("() => document.documentElement.scrollHeight > 2 * innerHeight")
    chat.page.wait_for_function("() => innerHeight + scrollY >= document.body.scrollHeight - 1")
    seen = chat.page.evaluate("seen")
    assert seen["most"] == 1
    assert {name for name, *_ in seen["places"]} == {"Send", "Stop"}
    assert len({tuple(place) for _, *place in seen["places"]}) == 1


def test_the_embedded_engine_talks_and_stops(chats: Any, tmp_path: Path) -> None:
    told: list[int] = []
    cancelled = threading.Event()

    class Counting(EmbeddedEngine):
        async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
            try:
                return await super().stream(request, lambda *news: (told.extend(news[0]), on_tokens(*news))[1])
            except asyncio.CancelledError:
                cancelled.set()
                raise

    chat = chats(Counting(str(build(tmp_path / "model"))))
    for name, value in {"Max tokens": "8000", "Temperature": "0"}.items():
        chat.page.get_by_label(name).fill(value)
    chat.ask("abc?")
    chat.turns.nth(1).locator(".token").nth(5).wait_for(state="attached")
    chat.page.get_by_role("button", name="Stop").click()
    chat.done()
    assert cancelled.wait(600)  # the server learns of it a little later
    counts = [-1, len(told)]
    while counts[-1] != counts[-2]:  # tokens that were under way
        chat.page.wait_for_timeout(300)
        counts.append(len(told))
    assert 5 < counts[-1] < 4000  # it would speak until its context is full
