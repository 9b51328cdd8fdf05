"""A small Hugging Face hub on loopback: it keeps what huggingface_hub uploads, and offers its repositories, which may
be datasets."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import close_session, constants

TOKEN = "hf_a_token_of_a_test"
MAY_NOT_WRITE = "other/"  # the token has no right to write there


class Hub:
    """``repos``: name -> branch -> path -> content; ``private``: names; ``commits``: the message of each."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.commits: list[str] = []
        self.large: dict[str, bytes] = {}  # by their SHA-256, as git-lfs has them
        self.url = ""

    def environment(self, home: str) -> dict[str, str]:
        """What makes huggingface_hub of a process talk to this hub, without what is cached elsewhere."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    @contextmanager
    def talking(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """huggingface_hub of this process talks to this hub."""
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        values = {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in {**values, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        close_session()  # its client keeps connections, and what it read of the environment
        yield
        close_session()

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        """The status and the JSON of one request."""
        if method == "PUT":
            self.large[path.rsplit("/", 1)[-1]] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        parts = path.strip("/").split("/")
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if repo.startswith(MAY_NOT_WRITE):
                return 403, {"error": "you have no rights there"}
            there = repo in self.repos
            self.repos.setdefault(repo, {"main": {}})
            if "private" in (wanted.get("visibility"), wanted.get("private") and "private") and not there:
                self.private.add(repo)
            return (409 if there else 200), {"url": f"{self.url}/{repo}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            links = [{"upload": {"href": f"{self.url}/lfs/{each['oid']}"}} for each in objects]
            return 200, {"objects": [{**o, "actions": a} for o, a in zip(objects, links, strict=True)]}
        repo, verb, branch = "/".join(parts[2:4]), *[*parts[4:6], "", ""][:2]
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}
        if verb == "preupload":
            files = [{"path": each["path"]} for each in json.loads(body)["files"]]
            kinds = ["lfs" if each["path"].endswith((".safetensors", ".gguf")) else "regular" for each in files]
            return 200, {
                "files": [f | {"uploadMode": k, "shouldIgnore": False} for f, k in zip(files, kinds, strict=True)]
            }
        if verb in ("tree", "paths-info"):
            return 200, self._listed(self.repos[repo]["main"], [*parts[6:]], body)
        if verb == "branch":
            self.repos[repo][branch] = {}
            return 200, {}
        if verb == "commit":
            return 200, self._commit(repo, branch, [json.loads(line) for line in body.splitlines()])
        siblings = [{"rfilename": name} for name in self.repos[repo]["main"]]
        return 200, {"id": repo, "sha": "0" * 40, "siblings": siblings}

    @staticmethod
    def _listed(files: dict[str, bytes], folder: list[str], body: bytes) -> list[dict[str, Any]]:
        """The files and folders of a folder, or those that ``body`` names."""
        wanted, below = parse_qs(body.decode()).get("paths"), "".join(f"{part}/" for part in folder)
        paths = {*files} | {name.rpartition("/")[0] for name in files if "/" in name}
        if wanted is None:
            paths = {path for path in paths if path.startswith(below)}
        return [
            {"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40}
            if path in files
            else {"type": "directory", "path": path, "oid": "0" * 40}
            for path in sorted(paths if wanted is None else paths & {*wanted})
        ]

    def _commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.commits.append(value["summary"])
                case "file":
                    self.repos[repo][branch][value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    content = self.large[value["oid"]]
                    assert hashlib.sha256(content).hexdigest() == value["oid"]
                    self.repos[repo][branch][value["path"]] = content
        return {"commitUrl": f"{self.url}/{repo}/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def download(self) -> None:
            """A file of a repository, with the headers that huggingface_hub's cache needs."""
            repo, _, file = self.path.removeprefix("/datasets").strip("/").partition("/resolve/")
            content = hub.repos.get(repo, {"main": {}})["main"].get(file.partition("/")[2])
            if content is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if repo in hub.repos else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            tag = f'"{hashlib.sha256(content).hexdigest()}"'  # two files with one tag are one file in the cache
            for name, value in {"ETag": tag, "X-Repo-Commit": "0" * 40, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        def reply(self) -> None:
            if "/resolve/" in self.path:
                self.download()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            status, content = hub.answer(self.command, path, body, self.headers.get("Authorization"))
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            if "error" in content:
                self.send_header("X-Error-Message", content["error"])
            self.end_headers()
            self.wfile.write(text)

        do_HEAD = do_GET = do_POST = do_PUT = reply

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
