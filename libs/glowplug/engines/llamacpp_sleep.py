"""How a llama.cpp engine gives its memory back and takes it again, inside its own process.

On host memory an idle engine keeps its server and its port, and gives pages back: those of the KV cache ("prewarmed"),
or of the mapped weights too ("swapped_out"). They fault in again when they are used, weights from the region in host
memory.
Where the KV cache cannot be found, or does not lie in host memory, the server is dropped and built again on the same
port.

A wake is proven: the first token's five likeliest, with their log probabilities, are as they were when the engine
started. If they are not, the server is built again; if that does not help either, the wake fails.
"""

import contextlib
import gc
import http.client
import json
import math
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glowplug.engines import pages, rendezvous
from glowplug.engines.pages import Pages

PREWARMED, SWAPPED_OUT = "prewarmed", "swapped_out"
_TIMEOUT_S = 120.0
_CANARY = {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "logprobs": 5, "cache_prompt": False}
_SAME = 1e-3  # of a log probability; another order of additions changes less
_LEAST_RUN_BYTES = 1 << 20
_LOAD_BYTES = 64 << 20  # that a load takes besides weights and KV cache: the vocabulary, buffers; 30 MB of SmolLM2
_FOUND = 0.9  # of the planned KV cache: chunks at its ends are not counted
_RUNNING = re.compile(r"^llamacpp:requests_(?:processing|deferred)[ \t]+(\S+)", re.MULTILINE)

Likeliest = dict[int, float]  # id of a token -> its log probability


