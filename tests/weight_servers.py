"""Web servers of weights that misbehave like real ones."""

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from glowplug.weights.pieces import Layout, piece_digest, piece_digests_json

STEP = 64 * 1024


class LocalServer:
    """On 127.0.0.1, in a thread, while its context is open. `_answer` answers a request."""

    host = "127.0.0.1"
    _server: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def do_HEAD(self) -> None:
                outer._answer_head(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer((self.host, 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    def _answer_head(self, handler: BaseHTTPRequestHandler) -> None:
        self._answer(handler)


@dataclass
class WeightServer(LocalServer):
    """`data` at any path. Fields may change while it runs; `requests` has the Range headers."""

    data: bytes
    etag: str = '"v1"'
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)  # of the first answers; then 200/206
    cuts: list[int] = field(default_factory=list)  # bytes after which the next bodies are cut
    moved: str = ""  # any other path redirects to this one (302)
    step_s: float = 0.0  # pause between steps of a body
    step: int = STEP  # bytes of one
    length_told: bool = True  # False: no Content-Length; the body ends with the connection
    extra: bytes = b""  # sent after a whole body of an honest length
    head: bool = False  # answers a HEAD; many servers refuse
    requests: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"{super().url}/weights.gguf"

    def _answer_head(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append("HEAD")
        handler.send_response(200 if self.head else 405)
        handler.send_header("Content-Length", str(len(self.data)) if self.head and self.length_told else "0")
        if self.head and self.ranges:
            handler.send_header("Accept-Ranges", "bytes")
        handler.end_headers()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range", "")
        with self._lock:
            self.requests.append(asked)
            status = self.statuses.pop(0) if self.statuses else 0
        is_moved = bool(self.moved) and handler.path != self.moved
        if is_moved or status:
            handler.send_response(302 if is_moved else status)
            if is_moved:
                handler.send_header("Location", self.moved)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        first, last, partial = 0, len(self.data), False
        whole = self.etag if handler.headers.get("If-Range", self.etag) == self.etag else ""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        if match and self.ranges and whole == self.etag:
            first, last, partial = int(match[1]), min(int(match[2] or len(self.data) - 1) + 1, len(self.data)), True
        handler.send_response(206 if partial else 200)
        if partial:
            handler.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(self.data)}")
        if self.etag:
            handler.send_header("ETag", self.etag)
        if self.length_told:
            handler.send_header("Content-Length", str(last - first))
        else:
            handler.send_header("Connection", "close")
        handler.end_headers()
        body = self.data[first:last] + (b"" if self.length_told else self.extra)
        self._send(handler, body, is_probe=last - first <= 1)

    def _send(self, handler: BaseHTTPRequestHandler, body: bytes, *, is_probe: bool) -> None:
        with self._lock:
            cut = self.cuts.pop(0) if self.cuts and not is_probe else len(body)
        try:
            for position in range(0, min(cut, len(body)), self.step):
                handler.wfile.write(body[position : min(position + self.step, cut)])
                with self._lock:
                    self.bytes_sent += min(position + self.step, cut, len(body)) - position
                if self.step_s:
                    time.sleep(self.step_s)
        except OSError:
            handler.close_connection = True  # some tests make the client leave
            return
        if cut < len(body) or not self.length_told:
            handler.close_connection = True


@dataclass
class PeerServer(LocalServer):
    """Another node's prefetcher with `data` as one file and the routes of weights/sources/peer.py. Fields may change
    while it runs."""

    data: bytes
    validator: str = '"v1"'
    sha256: str = ""  # "": incomplete on that node
    landed: Callable[[int], bool] = lambda piece: True
    tells_digests: bool = True
    wrong_pieces: frozenset[int] = frozenset()  # sent with bytes that fail their checksum
    lies: bool = False  # the checksums match the wrong bytes
    cut_after: int = 0  # bytes after which a body is cut
    step_s: float = 0.0
    status: int = 0  # of every answer, if set
    token: str = ""
    checksum: Callable[[bytes], str] = piece_digest
    bytes_sent: int = 0
    num_looks: int = 0

    @property
    def layout(self) -> Layout:
        return Layout.of([("", len(self.data))])

    def _piece(self, index: int) -> bytes:
        content = self.data[slice(*self.layout.piece(index))]
        return bytes(255 - byte for byte in content) if index in self.wrong_pieces else content

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        layout = self.layout
        if self.status or (self.token and handler.headers.get("Authorization") != f"Bearer {self.token}"):
            self._send(handler, self.status or 401, b"{}")
        elif handler.path.partition("?")[0].endswith("/bytes"):
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
            assert found
            first, last = int(found[1]), int(found[2]) + 1
            held = b"".join(self._piece(index) for index in layout.touched(first, last))
            start = first - layout.rounded(first, last)[0]
            self._send(handler, 206, held[start : start + last - first])
        else:
            self.num_looks += 1
            pieces = range(layout.num_pieces)
            told = [self._piece(i) if self.lies else self.data[slice(*layout.piece(i))] for i in pieces]
            digests = [self.checksum(content) for content in told] if self.tells_digests else []
            answer = {
                "files": [["", len(self.data), self.validator]],
                "sha256": self.sha256,
                "landed": "".join("1" if self.landed(index) else "0" for index in pieces),
                "pieces": piece_digests_json(layout, digests),
            }
            self._send(handler, 200, json.dumps(answer).encode())

    def _send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        cut = self.cut_after if self.cut_after and status == 206 else len(body)
        try:
            for position in range(0, min(cut, len(body)), STEP):
                sent = handler.wfile.write(body[position : min(position + STEP, cut)])
                self.bytes_sent += sent if status == 206 else 0
                if self.step_s:
                    time.sleep(self.step_s)
        except OSError:
            handler.close_connection = True
        if cut < len(body):
            handler.close_connection = True
