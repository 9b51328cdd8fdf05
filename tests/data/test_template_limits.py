"""Chat templates of strangers: none holds up a start, or takes the machine's memory."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from slimelite.arguments import Args
from slimelite.data import messages, render_watch
from slimelite.data.chat_sandbox import ChatSandbox, install
from slimelite.data.conversations import ChatReader
from slimelite.data.messages import ASKED, TooCostly, bounded, render, try_template
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
def test_a_template_without_end_is_refused(template: str, takes: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template takes more than {takes} to render a few words"):
        try_template(byte_tokenizer(template))


@pytest.mark.parametrize("template", [CHATML, None, "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% oops"])
def test_others_are_for_their_users_to_judge(template: str | None) -> None:
    """It says nothing of them, and leaves no process behind."""
    before = psutil.Process().children()
    try_template(byte_tokenizer(template))
    assert not {*psutil.Process().children()} - {*before}


@pytest.mark.parametrize("ending", ["hangs", "is torn"])
def test_a_trial_that_hangs_or_ends_otherwise_says_nothing_of_the_template(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a process with threads waits for a lock that nobody will free."""
    tokenizer, lock = byte_tokenizer(CHATML), threading.Lock()
    lock.acquire()

    def apply_chat_template(*_: object, **__: object) -> str:
        if ending == "hangs":
            lock.acquire()
        raise GeneratorExit

    monkeypatch.setattr(messages, "DEADLINE_S", 0.5 if ending == "hangs" else 60.0)
    monkeypatch.setattr(tokenizer, "apply_chat_template", apply_chat_template)
    me, before = os.getpid(), psutil.Process().children()
    try:
        try_template(tokenizer)
    finally:
        if os.getpid() != me:
            (tmp_path / "escaped").touch()
            os._exit(0)
    assert list(tmp_path.iterdir()) == []
    assert not {*psutil.Process().children()} - {*before}


# it does what a template does, but for one question
TRAP = f"{CHATML}{{% if messages[0].content == 'trap' %}}{LOOPS}{{% endif %}}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_watch, "RENDER_S", 0.3)


@pytest.mark.usefixtures("impatient")
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


def trap(template: str) -> str:
    """It is not sprung by messages such as those of the trial."""
    return f"{{% if messages[0].content == 'trap' %}}{template}{{% else %}}{CHATML}{{% endif %}}"


def spring(template: str) -> None:
    tokenizer = byte_tokenizer(trap(template))  # the trial, a copy of this process, may hang if it has many threads
    assert render(tokenizer, ASKED, None, {})
    render(tokenizer, [{"role": "user", "content": "trap"}], None, {})


