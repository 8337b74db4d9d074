"""What a fetch takes: weights from one registry at a given rate, and with other nodes that hold them.

    python -m bench.fetch [--megabytes 100] [--megabytes-per-s 20] [--tls] [--against TREE]

The registry is a web server that is throttled over all its connections (`--megabytes-per-s 0`: not at all; `--tls`: it
speaks https); each peer is the prefetcher's own routes (services/prefetcher/peer_rest.py) on a link that is throttled
to the same rate; the reader's link is not throttled. Each is a process of its own, and there is a new reader for each
fetch. `--against` has the readers of another tree fetch in turns with this one's, from the same servers.

Printed are the seconds until all is there and checked, beside the floor bytes / (sources x rate); when the first half
of the layers had landed; how much came from peers; and the processor seconds of the reader per gigabyte, beside what
the checksums take alone. Looking at what has landed is not counted.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from glowplug.domain.model import WeightsRef
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.link import LinkMeter
from glowplug.weights.order import Kind, read_header, reading_order
from glowplug.weights.pieces import Layout, piece_digest, read_layout
from glowplug.weights.region import Region, region_digest
from glowplug.weights.sources import open_source
from glowplug.weights.sources.peer import PeerRegion
from tests.arriving_region import has_landed
from tests.certificates import self_signed

STEP_BYTES = 64 << 10
STEP_S = 0.002
UNLIMITED_STEP_BYTES = 4 << 20
NUM_LAYERS = 32
SOURCES = (1, 2, 4)


class Throttle:
    """So many bytes a second, over all who ask; 0 is no limit. Blocks: for threads."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    @property
    def step_bytes(self) -> int:
        """That are sent at a time: what passes in two milliseconds, or `STEP_BYTES`."""
        return max(STEP_BYTES, int(self._bytes_per_s * STEP_S)) if self._bytes_per_s else UNLIMITED_STEP_BYTES

    def wait(self, num_bytes: int) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_at = max(self._free_at, now_s) + num_bytes / self._bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


class Registry(ThreadingHTTPServer):
    """Its readers leave when they like: one that has taken a part over closes the other's connection."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve_registry(file: Path, bytes_per_s: float, certificate: Path | None) -> None:
    """The process of the registry: prints its address, and serves the file by ranges until it is killed."""
    throttle, data = Throttle(bytes_per_s), memoryview(file.read_bytes())

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, last = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
            self.send_response(206 if asked else 200)
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(data)}")
            self.send_header("Content-Length", str(last - first))
            self.send_header("ETag", '"1"')
            self.end_headers()
            try:
                for position in range(first, last, throttle.step_bytes):
                    step = data[position : min(position + throttle.step_bytes, last)]
                    throttle.wait(len(step))
                    self.wfile.write(step)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = Registry(("127.0.0.1", 0), Handler)
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "https" if certificate else "http"
    print(f"{scheme}://127.0.0.1:{server.server_address[1]}/weights.safetensors", flush=True)
    server.serve_forever()


def serve_peer(shm_dir: Path, bytes_per_s: float) -> None:
    """The process of one peer: prints its address, and serves until it is killed."""
    import uvicorn
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry

    from services.prefetcher.metrics import PrefetcherMetrics
    from services.prefetcher.peer_rest import peer_routes
    from services.prefetcher.settings import PrefetcherSettings

    settings = PrefetcherSettings(shm_dir=shm_dir, node_id="peer")
    app, link = FastAPI(), LinkMeter("peer/nic", bytes_per_s)
    app.include_router(peer_routes(settings, link, PrefetcherMetrics("peer", CollectorRegistry())))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await serving

    asyncio.run(run())


@contextmanager
def served(role: str, path: Path, bytes_per_s: float, certificate: Path | None = None) -> Iterator[str]:
    """A process of that role; yields its address."""
    command = [sys.executable, "-m", "bench.fetch", f"--{role}", str(path), "--bytes-per-s", str(bytes_per_s)]
    command += ["--certificate", str(certificate)] if certificate else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def weights(num_bytes: int) -> bytes:
    """Safetensors of equal layers, which lie in the file in another order than they are read."""
    layers = [f"model.layers.{n}.w" for n in range(NUM_LAYERS)]
    random.Random(1).shuffle(layers)
    names = ["lm_head.weight", *layers, "model.norm.weight", "model.embed_tokens.weight"]
    each = num_bytes // len(names)
    entries = {
        name: {"dtype": "U8", "shape": [each], "data_offsets": [n * each, (n + 1) * each]}
        for n, name in enumerate(names)
    }
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + os.urandom(each * len(names))


@dataclass(frozen=True)
class Took:
    """One fetch: seconds until it is whole, and until the first half of the layers was; processor seconds; bytes by
    holder."""

    whole_s: float
    half_s: float
    cpu_s: float
    by_holder: dict[str, int]


@dataclass
class Watch:
    """When the first half of the layers has landed, and the processor seconds of looking."""

    half_s: float = 0.0
    cpu_s: float = 0.0

    async def run(self, region: Region, began: float) -> None:
        while not self._has_half(region):
            await asyncio.sleep(0.01)
        self.half_s = time.perf_counter() - began

    def _has_half(self, region: Region) -> bool:
        began = time.thread_time()
        try:
            if (order := region.read_order()) is None or read_layout(region.directory) is None:
                return False
            wanted = [r for r in order.ranges if r.kind is not Kind.FINAL and r.layer < NUM_LAYERS // 2]
            return all(has_landed(region.directory, one.first, one.last) for one in wanted)
        finally:
            self.cpu_s += time.thread_time() - began


async def fetched(ref: WeightsRef, root: Path, peers: list[str]) -> Took:
    """The process of a reader."""
    source, region = open_source(ref.uri), Region.at(root, "reader", region_digest(ref))
    region.remove()
    readers = [PeerRegion(url, region.digest, "") for url in peers]

    async def granted(num_bytes: int) -> int:
        return num_bytes

    fetch = Fetch(ref, region, source, LinkMeter("reader/nic"), granted, options=FetchOptions(), peers=readers)
    began, cpu, watch = time.perf_counter(), time.process_time(), Watch()
    watching = asyncio.create_task(watch.run(region, began))
    await fetch.run()
    whole_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu - watch.cpu_s
    await watching
    await source.close()
    region.remove()
    return Took(whole_s, watch.half_s, cpu_s, fetch.tally.by_holder)


def read_by(tree: Path, ref: WeightsRef, root: Path, peers: list[str], certificate: Path | None) -> Took:
    """One fetch by a process that runs the code of that tree."""
    command = [sys.executable, __file__, "--read", str(root), "--uri", ref.uri, "--sha256", ref.sha256, *peers]
    env = {**os.environ, "PYTHONPATH": f"{tree / 'libs'}:{tree}"}
    env |= {"SSL_CERT_FILE": str(certificate / "cert.pem")} if certificate else {}
    ran = subprocess.run(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    return Took(**json.loads(ran.stdout))


def overheads(data: bytes) -> tuple[float, float, float]:
    """Seconds of one processor per gigabyte for sha256 and for pieces' checksums; milliseconds for the order."""
    began = time.process_time()
    hashlib.sha256(data)
    whole = time.process_time() - began
    layout, began = Layout.of([("", len(data))]), time.process_time()
    for index in range(layout.num_pieces):
        piece_digest(memoryview(data)[slice(*layout.piece(index))])
    pieces, began = time.process_time() - began, time.process_time()
    header = read_header(data[: 1 << 20], len(data))
    assert header is not None
    reading_order(layout, {"": header})
    order = time.process_time() - began
    return whole * 1e9 / len(data), pieces * 1e9 / len(data), order * 1e3


