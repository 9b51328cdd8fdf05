"""A real browser for the pages of ``slimelite view`` and ``serve --web``; tests that use it are marked ``browser``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

    from tests.serving.scripted import Scripted, Server

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; its event loop runs in this thread, so it must not outlive the tests of a file."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # [ms], as a page may be slow on a busy machine
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


@dataclass
class Chat:
    """A page, the engine behind it, and its parts."""

    page: Page
    engine: Scripted
    server: Server

    def ask(self, text: str) -> None:
        box = self.page.get_by_label("Message")
        box.fill(text)
        box.press("Enter")

    @property
    def turns(self) -> Locator:
        return self.page.locator("article.turn")

    def says(self, text: str, turn: int) -> None:
        """Wait until a turn's text is this one."""
        from playwright.sync_api import expect

        expect(self.turns.nth(turn).locator(".body")).to_have_text(text, use_inner_text=True)

    def done(self) -> None:
        self.page.get_by_role("button", name="Send").wait_for()


@pytest.fixture
def chats(browser: Browser) -> Iterator[Any]:
    """``chats(engine, key=None, parser=None, **options of the browser's context)``: an open page of a server with this
    engine. It shows tokens, or is ``rendered``.
    """
    from tests.serving.scripted import Server

    opened, wrong = [], []

    def start(
        engine: Any,
        key: str | None = None,
        quiet: bool = True,
        parser: str | None = None,
        rendered: bool = False,
        **options: Any,
    ) -> Chat:
        server = Server(engine, key, parser)
        page = browser.new_context(**options).new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        if quiet:
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda sent: None if sent.url.startswith(server.url) else wrong.append(sent.url))
        page.goto(server.url)
        if not rendered:
            page.get_by_role("button", name="Tokens").click()
        opened.append((page, server))
        return Chat(page, engine, server)

    yield start
    for page, server in opened:
        page.context.close()
        server.stop()
    assert wrong == []
