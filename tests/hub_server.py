"""A hub of model repositories on 127.0.0.1, with Hugging Face's routes and redirects."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.weight_servers import LocalServer

_API = re.compile(r"/api/models/([^/]+/[^/]+?)/revision/([^/]+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@lru_cache(maxsize=64)  # hashed per request, and weights are large
def etag_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class HubServer(LocalServer):
    """`commits`: revision -> commit. As with the real hub, a GET of .gguf or .safetensors is redirected to a store path
    with another ETag; a HEAD is answered directly, as by mirrors."""

    repos: dict[str, dict[str, bytes]]
    commits: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    token: str = ""  # required of clients, if set
    gated: bool = False
    tells_sizes: bool = True  # False: as a mirror lists files
    statuses: list[int] = field(default_factory=list)  # of the first answers, one each
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)  # method, path, Range, Authorization

    def fetched(self) -> list[str]:
        return [path for method, path, *_ in self.requests if method == "GET" and not path.startswith("/api/")]

    def fill_cache(self, cache_dir: Path, repo: str, names: list[str] | None = None, revision: str = "main") -> Path:
        """Fill it as `hf download` does, with links into a blob store. Returns the snapshot."""
        root = cache_dir / f"models--{repo.replace('/', '--')}"
        snapshot = root / "snapshots" / self.commits[revision]
        for name, content in self.repos[repo].items():
            if names is None or name in names:
                blob = root / "blobs" / etag_of(content)
                blob.parent.mkdir(parents=True, exist_ok=True)
                blob.write_bytes(content)
                link = snapshot / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(blob)
        (root / "refs").mkdir(parents=True, exist_ok=True)
        (root / "refs" / revision).write_text(self.commits[revision])
        return snapshot

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path)
        authorization = handler.headers.get("Authorization", "")
        self.requests.append((handler.command, path, handler.headers.get("Range", ""), authorization))
        if self.statuses:
            _send(handler, self.statuses.pop(0))
        elif self.gated:
            _send(handler, 403, {"X-Error-Code": "GatedRepo"})
        elif self.token and authorization != f"Bearer {self.token}":
            _send(handler, 401, {"X-Error-Code": "RepoNotFound"})
        elif found := _API.fullmatch(path):
            self._list(handler, found[1], found[2])
        elif found := _FILE.fullmatch(path):
            self._resolve(handler, *found.groups())
        elif path.startswith("/store/"):
            content = next(c for files in self.repos.values() for c in files.values() if etag_of(c) == path[7:])
            _send_file(handler, content, {"ETag": '"of-the-store"'})
        else:
            _send(handler, 404)

    def _list(self, handler: BaseHTTPRequestHandler, repo: str, revision: str) -> None:
        if repo not in self.repos:
            return _send(handler, 404, {"X-Error-Code": "RepoNotFound"})
        if not (commit := self._commit(revision)):
            return _send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in self.repos[repo]]
        for row, content in zip(siblings, self.repos[repo].values(), strict=True):
            if self.tells_sizes:
                row |= {"size": len(content), "blobId": "of-git"}
                row["lfs"] = {"sha256": etag_of(content), "size": len(content), "pointerSize": 130}
        body = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}
        _send(handler, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _commit(self, revision: str) -> str:
        return self.commits.get(revision, revision if revision in self.commits.values() else "")

    def _resolve(self, handler: BaseHTTPRequestHandler, repo: str, revision: str, name: str) -> None:
        content = self.repos.get(repo, {}).get(name)
        if content is None or not self._commit(revision):
            return _send(handler, 404, {"X-Error-Code": "EntryNotFound"})
        said = {"X-Repo-Commit": self._commit(revision), "X-Linked-Etag": f'"{etag_of(content)}"'}
        said["X-Linked-Size"] = str(len(content))
        if name.endswith((".gguf", ".safetensors")) and handler.command == "GET":
            return _send(handler, 302, {**said, "Location": f"{self.url}/store/{etag_of(content)}"})
        return _send_file(handler, content, {**said, "ETag": f'"{etag_of(content)}"'})


def _send(
    handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str] | None = None, body: bytes = b""
) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _send_file(handler: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str]) -> None:
    part = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    if not part:
        return _send(handler, 200, {**headers, "Accept-Ranges": "bytes"}, content)
    first, end = int(part[1]), min(int(part[2] or len(content) - 1) + 1, len(content))
    stated = {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
    return _send(handler, 206, {**headers, **stated}, content[first:end])
