"""Redirects of weight addresses: which are followed, and what goes along."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import SourceFile, SourceOptions, next_url
from glowplug.weights.sources.http import HttpSource

CDN = ("*.cdn.example", "hub.example")
FOLLOWED = [
    ("http://a.example/w", "/other", "http://a.example/other"),
    ("http://a.example:8080/w", "http://a.example:8080/x", "http://a.example:8080/x"),
    ("http://a.example/w", "https://a.example/w", "https://a.example/w"),
    ("https://a.example/w", "https://eu.cdn.example/w?sig=1", "https://eu.cdn.example/w?sig=1"),
    ("http://127.0.0.1:9000/w", "/v2", "http://127.0.0.1:9000/v2"),
    ("https://user:pw@a.example/w", "/v2", "https://user:pw@a.example/v2"),
    ("https://user:pw@a.example/w", "https://user:pw@hub.example/w", "https://hub.example/w"),
]


@pytest.mark.parametrize(("source", "location", "wanted"), FOLLOWED)
def test_followed(source: str, location: str, wanted: str) -> None:
    assert str(next_url(httpx.URL(source), location, CDN, "shown")) == wanted


REFUSED = [
    ("https://a.example/w", "http://a.example/w"),  # from https to http
    ("https://a.example/w", "https://b.example/w"),  # a host that nobody named
    ("http://a.example/w", "http://eu.cdn.example/w"),  # named, and without a certificate
    ("http://a.example/w", "https://cdn.example.evil.example/w"),
    ("https://a.example/w", "https://evilhub.example/w"),
    ("http://a.example/w", "http://a.example:6379/w"),  # another service of the same host
    ("https://a.example/w", "https://a.example:2379/w"),
    ("http://127.0.0.1:9000/w", "http://127.0.0.1:6379/w"),
    ("http://a.example/w", "file:///etc/passwd"),
    ("http://a.example/w", "s3://bucket/key"),
    ("http://a.example/w", "http://127.0.0.1/w"),
    ("http://a.example/w", "//127.0.0.1/w"),
]


@pytest.mark.parametrize(("source", "location"), REFUSED)
def test_refused(source: str, location: str) -> None:
    with pytest.raises(WeightsUnavailable, match=r"shown: a redirect to \S+ is not followed"):
        next_url(httpx.URL(source), location, CDN, "shown")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]", "localhost", "x.localhost", "169.254.169.254", "10.0.0.1", "[fd00::1]", "[fe80::1]"]
)
def test_no_pattern_opens_the_network_within(host: str) -> None:
    with pytest.raises(WeightsUnavailable, match="not followed"):
        next_url(httpx.URL("https://a.example/w"), f"https://{host}/w", ("*",), "shown")


def test_a_reason_shows_no_secret() -> None:
    with pytest.raises(WeightsUnavailable) as refused:
        next_url(httpx.URL("https://a.example/w"), "https://u:secret@b.example/w?sig=secret", CDN, "shown")
    assert "secret" not in refused.value.message


@contextmanager
def redirecting(location: str) -> Iterator[tuple[str, list[str]]]:
    """A server that sends everybody to `location`; its address, and what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


async def test_nobody_is_asked_whom_a_redirect_may_not_lead_to() -> None:
    with redirecting("/") as (inner, inner_asked), redirecting(f"{inner}/secrets") as (outer, outer_asked):
        source = HttpSource(f"{outer}/w", SourceOptions())
        with pytest.raises(WeightsUnavailable, match="not followed"):
            await source.probe()
        with pytest.raises(WeightsUnavailable, match="not followed"):
            async for _ in source.read(SourceFile(path="", num_bytes=10), 0, 10):
                pass
        await source.close()
    assert inner_asked == [] and outer_asked == ["/w", "/w"]


async def test_redirects_without_an_end_are_given_up() -> None:
    with redirecting("/again") as (url, asked):
        source = HttpSource(f"{url}/w", SourceOptions())
        with pytest.raises(WeightsUnavailable, match="more than 5 redirects"):
            await source.probe()
        await source.close()
    assert asked == ["/w", *["/again"] * 5]
