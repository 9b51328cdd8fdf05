"""Chat templates of strangers: none holds up a start, or takes the machine's memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psutil
import pytest
from jinja2 import UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from slimelite.arguments import Args
from slimelite.data import messages as templates
from slimelite.data.chat_sandbox import ChatSandbox
from slimelite.data.messages import TooCostly, render, try_template
from slimelite.data.prompts import load_prompts
from slimelite.serving.format import ChatFormat
from tests.support import templates as real

from .tokenizers import CHATML, byte_tokenizer

DOUBLE = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (LOOPS, "2 s"),
        ("{{ 'x' * 10 ** 10 }}", "512 MB"),
        (DOUBLE, "512 MB"),
        ("{% if messages | length > 3 %}{{ 'x'.center(10 ** 10) }}{% endif %}", "512 MB"),
        ("{% if tools %}{{ 'x' * 10 ** 10 }}{% endif %}", "512 MB"),
    ],
)
@pytest.mark.timeout(60)
def test_a_template_without_end_is_refused(template: str, takes: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template takes more than {takes} to render a few words"):
        try_template(byte_tokenizer(template))


@pytest.mark.parametrize("template", [CHATML, None, "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% oops"])
def test_others_are_for_their_users_to_judge(template: str | None) -> None:
    """It says nothing of them, and leaves no process behind."""
    before = psutil.Process().children()
    try_template(byte_tokenizer(template))
    assert psutil.Process().children() == before


# it does what a template does, but for one question
TRAP = f"{CHATML}{{% if messages[0].content == 'trap' %}}{LOOPS}{{% endif %}}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "RENDER_S", 0.3)
    monkeypatch.setattr(templates, "POLL_S", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
def test_a_template_that_hangs_on_a_row_alone_is_stopped_there(tmp_path: Path) -> None:
    """It passes the trial at the start. Rows that may be left out do not make the run wait for each of them."""
    tokenizer, file = byte_tokenizer(TRAP), tmp_path / "rows.jsonl"
    tokenizer.name_or_path = "models/theirs"
    try_template(tokenizer)
    columns = Args(input_key="prompt", apply_chat_template=True)
    rows = [{"prompt": text} for text in ("a", "b", *["trap"] * 500)]
    file.write_text("\n".join(map(json.dumps, rows)))
    for skip in (False, True):
        with pytest.raises(ValueError, match=r"rows\.jsonl.*3.*chat template of models/theirs takes more than 0\.3 s"):
            load_prompts(columns, tokenizer, [str(file)], skip_bad_rows=skip)
    file.write_text("\n".join(map(json.dumps, rows[:2])))
    assert len(load_prompts(columns, tokenizer, [str(file)])) == 2


LONG = "'x' * 1000000"
NESTED = "{% set n = namespace(x=[1, 2]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('x' * 10 ** 9) | length }}",
        "{{ ([1] * 10 ** 9) | length }}",
        "{{ (10 ** 9 * ['x']) | length }}",
        "{{ 9 ** (9 ** 9) > 1 }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        DOUBLE,
        DOUBLE.replace("~", "+"),
        DOUBLE.replace("= n.x ~ n.x %}", "%}{{ n.x }}{{ n.x }}{% endset %}"),
        DOUBLE.replace("'xxxxxxxx'", "[1]").replace("~", "+"),
        DOUBLE.replace("n.x ~ n.x", "[n.x, n.x] | join"),
        DOUBLE.replace("n.x ~ n.x", "'%s%s' % (n.x, n.x)"),
        DOUBLE.replace("n.x ~ n.x", "'{0}{0}'.format(n.x)"),
        DOUBLE.replace("n.x ~ n.x", "n.x.replace('x', 'xx')"),
        DOUBLE.replace("n.x ~ n.x", "n.x | replace('x', 'xx')"),
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% else %}12345678{% endif %}{% endmacro %}{{ m(30) }}",
        *(f"{{{{ ('x' {name}) | length }}}}" for name in ("| center(10 ** 9)", "| indent(10 ** 9, true)")),
        *(f"{{{{ 'x'.{name}(10 ** 9) | length }}}}" for name in ("center", "ljust", "rjust", "zfill")),
        "{{ '\t'.expandtabs(10 ** 9) | length }}",
        "{{ (5).to_bytes(10 ** 9, 'big') | length }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '{x:{y}}'.format_map({'x': 1, 'y': 10 ** 9}) }}",
        "{{ ['x'] | map('center', 10 ** 9) | list }}",
        "{{ messages | batch(10 ** 9, 1) | list }}",
        "{{ [[1]] | tojson(indent=10 ** 9) }}",
        f"{{{{ ({LONG}).join(['', ''] * 1000) }}}}",
        f"{{{{ (['', ''] * 1000) | join({LONG}) }}}}",
        f"{{{{ ({LONG}).translate({{120: {LONG}}}) }}}}",
        f"{{% set s = {LONG} %}}{{% for i in range(1000) %}}{{% set n = s[1:] %}}{{% endfor %}}",
        f"{{% set s = {LONG} %}}{{% for i in range(1000) %}}{{{{ s }}}}{{% endfor %}}",
        *(NESTED + shown for shown in ("{{ n.x }}", "{{ n.x ~ 'a' }}", "{{ n.x | tojson }}", "{{ n.x | upper }}")),
        NESTED + "{{ '%s' % (n.x,) }}",
        "{{ lipsum(10 ** 6) }}",
        "{{ [[1]] | sum(start=[1]) }}",
    ],
)
@pytest.mark.timeout(60)
def test_a_template_whose_values_grow_on_one_row_alone_is_stopped_before_they_do(template: str) -> None:
    """The messages that grow the values are not those of the trial."""
    tokenizer = byte_tokenizer(f"{{% if messages[0].content == 'trap' %}}{template}{{% else %}}{CHATML}{{% endif %}}")
    try_template(tokenizer)
    with pytest.raises((TooCostly, UndefinedError), match=r"takes more than 134,217,728 characters|'lipsum'"):
        render(tokenizer, [{"role": "user", "content": "trap"}], None, {})
    assert render(tokenizer, [{"role": "user", "content": "a"}], None, {})


def test_sums_of_numbers_are_allowed() -> None:
    tokenizer = byte_tokenizer("{{ messages | map(attribute='content') | map('length') | sum }}")
    assert render(tokenizer, [{"role": "user", "content": "abc"}], None, {}) == "3"


def test_the_sandbox_renders_real_templates_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for sandbox in (ImmutableSandboxedEnvironment, ChatSandbox):
        monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", sandbox)
        chat_template_utils._compile_jinja_template.cache_clear()
        speakers = {name: real.tokenizer(name) for name in real.names()}
        talks = [(speaker, real.talk(speaker, talk)) for speaker in speakers.values() for talk in real.TALKS]
        texts.append([render(speaker, talk, real.tools(talk), {}) for speaker, talk in talks if talk])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 300


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
def test_a_rendering_in_any_thread_has_its_own_time() -> None:
    tokenizer, said = byte_tokenizer(TRAP), dict[int, object]()

    def ask(number: int, text: str) -> None:
        try:
            said[number] = render(tokenizer, [{"role": "user", "content": text}], None, {})
        except TooCostly as error:
            said[number] = error

    threads = [threading.Thread(target=ask, args=(i, text)) for i, text in enumerate(("trap", "a", "trap"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [isinstance(said[i], TooCostly) for i in range(3)] == [True, False, True]
    assert not templates._watch._running


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
def test_a_served_question_that_the_template_hangs_on_is_refused() -> None:
    chat = ChatFormat(byte_tokenizer(TRAP))
    with pytest.raises(ValueError, match=r"takes more than 0\.3 s"):
        chat.prompt([{"role": "user", "content": "trap"}])
    assert chat.prompt([{"role": "user", "content": "a"}])
