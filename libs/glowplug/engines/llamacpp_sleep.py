"""Give a llama.cpp engine's memory back and take it again, inside its own process.

On host memory an idle engine gives pages back: those of the KV cache ("prewarmed"), and of the mapped weights too
("swapped_out"). They fault in again on use. Where the KV cache cannot be found, or is not in host memory, the server is
dropped and rebuilt on the same port.
A wake is proven: the first token's five likeliest, with log probabilities, match those at the start. Otherwise the
server is rebuilt once; then the wake fails.
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

# Find zero pages of this process and give them back to the kernel. Linux only; standard library only.
# llama.cpp zeroes a new KV cache; nothing else of that length is zero and resident then, so it is found without a
# change to llama.cpp. Pages given back read as zeros on the next touch, as llama.cpp left them.

CHUNK_BYTES = 1 << 18
_PRESENT = 1 << 63  # page-present bit of a /proc/self/pagemap entry
_PRESENT_BYTE = 1 << 7
_ENTRY_BYTES = 8
_AROUND_BYTES = (1 << 21, 1 << 16)  # read in by a fault on a file's page: a large folio, or fault_around_bytes
_SAMPLE_BYTES = 64
_ZEROS = bytes(CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Pages:
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def zero_runs(least_bytes: int) -> list[Pages]:
    """Runs of resident, zero private memory of at least `least_bytes`, in whole chunks, not written meanwhile. End
    chunks are read whole, others at three places. Raises OSError where the kernel forbids a process to inspect
    itself."""
    candidates = [pages for pages in _private() if pages.num_bytes >= least_bytes]
    if not candidates:
        return []
    own = Path("/proc/self")
    with (own / "pagemap").open("rb", buffering=0) as pagemap, (own / "mem").open("rb", buffering=0) as memory:
        runs = [run for pages in candidates for run in _runs_of(pages, pagemap.fileno(), memory.fileno())]
    return [run for run in runs if run.num_bytes >= least_bytes]


def _private() -> list[Pages]:
    return [pages for pages, permissions, path, _ in _mappings() if permissions == "rw-p" and path in ("", "[heap]")]


def mapped(path: Path) -> list[Pages]:
    """Mappings of that file, deleted or not; none off Linux."""
    return [pages for pages, _ in _mapped(path)]


def num_bytes_read(path: Path, spans: Iterable[tuple[int, int]]) -> int:
    """Bytes of those spans (first byte, end) of a mapped file read since its pages were last given back; 0 off
    Linux. A span counts whole. The kernel reads in a page's neighbours, so the ends of a long span prove nothing;
    with large folios (Linux 6.18) short spans may seem read."""
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
    name = str(path.resolve())
    return [(pages, offset) for pages, _, at, offset in _mappings() if at.removesuffix(" (deleted)") == name]


def _mappings() -> list[tuple[Pages, str, str, int]]:
    """(addresses, permissions, path or "", first byte in its file) of each mapping."""
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
    """Checked first: reading a never-touched page would make it look zero and resident."""
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
    """Private memory without a file; 0 off Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
    return 0


def give_back(runs: Iterable[Pages]) -> None:
    """Private pages then read as zeros, mapped ones as their file. Raises OSError."""
    for run in runs:
        _advise(run, mmap.MADV_DONTNEED)


def give_back_small(runs: Iterable[Pages]) -> None:
    for run in runs:
        with contextlib.suppress(OSError):
            _advise(run, mmap.MADV_NOHUGEPAGE)
        _advise(run, mmap.MADV_DONTNEED)


