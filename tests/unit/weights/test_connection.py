"""Connections read by threads."""

import asyncio
import gzip
import random
import ssl
import threading
import traceback
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from glowplug.domain.errors import WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, RegionState, region_digest
from glowplug.weights.source import SourceFile, SourceInterrupted, SourceOptions
from glowplug.weights.sources import connection
from glowplug.weights.sources.connection import KEPT_S, TICK_S, ConnectionLimits, Connections
from glowplug.weights.sources.http import HttpSource, WebReader, inflated
from glowplug.weights.sources.peer import PeerRegion
from tests.certificates import self_signed
from tests.waiting import WAIT_S, until
from tests.weight_servers import LocalServer, WeightServer

DATA = random.Random(11).randbytes(700_001)
LIMITS = ConnectionLimits(connect_s=WAIT_S, stall_s=WAIT_S, buffer_bytes=65_536)


class Body(LocalServer):
    """Sends the pieces in `sent`, head included."""

    def __init__(self, *sent: bytes) -> None:
        self.sent, self.pause_s = sent, 0.0
        self.num_requests = 0
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.clients: set[tuple[str, int]] = set()
        self.left = threading.Event()  # a client left midway
        self.hurries = threading.Event()  # without further pauses

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        self.clients.add(handler.client_address)
        self.heads.append({name.lower(): value for name, value in handler.headers.items()})
        self.paths.append(handler.path)
        try:
            for piece in self.sent:
                handler.wfile.write(piece)
                self.hurries.wait(self.pause_s)
        except OSError:
            self.left.set()
        handler.close_connection = b"connection: close" in self.sent[0].lower()


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def chunked(*parts: bytes) -> bytes:
    return b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (*parts, b""))


@asynccontextmanager
async def connections(limits: ConnectionLimits = LIMITS) -> AsyncIterator[Connections]:
    made = Connections(limits)
    try:
        yield made
    finally:
        await made.close()


async def body(made: Connections, url: str) -> bytes:
    content = bytearray()
    async with made.ask("GET", httpx.URL(url), {}) as answer:
        async for chunk in answer.chunks():
            content += chunk
    return bytes(content)


SMALL = DATA[:100_000]
BODIES = {
    "with a length": (head("Content-Length: 100000") + SMALL[:10], SMALL[10:]),
    "without a length": (head("Connection: close"), SMALL),
    "in chunks": (head("Transfer-Encoding: chunked"), chunked(SMALL[:1], SMALL[1:70_000], SMALL[70_000:])),
    "head and body in pieces": (
        b"HTTP/1.1 200",
        b" OK\r\ncontent-",
        b"length: 100000\r\n\r",
        b"\n" + SMALL[:3],
        SMALL[3:],
    ),
}


@pytest.mark.parametrize("sent", BODIES.values(), ids=BODIES)
async def test_a_body_comes_whole(sent: tuple[bytes, ...]) -> None:
    with Body(*sent) as server:
        server.pause_s = 0.01
        async with connections() as made:
            assert await body(made, server.url) == SMALL
            assert await body(made, server.url) == SMALL
        assert len(server.clients) == (2 if b"close" in sent[0] else 1)


async def test_a_body_comes_whole_through_a_window_that_is_smaller_than_a_buffer() -> None:
    asked = list[float]()

    def window(rtt_s: float) -> int:
        asked.append(rtt_s)
        return 32 << 10

    with Body(head(f"Content-Length: {len(DATA)}"), DATA) as server:
        async with connections(replace(LIMITS, buffer_bytes=1 << 20, window=window)) as made:
            assert await body(made, server.url) == DATA
    assert asked


CUT = {
    "within its length": (head("Content-Length: 100000", "Connection: close"), SMALL[:-1]),
    "within a chunk": (head("Transfer-Encoding: chunked", "Connection: close"), chunked(SMALL)[:90_000]),
    "between chunks": (head("Transfer-Encoding: chunked", "Connection: close"), chunked(SMALL)[:-5]),
    "within the head": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Le",),
    "no head at all": (b"what? Connection: close\r\n\r\n",),
}


