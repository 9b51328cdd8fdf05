"""Write docs/templates.md from the chat templates in the installed TRL.

python scripts/dev/templates_table.py [--check]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import transformers

from slimelite.base.version import answer_version
from slimelite.data.conversations import MARKS, ChatReader
from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Sessions
from tests.support import templates

PATH = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
INTRODUCTION = """\
# Chat templates

`scripts/dev/templates_table.py` generates this page; do not edit it. The {count} chat templates belong to real models.
The templates are files of the Python package TRL {version}, and our tests read these files. A row is valid for every
model with the same template, whatever the model's name. The table is for transformers {transformers}. transformers
5.23.0 also passes the thinking to a template under the name `thinking`. With transformers 5.23.0, the templates
`gptoss` and `lfm2_2_5` therefore show thoughts, and their conversations branch after a thought.

- **SFT**: this column shows who marked the model's own text in the template: TRL, the template's author, or nobody. The
  tests compare these marks with the loss masks of `--loss-mask-type auto`. The tests use conversations of several turns
  with tools and thinking. For every template the tests also check that the loss masks do not cover text of a user, a
  system prompt or a tool. The loss masks must cover everything that the model writes.
    - *TRL's*: TRL has a copy of the template with `{{% generation %}}` marks. The loss masks must equal these marks at
      every token, with two exceptions. The first exception is tokens that are part of the generation prompt. The second
      exception is the token `<|tool_response>`: Gemma 4 ends a call with this token, but TRL's marks do not include it.
    - *own*: the template itself has marks.
    - *tests alone*: neither the template nor TRL has marks, so the tests check only which text the loss masks cover.
    - *calls in a row: refused*: SFT refuses conversations with several tool calls in a row.
- **tool calls**: the format in which the template writes calls. The tests check that slimelite parses each written call
  back into the original call. There are two exceptions, because nothing in the written call shows what was meant. The
  formats `glm`, `qwen3_coder` and `muse` put tags around a text: if an argument contains such a tag, the call counts as
  malformed, or its argument is cut. The templates `lfm2_2_5` and `lfm2_2_5_v2` do not escape a text: a backslash in an
  argument may come back as another character, and text that looks like the next parameter as a parameter. *none*: the
  template does not show tools to the model. With such a template slimelite refuses `--environment` with tools, and
  requests with `tools`.
- **next question**, **after a thought**: these columns show what a session's prompt contains when the user asks the
  next question. *continues*: the prompt contains the sampled tokens of the reply. *branches*: the template writes the
  reply differently from the sampled tokens, and the prompt contains the template's text. "next question" is for a plain
  reply, and "after a thought" is for a reply with thinking. *not shown*: the template leaves out thinking that is in a
  separate field of the message. From one tool call to the next, the prompt keeps the sampled thoughts, except with the
  templates that `tests/serving/test_real_templates.py` names.

| template | SFT | tool calls | next question | after a thought |
|---|---|---|---|---|
"""


def goes_on(name: str, talk: str) -> str:
    """What happens at the second question of ``talk``. The model's first reply has the form in which the template
    writes it."""
    spoken = templates.tokenizer(name)
    chat_format, messages = ChatFormat(spoken), templates.talk(spoken, talk)
    assert messages is not None
    asked, reply, question = messages[:3]
    ids, mask = ChatReader(spoken).tokens([asked, reply])
    said = [token for token, value in zip(ids, mask, strict=True) if value]
    if "reasoning_content" in reply and reply["reasoning_content"] not in spoken.decode(said):
        return "not shown"
    while spoken.decode(said[-1:]).isspace():  # the line end after a mark: no model writes it
        said.pop()

    async def sample(request: GenerateRequest, _: OnTokens | None) -> GenerateResult:
        return GenerateResult(request.request_id, said, [-0.5] * len(said), [1] * len(said), "stop")

    session = Sessions(chat_format, sample, 100_000).open()
    turn = asyncio.run(session.chat([asked]))
    after = session.turn([asked, turn.reply.message(), question])
    return "branches" if after.before is None else "continues"


def row(name: str) -> str:
    source = templates.source(name)
    marks = "own" if MARKS.search(source) else "TRL's" if templates.twin(name) else "tests alone"
    refused = [f"{talk}: refused" for template, talk in templates.REFUSED if template == name]
    form = ChatFormat(templates.tokenizer(name)).tools if templates.shows_tools(name) else None
    cells = [
        "; ".join([marks, *refused]),
        form.name if form else "none",
        goes_on(name, "turns"),
        goes_on(name, "thinking"),
    ]
    return f"| {name} | {' | '.join(cells)} |\n"


def page() -> str:
    introduction = INTRODUCTION.format(
        count=len(templates.names()), version=templates.VERSION, transformers=transformers.__version__
    )
    return introduction + "".join(map(row, templates.names()))


if __name__ == "__main__":
    answer_version()
    if "--check" not in sys.argv:
        PATH.write_text(page())
    elif PATH.read_text() != page():
        sys.exit(f"{PATH} is out of date: python scripts/dev/templates_table.py")
