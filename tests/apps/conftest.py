"""A real browser for the page of ``slimelite view``; tests that use it are marked ``browser``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; its event loop runs in this thread, so it must not outlive the tests of a file."""
    from playwright.sync_api import sync_playwright

    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no browser found: install chromium (apt-get install chromium); without -m browser none is needed")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """``open_page(file, tab, **options of the browser's context)``; in the end nothing was requested or went wrong."""
    pages, wrong = [], []

    def start(file: Path, place: str = "", **options: Any) -> Page:
        page = browser.new_context(**options).new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda request: wrong.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri() + (f"#{place}" if place else ""))
        pages.append(page)
        return page

    yield start
    for page in pages:
        page.context.close()
    assert wrong == []