@pytest.mark.parametrize("sent", CUT.values(), ids=CUT)
async def test_a_server_that_closes_early_is_told_apart_from_an_end(sent: tuple[bytes, ...]) -> None:
    with Body(*sent) as server:
        source = HttpSource(f"{server.url}/w", SourceOptions())
        with pytest.raises(SourceInterrupted):
            async for _ in source.read(SourceFile(path="", num_bytes=100_000), 0, 0):
                pass
        await source.close()


async def test_what_is_compressed_though_nobody_asked_for_it_is_inflated() -> None:
    packed = gzip.compress(DATA)
    with Body(head(f"Content-Length: {len(packed)}", "Content-Encoding: gzip"), packed) as server:
        source = HttpSource(f"{server.url}/w", SourceOptions())
        chunks = source.read(SourceFile(path="", num_bytes=0), 0, 0)
        assert b"".join([bytes(chunk) async for chunk in chunks]) == DATA
        await source.close()
        assert server.heads[0]["accept-encoding"] == "identity"


CUT_OFF = {"within its bytes": gzip.compress(DATA)[:-100], "within its checksum": gzip.compress(DATA[:9])[:-1]}


@pytest.mark.parametrize("packed", CUT_OFF.values(), ids=CUT_OFF)
async def test_what_is_compressed_and_cut_is_no_whole_file(packed: bytes) -> None:
    with Body(head("Connection: close", "Content-Encoding: gzip") + packed[:1], packed[1:]) as server:
        source = HttpSource(f"{server.url}/w", SourceOptions())
        with pytest.raises(SourceInterrupted, match="ends early"):
            async for _ in source.read(SourceFile(path="", num_bytes=0), 0, 0):
                pass
        await source.close()


async def test_a_file_may_be_compressed_in_several_members() -> None:
    packed = gzip.compress(DATA[:300_000]) + gzip.compress(DATA[300_000:])
    with Body(head(f"Content-Length: {len(packed)}", "Content-Encoding: gzip"), packed) as server:
        source = HttpSource(f"{server.url}/w", SourceOptions())
        chunks = source.read(SourceFile(path="", num_bytes=0), 0, 0)
        assert b"".join([bytes(chunk) async for chunk in chunks]) == DATA
        await source.close()


PADDED = {
    "behind the last member": (gzip.compress(DATA[:9]) + bytes(500),),
    "in a chunk of its own": (gzip.compress(DATA[:9]), bytes(500)),
    "between two members": (gzip.compress(DATA[:4]) + bytes(3), bytes(2) + gzip.compress(DATA[4:9])),
}


@pytest.mark.parametrize("parts", PADDED.values(), ids=PADDED)
async def test_zeros_behind_a_member_are_padding(parts: tuple[bytes, ...]) -> None:
    async def given() -> AsyncGenerator[bytes, None]:
        for part in parts:
            yield part

    assert b"".join([bytes(chunk) async for chunk in inflated(given())]) == DATA[:9]


async def test_what_is_neither_padding_nor_a_member_is_refused() -> None:
    async def given() -> AsyncGenerator[bytes, None]:
        yield gzip.compress(DATA[:9]) + bytes(3) + b"x" * 20

    with pytest.raises(zlib.error):
        async for _ in inflated(given()):
            pass


async def test_a_slow_body_is_given_as_it_comes_and_a_fast_one_in_whole_buffers() -> None:
    steps = [SMALL[at : at + 5_000] for at in range(0, len(SMALL), 5_000)]
    with Body(head("Content-Length: 100000"), *steps) as server:
        async with connections() as made:
            async with made.ask("GET", httpx.URL(server.url), {}) as answer:
                sizes = [len(chunk) async for chunk in answer.chunks()]
            assert sum(sizes) == 100_000 and sizes.count(65_536) == 1
            server.pause_s = 4 * TICK_S
            async with made.ask("GET", httpx.URL(server.url), {}) as answer:
                assert 0 < len(await answer.fill()) < 65_536


