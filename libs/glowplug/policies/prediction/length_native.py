"""length_model.py for ASCII texts, with inner loops in C (length_native.c): a tenth of the time.

Compiled at installation where there is a C compiler (hatch_build.py). Otherwise, and for other texts, the Python model
predicts the same lengths.
"""

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from glowplug.policies.prediction import length_text
from glowplug.policies.prediction.length_model import Length, LengthModel
from glowplug.policies.prediction.length_text import BUCKET, NUM_KINDS, NUM_NUMBERS, Read, Signs, Turn, WordCounts

LIBRARY: Final = Path(__file__).with_name("_length_native.so")
_SET_SIZE: Final = 8192
_MAX_HEADS: Final = 16
_POINTER, _INT, _WORD = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32


class _Context(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weights", "scale", "bias", "feature", "limit", "value", "next", "roots")),
        *((name, _INT) for name in ("num_heads", "num_roots", "num_numbers")),
        ("bucket_mask", _WORD),
        *((name, _POINTER) for name in ("stems", "stem_kinds", "spelled", "spelled_values")),
        *((name, _INT) for name in ("num_stems", "num_spelled", "stem_letters", "num_edge_words")),
        *((name, _WORD) for name in ("text_seed", "begin_seed", "end_seed", "first_mark")),
        ("sums", _INT * _MAX_HEADS * 2),
        ("num_hashes", _INT * 2),
        ("stamp", _WORD),
        ("stamps", _WORD * _SET_SIZE),
        ("members", _WORD * _SET_SIZE),
    )


class _Scanned(ctypes.Structure):
    _fields_ = (("num_words", _INT), ("num_unique", _INT), ("spelled", _INT), ("kinds", _INT * 32))


class NativeLengths:
    """A `LengthModel` in C, for one thread. Raises OSError if not built."""

    def __init__(self, model: LengthModel, path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        self._model, self._scan, self._around, self._log = model, library.scan, library.around, library.log_tokens
        self._count_signs, self._signs = library.count_signs, (_INT * len(Signs._fields))()
        self._log.restype = ctypes.c_double
        self._context, self._scanned = _Context(), _Scanned()
        self._at, self._out = ctypes.byref(self._context), ctypes.byref(self._scanned)
        self._numbers: Any = (ctypes.c_double * NUM_NUMBERS)()
        self._kept: list[Any] = []  # arrays that the context points to
        stems, spelled = _packed(length_text.KINDS_OF), _packed(length_text.SPELLED)
        kinds = [sum(1 << kind for kind in length_text.KINDS_OF[stem]) for _, stem in stems]
        for name, kind, values in (
            *model.tables(),
            ("stems", np.uint64, [number for number, _ in stems]),
            ("stem_kinds", np.uint32, kinds),
            ("spelled", np.uint64, [number for number, _ in spelled]),
            ("spelled_values", np.int32, [length_text.SPELLED[word] for _, word in spelled]),
        ):
            array = np.ascontiguousarray(values, dtype=kind)
            self._kept.append(array)
            setattr(self._context, name, array.ctypes.data)
        context = self._context
        context.num_heads, context.num_roots = model.num_heads, model.num_trees
        context.num_numbers, context.bucket_mask = NUM_NUMBERS, BUCKET
        context.num_stems, context.num_spelled = len(stems), len(spelled)
        context.stem_letters, context.num_edge_words = length_text.STEM, length_text.EDGE_WORDS
        context.text_seed, context.begin_seed, context.end_seed = length_text.TEXT, length_text.BEGIN, length_text.END
        context.first_mark = length_text.FIRST

    def of(self, turns: Sequence[Turn]) -> Length:
        read = Read.of(turns)
        around = read.around()
        if not read.read.isascii() or not all(text.isascii() for _, text in around):
            return self._model.of(turns)
        has_answers = bool(read.answers)
        text = read.read.encode()
        self._scan(self._at, text, len(text), not has_answers, self._out)
        for seed, part in around:
            self._around(self._at, part.encode(), len(part), seed)
        scanned = self._scanned
        counted = WordCounts(scanned.num_words, scanned.num_unique, scanned.spelled, scanned.kinds[:NUM_KINDS])
        self._numbers[:] = read.numbers(counted, self._signs_of(turns[-1].text))
        return self._model.length(self._log(self._at, self._numbers), has_answers)

    def _signs_of(self, text: str) -> Signs:
        if not text.isascii():
            return Signs.of(text)
        self._count_signs(text.encode(), len(text), self._signs)
        return Signs(*self._signs)


def _packed(words: Iterable[bytes]) -> list[tuple[int, bytes]]:
    return sorted((int.from_bytes(word, "little"), word) for word in words)
