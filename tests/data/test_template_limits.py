"""Chat templates of strangers: none holds up a start, or takes the machine's memory."""

from __future__ import annotations

import psutil
import pytest

from slimelite.data.templates import try_template

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
