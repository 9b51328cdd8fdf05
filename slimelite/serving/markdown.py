"""Converts a model's text to HTML for the chat page: Markdown with tables, code and LaTeX.

HTML in the text is shown as text. A formula becomes MathML, which browsers can draw. If a formula cannot be parsed, its
source is shown. The output is filtered by an allow list, because a formula may contain links and styles.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from html import unescape
from xml.etree import ElementTree

import nh3
from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin

# if a formula is longer, its source is shown [characters]
MOST_FORMULA = 4000
# environment of a formula with several lines -> the library's environment without equation numbers
LINES = {"align": "align*", "aligned": "align*", "split": "align*", "gather": "gather*", "gathered": "gather*"}
ENVIRONMENT = re.compile(rf"(\\(?:begin|end)\{{)({'|'.join(LINES)})\}}")
# the elements that a page may have; the MathML elements are those of MathML Core
TEXT = "a blockquote br code div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong ul table thead tbody tr th td"
MATH = (
    "math menclose mfrac mi mn mo mover mpadded mphantom mroot mrow ms mspace msqrt mstyle msub msubsup msup mtable "
    "mtd mtext mtr munder munderover"
)
MATH_ATTRIBUTES = (
    "accent accentunder columnalign depth display displaystyle fence form height largeop linethickness lspace "
    "mathcolor mathvariant maxsize minsize movablelimits notation rspace scriptlevel separator stretchy symmetric "
    "voffset width"
)
TEXT_TAGS, MATH_TAGS = TEXT.split(), MATH.split()
ATTRIBUTES = {
    **{tag: {"dir"} for tag in TEXT_TAGS},
    **{tag: set(MATH_ATTRIBUTES.split()) for tag in MATH_TAGS},
    **{tag: {"dir", "class"} for tag in ("div", "code", "span", "th", "td")},
    "a": {"href", "title"},
    "ol": {"dir", "start"},
}


def to_html(text: str) -> str:
    """Convert Markdown to HTML that is safe in a page: it has no scripts, styles, pictures, forms or frames.

    Links must be absolute, with http, https or mailto. Blocks take the direction of their text (``dir="auto"``).
    """
    return nh3.clean(
        _markdown().render(text),
        tags={*TEXT_TAGS, *MATH_TAGS},
        clean_content_tags=set(),
        attributes=ATTRIBUTES,
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )


@cache
def _markdown() -> MarkdownIt:
    markdown = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("image")
    dollarmath_plugin(markdown, allow_labels=False, allow_space=False, allow_digits=False, double_inline=True)
    amsmath_plugin(markdown)
    markdown.block.ruler.before(
        "fence", "math_brackets", _block_in_brackets, {"alt": ["paragraph", "reference", "blockquote", "list"]}
    )
    markdown.inline.ruler.before("escape", "math_brackets", _in_brackets)
    markdown.core.ruler.push("directions", lambda state: _directions(state.tokens))
    rules: dict[str, Callable[..., str]] = {
        "fence": _code,
        "code_block": _code,
        "math_inline": lambda _, tokens, place, *__: _math(tokens[place].content, "inline"),
    }
    displayed = ("math_inline_double", "math_block", "amsmath")
    rules |= {name: lambda _, tokens, place, *__: _math(tokens[place].content, "block") for name in displayed}
    for name, rule in rules.items():
        markdown.add_render_rule(name, rule)
    return markdown


def _block_in_brackets(state: StateBlock, begin: int, end: int, silent: bool) -> bool:
    r"""Parse ``\[…\]`` on separate lines. Without this rule, Markdown could read such lines as lists or headings."""
    start = state.bMarks[begin] + state.tShift[begin]
    if state.is_code_block(begin) or not state.src.startswith(r"\[", start):
        return False
    close = state.src.find(r"\]", start, state.eMarks[end - 1])
    if close < 0:
        return False
    last = bisect_right(state.eMarks, close, begin, end)
    if state.src[close + 2 : state.eMarks[last]].strip():
        return False
    if not silent:
        state.push("math_block", "math", 0).content = state.src[start + 2 : close]
        state.line = last + 1
    return True


def _in_brackets(state: StateInline, silent: bool) -> bool:
    r"""Parse ``\(…\)`` and ``\[…\]`` within a paragraph, where Markdown alone would read escaped brackets."""
    close = {r"\(": r"\)", r"\[": r"\]"}.get(state.src[state.pos : state.pos + 2])
    # (closing mark, text) pairs without a match; they need not be searched again
    unclosed = state.env.setdefault("unclosed", set())
    if close is None or (close, state.src) in unclosed:
        return False
    if (end := state.src.find(close, state.pos + 2)) < 0:
        unclosed.add((close, state.src))
        return False
    if not silent:
        name = "math_inline" if close == r"\)" else "math_inline_double"
        state.push(name, "math", 0).content = state.src[state.pos + 2 : end]
    state.pos = end + 2
    return True


def _directions(tokens: Sequence[Token]) -> None:
    """Let each block take the direction of its text. Write the alignment of cells as a class, not as a style."""
    for token in tokens:
        if token.nesting == 1 and token.tag in TEXT_TAGS:
            style = str(token.attrs.pop("style", ""))
            if style:
                token.attrSet("class", style.removeprefix("text-align:"))
            token.attrSet("dir", "auto")


def _code(_: object, tokens: Sequence[Token], place: int, *__: object) -> str:
    language = re.match(r"[\w+#.-]*", tokens[place].info.strip())
    name = f'<span class="language">{escapeHtml(language[0])}</span>' if language and language[0] else ""
    code = escapeHtml(tokens[place].content)
    return f'<div class="code">{name}<pre dir="ltr"><code>{code}</code></pre></div>\n'


def _math(latex: str, display: str) -> str:
    """Convert the formula to MathML. If this fails, the formula is shown as code."""
    try:
        if len(latex) > MOST_FORMULA:
            raise ValueError("the formula is too long")
        plain = ENVIRONMENT.sub(lambda match: f"{match[1]}{LINES[match[2]]}}}", latex)
        element = convert_to_element(plain, display=display)
    except Exception:  # the library may raise any error
        return f'<code class="formula" dir="ltr">{escapeHtml(latex)}</code>'
    for node in element.iter():  # undo the library's escapes, because `tostring` escapes each text again
        node.text = unescape(node.text) if node.text else node.text
    return ElementTree.tostring(element, encoding="unicode")
