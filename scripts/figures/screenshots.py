"""Photograph the pages for README and docs/:

    python scripts/figures/screenshots.py run runs/quickstart/seed-0/grpo 4
    python scripts/figures/screenshots.py agents runs/examples/tool/rl
    python scripts/figures/screenshots.py chat data/SmolLM2-135M-Instruct
    python scripts/figures/screenshots.py report runs/speedrun-full/seed-0/report.html

The first writes docs/view/{curves,samples}-{light,dark}.png, with the samples of one rollout. The second writes
docs/view/agents-{light,dark}.png, with the episodes of the last rollout of a run of docs/examples/tool. The third
writes docs/serving/{chat,tokens}-{light,dark}.png, which show a chat with a model. The fourth writes
docs/speedrun/report.png, the beginning of a page of `slimelite report`. The second and the third also photograph the
page at a phone's size (…-phone-….png). It needs playwright and a chromium (apt-get install chromium).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slimelite.apps.view import main as view  # noqa: E402
from slimelite.base.version import answer_version  # noqa: E402

OUT = ROOT / "docs"
SIZE: ViewportSize = {"width": 1280, "height": 760}
PHONE: ViewportSize = {"width": 390, "height": 700}
TIMEOUT_MS = 120_000
SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")


def main(kind: str, path: str, rollout: str = "0") -> None:
    """Photograph the page of the run ``path``, of its agents, the chat page of a model, or a report."""
    with sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--lang=en-US"]
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        if kind == "chat":
            photograph_chat(chromium, path)
        elif kind == "report":
            photograph_report(chromium, Path(path))
        else:
            photograph_run(chromium, path, None if kind == "agents" else rollout)
        chromium.close()


def pages(chromium: Browser, desktop: ViewportSize, *, phone: bool) -> Iterator[tuple[str, Page]]:
    """A page of each size in each colour scheme, and the end of its pictures' names."""
    for name, size in {"": desktop, **({"phone-": PHONE} if phone else {})}.items():
        for scheme in SCHEMES:
            page = chromium.new_context(viewport=size, color_scheme=scheme).new_page()
            page.set_default_timeout(TIMEOUT_MS)
            yield f"{name}{scheme}.png", page


def photograph(page: Page, path: Path) -> None:
    """Write the visible part in 256 colours, which takes a third of the bytes."""
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def photograph_run(chromium: Browser, run: str, rollout: str | None) -> None:
    """Photograph the run's curves under the pointer and a sample of ``rollout``. Without ``rollout``, photograph the
    episodes of its last rollout."""
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder, "page.html")
        if view([run, "-o", str(page_file)]) != 0:
            raise SystemExit(1)
        for end, page in pages(chromium, SIZE, phone=rollout is None):
            if rollout is None:
                page.goto(f"{page_file.as_uri()}#agents")
                page.locator(".calls-table").wait_for()
                photograph(page, OUT / f"view/agents-{end}")
                continue
            page.goto(f"{page_file.as_uri()}#curves")
            page.locator(".chart svg").first.hover()
            photograph(page, OUT / f"view/curves-{end}")
            page.goto(f"{page_file.as_uri()}#samples?run=0&rollout={rollout}")
            page.locator(".row").nth(2).click()
            page.get_by_role("button", name="›").click()
            page.get_by_label("colour").select_option("entropy")
            photograph(page, OUT / f"view/samples-{end}")


def photograph_report(chromium: Browser, file: Path) -> None:
    """Photograph the beginning of the report: stages, scores and answers. It has one colour scheme."""
    (OUT / "speedrun").mkdir(exist_ok=True)
    page = chromium.new_context(viewport={**SIZE, "height": 1020}).new_page()
    page.goto(file.absolute().as_uri())
    page.screenshot(path=OUT / "speedrun/report.png")


def photograph_chat(chromium: Browser, model: str) -> None:
    """Photograph two answers: as text, and as tokens with the alternatives of one of them."""
    words = [sys.executable, "-m", "slimelite.apps.command", "serve", model, "--web", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        url = server.stdout.readline().rpartition(" at ")[2].strip()
        for end, page in pages(chromium, SIZE, phone=True):
            page.goto(url)
            page.wait_for_function("() => document.title.includes('slimelite') && document.title !== 'slimelite'")
            folded = page.get_by_text("Settings") if end.startswith("phone") else None
            if folded:
                folded.click()
            for name, value in {"Max tokens": "160", "Temperature": "0", "Seed": "1"}.items():
                page.get_by_label(name).fill(value)
            if folded:
                folded.click()
            for number, question in enumerate(QUESTIONS):
                page.get_by_label("Message").fill(question)
                page.keyboard.press("Enter")
                page.get_by_text("a second").nth(number).wait_for()
            page.wait_for_timeout(1000)
            photograph(page, OUT / f"serving/chat-{end}")
            if end.startswith("phone"):
                continue
            page.get_by_label("colour").check()
            page.locator(".turn").nth(1).locator(".token:visible").nth(4).hover()
            page.locator(".token-box tr").nth(4).wait_for()
            photograph(page, OUT / f"serving/tokens-{end}")
        server.terminate()


if __name__ == "__main__":
    answer_version()
    main(*sys.argv[1:])
