"""Parse the header of a GGUF file: metadata and tensor positions. Pure.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). All counts and
lengths are bounded: reading takes a fraction of a second and a few megabytes for any file.
"""

import struct
from collections.abc import Iterator
from mmap import mmap
from typing import Final, NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_READ = ("general.a", "tokenizer.chat_template")  # key prefixes of texts to read
_ALIGNMENT = 32  # unless general.alignment differs

# The largest existing models stay below a tenth of each.
MAX_HEADER_BYTES: Final = 256 << 20
MAX_KEY_BYTES: Final = 1 << 16  # as in the format
MAX_TEXT_BYTES: Final = 4 << 20  # of a read text, such as a chat template
MAX_VALUES: Final = 1 << 16
MAX_TENSORS: Final = 1 << 17
MAX_DIMENSIONS: Final = 8
MAX_STEPS: Final = 1 << 22  # skipped list texts
MAX_ALIGNMENT: Final = 1 << 20

Scalar = int | float | bool | str


class InvalidGguf(ValueError):
    """The file is not a readable GGUF file."""


class NeedMore(Exception):
    """The header needs at least `num_bytes` of the file."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes of the file are needed")
        self.num_bytes = num_bytes


class Value(NamedTuple):
    """A metadata entry in bytes [first, end). `value`: "" for a skipped text, None for a list."""

    key: str
    value: Scalar | None
    first: int
    end: int


class Tensor(NamedTuple):
    """A tensor. `offset`, from the first tensor's data, is stored after bytes [first, end)."""

    name: str
    shape: tuple[int, ...]
    kind: int  # GGML's type number
    offset: int
    first: int
    end: int


class GgufReader:
    """Read `content`, the file's beginning, once and up to `at`: all `values`, then all `tensors`. Methods raise
    NeedMore if it is too short, and InvalidGguf."""

    def __init__(self, content: bytes | mmap) -> None:
        self._content, self.at, self._num_steps = content, 4, 0
        self.alignment = _ALIGNMENT
        if content[:4] != b"GGUF"[: len(content)]:
            raise InvalidGguf("not a GGUF file")
        self.version, self._num_tensors, self._num_values = self._take("IQQ")
        if self.version not in (2, 3):
            raise InvalidGguf(f"GGUF version {self.version} is not supported")
        for what, num, most in (("values", self._num_values, MAX_VALUES), ("tensors", self._num_tensors, MAX_TENSORS)):
            if num > most:
                raise InvalidGguf(f"it declares {num} {what}; at most {most} are read")

    def values(self) -> Iterator[Value]:
        for _ in range(self._num_values):
            first, key = self.at, self._text(MAX_KEY_BYTES)
            (kind,) = self._take("I")
            value: Scalar | None = None
            if kind == _LIST:
                self._skip_list()
            elif kind != _STRING:
                (value,) = self._take(_scalar(kind))
            elif key.startswith(_READ):
                value = self._text(MAX_TEXT_BYTES)
            else:
                value = ""
                self._skip_text()
            if key == "general.alignment":
                if type(value) is not int or not 0 < value <= MAX_ALIGNMENT:
                    raise InvalidGguf(f"{key} is {value!r:.40}, not a whole number from 1 to {MAX_ALIGNMENT}")
                self.alignment = value
            yield Value(key, value, first, self.at)

    def tensors(self) -> Iterator[Tensor]:
        for _ in range(self._num_tensors):
            first, name = self.at, self._text(MAX_KEY_BYTES)
            (num_dimensions,) = self._take("I")
            if num_dimensions > MAX_DIMENSIONS:
                raise InvalidGguf(f"a tensor of {num_dimensions} dimensions")
            *shape, kind = self._take(f"{num_dimensions}QI")
            end = self.at
            (offset,) = self._take("Q")
            yield Tensor(name, tuple(shape), kind, offset, first, end)

    @property
    def data_first(self) -> int:
        """Padded if there are tensors; call after reading them."""
        return padded(self.at, self.alignment) if self._num_tensors else self.at

    def _take(self, form: str) -> tuple[int, ...]:
        form = f"<{form}"
        begin = self._step(struct.calcsize(form))
        return struct.unpack_from(form, self._content, begin)

    def _step(self, num_bytes: int) -> int:
        begin, end = self.at, self.at + num_bytes
        if end > MAX_HEADER_BYTES:
            raise InvalidGguf("no GGUF has such a header")
        if end > len(self._content):
            raise NeedMore(end)
        self.at = end
        return begin

    def _skip_text(self) -> int:
        (num_bytes,) = self._take("Q")
        return self._step(num_bytes)

    def _text(self, most: int) -> str:
        begin = self._skip_text()
        if self.at - begin > most:
            raise InvalidGguf(f"a text of {self.at - begin} bytes; at most {most} are read")
        try:
            return self._content[begin : self.at].decode()
        except UnicodeDecodeError as error:
            raise InvalidGguf(str(error)) from error

    def _skip_list(self) -> None:
        kind, count = self._take("IQ")
        if kind != _STRING:
            self._step(count * struct.calcsize(_scalar(kind)))
            return
        self._num_steps += count
        if self._num_steps > MAX_STEPS:
            raise InvalidGguf(f"lists of more than {MAX_STEPS} texts")
        unpack, at, end = struct.Struct("<Q").unpack_from, self.at, len(self._content) - 8
        for _ in range(count):
            if at > end:
                raise NeedMore(at + 8) if at < MAX_HEADER_BYTES else InvalidGguf("no GGUF has such a header")
            at += 8 + unpack(self._content, at)[0]
        self._step(at - self.at)


def padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise InvalidGguf(f"no GGUF has a value of type {kind}")
    return _SCALARS[kind]