def measure(num_bytes: int, bytes_per_s: float, repeats: int, trees: dict[str, Path], *, tls: bool) -> None:
    data = weights(num_bytes)
    ref_sha = hashlib.sha256(data).hexdigest()
    whole, pieces, order = overheads(data)
    limit = f"each source at {bytes_per_s / 1e6:.0f} MB/s" if bytes_per_s else "not limited"
    print(f"{len(data) / 1e6:.0f} MB, {limit}{', by https' if tls else ''}")
    print(f"processor per GB: sha256 {whole:.2f} s, checksums of pieces {pieces:.2f} s; reading order {order:.1f} ms")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm, ExitStack() as servers:
        root, file = Path(shm), Path(shm) / "weights"
        file.write_bytes(data)
        certificate = root if tls else None
        if certificate:
            self_signed(certificate)
        uri = servers.enter_context(served("registry", file, bytes_per_s, certificate))
        ref = WeightsRef(uri=uri, sha256=ref_sha)
        urls = []
        for number in range(max(SOURCES) - 1):
            region = Region.at(root / f"peer-{number}", "peer", region_digest(ref))
            asyncio.run(filled(ref, region, file))
            urls.append(servers.enter_context(served("peer", root / f"peer-{number}", bytes_per_s)))
        print("sources   tree      whole s   floor s   half of the layers s   processor s/GB   from peers")
        for _ in range(repeats):
            for num in SOURCES:
                for name, tree in trees.items():
                    took = read_by(tree, ref, root, urls[: num - 1], certificate)
                    floor = f"{len(data) / num / bytes_per_s:7.2f}" if bytes_per_s else "      -"
                    share = 1 - took.by_holder.get("http", 0) / sum(took.by_holder.values())
                    cpu = took.cpu_s * 1e9 / len(data)
                    line = f"{num:7d}   {name:7s}   {took.whole_s:7.2f}   {floor}   {took.half_s:20.2f}   {cpu:14.2f}"
                    print(f"{line}   {share:9.0%}", flush=True)


async def filled(ref: WeightsRef, region: Region, file: Path) -> None:
    """A region as a peer has it that fetched it from the registry."""

    async def granted(num_bytes: int) -> int:
        return num_bytes

    source = open_source(str(file))
    await Fetch(ref, region, source, LinkMeter("fill"), granted).run()
    layout, data = read_layout(region.directory), region.blob.read_bytes()
    assert layout is not None
    digests = [piece_digest(data[slice(*layout.piece(index))]) for index in range(layout.num_pieces)]
    region.write_piece_digests(layout, digests)  # of a file's pieces there are none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--megabytes-per-s", type=float, default=20, help="0: as fast as it goes")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tls", action="store_true", help="the registry speaks https")
    parser.add_argument("--against", type=Path, help="another tree, whose readers fetch in turns with this one's")
    parser.add_argument("--registry", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--uri", default="", help=argparse.SUPPRESS)
    parser.add_argument("--sha256", default="", help=argparse.SUPPRESS)
    parser.add_argument("peers", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--bytes-per-s", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--certificate", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        serve_peer(given.peer, given.bytes_per_s)
    elif given.registry:
        serve_registry(given.registry, given.bytes_per_s, given.certificate)
    elif given.read:
        took = asyncio.run(fetched(WeightsRef(uri=given.uri, sha256=given.sha256), given.read, given.peers))
        print(json.dumps(asdict(took)))
    else:
        trees = {"this": Path(__file__).parents[1]} | ({"against": given.against} if given.against else {})
        num_bytes, bytes_per_s = int(given.megabytes * 1e6), given.megabytes_per_s * 1e6
        measure(num_bytes, bytes_per_s, given.repeats, trees, tls=given.tls)


if __name__ == "__main__":
    main()
