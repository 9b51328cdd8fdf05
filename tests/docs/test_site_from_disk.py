"""The site opened from disk in a real browser: its search finds, and nothing is fetched."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.apps.conftest import browser as browser
from tests.docs.test_site import site as site

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# beside other work the search of the page did not always begin, on a quiet machine it did
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_search_finds_on_a_page_from_disk(site: Path, browser: Browser) -> None:
    from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

    page = browser.new_page()
    asked, wrong = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((site / "index.html").as_uri())
    box, result = page.get_by_role("textbox", name="Search"), page.locator(".md-search-result__link").first
    for _ in range(10):  # words that are typed before the index is read are not looked for
        box.fill("")
        box.fill("icepop")
        with suppress(PlaywrightTimeoutError):
            result.wait_for(timeout=20_000)
            break
    assert "algorithms.html" in (result.get_attribute("href") or "")
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.close()
