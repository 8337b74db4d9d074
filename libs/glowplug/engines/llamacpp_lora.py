"""Load and unload LoRA adapters while a llama.cpp server runs.

The server knows only the adapters of its start, and scales them per request; its library accepts them at any time. So
the server starts with one adapter without effect, and a request's scale is a whole number that names its adapter
(engines/apis.py: `adapter_number`). At llama_set_adapters_lora, in the library's own call table, `Adapters` replaces
the placeholder by that adapter, at scale 1. The server takes different scales for different adapters: it batches only
requests of the same one, and clears another's cache from a slot.
"""

import ctypes
import mmap
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from glowplug.domain.errors import EngineMisconfigured
from glowplug.engines.gguf import GgufFacts

PLACEHOLDER: Final = "adapters.gguf"
_HOOKED: Final = "llama_set_adapters_lora"
_JMPREL, _PLTRELSZ, _SYMTAB, _STRTAB, _DYNAMIC = 23, 2, 6, 5, 2  # ELF
_SetAdapters = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_float),
)


class AdapterRefused(RuntimeError):
    """llama.cpp refuses the adapter; the server is unchanged."""


def write_placeholder(path: Path, architecture: str, tensor: tuple[str, int, int]) -> None:
    """Write a zero adapter of rank 1 for one matrix: (name, inputs, outputs)."""
    name, inputs, outputs = tensor
    values: Mapping[str, str | float] = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": 1.0,
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, len(values))
    for key, value in values.items():
        head += _text(key) + (
            struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<I", 8) + _text(value)
        )
    half = -(-inputs * 4 // 32) * 32
    head += _text(f"{name}.lora_a") + struct.pack("<IQQIQ", 2, inputs, 1, 0, 0)
    head += _text(f"{name}.lora_b") + struct.pack("<IQQIQ", 2, 1, outputs, 0, half)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(half + -(-outputs * 4 // 32) * 32))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


class Adapters:
    """Adapters of this process's server, by number. `path`: llama.cpp's library.

    Create it before the server, since it writes the placeholder. Raises EngineMisconfigured where this build cannot be
    hooked, or the model has no suitable matrix.
    """

    def __init__(self, path: Path, num_slots: int, placeholder: Path, facts: GgufFacts) -> None:
        if facts.matrix is None:
            raise EngineMisconfigured("its weights have no matrix that an adapter could change", param="adapter")
        write_placeholder(placeholder, facts.architecture, facts.matrix)
        library = ctypes.CDLL(str(path))
        self._num_slots = num_slots
        self._init, self._free = library.llama_adapter_lora_init, library.llama_adapter_lora_free
        self._init.restype, self._init.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]
        self._model_of = library.llama_get_model
        self._model_of.restype, self._model_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        address = ctypes.cast(library[_HOOKED], ctypes.c_void_p).value or 0
        self._set = _SetAdapters(address)
        self._lock = threading.Lock()
        self._model: int | None = None
        self._by_number: dict[int, int] = {}
        self._files: dict[int, tuple[int, ...]] = {}  # by every number ever used: its file's identity
        self._retired: list[int] = []
        self._hook = _SetAdapters(self._replaced)
        try:
            _redirect(path, address, ctypes.cast(self._hook, ctypes.c_void_p).value or 0)
        except OSError as error:
            raise EngineMisconfigured(f"this build of llama.cpp takes no adapters: {error}", param="adapter") from error

    def forget(self) -> None:
        """Drop all state: the server has been dropped with its model."""
        with self._lock:
            self._model = None
            for kept in (self._by_number, self._files, self._retired):
                kept.clear()

    def load(self, number: int, path: Path) -> bool:
        """Return whether the number belonged to other weights before. Idempotent. Raises AdapterRefused, OSError."""
        found = path.stat()
        file = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
        with self._lock:
            was = self._files.get(number, file)
            if number in self._by_number and was == file:
                return False
            if self._model is None:
                raise AdapterRefused("the server has not computed anything yet")
            if number not in self._by_number and len(self._by_number) >= self._num_slots:
                raise AdapterRefused(f"all {self._num_slots} places for adapters are taken")
            pointer = self._init(self._model, str(path).encode())
            if not pointer:
                raise AdapterRefused("llama.cpp does not take this adapter for its model")
            if number in self._by_number:
                self._retired.append(self._by_number[number])
            self._by_number[number], self._files[number] = pointer, file
            return was != file

    def unload(self, number: int) -> None:
        with self._lock:
            if (pointer := self._by_number.pop(number, None)) is not None:
                self._retired.append(pointer)

    def _replaced(self, context: int, adapters: Any, count: int, scales: Any) -> int:
        """Put in the request's adapter; called by the server's thread before each batch. Frees retired adapters,
        which the library no longer uses."""
        with self._lock:
            if self._model is None:
                self._model = self._model_of(context)
            found = self._by_number.get(round(scales[0])) if count else None
            if found is None:
                answer = self._set(context, adapters, count, scales)
            else:
                answer = self._set(context, (ctypes.c_void_p * 1)(found), 1, (ctypes.c_float * 1)(1.0))
            while self._retired:
                self._free(self._retired.pop())
            return int(answer)


def _redirect(path: Path, address: int, target: int) -> None:
    """Redirect the library's own calls of the hooked function to `target`. Raises OSError."""
    value, entry = _symbols(path)
    at = address - value + entry
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(at // page * page), ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "the library's table of calls cannot be written")
    ctypes.c_void_p.from_address(at).value = target


def _symbols(path: Path) -> tuple[int, int]:
    """The hooked function's symbol value in a 64-bit ELF library, and its entry in the call table. Raises OSError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (offset,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        parts = [struct.unpack_from("<IIQQQQ", data, offset + size * n) for n in range(count)]
        tags = dict(_dynamic(data, parts))

        def place(address: int) -> int:
            for kind, _, first, virtual, _, length in parts:
                if kind == 1 and virtual <= address < virtual + length:
                    return int(first + address - virtual)
            raise OSError(f"{path.name} has nothing at {address:#x}")

        texts, symbols = place(tags[_STRTAB]), place(tags[_SYMTAB])
        name = _HOOKED.encode() + b"\0"
        for entry in struct.iter_unpack("<QQq", data[place(tags[_JMPREL]) :][: tags[_PLTRELSZ]]):
            at, info, _ = entry
            name_at, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, symbols + 24 * (info >> 32))
            if data[texts + name_at : texts + name_at + len(name)] == name:
                return value, at
    raise OSError(f"{path.name} does not call {_HOOKED} by a table")


def _dynamic(data: mmap.mmap, parts: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    for kind, _, first, _, _, length in parts:
        if kind == _DYNAMIC:
            yield from struct.iter_unpack("<QQ", data[first : first + length])