@pytest.mark.parametrize(
    ("operation", "template"),
    [
        (r"\*", "{{ 'x' * (2 * 10 ** 9) }}"),
        (r"\*", "{{ ([1] * 10 ** 9) | length }}"),
        (r"\*", "{{ (10 ** 9 * ['x']) | length }}"),
        (r"\*\*", "{{ 9 ** (9 ** 9) > 1 }}"),
        (r"\*", "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"),
        *(("center", f"{{{{ {value} | length }}}}") for value in ("'x' | center(10 ** 9)", "'x' | center(1000000000)")),
        *((name, f"{{{{ 'x'.{name}(10 ** 9) | length }}}}") for name in ("center", "ljust", "rjust", "zfill")),
        ("center", "{{ ['x'] | map('center', 10 ** 9) | list }}"),
        ("indent", "{{ 'x' | indent(10 ** 9, true) }}"),
        ("expandtabs", "{{ '\t'.expandtabs(10 ** 9) | length }}"),
        ("to_bytes", "{{ (5).to_bytes(10 ** 9, 'big') | length }}"),
        ("%", "{{ '%999999999d' % 1 }}"),
        ("%", "{{ '%.999999999f' % 1 }}"),
        ("%", "{{ '%*d' % (10 ** 9, 1) }}"),
        ("%", "{{ '%(a)-999999999d' % {'a': 1} }}"),
        ("%", "{{ '%999999999d' | format(1) }}"),
        ("%", f"{{{{ ('%s' * 1000) % ([{LONG}] * 1000) }}}}"),
        ("format", "{{ '{:999999999}'.format(1) }}"),
        ("format", "{{ '{:{}}'.format(1, 10 ** 9) }}"),
        ("format", "{{ '{:{}{}}'.format(1, 99999, 9999) }}"),
        ("format", "{{ '{0:{1}{1}}'.format(1, 99999) }}"),
        ("format", "{{ '{:9{}}'.format(1, '99999999') }}"),
        ("format", "{{ '{0:9{1}9{1}9{1}9{1}9{1}9}'.format('x', 1) }}"),
        ("format", "{{ '{:{}}'.format('x', '>0999999999') }}"),
        ("format", "{{ '{:{x[a][0]}}'.format(1, x={'a': [999999999]}) }}"),
        ("format", f"{{{{ ('{{0[0]}}' * 1000).format([{LONG}]) }}}}"),
        ("format_map", "{{ '{x:{y}}'.format_map({'x': 1, 'y': 10 ** 9}) }}"),
        ("batch", "{{ messages | batch(10 ** 9, 1) | list }}"),
        ("tojson", "{{ [[1]] | tojson(indent=10 ** 9) }}"),
        ("tojson", f"{{{{ [[1]] | tojson(separators=({LONG}, ':')) }}}}"),
        ("round", "{{ 5 | round(10 ** 9, 'ceil') }}"),
        ("join", f"{{{{ ({LONG}).join(['', ''] * 1000) }}}}"),
        ("join", f"{{{{ (['', ''] * 1000) | join({LONG}) }}}}"),
        ("join", f"{{{{ ([{LONG}] * 1000) | map('string') | join }}}}"),
        ("join", f"{{{{ ([{{'a': {LONG}}}] * 1000) | join(attribute='a') }}}}"),
        ("sum", "{{ ([[1] * 1000000] * 1000) | sum(start=[]) }}"),
        ("replace", f"{{{{ ({LONG}).replace('x', {LONG}) }}}}"),
        ("replace", f"{{{{ ({LONG}) | replace(new={LONG}, old='x') }}}}"),
        ("translate", f"{{{{ ({LONG}).translate({{120: {LONG}}}) }}}}"),
        ("list", "{{ ('x' * 10 ** 8) | list }}"),
        ("split", "{{ ('x' * 10 ** 8).split('x') }}"),
        ("strftime_now", "{{ strftime_now('%c' * 1000000) }}"),
        ("output", f"{{% set x = {LONG} %}}{'{{ x }}' * 200}"),
    ],
)
def test_one_operation_that_makes_a_huge_value_on_one_row_alone_is_refused(operation: str, template: str) -> None:
    with pytest.raises(TooCostly, match=rf"of the tokenizer makes a value that is too large \(with '{operation}'\) to"):
        spring(template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '{name} {value}'.format(name='a', value='b') }}", "a b"),
        ("{{ '%(name)s' | format(name='a') }}", "a"),
        ("{{ '{x} {args}'.format(**{'x': 1, 'args': 2}) }}", "1 2"),
        ("{{ '{:>{w}}'.format(messages[0].content, w=10) }}", "         a"),
        ("{{ '{:>{w}.{p}f}'.format(2.5, w=10, p=2) }}", "      2.50"),
        ("{{ '{:{form}}'.format(2.5, form='>8') }}", "     2.5"),
    ],
)
def test_small_formats_are_rendered(template: str, text: str) -> None:
    assert render(byte_tokenizer(template), ASKED, None, {}) == text