def _advise(run: Pages, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(run.start, run.num_bytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")


PREWARMED, SWAPPED_OUT = "prewarmed", "swapped_out"
SLOTS = "slots"
_NAMED = '{"filename": "opening.bin"}'
_LONGEST_OPENING = 4096  # characters: some thousand tokens
_BROKEN_OFF_S, _POLL_S = 2.5, 0.002  # llama.cpp notices a disconnected client within about a second
_TRIES = 3
_TIMEOUT_S = 120.0
_CANARY = {"prompt": "Hello", "temperature": 0, "logprobs": 5, "cache_prompt": False}
NO_ADAPTER = {"lora": [{"id": 0, "scale": 0}]}  # else it would continue from a slot's cache of an adapter
_SAME = 1e-3  # of a log probability; a different order of additions changes less
_LEAST_RUN_BYTES = 1 << 20
_LOAD_BYTES = 64 << 20  # a load's memory besides weights and KV cache: vocabulary, buffers; 30 MB for SmolLM2
_FOUND = 0.9
_RUNNING = re.compile(r"^llamacpp:requests_(?:processing|deferred)[ \t]+(\S+)", re.MULTILINE)

Likeliest = dict[int, float]


class EngineServer:
    """One llama.cpp server, made by `build(port)`. `tensors`: (first byte, end) of each in the weights file."""

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
        if host_memory:  # the first token faults its pages back in, which shows the weights read in place
            give_back_small(mapped(weights))
        self._num_slots = 0
        self._likeliest: Likeliest = {}
        self.step_s = 0.0  # a decode step, measured by `warm_up`; 0: unknown
        self._opening: bool | None = None  # whether a file keeps it; None: not tried yet
        self.becomes = ""  # PREWARMED or SWAPPED_OUT while asleep

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    def warm_up(self) -> dict[str, Any]:
        """Generate two tokens; the second one is a lone step (`step_s`). Returns llama.cpp's /props. Raises
        RuntimeError."""
        self._likeliest = self._canary(num_tokens=2)
        props: dict[str, Any] = json.loads(self._ask("GET", "/props"))
        self._num_slots = int(props["total_slots"])
        return props

    def shared_bytes(self) -> int:
        """Bytes of tensors read in the weights file's shared pages; call after `warm_up`. llama.cpp reads its own
        copy of types that it repacks.

        Two measures must agree: pages faulted in by the first token, and the load's own memory. Where a kernel reads
        many pages in at once the first overestimates, and the second counts.
        """
        whole = sum(end - first for first, end in self._tensors)
        shared = num_bytes_read(self._weights, self._tensors) if whole else 0
        if self._own_bytes > whole - shared + max(_LOAD_BYTES, whole // 8):
            shared = min(shared, max(0, whole - self._own_bytes))
        return shared

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer {"do": "sleep", "becomes", "if_idle"}, {"do": "wake"}, {"do": "state"}, {"do": "load_adapter",
        "number", "path"} or {"do": "unload_adapter", "number"} with {"state", "how", "running"}; `running`:
        requests that kept it awake. Raises RuntimeError, and ValueError for another question."""
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
            raise RuntimeError("it was started without adapters")
        if self._server is None:
            raise RuntimeError("it sleeps")
        if self._adapters.load(number, path):
            self._erase_slots()

    def _erase_slots(self) -> None:
        for slot in range(self._num_slots):
            self._ask("POST", f"/slots/{slot}?action=erase")

    def _sleep(self, becomes: str, *, if_idle: bool) -> int:
        """Sleep by pages where nothing runs, else by ending the server. Returns the requests that keep it awake."""
        if becomes not in (PREWARMED, SWAPPED_OUT):
            raise ValueError(f"an engine cannot become {becomes!r}")
        if self._server is None:
            self.becomes = becomes
            return 0
        if self._listener is not None:
            self._listener.refuse()
        num_running = self._num_running()
        if not num_running:
            end_connections(self.port)  # a request under way in an idle one is sent elsewhere
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
        end_connections(self.port)  # a dropped server waits for its clients, and they for answers
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
        """Requests on connections being broken off may still touch memory, which is given back too. Raises
        RuntimeError where they do not end."""
        for _ in range(_TRIES):
            self._erase_slots()  # else the next prompt would rely on its slot's cache
            give_back([*self._kv, *(mapped(self._weights) if becomes == SWAPPED_OUT else [])])
            if not self._num_running():
                return
            self._until_idle()
        raise RuntimeError("requests still arrive although the engine refuses them")

    def _until_idle(self) -> int:
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
            print("after waking it does not answer as at its start: rebuilding its server", flush=True)
            self._kv = []  # more or other memory than the KV cache was given back
            self._drop()
            self._rebuild()
            if not self._is_itself():
                raise RuntimeError("it does not answer as at its start")
        self._bring_opening()
        self.becomes = ""
        self._serve()

    def _keep_opening(self) -> None:
        """Keep the KV cache of the chat template's common prefix in a file before the first sleep, so that a wake's
        request waits only for its own prefill."""
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
        """The common prefix of two conversations without a shared word; "" where there is none, or it is too long."""
        asked = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("a", "b")]
        whole = [str(json.loads(self._ask("POST", "/apply-template", one))["prompt"]) for one in asked]
        alike = [one == other for one, other in zip(*whole, strict=False)]
        text = whole[0][: alike.index(False)] if False in alike else ""
        return text if len(text) <= _LONGEST_OPENING else ""

    def _bring_opening(self) -> None:
        for slot in range(self._num_slots if self._opening else 0):
            self._ask("POST", f"/slots/{slot}?action=restore", _NAMED)

    def _is_itself(self) -> bool:
        now, then = self._canary(), self._likeliest
        return now.keys() == then.keys() and all(math.isclose(now[t], then[t], abs_tol=_SAME) for t in then)

    def _canary(self, num_tokens: int = 1) -> Likeliest:
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
    """Return seconds per step on llama.cpp's own clock, which starts after the first token."""
    num_steps = int(timings.get("predicted_n") or 0) - 1
    return float(timings["predicted_ms"]) / 1e3 / num_steps if num_steps > 0 else 0.0


def kv_pages(kv_bytes: int) -> list[Pages]:
    """The one run of zeros as long as a fresh KV cache; empty where there is none or more than one, or the kernel
    forbids the look."""
    try:
        runs = zero_runs(max(_LEAST_RUN_BYTES, int(kv_bytes * _FOUND)))
    except OSError as error:
        print(f"its KV cache cannot be searched for: {error}", flush=True)
        return []
    fitting = [run for run in runs if kv_bytes * _FOUND <= run.num_bytes <= kv_bytes]
    return fitting if len(fitting) == 1 else []
