"""A pipeline over several of these processes (HydraServe sections 4 and 6): each holds its part of the layers, the
first one answers clients and asks the later ones, in order, for their part of every step.

Real: the processes, the connections, and the bytes on them (activations of a step's tokens, KV cache of a
consolidation; zeros of the size that the modelled model has). Modelled: the time of a step, an even part at each stage.
Departure: activations come back to the first stage, which sends them on; in the paper each stage sends them to the
next.
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
DEFAULT_STAGE_TIMEOUT_S = 10.0  # real seconds until a stage that does not answer is lost
IDLE_S = 5.0  # after so long without a step a pipeline has no request under way
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


class StageLost(Exception):
    """A later stage does not answer, or not as it must: the pipeline cannot go on."""


class StageLink:
    """One connection to a later stage, held open between questions, which go one after the other."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self.url, self._api_key, self._timeout_s = url, api_key, timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._asking = asyncio.Lock()

    def another(self) -> "StageLink":
        """A second connection to the same stage."""
        return StageLink(self.url, self._api_key, self._timeout_s)

    async def ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        """The body of its answer. Raises StageLost."""
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
            except BaseException:  # cancelled in the middle of an answer, which nobody reads any more
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
    """What a later stage is told of one step: its own seconds (emulated), and what the pipeline holds after it."""

    seconds: float
    num_tokens: int  # that pass through
    kv_tokens: int  # whose keys and values are kept
    num_running: int

    def target(self) -> str:
        fields = f"seconds={self.seconds!r}&tokens={self.num_tokens}&kv={self.kv_tokens}&running={self.num_running}"
        return f"/stage/step?{fields}"

    @classmethod
    def read(cls, query: dict[str, list[str]]) -> "StepPart":
        """Raises ValueError for what is missing or no number."""
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
    """The later stages, as the first one sees them. `hop_s` real seconds are added to each way of a step (a modelled
    network)."""

    def __init__(self, links: Items[StageLink], activation_bytes: int, hop_s: float = 0.0) -> None:
        self._links, self._activation_bytes, self._hop_s = tuple(links), activation_bytes, hop_s
        self._bulk = tuple(link.another() for link in links)  # so that no step waits for KV cache that moves
        self.num_bytes_moved = 0  # of KV cache

    @property
    def num_stages(self) -> int:
        return len(self._links) + 1

    async def attach(self, instance_id: str) -> int:
        """Make sure that each is there and has its part. Returns the tokens that the smallest of their KV caches holds.
        Raises StageLost."""
        num_tokens = []
        for number, link in enumerate(self._links, start=1):
            question = {"instance_id": instance_id, "stage": number, "num_stages": self.num_stages}
            answer = await link.ask("POST", "/stage/attach", json.dumps(question).encode())
            num_tokens.append(int(json.loads(answer)["kv_tokens"]))
        return min(num_tokens)

    async def step(self, part: StepPart) -> None:
        """Have each stage do its part of a step, one after the other. Raises StageLost."""
        activations = bytes(part.num_tokens * self._activation_bytes)
        for link in self._links:
            await self._hop()
            activations = await link.ask("POST", part.target(), activations)
        await self._hop()

    async def _hop(self) -> None:
        if self._hop_s:
            await asyncio.sleep(self._hop_s)

    async def take_kv(self, num_tokens: int, bytes_per_token: int) -> None:
        """Bring the keys and values of so many tokens over, from all later stages side by side. `bytes_per_token` of
        one stage. Raises StageLost."""
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
    """What a later stage knows of the pipeline that passes through it. An idle pipeline does not say that it is."""

    bytes_per_token: int  # of KV cache, of this stage's layers
    kv_tokens: int = 0
    num_running: int = 0
    stepped_at: float = float("-inf")  # on the event loop's clock

    def stepped(self, part: StepPart, now_s: float) -> None:
        self.kv_tokens, self.num_running, self.stepped_at = part.kv_tokens, part.num_running, now_s

    def kv_bytes(self, now_s: float) -> int:
        return self.kv_tokens * self.bytes_per_token if self.is_passing(now_s) else 0

    def requests(self, now_s: float) -> int:
        return self.num_running if self.is_passing(now_s) else 0

    def is_passing(self, now_s: float) -> bool:
        """Whether there was a step lately."""
        return now_s - self.stepped_at < IDLE_S


async def ended(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, StageLost):
        await task
