"""A pipeline over several processes (HydraServe sections 4 and 6): the first stage answers clients and asks the later
ones, in order, for their part of each step.

Real: processes, connections, and bytes (activations, KV cache; zeros of the modelled size). Modelled: step times,
divided evenly. Departure: activations return to the first stage, which sends them on; in the paper each stage sends
them to the next.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 1 << 16
KV_CHUNK_BYTES = 1 << 20
DEFAULT_STAGE_TIMEOUT_S = 10.0  # real seconds without an answer
IDLE_S = 5.0  # an idle pipeline has no request in flight
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


class StageLost(Exception):
    """A later stage gave no valid answer."""


class StageLink:
    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self.url, self._api_key, self._timeout_s = url, api_key, timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking = asyncio.Lock()

    def another(self) -> "StageLink":
        return StageLink(self.url, self._api_key, self._timeout_s)

    async def ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Raises StageLost."""
        where = f"{self.url}{target.partition('?')[0]}"
        async with self._asking:
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, answer = await self._exchange(method, target, body)
            except TimeoutError as error:
                self.close()
                raise StageLost(f"{where}: no answer in {self._timeout_s:g} s") from error
            except (OSError, ValueError, IndexError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                self.close()
                raise StageLost(f"{where}: {type(error).__name__} {error}") from error
            except BaseException:  # cancelled in the middle of an answer
                self.close()
                raise
        if status != 200:
            raise StageLost(f"{where} says {status}: {answer[:300].decode('utf-8', 'replace')}")
        return answer

    async def _exchange(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        if self._streams is None:
            self._streams = await asyncio.open_connection(parts.hostname, parts.port, limit=MAX_HEAD_BYTES)
        reader, writer = self._streams
        head = f"{method} {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(body)}\r\n"
        head += f"authorization: Bearer {self._api_key}\r\n" if self._api_key else ""
        writer.write(head.encode() + b"\r\n")
        writer.write(body)
        await writer.drain()
        answer_head = await reader.readuntil(b"\r\n\r\n")
        status, length = int(answer_head.split(None, 2)[1]), _LENGTH.search(answer_head)
        if length is None:
            raise ValueError("an answer without its length")
        return status, await reader.readexactly(int(length[1]))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass(frozen=True, slots=True)
class StepPart:
    """Seconds are emulated."""

    seconds: float
    num_tokens: int
    kv_tokens: int
    num_running: int

    def target(self) -> str:
        fields = f"seconds={self.seconds!r}&tokens={self.num_tokens}&kv={self.kv_tokens}&running={self.num_running}"
        return f"/stage/step?{fields}"

    @classmethod
    def read(cls, query: dict[str, list[str]]) -> "StepPart":
        """Raises ValueError."""
        given = {name: values[-1] for name, values in query.items()}
        try:
            counts = [int(given[name]) for name in ("tokens", "kv", "running")]
            part = cls(float(given["seconds"]), *counts)
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        if min(counts) < 0 or not 0 <= part.seconds < float("inf"):
            raise ValueError("a number is below zero")
        return part


class Pipeline:
    """`hop_s` real seconds are added per hop (a modelled network)."""

    def __init__(self, links: Items[StageLink], activation_bytes: int, hop_s: float = 0.0) -> None:
        self._links, self._activation_bytes, self._hop_s = tuple(links), activation_bytes, hop_s
        self._bulk = tuple(link.another() for link in links)  # steps do not wait for KV cache
        self.num_bytes_moved = 0

    @property
    def num_stages(self) -> int:
        return len(self._links) + 1

    async def attach(self, instance_id: str) -> int:
        """Check each stage's part; return the tokens of the smallest KV cache. Raises StageLost."""
        num_tokens = []
        for number, link in enumerate(self._links, start=1):
            question = {"instance_id": instance_id, "stage": number, "num_stages": self.num_stages}
            answer = await link.ask("POST", "/stage/attach", json.dumps(question).encode())
            num_tokens.append(int(json.loads(answer)["kv_tokens"]))
        return min(num_tokens)

    async def step(self, part: StepPart) -> None:
        """Raises StageLost."""
        activations = bytes(part.num_tokens * self._activation_bytes)
        for link in self._links:
            await self._hop()
            activations = await link.ask("POST", part.target(), activations)
        await self._hop()

    async def _hop(self) -> None:
        if self._hop_s:
            await asyncio.sleep(self._hop_s)

    async def take_kv(self, num_tokens: int, bytes_per_token: int) -> None:
        """Fetch from all later stages in parallel; `bytes_per_token` is per stage. Raises StageLost."""
        at_once = max(1, KV_CHUNK_BYTES // max(1, bytes_per_token))

        async def take(link: StageLink) -> None:
            for position in range(0, num_tokens, at_once):
                chunk = await link.ask("GET", f"/stage/kv?tokens={min(at_once, num_tokens - position)}")
                self.num_bytes_moved += len(chunk)

        await asyncio.gather(*(take(link) for link in self._bulk))

    def close(self) -> None:
        for link in (*self._links, *self._bulk):
            link.close()


@dataclass(slots=True)
class Carried:
    bytes_per_token: int  # of this stage's KV cache
    kv_tokens: int = 0
    num_running: int = 0
    stepped_at: float = float("-inf")  # event loop's clock

    def stepped(self, part: StepPart, now_s: float) -> None:
        self.kv_tokens, self.num_running, self.stepped_at = part.kv_tokens, part.num_running, now_s

    def kv_bytes(self, now_s: float) -> int:
        return self.kv_tokens * self.bytes_per_token if self.is_passing(now_s) else 0

    def requests(self, now_s: float) -> int:
        return self.num_running if self.is_passing(now_s) else 0

    def is_passing(self, now_s: float) -> bool:
        return now_s - self.stepped_at < IDLE_S


async def ended(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StageLost):
        await task
