"""How a llama.cpp engine gives its memory back and takes it again, inside its own process.

On host memory an idle engine keeps its server and its port, and gives pages back: those of the KV cache ("prewarmed"),
or of the mapped weights too ("swapped_out"). They fault in again when they are used, weights from the region in host
memory.
Where the KV cache cannot be found, or does not lie in host memory, the server is dropped and built again on the same
port.

A wake is proven: the first token's five likeliest, with their log probabilities, are as they were when the engine
started. If they are not, the server is built again; if that does not help either, the wake fails.
"""

import array
import contextlib
import ctypes
import gc
import http.client
import json
import math
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glowplug.engines import rendezvous
from glowplug.engines.listener import Listener, end_connections
from glowplug.engines.llamacpp_lora import Adapters

# Pages of this process: which are all zeros, and giving them back to the kernel. Linux only.
#
# llama.cpp fills its KV cache with zeros when it makes a context. At that moment nothing else of its length is zero
# and resident, so the cache is found from the outside, without a change to llama.cpp. Pages that are given back read
# as zeros when they are touched again: as llama.cpp left them. Standard library only, since engine processes import
# it.

CHUNK_BYTES = 1 << 18
_PRESENT = 1 << 63  # in an entry of /proc/self/pagemap: the page is in memory
_PRESENT_BYTE = 1 << 7  # ... in its last byte
_ENTRY_BYTES = 8
_AROUND_BYTES = (1 << 21, 1 << 16)  # what a fault on a file's page brings in: a large folio, or fault_around_bytes
_SAMPLE_BYTES = 64
_ZEROS = bytes(CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Pages:
    """Addresses from `start` up to `end`, multiples of the page size."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def zero_runs(least_bytes: int) -> list[Pages]:
    """Runs of private memory that is resident and zero, of at least `least_bytes`, in whole chunks. Nothing may write
    to them meanwhile. The chunks at both ends are read whole, those between at three places each, so a run is all zeros
    with near certainty. Raises OSError where the kernel does not let a process look at itself."""
    candidates = [pages for pages in _private() if pages.num_bytes >= least_bytes]
    if not candidates:
        return []
    own = Path("/proc/self")
    with (own / "pagemap").open("rb", buffering=0) as pagemap, (own / "mem").open("rb", buffering=0) as memory:
        runs = [run for pages in candidates for run in _runs_of(pages, pagemap.fileno(), memory.fileno())]
    return [run for run in runs if run.num_bytes >= least_bytes]


def _private() -> list[Pages]:
    """Mappings of this process that can be written and have no file behind them."""
    return [pages for pages, permissions, path, _ in _mappings() if permissions == "rw-p" and path in ("", "[heap]")]


def mapped(path: Path) -> list[Pages]:
    """Where this process has mapped that file, deleted or not; none on another system than Linux."""
    return [pages for pages, _ in _mapped(path)]


def num_bytes_read(path: Path, spans: Iterable[tuple[int, int]]) -> int:
    """Bytes of those spans (first byte, end) of a mapped file in which this process has read since its pages were last
    given back; 0 on another system than Linux. A span counts whole: of a table one row may have been read. The kernel
    brings neighbours of a page in with it, so that what lies near the ends of a long span says nothing; where it keeps
    the file in large folios it brings all of one in (Linux 6.18), and short spans seem to have been read."""
    mappings = _mapped(path)
    if not mappings:
        return 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        return sum(end - first for first, end in spans if _was_read(first, end, mappings, pagemap.fileno()))


def _was_read(first: int, end: int, mappings: list[tuple[Pages, int]], pagemap: int) -> bool:
    margin = next((one for one in _AROUND_BYTES if end - first > 2 * one + mmap.PAGESIZE), 0)
    first, end = first + margin, end - margin
    for pages, offset in mappings:
        low, high = max(first, offset), min(end, offset + pages.num_bytes)
        if low < high:
            start = (pages.start + low - offset) // mmap.PAGESIZE
            stop = (pages.start + high - offset - 1) // mmap.PAGESIZE + 1
            entries = os.pread(pagemap, (stop - start) * _ENTRY_BYTES, start * _ENTRY_BYTES)
            if max(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES], default=0) & _PRESENT_BYTE:
                return True
    return False


def _mapped(path: Path) -> list[tuple[Pages, int]]:
    """(addresses, first byte of the file) of each mapping of it."""
    name = str(path.resolve())
    return [(pages, offset) for pages, _, at, offset in _mappings() if at.removesuffix(" (deleted)") == name]


def _mappings() -> list[tuple[Pages, str, str, int]]:
    """(addresses, permissions, path or "", first byte of its file) of each mapping."""
    if sys.platform != "linux":
        return []
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, offset, _, _, *path = line.split(maxsplit=5)
        low, high = addresses.split("-")
        found.append((Pages(int(low, 16), int(high, 16)), permissions, path[0] if path else "", int(offset, 16)))
    return found


def _runs_of(within: Pages, pagemap: int, memory: int) -> Iterator[Pages]:
    begins, end = -1, within.end - within.num_bytes % CHUNK_BYTES
    for at in range(within.start, end + 1, CHUNK_BYTES):
        if at < end and _is_resident(at, pagemap) and _samples_are_zero(at, memory):
            begins = at if begins < 0 else begins
        elif begins >= 0:
            yield _trimmed(begins, at, memory)
            begins = -1


def _is_resident(at: int, pagemap: int) -> bool:
    """Asked first: reading a page that was never touched would make it look like one that holds zeros."""
    num_pages = CHUNK_BYTES // mmap.PAGESIZE
    entries = array.array("Q", os.pread(pagemap, num_pages * _ENTRY_BYTES, at // mmap.PAGESIZE * _ENTRY_BYTES))
    return len(entries) == num_pages and min(entries) >= _PRESENT


def _samples_are_zero(at: int, memory: int) -> bool:
    places = (at, at + CHUNK_BYTES // 2, at + CHUNK_BYTES - _SAMPLE_BYTES)
    return all(os.pread(memory, _SAMPLE_BYTES, place) == _ZEROS[:_SAMPLE_BYTES] for place in places)


def _trimmed(start: int, end: int, memory: int) -> Pages:
    while start < end and os.pread(memory, CHUNK_BYTES, start) != _ZEROS:
        start += CHUNK_BYTES
    while start < end and os.pread(memory, CHUNK_BYTES, end - CHUNK_BYTES) != _ZEROS:
        end -= CHUNK_BYTES
    return Pages(start, end)


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind; 0 on another system than Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
    return 0


def give_back(runs: Iterable[Pages]) -> None:
    """Their memory is free at once. Private pages read as zeros from now on, mapped ones as their file has them. Raises
    OSError."""
    for run in runs:
        _advise(run, mmap.MADV_DONTNEED)


def give_back_small(runs: Iterable[Pages]) -> None:
    """`give_back` of mapped pages, so that from now on they come back a few at a time, and never as huge ones. Raises
    OSError."""
    for run in runs:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            _advise(run, mmap.MADV_NOHUGEPAGE)
        _advise(run, mmap.MADV_DONTNEED)


def _advise(run: Pages, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(run.start, run.num_bytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")


PREWARMED, SWAPPED_OUT = "prewarmed", "swapped_out"
SLOTS = "slots"  # a folder of the run directory
_NAMED = '{"filename": "opening.bin"}'
_LONGEST_OPENING = 4096  # characters: some thousand tokens
_BROKEN_OFF_S, _POLL_S = 2.5, 0.002  # llama.cpp notices within a second or so that a client has left
_TRIES = 3
_TIMEOUT_S = 120.0
_CANARY = {"prompt": "Hello", "temperature": 0, "logprobs": 5, "cache_prompt": False}
NO_ADAPTER = {"lora": [{"id": 0, "scale": 0}]}  # else it would go on from what a slot has cached of an adapter
_SAME = 1e-3  # of a log probability; another order of additions changes less
_LEAST_RUN_BYTES = 1 << 20
_LOAD_BYTES = 64 << 20  # that a load takes besides weights and KV cache: the vocabulary, buffers; 30 MB of SmolLM2
_FOUND = 0.9  # of the planned KV cache: chunks at its ends are not counted
_RUNNING = re.compile(r"^llamacpp:requests_(?:processing|deferred)[ \t]+(\S+)", re.MULTILINE)

Likeliest = dict[int, float]  # id of a token -> its log probability


class EngineServer:
    """One llama.cpp server, which may be built more than once; `build(port)` makes it. `run_dir` is its own; `tensors`:
    where they lie in the file of its weights, (first byte, end) of each."""

    def __init__(
        self,
        build: Callable[[int], Any],
        kv_bytes: int,
        weights: Path,
        host_memory: bool,
        run_dir: Path,
        tensors: Sequence[tuple[int, int]] = (),
        adapters: Adapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._build, self._weights, self._run_dir = build, weights, run_dir
        self._tensors = tensors if host_memory else ()
        before = anonymous_bytes()
        self._server: Any = build(0)
        self._own_bytes = max(0, anonymous_bytes() - before - kv_bytes)
        self.address: str = self._server.listening_address
        self._listener = Listener(self.port, run_dir) if sys.platform == "linux" else None
        self._kv = kv_pages(kv_bytes) if host_memory else []
        if host_memory:  # what the first token reads comes back, and shows what of the weights is read in place
            give_back_small(mapped(weights))
        self._num_slots = 0
        self._likeliest: Likeliest = {}
        self.step_s = 0.0  # seconds of a decode step, as `warm_up` has seen; 0: not known
        self._opening: bool | None = None  # whether it is kept in a file; None: nobody has looked yet
        self.becomes = ""  # PREWARMED or SWAPPED_OUT while it sleeps

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    def warm_up(self) -> dict[str, Any]:
        """Two tokens through the whole path, so that READY means answering; the second one is a step alone (`step_s`).
        Returns llama.cpp's /props. Raises RuntimeError when it does not answer."""
        self._likeliest = self._canary(num_tokens=2)
        props: dict[str, Any] = json.loads(self._ask("GET", "/props"))
        self._num_slots = int(props["total_slots"])
        return props

    def shared_bytes(self) -> int:
        """Of the weights' file, the tensors that are read in the pages that every engine of them reads: after
        `warm_up`. llama.cpp repacks some kinds for the processor, and reads its own copy of those.

        Two measures have to agree: whose pages came back with the first token, and how much memory of its own the load
        took. Where a kernel brings many pages in at once the first one sees too much, and the second one counts."""
        whole = sum(end - first for first, end in self._tensors)
        shared = num_bytes_read(self._weights, self._tensors) if whole else 0
        if self._own_bytes > whole - shared + max(_LOAD_BYTES, whole // 8):
            shared = min(shared, max(0, whole - self._own_bytes))
        return shared

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What the driver asks: {"do": "sleep", "becomes", "if_idle"}, {"do": "wake"}, {"do": "state"}, {"do":
        "load_adapter", "number", "path"} or {"do": "unload_adapter", "number"}. Returns {"state", "how", "running"}: of
        a sleep that was to be only if it is idle, the requests for which it serves on. Raises RuntimeError, and
        ValueError for another question."""
        do, num_running = question.get("do"), 0
        if do == "sleep":
            num_running = self._sleep(question["becomes"], if_idle=bool(question.get("if_idle")))
        elif do == "wake":
            self._wake()
        elif do == "load_adapter":
            self._load_adapter(int(question["number"]), Path(question["path"]))
        elif do == "unload_adapter":
            if self._adapters is not None:
                self._adapters.unload(int(question["number"]))
        elif do != "state":
            raise ValueError(f"unknown question: {do!r}")
        return {"state": self.becomes or "awake", "how": "pages" if self._kv else "server", "running": num_running}

    def _load_adapter(self, number: int, path: Path) -> None:
        if self._adapters is None:
            raise RuntimeError("it was started for no adapters")
        if self._server is None:
            raise RuntimeError("it sleeps")
        if self._adapters.load(number, path):
            self._erase_slots()  # what they have cached of requests with that number was another adapter's

    def _erase_slots(self) -> None:
        for slot in range(self._num_slots):
            self._ask("POST", f"/slots/{slot}?action=erase")

    def _sleep(self, becomes: str, *, if_idle: bool) -> int:
        """By pages where nothing runs, else by ending the server and what runs in it. Returns how many requests run
        that keep it awake."""
        if becomes not in (PREWARMED, SWAPPED_OUT):
            raise ValueError(f"an engine does not become {becomes!r}")
        if self._server is None:
            self.becomes = becomes
            return 0
        if self._listener is not None:
            self._listener.refuse()
        num_running = self._num_running()
        if not num_running:
            end_connections(self.port)  # idle ones: a request on its way in one of them is sent elsewhere
            num_running = self._until_idle()
        if num_running and if_idle:
            self._serve()
            return num_running
        if num_running or not self._kv:
            if becomes == PREWARMED:
                self._serve()
                raise RuntimeError("its KV cache was not found in host memory, or requests still run in it")
            self._drop()
        else:
            self._keep_opening()
            self._give_back(becomes)
        self.becomes = becomes
        return 0

    def _serve(self) -> None:
        if self._listener is not None:
            self._listener.serve()

    def _drop(self) -> None:
        """End the server, whose port refuses connections then."""
        end_connections(self.port)  # a server that is dropped waits for its clients, and they for answers
        self._server = None
        gc.collect()
        if self._adapters is not None:
            self._adapters.forget()
        if self._listener is not None:
            self._listener.close()

    def _rebuild(self) -> None:
        self._server = self._build(self.port)
        if self._listener is not None:
            self._listener = Listener(self.port, self._run_dir)
            self._listener.refuse()

    def _give_back(self, becomes: str) -> None:
        """Nothing runs but what came in this moment on a connection that is broken off: nobody reads its answer, and
        what it has touched is given back too. Raises RuntimeError where there is no end of it."""
        for _ in range(_TRIES):
            self._erase_slots()  # else the next prompt would count on what its slot has cached
            give_back([*self._kv, *(mapped(self._weights) if becomes == SWAPPED_OUT else [])])
            if not self._num_running():
                return
            self._until_idle()
        raise RuntimeError("requests still arrive although the engine refuses them")

    def _until_idle(self) -> int:
        """Wait a while for requests whose connections are broken off. Returns how many run on."""
        deadline = time.monotonic() + _BROKEN_OFF_S
        while (num_running := self._num_running()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return num_running

    def _num_running(self) -> int:
        return int(sum(float(value) for value in _RUNNING.findall(str(self._server.handle_metrics()))))

    def _wake(self) -> None:
        if self._server is None:
            self._rebuild()
        if not self._is_itself():
            print("after its wake it does not answer as it did at its start: its server is built again", flush=True)
            self._kv = []  # what was given back was not, or not only, the KV cache
            self._drop()
            self._rebuild()
            if not self._is_itself():
                raise RuntimeError("it does not answer as it did at its start")
        self._bring_opening()
        self.becomes = ""
        self._serve()

    # how every chat begins

    def _keep_opening(self) -> None:
        """Before the first sleep: have a slot hold what the chat template puts before every conversation, and keep its
        part of the KV cache in a file. Whoever waits for the wake then waits for his own words' prefill alone."""
        if self._opening is not None:
            return
        self._opening = False
        try:
            text = self._opening_text()
            asked = {"prompt": text, "n_predict": 0, "cache_prompt": True, "id_slot": 0, **NO_ADAPTER}
            if not text or json.loads(self._ask("POST", "/completion", json.dumps(asked)))["tokens_evaluated"] < 2:
                return
            slots_dir = self._run_dir / SLOTS
            slots_dir.chmod(0o700)
            try:
                self._ask("POST", "/slots/0?action=save", _NAMED)
            finally:
                slots_dir.chmod(0o500)
        except (RuntimeError, OSError, KeyError, ValueError) as error:  # embeddings have no chats, others no template
            print(f"no opening of its chats is kept: {error}", flush=True)
            return
        self._opening = True

    def _opening_text(self) -> str:
        """What two conversations that share no word begin with; "" where that is nothing, or too much to keep."""
        asked = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("a", "b")]
        whole = [str(json.loads(self._ask("POST", "/apply-template", one))["prompt"]) for one in asked]
        alike = [one == other for one, other in zip(*whole, strict=False)]
        text = whole[0][: alike.index(False)] if False in alike else ""
        return text if len(text) <= _LONGEST_OPENING else ""

    def _bring_opening(self) -> None:
        """Into each slot, since a burst fills several."""
        for slot in range(self._num_slots if self._opening else 0):
            self._ask("POST", f"/slots/{slot}?action=restore", _NAMED)

    # questions to the server

    def _is_itself(self) -> bool:
        now, then = self._canary(), self._likeliest
        return now.keys() == then.keys() and all(math.isclose(now[t], then[t], abs_tol=_SAME) for t in then)

    def _canary(self, num_tokens: int = 1) -> Likeliest:
        """The likeliest first tokens of the same short answer."""
        said = json.loads(self._ask("POST", "/v1/completions", json.dumps({**_CANARY, "max_tokens": num_tokens})))
        self.step_s = _step_s(said.get("timings") or {}) or self.step_s
        tokens = (said["choices"][0].get("logprobs") or {}).get("content") or []
        return {int(top["id"]): float(top["logprob"]) for token in tokens[:1] for top in token["top_logprobs"]}

    def _ask(self, method: str, path: str, body: str = "") -> bytes:
        parts = urlsplit(self.address)
        headers = {"Content-Type": "application/json"}
        if api_key := os.environ.get(rendezvous.API_KEY, ""):
            headers["Authorization"] = f"Bearer {api_key}"
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
        if self._listener is not None:
            connection.sock = self._listener.connected()
            connection.sock.settimeout(_TIMEOUT_S)
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


def _step_s(timings: dict[str, Any]) -> float:
    """Seconds of one step, from llama.cpp's own clock: it runs from the first token, which came with the prompt."""
    num_steps = int(timings.get("predicted_n") or 0) - 1
    return float(timings["predicted_ms"]) / 1e3 / num_steps if num_steps > 0 else 0.0


def kv_pages(kv_bytes: int) -> list[Pages]:
    """The one run of zeros that is as long as a KV cache of `kv_bytes`, which has just been made; empty where there is
    none, or more than one, or where the kernel does not let a process look at itself."""
    try:
        runs = zero_runs(max(_LEAST_RUN_BYTES, int(kv_bytes * _FOUND)))  # smaller mappings are not looked at
    except OSError as error:
        print(f"its KV cache is not looked for: {error}", flush=True)
        return []
    fitting = [run for run in runs if kv_bytes * _FOUND <= run.num_bytes <= kv_bytes]
    return fitting if len(fitting) == 1 else []