def test_the_output_of_a_template_with_marks_is_limited_too() -> None:
    """With marks, transformers joins the parts of the text, and not Jinja."""
    template = f"{{% set x = {LONG} %}}{'{{ x }}' * 200}{{% generation %}}a{{% endgeneration %}}"
    with pytest.raises(TooCostly, match="'output'"):
        ChatReader(byte_tokenizer(trap(template))).tokens([{"role": "user", "content": "trap"}])


@pytest.mark.parametrize(
    "template",
    [
        DOUBLE,
        DOUBLE.replace("~", "+"),
        DOUBLE.replace("'xxxxxxxx'", "[1]").replace("~", "+"),
        f"{{% set n = namespace(x={LONG}) %}}{{% set n.x = n.x {'~ n.x' * 1000} %}}",
        f"{{% set n = namespace(x=[]) %}}{{% for i in range(2000) %}}{{% set n.x = n.x+[i ~ {LONG}] %}}{{% endfor %}}",
    ],
)
def test_a_rendering_whose_values_grow_step_by_step_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_watch, "GROWTH", 1 << 28)
    ctypes.CDLL(None).malloc_trim(0)  # the process does not grow while it has memory that earlier tests freed
    with pytest.raises(TooCostly, match="of the tokenizer takes more than 256 MB to render these messages"):
        spring(template)


def test_memory_that_others_need_during_a_short_rendering_is_not_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_watch, "GROWTH", 1 << 24)
    with bounded(byte_tokenizer(CHATML)):
        others = bytes(1 << 26)
        time.sleep(0.3)
    assert len(others) == 1 << 26


def test_long_honest_conversations_are_rendered() -> None:
    """All values that the template makes have more characters together than one operation may make."""
    template = (
        "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.content %}{% endfor %}{{ n.x }}"
    )
    talk = [{"role": "user", "content": "x" * 4000}] * 300
    tokenizer = byte_tokenizer(template)
    assert len(render(tokenizer, talk, None, {})) == 1_200_000


def test_outside_of_limits_a_plugin_renders_what_it_likes() -> None:
    tokenizer = byte_tokenizer("{{ ('x' * 140000000) | center(150000000) }}")
    with pytest.raises(TooCostly):
        render(tokenizer, ASKED, None, {})
    assert len(tokenizer.apply_chat_template(ASKED, tokenize=False)) == 150_000_000


def test_a_template_that_was_compiled_before_the_first_rendering_has_limits_too() -> None:
    install.cache_clear()
    chat_template_utils.ImmutableSandboxedEnvironment = ImmutableSandboxedEnvironment
    chat_template_utils._compile_jinja_template.cache_clear()
    tokenizer = byte_tokenizer(trap("{{ messages[0].content * 10 ** 9 }}"))
    assert tokenizer.apply_chat_template(ASKED, tokenize=False)
    with pytest.raises(TooCostly):
        render(tokenizer, [{"role": "user", "content": "trap"}], None, {})


def test_real_templates_give_the_same_texts_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    speakers = {name: real.tokenizer(name) for name in real.names()}
    texts = []
    for sandbox in (ImmutableSandboxedEnvironment, ChatSandbox):
        install()
        monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", sandbox)
        chat_template_utils._compile_jinja_template.cache_clear()
        talks = [(speaker, real.talk(speaker, talk)) for speaker in speakers.values() for talk in real.TALKS]
        texts.append([render(speaker, talk, real.tools(talk), {}) for speaker, talk in talks if talk])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 300


@pytest.mark.usefixtures("impatient")
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
    assert not render_watch.watch._running


@pytest.mark.usefixtures("impatient")
def test_a_served_question_that_the_template_hangs_on_is_refused() -> None:
    chat = ChatFormat(byte_tokenizer(TRAP))
    with pytest.raises(ValueError, match=r"takes more than 0\.3 s"):
        chat.prompt([{"role": "user", "content": "trap"}])
    assert chat.prompt([{"role": "user", "content": "a"}])
