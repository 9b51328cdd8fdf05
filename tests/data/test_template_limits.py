"""Chat templates of strangers: none holds up a start, or takes the machine's memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import psutil
import pytest

from slimelite.arguments import Args
from slimelite.data import messages as templates
from slimelite.data.messages import TooSlow, render, try_template
from slimelite.data.prompts import load_prompts
from slimelite.serving.format import ChatFormat

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


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
def test_a_rendering_in_any_thread_has_its_own_time() -> None:
    tokenizer, said = byte_tokenizer(TRAP), dict[int, object]()

    def ask(number: int, text: str) -> None:
        try:
            said[number] = render(tokenizer, [{"role": "user", "content": text}], None, {})
        except TooSlow as error:
            said[number] = error

    threads = [threading.Thread(target=ask, args=(i, text)) for i, text in enumerate(("trap", "a", "trap"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [isinstance(said[i], TooSlow) for i in range(3)] == [True, False, True]
    assert not templates._watch._running


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
def test_a_served_question_that_the_template_hangs_on_is_refused() -> None:
    chat = ChatFormat(byte_tokenizer(TRAP))
    with pytest.raises(ValueError, match=r"takes more than 0\.3 s"):
        chat.prompt([{"role": "user", "content": "trap"}])
    assert chat.prompt([{"role": "user", "content": "a"}])