@pytest.mark.parametrize(
    "sent",
    [
        (b"HTTP/1.1 200 OK\r\n", b""),
        (head("Content-Length: 4"), b"0123"),
        (head("Transfer-Encoding: chunked"), b"4\r\n0123\r\n0\r\n\r\n"),
        (head("Content-Length: 4") + b"01", b"23"),
    ],
    ids=["in its head", "before its body", "before its first chunk", "in its body"],
)
async def test_a_stall_is_told_in_the_same_words_wherever_it_comes(sent: tuple[bytes, ...]) -> None:
    with Body(*sent) as server:
        server.pause_s = 1.0
        async with connections(replace(LIMITS, stall_s=0.3)) as made:
            with pytest.raises(TimeoutError, match=r"no byte within 0\.3 s"):
                await body(made, server.url)


async def test_a_reader_may_be_slower_than_the_server_and_pause_for_longer_than_a_stall() -> None:
    with Body(head("Content-Length: 700001"), DATA) as server:
        async with connections(replace(LIMITS, stall_s=1.0)) as made:
            content = bytearray()
            async with made.ask("GET", httpx.URL(server.url), {}) as answer:
                content += await answer.fill()
                await asyncio.sleep(1.5)
                async for chunk in answer.chunks():
                    content += chunk
            assert content == DATA


async def test_a_reader_that_is_cancelled_leaves_at_once_and_nothing_is_read_after_it() -> None:
    before = threading.active_count()
    with Body(head("Content-Length: 100000"), SMALL[:50_000], b"", SMALL[50_000:]) as server:
        server.pause_s = 0.2
        async with connections(ConnectionLimits(connect_s=2.0, stall_s=30.0, buffer_bytes=65_536)) as made:
            reading = asyncio.create_task(body(made, server.url))
            await until(lambda: server.num_requests)
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert not made._all, "its connection is no one's any more"
        await until(lambda: threading.active_count() <= before + 2)  # the server's threads


async def test_a_cancelled_fetch_writes_nothing_more(tmp_path: Path) -> None:
    ref = WeightsRef(uri="")
    with WeightServer(DATA, step_s=0.05) as server:
        ref = WeightsRef(uri=server.url)
        region = Region.at(tmp_path, "n", region_digest(ref))
        source = HttpSource(server.url, SourceOptions(chunk_bytes=32_768))
        fetch = Fetch(ref, region, source, LinkMeter("n/nic"), granted, options=FetchOptions(max_parts=2))
        running = asyncio.create_task(fetch.run())
        await until(lambda: fetch.num_bytes_landed >= 100_000)
        running.cancel()
        await asyncio.wait([running])
        landed, content = fetch.num_bytes_landed, region.blob.read_bytes()
        assert region.read_state().state is RegionState.FETCHING
        await asyncio.sleep(0.15)
        assert (fetch.num_bytes_landed, region.blob.read_bytes()) == (landed, content)
        for first, last in fetch.landed:
            assert content[first:last] == DATA[first:last]
        await source.close()


async def granted(num_bytes: int) -> int:
    return num_bytes


async def test_a_connection_is_kept_where_its_answer_was_read_and_dropped_where_it_was_not() -> None:
    with Body(head("Content-Length: 100000") + SMALL) as server:
        async with connections() as made:
            await body(made, server.url)
            await body(made, server.url)
            assert len(server.clients) == 1
            async with made.ask("GET", httpx.URL(server.url), {}) as answer:
                assert len(await answer.fill()) == 65_536
            await body(made, server.url)
            assert len(server.clients) == 1
            async with made.ask("GET", httpx.URL(server.url), {}):
                pass
            await body(made, server.url)
            assert len(server.clients) == 2


async def test_a_connection_that_was_idle_for_long_or_has_ended_is_not_used_again() -> None:
    with Body(head("Content-Length: 3") + b"abc") as server:
        async with connections() as made:
            await body(made, server.url)
            (connection,) = made._all
            connection._used_at -= KEPT_S
            await body(made, server.url)
            assert len(server.clients) == 2
            (connection,) = made._all
            connection._line.shut()
            assert await body(made, server.url) == b"abc"
            assert len(server.clients) == 3


