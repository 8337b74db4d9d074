"""Short requests to an engine, by HTTP or its control socket: one connection each, so that a hung engine holds no
resource."""

import asyncio
import contextlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glowplug.engines import control

MAX_ANSWER_BYTES = 4_000_000
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{[^\n]*\})?[ \t]+([^\s]+)", re.MULTILINE)


async def ask(
    url: str, path: str, timeout_s: float, *, method: str = "GET", body: bytes = b"", api_key: str = ""
) -> tuple[int, bytes]:
    """Raises OSError or TimeoutError without a complete answer."""
    async with asyncio.timeout(timeout_s):
        return await _exchange(url, path, method, body, api_key)


async def _exchange(url: str, path: str, method: str, body: bytes, api_key: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=MAX_ANSWER_BYTES)
    try:
        head = f"{method} {path} HTTP/1.0\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            head += f"Authorization: Bearer {api_key}\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()
        answer_head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length:\s*(\d+)", answer_head, re.IGNORECASE)
        answer = await (reader.readexactly(int(length[1])) if length else reader.read(MAX_ANSWER_BYTES))
        return int(answer_head.split(None, 2)[1]), answer
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        raise ConnectionError(f"{url}{path}: broken answer ({type(error).__name__})") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask_control(run_dir: Path, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """See control.py. Raises OSError when it does not listen, TimeoutError, and RuntimeError with an error inside."""
    async with asyncio.timeout(timeout_s):
        with control.address(run_dir) as address:
            reader, writer = await asyncio.open_unix_connection(address)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            line = await reader.readline()
        finally:
            writer.close()
    if not line:
        raise ConnectionResetError("the engine process hung up")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def sample_sum(exposition: bytes, names: tuple[str, ...]) -> float:
    wanted = {name.encode() for name in names}
    return sum(float(value) for name, value in _SAMPLE.findall(exposition) if name in wanted)
