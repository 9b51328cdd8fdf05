"""The site opened from disk in a real browser: its search finds, and nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.apps.conftest import browser as browser
from tests.docs.test_site import site as site

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def test_search_finds_on_a_page_from_disk(site: Path, browser: Browser) -> None:
    """The page reads its words when a key goes up, and those typed before its index is there when it is."""
    page = browser.new_page()
    asked, wrong = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").press_sequentially("icepop")
    result = page.locator(".md-search-result__link").first
    result.wait_for(timeout=120_000)
    assert "algorithms.html" in (result.get_attribute("href") or "")
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()