NO_BODY = {
    "HEAD": ("HEAD", head("Transfer-Encoding: chunked")),
    "204": ("GET", head("Transfer-Encoding: chunked", status="204 No Content")),
    "304": ("GET", head("Transfer-Encoding: chunked", status="304 Not Modified")),
    "HEAD with a length": ("HEAD", head("Content-Length: 100000")),
}


@pytest.mark.parametrize(("method", "sent"), NO_BODY.values(), ids=NO_BODY)
async def test_an_answer_without_a_body_is_not_waited_for(method: str, sent: bytes) -> None:
    with Body(sent) as server:
        async with connections() as made:
            for _ in range(2):
                async with made.ask(method, httpx.URL(server.url), {}) as answer:
                    assert not await answer.fill()
        assert len(server.clients) == 1, "its connection is not kept"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_headers_may_hold_any_byte(encoding: str) -> None:
    named = 'attachment; filename="modèle.gguf"'
    sent = f"HTTP/1.1 200 OK\r\nContent-Disposition: {named}\r\nContent-Length: 3\r\n\r\nabc".encode(encoding)
    with Body(sent) as server:
        async with connections() as made, made.ask("GET", httpx.URL(server.url), {}) as answer:
            assert answer.headers["content-disposition"] == named
            assert await answer.fill() == b"abc"


async def test_a_reader_between_two_chunks_ends_when_all_are_closed() -> None:
    with Body(head("Content-Length: 100000"), SMALL) as server:
        made = Connections(LIMITS)
        with pytest.raises(ConnectionAbortedError):
            async with made.ask("GET", httpx.URL(server.url), {}) as answer:
                await answer.fill()
                await made.close()
                await asyncio.wait_for(answer.fill(), WAIT_S)


async def test_a_body_without_a_length_that_is_closed_while_it_comes_has_no_end() -> None:
    with Body(head("Connection: close") + SMALL[:10], b"") as server:
        server.pause_s = WAIT_S
        made = Connections(LIMITS)
        async with made.ask("GET", httpx.URL(server.url), {}) as answer:
            assert await answer.fill() == SMALL[:10]
            rest = asyncio.ensure_future(answer.fill())
            await asyncio.sleep(TICK_S / 2)
            await made.close()
            with pytest.raises(ConnectionAbortedError, match="closed before the end"):
                await asyncio.wait_for(rest, WAIT_S)
        server.hurries.set()


@pytest.mark.parametrize("token", ["hf_secret\n", "hf_secret\u20ac"], ids=["a line's end", "no latin letter"])
async def test_a_token_that_no_header_may_hold_is_refused_and_not_shown(token: str) -> None:
    with Body(head("Content-Length: 3") + b"abc") as server:
        web = WebReader(server.url, SourceOptions(), bearer=lambda: token)
        peer = PeerRegion(server.url, "0" * 64, token)
        with pytest.raises(WeightsUnavailable, match="a header holds a character") as of_web:
            async with web.ask("GET", server.url, {}):
                pass
        with pytest.raises(SourceInterrupted, match="a header holds a character") as of_peer:
            await peer.look()
        for shown in (of_web, of_peer):
            assert "hf_secret" not in "".join(traceback.format_exception(shown.value))
        await web.close()
        await peer.close()
        assert server.num_requests == 0


async def test_a_kept_connection_on_which_some_bytes_more_came_is_not_used_again() -> None:
    with Body(head("Content-Length: 100000"), SMALL[:50_000], SMALL[50_000:] + b"more") as server:
        server.pause_s = 0.01
        async with connections() as made:
            assert await body(made, server.url) == SMALL
            await asyncio.sleep(0.01)
            assert await body(made, server.url) == SMALL
        assert len(server.clients) == 2


async def test_user_and_password_of_an_address_are_shown_to_its_server() -> None:
    with Body(head("Content-Length: 3") + b"abc") as server:
        async with connections() as made:
            await body(made, server.url.replace("//", "//ann:se%20cret@"))
        assert server.heads[0]["authorization"] == "Basic YW5uOnNlIGNyZXQ="


