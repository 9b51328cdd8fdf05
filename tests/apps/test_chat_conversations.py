"""What the chat page makes of answers and keeps of conversations, in a real browser on the real front."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.apps.conftest import Chat
from tests.serving.scripted import Scripted

pytestmark = pytest.mark.browser
CODE = "for i in range(3):\n    print(i)"
ANSWER = f"# Title\n\nOne *word* and $x^2$.\n\n```python\n{CODE}\n```\n\n|a|b|\n|--:|---|\n|1|2|\n\nمرحبا abc\n"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "why": "a <b>test</b>"}}\n</tool_call>'
# what must not run, load, lead away or stand outside of an answer
XSS = [
    "<script>owned()</script>",
    "<img src=x onerror=owned()>",
    "<svg/onload=owned()>",
    "<svg><script>owned()</script></svg>",
    "<svg><animate onbegin=owned() attributeName=x dur=1s>",
    "<iframe srcdoc='<script>parent.owned()</script>'></iframe>",
    "<object data='javascript:owned()'></object>",
    "<embed src='javascript:owned()'>",
    "<a href='javascript:owned()'>x</a>",
    "<form action='javascript:owned()'><input type=submit autofocus onfocus=owned()></form>",
    "<details open ontoggle=owned()>x</details>",
    "<style>*{display:none}</style><link rel=stylesheet href=//evil.test/x.css>",
    "<base href='https://evil.test/'><meta http-equiv=refresh content='0;url=//evil.test'>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=owned()&gt;'>",
    "<noscript><p title='</noscript><img src=x onerror=owned()>'>",
    "[x](javascript:owned())",
    "[x](JaVaScRiPt:owned())",
    "[x](data:text/html;base64,PHNjcmlwdD5vd25lZCgpPC9zY3JpcHQ+)",
    "<javascript:owned()> and <vbscript:owned()>",
    "![x](https://evil.test/track.png) ![x](x 'onerror=owned()')",
    '[x](https://a.test/"onmouseover="owned())\n\n[y]: javascript:owned()\n[y]',
    "```html onload=owned()\n</code></pre><img src=x onerror=owned()>\n```",
    "$\\href{javascript:owned()}{x}$ $\\style{position:fixed;inset:0}{x}$ $\\class{token-box}{x}$",
    "$\\text{<img src=x onerror=owned()><script>owned()</script>}$",
    "$$\\text{</math><img src=x onerror=owned()>&lt;img src=x onerror=owned()&gt;}$$",
    "|<img src=x onerror=owned()>|\n|---|\n|<b onclick=owned()>|",
]
# what an answer holds that none may: elements, attributes and addresses
NAMES = "script|img|svg|iframe|object|embed|form|input|style|link|base|meta|details|video|noscript"
FOUND = """(root) => [...root.querySelectorAll("*")].flatMap((node) => [
  ...(/^(NAMES)$/.test(node.localName) ? [node.localName] : []),
  ...[...node.attributes].filter(({ name, value }) => /^(on|style$|src|action|formaction|xlink)/i.test(name)
    || (name === "href" && !/^(https?|mailto):/i.test(value))).map(({ name }) => name),
])""".replace("NAMES", NAMES)
PARSED = f"(texts) => texts.map((text) => new DOMParser().parseFromString(text, 'text/html')).map({FOUND})"
PLACED = f"""async (texts) => {{
  window.owned = () => {{ window.was = true; }};
  const roots = texts.map(() => el("div", {{ class: "rendered" }}));
  const list = document.querySelector(".turns");
  list.append(...roots);
  const answer = await request("render", {{ method: "POST", body: JSON.stringify({{ texts }}) }});
  (await answer.json()).html.forEach((html, i) => place(roots[i], html));
  for (const link of list.querySelectorAll("a")) link.addEventListener("click", (event) => event.preventDefault());
  for (const node of list.querySelectorAll("*")) {{
    for (const kind of ["click", "mouseover", "focus", "toggle", "error"]) node.dispatchEvent(new Event(kind));
  }}
  await new Promise((done) => setTimeout(done, 50));
  return roots.map({FOUND});
}}"""


def rendered(chat: Chat, turn: int) -> Any:
    """The text of an answer, once the server has rendered all of it."""
    chat.done()
    chat.page.wait_for_function("() => ![...views.values()].some((view) => view.rendering)")
    return chat.turns.nth(turn).locator(".body")


def test_markdown_code_tables_and_formulas_are_drawn_and_tokens_are_a_switch_away(chats: Any) -> None:
    chat = chats(Scripted([ANSWER]), rendered=True, permissions=["clipboard-read", "clipboard-write"])
    chat.ask("**Hi**")
    body = rendered(chat, 1)
    assert chat.turns.nth(0).locator(".body").inner_text() == "**Hi**"
    assert body.locator("h1").inner_text() == "Title"
    assert body.locator("em").inner_text() == "word"
    assert body.locator("math msup").text_content() == "x2"
    assert body.locator("td").all_inner_texts() == ["1", "2"]
    aligned = "(nodes) => nodes.map((node) => getComputedStyle(node).textAlign)"
    assert body.locator("td").evaluate_all(aligned) == ["right", "start"]
    directions = "(nodes) => nodes.map((node) => getComputedStyle(node).direction)"
    assert body.locator("p").evaluate_all(directions) == ["ltr", "rtl"]
    body.locator("pre").hover()
    body.get_by_role("button", name="Copy").click()
    copied = "async (code) => (await navigator.clipboard.readText()) === code"
    chat.page.wait_for_function(copied, arg=CODE)
    chat.page.get_by_role("button", name="Tokens").click()
    assert body.inner_text().rstrip() == ANSWER.rstrip()
    assert body.locator("h1, math, table").count() == 0
    chat.page.get_by_label("colour tokens by probability").check()
    assert chat.page.get_by_text("<|im_end|>", exact=True).is_visible()
    chat.page.reload()  # tokens and their numbers come back with the conversation, and the switch stays
    body.locator(".token:visible").first.hover()
    chat.page.locator(".token-box").get_by_text('"z"').wait_for()
    chat.page.get_by_role("button", name="Rendered").click()
    body.locator("h1").wait_for()


# a pause of the page does not end by itself; `paused` says that there is one
ENDLESS_PAUSES = """((real) => {
  window.setTimeout = (does, ms, ...more) => {
    window.paused ||= ms >= 50;
    return real(does, ms >= 50 ? 1e9 : ms, ...more);
  };
})(window.setTimeout)"""


def test_an_answer_that_has_ended_is_rendered_at_once(chats: Any) -> None:
    """The pause between two renderings is for the model, which has ended by then."""
    chat = chats(engine := Scripted(["one two three"], allowed=1), rendered=True)
    chat.page.evaluate(ENDLESS_PAUSES)
    chat.ask("question")
    chat.page.wait_for_function("() => window.paused")
    engine.allowed = None
    chat.says("one two three", 1)


def test_none_of_these_texts_runs_or_leads_away(chats: Any) -> None:
    chat = chats(Scripted(["\n\n".join(XSS)]), rendered=True)
    found = chat.page.evaluate(PLACED, XSS[:16]) + chat.page.evaluate(PLACED, XSS[16:])
    assert dict(zip(XSS, found, strict=True)) == {text: [] for text in XSS}
    # the same eyes see what a browser makes of those that are HTML
    assert sum(map(bool, chat.page.context.new_page().evaluate(PARSED, XSS))) >= 18
    # as a message, as a title in the list, and as an answer of the model
    chat.ask(XSS[1])
    body = rendered(chat, 1)
    assert body.evaluate(FOUND) == []
    assert "owned" in body.inner_text()
    assert chat.turns.nth(0).locator(".body").inner_text() == XSS[1]
    assert chat.page.locator(".talks .link").inner_text() == XSS[1]
    assert not chat.page.evaluate("window.was ?? false")


def test_conversations_come_back_and_can_be_saved_and_deleted(chats: Any, tmp_path: Path) -> None:
    chat = chats(Scripted(["one", "two", "three"]), rendered=True)
    chat.page.get_by_label("System prompt").fill("Be brief.")
    chat.ask("first question")
    chat.says("one", 1)
    chat.done()
    chat.page.get_by_role("button", name="New chat").click()
    chat.ask("second question")
    chat.says("two", 1)
    chat.done()
    listed = chat.page.locator(".talks .link")
    chat.page.locator(".talks li").nth(1).wait_for()
    assert listed.all_inner_texts() == ["second question", "first question"]
    chat.page.reload()
    chat.says("two", 1)
    listed.nth(1).click()
    chat.says("one", 1)
    chat.ask("and now?")
    chat.says("three", 3)
    chat.done()
    prompt = chat.engine.prompts[2]
    assert "first question" in prompt
    assert "<|im_start|>assistant\none<|im_end|>" in prompt
    saved = {}
    for kind in ("JSON", "Markdown"):
        with chat.page.expect_download() as event:
            chat.page.get_by_role("button", name=kind, exact=True).click()
        event.value.save_as(tmp_path / kind)
        saved[event.value.suggested_filename] = (tmp_path / kind).read_text()
    assert saved.keys() == {"first-question.json", "first-question.md"}
    talk = json.loads(saved["first-question.json"])
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in talk["messages"]] == roles
    assert talk["turns"][1]["versions"][0]["parts"][0]["output"]
    assert "## You\n\nand now?\n\n## Model\n\nthree\n" in saved["first-question.md"]
    chat.page.get_by_role("button", name="Delete first question").click()
    chat.page.wait_for_function("() => document.querySelectorAll('.talks li').length === 1")
    assert chat.turns.count() == 0
    chat.page.reload()
    chat.page.wait_for_function("() => document.querySelectorAll('.talks li').length === 1")
    assert listed.all_inner_texts() == ["second question"]


def test_a_regenerated_answer_has_versions_with_what_came_after_each(chats: Any) -> None:
    chat = chats(Scripted(["one", "two", "after two", "after one"]), rendered=True)
    chat.ask("question")
    chat.says("one", 1)
    chat.done()
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.says("two", 1)
    chat.done()
    chat.ask("more")
    chat.says("after two", 3)
    chat.done()
    answer = chat.turns.nth(1)
    assert "2/2" in answer.inner_text()
    answer.get_by_role("button", name="Version before").click()
    chat.says("one", 1)
    assert (chat.turns.count(), "1/2" in answer.inner_text()) == (2, True)
    chat.ask("more of one")
    chat.says("after one", 3)
    chat.done()
    assert "<|im_start|>assistant\none<|im_end|>" in chat.engine.prompts[3]
    chat.page.reload()
    chat.says("after one", 3)
    answer.get_by_role("button", name="Next version").click()
    chat.says("two", 1)
    chat.says("after two", 3)
    assert answer.get_by_role("button", name="Next version").is_disabled()


def test_a_cut_answer_goes_on_from_its_text(chats: Any) -> None:
    chat = chats(Scripted(["alpha beta", " and more"]), rendered=True)
    chat.page.get_by_label("Max tokens").fill("7")
    chat.ask("question")
    whole = chat.engine.texts[0]
    chat.page.get_by_role("button", name="Continue").wait_for()
    begun = rendered(chat, 1).inner_text()
    assert begun in [whole[:length] for length in range(1, len(whole))]
    chat.page.get_by_label("Max tokens").fill("50")
    chat.page.get_by_role("button", name="Continue").click()
    chat.says(f"{begun} and more", 1)
    chat.done()
    assert chat.engine.prompts[1].endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{begun}")
    assert not chat.page.get_by_role("button", name="Continue").is_visible()
    assert "1/2" not in chat.turns.nth(1).inner_text()
    # the alternatives of both parts are asked for with the prompt that each had
    chat.page.get_by_role("button", name="Tokens").click()
    tokens = chat.turns.nth(1).locator(".token:visible")
    tokens.last.hover()
    chat.page.locator(".token-box").get_by_text('"z"').wait_for()
    tokens.first.hover()
    chat.page.locator(".token-box").get_by_text('"z"').wait_for()


def test_presets_fill_the_system_prompt(chats: Any) -> None:
    chat = chats(Scripted(["yes"]), rendered=True)
    system, presets = chat.page.get_by_label("System prompt"), chat.page.get_by_label("Presets")
    presets.select_option("Translator")
    assert "English" in system.input_value()
    assert chat.page.get_by_role("button", name="Forget").is_disabled()
    system.fill("You are a pirate.\nAye.")
    chat.page.get_by_role("button", name="Save").click()
    chat.page.reload()
    assert system.input_value() == ""
    presets.select_option("You are a pirate.")
    assert system.input_value() == "You are a pirate.\nAye."
    chat.page.get_by_role("button", name="Forget").click()
    assert "You are a pirate." not in presets.inner_text()
    chat.ask("Hi")
    chat.says("yes", 1)
    assert chat.engine.prompts[0].startswith("<|im_start|>system\nYou are a pirate.\nAye.")


def test_a_call_is_shown_with_its_arguments_and_answered_by_the_user(chats: Any) -> None:
    chat = chats(Scripted([f"Let me.\n{CALL}", "It is 2."]), parser="hermes", rendered=True)
    chat.page.get_by_label("Tools").fill("[{")
    chat.ask("1+1?")
    chat.page.get_by_role("alert").filter(has_text="The tools are not JSON").wait_for()
    chat.page.get_by_label("Tools").fill(json.dumps([TOOL]))
    chat.page.get_by_role("button", name="Regenerate").click()
    call = chat.page.get_by_role("group", name="Call of add")
    call.wait_for()
    assert [call.locator(name).all_inner_texts() for name in ("dt", "dd")] == [["a", "why"], ["1", "a <b>test</b>"]]
    assert "1/2" not in chat.turns.nth(1).inner_text()  # the failure was no version
    chat.page.get_by_label("Result of add").fill("2")
    chat.page.get_by_role("button", name="Return results").click()
    chat.says("It is 2.", 3)
    assert chat.turns.nth(2).locator(".body").inner_text() == "add: 2"
    assert "<tool_response>\n2\n</tool_response>" in chat.engine.prompts[1]
    assert '"name": "add"' in chat.engine.prompts[1]


def test_a_stream_changes_the_end_of_what_is_rendered(chats: Any) -> None:
    chat = chats(Scripted(["first *one*\n\nsecond"], allowed=14), rendered=True)
    chat.ask("Hi")
    first = chat.turns.nth(1).locator(".body p").first
    first.locator("em").wait_for()
    first.evaluate("(node) => { node.seen = true; }")
    chat.engine.allowed = None
    chat.turns.nth(1).locator(".body p").nth(1).wait_for()
    assert first.evaluate("(node) => node.seen === true")


def test_an_answer_that_cannot_be_rendered_is_text(chats: Any) -> None:
    chat = chats(Scripted(["*a*\nb"]), rendered=True, quiet=False)
    chat.page.route("**/render", lambda route: route.abort())
    chat.ask("Hi")
    chat.says("*a*\nb", 1)
