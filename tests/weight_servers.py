"""A web server of weights that can misbehave in every way a real one does."""

import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

STEP = 64 * 1024


class LocalServer:
    """A web server on 127.0.0.1, in a thread, while its context is open; `_answer` sends what it answers."""

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
                """Quiet."""

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
    """Serves `data` at any path on 127.0.0.1. Knobs may be turned while it runs; `requests` logs Range headers."""

    data: bytes
    etag: str = '"v1"'
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)  # answered first, one each, then 200/206
    cuts: list[int] = field(default_factory=list)  # bytes after which each of the next bodies is cut
    moved: str = ""  # what is asked for at any other path is at this one (302)
    step_s: float = 0.0  # pause between steps of a body
    length_told: bool = True  # False: no Content-Length, the end of the connection ends the body
    extra: bytes = b""  # sent after a whole body of an honest length
    head: bool = False  # answers a HEAD; many servers refuse it
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
            for position in range(0, min(cut, len(body)), STEP):
                handler.wfile.write(body[position : min(position + STEP, cut)])
                with self._lock:
                    self.bytes_sent += min(position + STEP, cut, len(body)) - position
                if self.step_s:
                    time.sleep(self.step_s)
        except OSError:
            handler.close_connection = True  # the client has gone, as some tests make it do
            return
        if cut < len(body) or not self.length_told:
            handler.close_connection = True
