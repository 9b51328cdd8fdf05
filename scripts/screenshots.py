"""Photograph the page of a run for README:   python scripts/screenshots.py runs/quickstart/seed-0/grpo 4

The second argument is the rollout whose samples are shown. Writes docs/view/{curves,samples}-{light,dark}.png. Needs
playwright and a chromium (apt-get install chromium).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slimelite.view.page import main as view  # noqa: E402

OUT = ROOT / "docs" / "view"
SIZE = {"width": 1280, "height": 760}


def main(run: str, rollout: str) -> None:
    """Open the page of ``run`` in both schemes: its curves under the pointer, and a sample of ``rollout``."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder, "page.html")
        if view([run, "-o", str(page_file)]) != 0:
            raise SystemExit(1)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for scheme in ("light", "dark"):
            page = chromium.new_context(viewport=SIZE, color_scheme=scheme).new_page()
            page.goto(f"{page_file.as_uri()}#curves")
            page.locator(".chart svg").first.hover()
            page.screenshot(path=OUT / f"curves-{scheme}.png")
            page.goto(f"{page_file.as_uri()}#samples?run=0&rollout={rollout}")
            page.locator(".row").nth(2).click()
            page.get_by_role("button", name="›").click()
            page.get_by_label("colour").select_option("entropy")
            page.screenshot(path=OUT / f"samples-{scheme}.png")
        chromium.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
