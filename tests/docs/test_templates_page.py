"""docs/templates.md is what the script makes of the templates that the tests read."""

from __future__ import annotations

import pytest

from scripts.dev import templates_table


@pytest.mark.pinned
def test_the_table_of_chat_templates_is_the_scripts() -> None:
    assert templates_table.PATH.read_text() == templates_table.page(), "python scripts/dev/templates_table.py"
