"""Photograph the pages for README and docs/:

    python scripts/figures/screenshots.py runs/quickstart/seed-0/grpo 4
    python scripts/figures/screenshots.py data/SmolLM2-135M-Instruct
    python scripts/figures/screenshots.py runs/speedrun-full/seed-0/report.html

The first writes docs/view/{curves,samples}-{light,dark}.png, with the samples of a rollout of the run; the second
docs/serving/chat-{light,dark}.png, a chat with a model; the third docs/speedrun/report.png, the beginning
of a page of `slimelite report`. Needs playwright and a chromium (apt-get install chromium).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ViewportSize, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slimelite.apps.view import main as view  # noqa: E402

OUT = ROOT / "docs"
SIZE: ViewportSize = {"width": 1280, "height": 760}


SCHEMES: tuple[Literal["light"], Literal["dark"]] = ("light", "dark")
QUESTIONS = ("What is the capital of France?", "What is a planet?")


def main(path: str, rollout: str | None = None) -> None:
    """Photograph the page of the run ``path``, or without a rollout a report or the chat page of a model."""
    with sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--lang=en-US"]
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        if rollout is not None:
            photograph_run(chromium, path, rollout)
        elif path.endswith(".html"):
            photograph_report(chromium, Path(path))
        else:
            photograph_chat(chromium, path)
        chromium.close()


def photograph_run(chromium: Browser, run: str, rollout: str) -> None:
    """Its curves under the pointer, and a sample of ``rollout``."""
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder, "page.html")
        if view([run, "-o", str(page_file)]) != 0:
            raise SystemExit(1)
        for scheme in SCHEMES:
            page = chromium.new_context(viewport=SIZE, color_scheme=scheme).new_page()
            page.goto(f"{page_file.as_uri()}#curves")
            page.locator(".chart svg").first.hover()
            page.screenshot(path=OUT / f"view/curves-{scheme}.png")
            page.goto(f"{page_file.as_uri()}#samples?run=0&rollout={rollout}")
            page.locator(".row").nth(2).click()
            page.get_by_role("button", name="›").click()
            page.get_by_label("colour").select_option("entropy")
            page.screenshot(path=OUT / f"view/samples-{scheme}.png")


def photograph_report(chromium: Browser, file: Path) -> None:
    """Its head: stages, scores and answers; it has one scheme."""
    (OUT / "speedrun").mkdir(exist_ok=True)
    page = chromium.new_context(viewport={**SIZE, "height": 1020}).new_page()
    page.goto(file.absolute().as_uri())
    page.screenshot(path=OUT / "speedrun/report.png")


def photograph_chat(chromium: Browser, model: str) -> None:
    """Two answers with their colours, and the alternatives of a token."""
    words = [sys.executable, "-m", "slimelite.apps.command", "serve", model, "--web", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        url = server.stdout.readline().rpartition(" at ")[2].strip()
        for scheme in SCHEMES:
            page = chromium.new_context(viewport={**SIZE, "height": 560}, color_scheme=scheme).new_page()
            page.set_default_timeout(120_000)
            page.goto(url)
            page.get_by_label("Max tokens").fill("96")
            page.get_by_label("Temperature").fill("0.7")
            page.get_by_label("Seed").fill("1")
            page.get_by_label("colour").check()
            for number, question in enumerate(QUESTIONS):
                page.get_by_label("Message").fill(question)
                page.keyboard.press("Enter")
                page.get_by_text("a second").nth(number).wait_for()
            page.locator(".turn").nth(3).locator(".token:visible").nth(7).hover()
            page.locator(".token-box tr").nth(4).wait_for()
            page.screenshot(path=OUT / f"serving/chat-{scheme}.png")
        server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
