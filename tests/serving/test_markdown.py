"""Markdown of a model as HTML: what is made of each construct, what is left as text, and who may ask for it."""

from __future__ import annotations

import re

import pytest

from slimelite.apps.serve import chat_page
from slimelite.serving.front import MOST_RENDERED
from slimelite.serving.markdown import MOST_FORMULA, to_html
from tests.serving.fronts import run, scripted_front

HALF = "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>"


@pytest.mark.parametrize(
    ("text", "display"),
    [
        (r"a $\frac{1}{2}$ b", "inline"),
        (r"a \(\frac{1}{2}\) b", "inline"),
        (r"a $$\frac{1}{2}$$ b", "block"),
        (r"a \[\frac{1}{2}\] b", "block"),
        ("$$\n\\frac{1}{2}\n$$", "block"),
        ("So\n\\[\n\\frac{1}{2}\n\\]\nholds.", "block"),
        ("- one\n\n  \\[\\frac{1}{2}\\]\n- two", "block"),
        ("\\begin{equation}\n\\frac{1}{2}\n\\end{equation}", "block"),
    ],
)
def test_a_formula_is_mathml_whatever_stands_around_it(text: str, display: str) -> None:
    html = to_html(text)
    assert html.count("<math") == 1
    assert f'<math display="{display}">' in html
    assert HALF in html
    assert "frac{" not in html
    assert re.findall(r"So|holds\.|one|two", html) == re.findall(r"So|holds\.|one|two", text)


def test_lines_of_a_formula_are_aligned_without_numbers() -> None:
    for name in ("align", "aligned", "split", "align*"):
        html = to_html(f"$$\\begin{{{name}}} a &= b \\\\ c &= d \\end{{{name}}}$$")
        assert re.findall('<mtd columnalign="(.*?)"><mi>([ac]?)</mi>', html) == [
            *(("right", "a"), ("left", ""), ("right", "c"), ("left", ""))
        ]
        assert "<mtext>" not in html


def test_money_code_and_formulas_that_cannot_be_read_stay_text() -> None:
    assert to_html("from $5 to $6") == '<p dir="auto">from $5 to $6</p>\n'
    assert "<math" not in to_html("`$x$` and\n```\n\\[x\\]\n```")
    for wrong in (r"\frac{", "x" * (MOST_FORMULA + 1), "{" * 3000):
        assert to_html(f"${wrong}$") == f'<p dir="auto"><code class="formula" dir="ltr">{wrong}</code></p>\n'
    assert to_html(r"an open \[ x") == '<p dir="auto">an open [ x</p>\n'


def test_tables_lists_and_code() -> None:
    html = to_html("|a|b|\n|:-:|--:|\n|1|~~2~~|\n\n3. x\n4. y\n\n```c++\na < b;\n```")
    assert '<td class="center" dir="auto">1</td>\n<td class="right" dir="auto"><s>2</s></td>' in html
    assert '<ol start="3" dir="auto">' in html
    assert '<span class="language">c++</span><pre dir="ltr"><code>a &lt; b;\n</code></pre>' in html


def test_tags_in_text_and_in_formulas_are_text_and_links_lead_to_pages_alone() -> None:
    assert to_html("<b>x</b>") == '<p dir="auto">&lt;b&gt;x&lt;/b&gt;</p>\n'
    assert "<mtext>&lt;script&gt;x&lt;/script&gt;</mtext>" in to_html(r"$\text{<script>x</script>}$")
    for formula in (r"\href{javascript:x}{y}", r"\style{position:fixed}{y}", r"\class{token}{y}"):
        html = to_html(f"${formula}$")
        assert "<mi>y</mi>" in html
        assert re.search("href|style|class|position", html) is None
    assert 'href="https://a.b/c"' in to_html("[x](https://a.b/c)")
    assert "<img" not in to_html("![x](https://a.b/c)")
    for target in (
        "javascript:x",
        "JAVASCRIPT&#58;x",
        "data:text/html,x",
        "file:///etc/passwd",
        "vbscript:x",
        "/v1/models",
    ):
        assert "href" not in to_html(f"[x]({target}) <{target}>"), target


def test_a_server_with_the_page_renders_for_whoever_has_the_key() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", key="k", page=chat_page()) as (ask, _):
            ask.key = "other"
            assert (await ask("/render", {"texts": ["*a*"]}))[0] == 401
            ask.key = "k"
            html = ['<p dir="auto"><em>a</em></p>\n', ""]
            assert await ask("/render", {"texts": ["*a*", ""]}) == (200, {"html": html})
            status, answer = await ask("/render", {"texts": ["a" * MOST_RENDERED, "b"]})
            assert (status, str(MOST_RENDERED) in answer["error"]["message"]) == (413, True)
        async with scripted_front("qwen2.5") as (ask, _):
            assert (await ask("/render", {"texts": ["*a*"]}))[0] == 404

    run(scenario())
