"""Makes an HTML page that is a single file. The file contains its styles and scripts, and a content security policy
allows no others."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable

# the scripts of slimelite/apps/page that every page has
SHARED = ("elements.js", "token_box.js")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>slimelite</title>
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript, but JavaScript is switched off.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def document(scripts: Sequence[Traversable], styles: Sequence[Traversable], data: str, *, asks: bool = False) -> str:
    """Make a page from ``styles``, ``scripts`` and the `SHARED` scripts. ``data``: JSON text for the element with the
    id "data". ``asks``: whether the page may send requests to its own server. The page can never send requests to other
    servers."""
    shared = files("slimelite.apps") / "page"
    script = "\n".join(file.read_text(encoding="utf-8") for file in (*map(shared.joinpath, SHARED), *scripts))
    style = "\n".join(file.read_text(encoding="utf-8") for file in (shared / "base.css", *styles))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    policy += "; base-uri 'none'; form-action 'none'"
    policy += "; connect-src 'self'" if asks else ""
    return PAGE.format(policy=policy, style=style, script=script, data=data)


def _hash(text: str) -> str:
    """The source in a content security policy that allows exactly this text."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