async def test_a_proxy_of_the_environment_is_asked_and_no_proxy_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with Body(head("Content-Length: 3") + b"abc") as server:
        monkeypatch.setenv("http_proxy", server.url.replace("//", "//ann:pw@"))
        async with connections() as made:
            assert await body(made, "http://weights.example/w?x=1") == b"abc"
            assert server.paths == ["http://weights.example/w?x=1"]
            assert server.heads[0]["host"] == "weights.example"
            assert server.heads[0]["proxy-authorization"] == "Basic YW5uOnB3"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with connections() as made:
            assert await body(made, f"{server.url}/own") == b"abc"
            assert server.paths[-1] == "/own" and "proxy-authorization" not in server.heads[-1]
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    monkeypatch.delenv("http_proxy")
    source = HttpSource("http://weights.example/w", SourceOptions())
    with pytest.raises(WeightsUnavailable, match="a proxy of socks5 is not supported"):
        await source.probe()
    peer = PeerRegion("http://weights.example", "0" * 64, "")
    with pytest.raises(SourceInterrupted, match="a proxy of socks5 is not supported"):
        await peer.look()


# TLS


class SecureServer(WeightServer):
    certificate: Path

    def __enter__(self) -> "SecureServer":
        super().__enter__()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.certificate / "cert.pem", self.certificate / "key.pem")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        return self

    @property
    def url(self) -> str:
        return super().url.replace("http:", "https:")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    self_signed(directory)
    return directory


@pytest.fixture
def secure(certificate: Path) -> Iterator[SecureServer]:
    made = SecureServer(DATA)
    made.certificate = certificate
    with made:
        yield made


def fetch_of(uri: str, root: Path, max_attempts: int = 1, stall_s: float = WAIT_S) -> Fetch:
    ref = WeightsRef(uri=uri)
    source = HttpSource(uri, SourceOptions(chunk_bytes=100_000, stall_timeout_s=stall_s))
    options = FetchOptions(part_bytes=262_144, max_parts=2, max_attempts=max_attempts, backoff_first_s=0.001)
    return Fetch(ref, Region.at(root, "n", region_digest(ref)), source, LinkMeter("n/nic"), granted, options=options)


async def test_weights_come_over_tls(secure: SecureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate / "cert.pem"))
    fetch = fetch_of(secure.url, tmp_path, max_attempts=3)
    secure.cuts = [len(DATA), 1_000]  # cuts the file's head, then a longer part
    await fetch.run()
    assert fetch.region.blob.read_bytes() == DATA and fetch.tally.num_retries == 1
    assert fetch.tally.num_bytes == len(DATA), "what came before the cut was kept"


async def test_a_slow_server_over_tls_is_read_as_it_sends_and_given_up_where_it_stalls(
    secure: SecureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate / "cert.pem"))
    secure.step_s = 0.12
    fetch = fetch_of(secure.url, tmp_path, stall_s=1.0)
    running = asyncio.create_task(fetch.run())
    await until(lambda: fetch.num_bytes_landed > 100_000)
    secure.step_s = 5.0
    with pytest.raises(WeightsUnavailable, match="no byte within"):
        await running
    assert fetch.num_bytes_landed < len(DATA)


async def test_a_certificate_that_nobody_vouches_for_is_refused(secure: SecureServer, tmp_path: Path) -> None:
    with pytest.raises(WeightsUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await fetch_of(secure.url, tmp_path).run()
    assert secure.requests == []


async def test_certificates_are_read_once_and_not_by_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by, make = [], httpx.create_ssl_context

    def create() -> ssl.SSLContext:
        made_by.append(threading.get_ident())
        return make()

    monkeypatch.setattr(httpx, "create_ssl_context", create)
    connection._tls_context.cache_clear()
    with Body(b"no TLS") as server:
        for _ in range(2):
            async with connections() as made:
                with pytest.raises(OSError):
                    async with made.ask("GET", httpx.URL(server.url.replace("http:", "https:")), {}):
                        pytest.fail("a server without TLS was spoken to")
    assert len(made_by) == 1 and made_by[0] != threading.get_ident()