class EngineServer:
    """One llama.cpp server, which may be built more than once; `build(port)` makes it. `tensors`: where they lie in the
    file of its weights, (first byte, end) of each."""

    def __init__(
        self,
        build: Callable[[int], Any],
        kv_bytes: int,
        weights: Path,
        host_memory: bool,
        tensors: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._build, self._weights, self._tensors = build, weights, tensors if host_memory else ()
        before = pages.anonymous_bytes()
        self._server: Any = build(0)
        self._own_bytes = max(0, pages.anonymous_bytes() - before - kv_bytes)
        self.address: str = self._server.listening_address
        self._kv = kv_pages(kv_bytes) if host_memory else []
        if host_memory:  # what the first token reads comes back, and shows what of the weights is read in place
            pages.give_back_small(pages.mapped(weights))
        self._num_slots = 0
        self._likeliest: Likeliest = {}
        self.becomes = ""  # PREWARMED or SWAPPED_OUT while it sleeps

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    def warm_up(self) -> dict[str, Any]:
        """One token through the whole path, so that READY means answering. Returns llama.cpp's /props. Raises
        RuntimeError when it does not answer."""
        self._likeliest = self._canary()
        props: dict[str, Any] = json.loads(self._ask("GET", "/props"))
        self._num_slots = int(props["total_slots"])
        return props

    def shared_bytes(self) -> int:
        """Of the weights' file, the tensors that are read in the pages that every engine of them reads: after
        `warm_up`. llama.cpp repacks some kinds for the processor, and reads its own copy of those.

        Two measures have to agree: whose pages came back with the first token, and how much memory of its own the load
        took. Where a kernel brings many pages in at once the first one sees too much, and the second one counts."""
        whole = sum(end - first for first, end in self._tensors)
        shared = pages.num_bytes_read(self._weights, self._tensors) if whole else 0
        if self._own_bytes > whole - shared + max(_LOAD_BYTES, whole // 8):
            shared = min(shared, max(0, whole - self._own_bytes))
        return shared

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the driver asks: {"do": "sleep", "becomes"}, {"do": "wake"} or {"do": "state"}. Returns {"state",
        "how"}. Raises RuntimeError, and ValueError for another question."""
        do = question.get("do")
        if do == "sleep":
            self._sleep(question["becomes"])
        elif do == "wake":
            self._wake()
        elif do != "state":
            raise ValueError(f"no {do!r} is known")
        return {"state": self.becomes or "awake", "how": "pages" if self._kv else "server"}

    def _sleep(self, becomes: str) -> None:
        """By pages where nothing runs, else by ending the server and what runs in it."""
        if becomes not in (PREWARMED, SWAPPED_OUT):
            raise ValueError(f"an engine does not become {becomes!r}")
        if not (self._kv and self._server is not None and self._give_back(becomes)):
            if becomes == PREWARMED:
                raise RuntimeError("its KV cache was not found in host memory, or requests still run in it")
            end_connections(self.port)  # a server that is dropped waits for its clients, and they for answers
            self._server = None
            gc.collect()
        self.becomes = becomes

    def _give_back(self, becomes: str) -> bool:
        """False where requests run, or have come meanwhile: those must not go on, since their cache is gone."""
        if self._num_running():
            return False
        for slot in range(self._num_slots):  # else the next prompt would count on what its slot has cached
            self._ask("POST", f"/slots/{slot}?action=erase")
        if self._num_running():
            return False
        pages.give_back([*self._kv, *(pages.mapped(self._weights) if becomes == SWAPPED_OUT else [])])
        return not self._num_running()

    def _num_running(self) -> float:
        text = self._ask("GET", "/metrics").decode()
        return sum(float(value) for value in _RUNNING.findall(text))

    def _wake(self) -> None:
        if self._server is None:
            self._server = self._build(self.port)
        if not self._is_itself():
            print("after its wake it does not answer as it did at its start: its server is built again", flush=True)
            self._kv = []  # what was given back was not, or not only, the KV cache
            self._server = None
            gc.collect()
            self._server = self._build(self.port)
            if not self._is_itself():
                raise RuntimeError("it does not answer as it did at its start")
        self.becomes = ""

    def _is_itself(self) -> bool:
        now, then = self._canary(), self._likeliest
        return now.keys() == then.keys() and all(math.isclose(now[t], then[t], abs_tol=_SAME) for t in then)

    def _canary(self) -> Likeliest:
        choice = json.loads(self._ask("POST", "/v1/completions", json.dumps(_CANARY)))["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        return {int(top["id"]): float(top["logprob"]) for token in tokens for top in token["top_logprobs"]}

    def _ask(self, method: str, path: str, body: str = "") -> bytes:
        parts = urlsplit(self.address)
        headers = {"Content-Type": "application/json"}
        if api_key := os.environ.get(rendezvous.API_KEY, ""):
            headers["Authorization"] = f"Bearer {api_key}"
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            shown = text[:500].decode("utf-8", "replace")
            raise RuntimeError(f"{path} answered {answer.status} to the engine's own process: {shown}")
        return text


def end_connections(port: int) -> None:
    """Break off every connection that this process has accepted at `port`."""
    for open_file in Path("/proc/self/fd").iterdir():
        try:
            fd = os.dup(int(open_file.name))
        except OSError:
            continue  # it was the directory's own
        try:
            accepted = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue  # it is no socket
        with accepted, contextlib.suppress(OSError):  # one that listens has no peer
            if accepted.family in (socket.AF_INET, socket.AF_INET6) and accepted.getsockname()[1] == port:
                accepted.getpeername()
                accepted.shutdown(socket.SHUT_RDWR)


def kv_pages(kv_bytes: int) -> list[Pages]:
    """The one run of zeros that is as long as a KV cache of `kv_bytes`, which has just been made; empty where there is
    none, or more than one, or where the kernel does not let a process look at itself."""
    try:
        runs = pages.zero_runs(max(_LEAST_RUN_BYTES, int(kv_bytes * _FOUND)))  # smaller mappings are not looked at
    except OSError as error:
        print(f"its KV cache is not looked for: {error}", flush=True)
        return []
    fitting = [run for run in runs if kv_bytes * _FOUND <= run.num_bytes <= kv_bytes]
    return fitting if len(fitting) == 1 else []
