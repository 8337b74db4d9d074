"""Bounds of the schemas and grammars that an engine compiles, with all its other requests waiting."""

import re
from typing import Any, Final

import msgspec

from glowplug.domain.errors import BadRequest

SCHEMA_BYTES: Final = 16 * 1024  # of one schema or grammar: llama.cpp compiles 44 KB of enum values for 25 s
# Of all schemas of a request: llama.cpp makes a rule for each repetition, and has each token tried by each alternative
# that may still come: 400 texts of up to 2,000 characters kept one engine from its other requests for a minute.
NUM_REPETITIONS: Final = 20_000
NUM_ALTERNATIVES: Final = 128
# A longer upper bound costs an engine nothing: llama.cpp drops it, and xgrammar counts. Coding agents give 524,288.
_DROPPED: Final = range(2001, 2**31)
_UPPER: Final = frozenset(("maxLength", "maxItems"))
_LENGTHS: Final = _UPPER | {"minLength", "minItems"}
_TEXTS: Final = frozenset(("pattern", "regex", "grammar"))
_REPEATED: Final = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def check_size(param: str, num_bytes: int) -> None:
    if num_bytes > SCHEMA_BYTES:
        raise BadRequest(f"{param}: {num_bytes} bytes are more than {SCHEMA_BYTES}.", param=param)


def check_repetitions(param: str, num: int) -> None:
    if num > NUM_REPETITIONS:
        text = f"{param}: its lengths, numbers of items and {{n,m}} add up to {num}, more than {NUM_REPETITIONS}."
        raise BadRequest(text, param=param)


def check_schema(param: str, schema: bytes) -> int:
    """Check a JSON schema, or vLLM's `structured_outputs`. Return its repetitions. Raises BadRequest."""
    check_size(param, len(schema))
    try:
        value = _decoded(schema)
        num_repetitions, num_alternatives = _repetitions(value), _Alternatives(value).of(value)
    except RecursionError as error:
        raise BadRequest(f"{param}: it is nested too deeply.", param=param) from error
    check_repetitions(param, num_repetitions)
    if num_alternatives > NUM_ALTERNATIVES:
        text = f"{param}: {num_alternatives} alternatives in one place are more than {NUM_ALTERNATIVES}."
        raise BadRequest(text, param=param)
    return num_repetitions


def repetitions_of_text(text: str) -> int:
    """Count those of a pattern or grammar."""
    return sum(max(int(number[:9] or 0) for number in found) for found in _REPEATED.findall(text))


def _decoded(schema: bytes | str) -> Any:
    """Decode a schema, which vLLM also takes as a text."""
    try:
        value = msgspec.json.decode(schema)
    except msgspec.DecodeError:
        return None
    return _decoded(value) if isinstance(value, str) else value


def _repetitions(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_repeated(key, one) for key, one in value.items())
    return sum(map(_repetitions, value)) if isinstance(value, list) else 0


def _repeated(key: str, value: Any) -> int:
    if isinstance(value, str):
        return repetitions_of_text(value) if key in _TEXTS else _repetitions(_decoded(value)) if key == "json" else 0
    if key in _UPPER and isinstance(value, int) and value in _DROPPED:
        return 0
    if key in _LENGTHS and isinstance(value, int | float):
        return int(min(max(value, 0), NUM_REPETITIONS + 1))
    return _repetitions(value)


class _Alternatives:
    """Counts the most that may come at one place of a schema."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._known: dict[str, int] = {}  # by reference; 1 while it is counted, so that a recursion ends

    def of(self, value: Any) -> int:
        if isinstance(value, list):
            return max(map(self.of, value), default=1)
        if not isinstance(value, dict):
            return 1
        return max((self._of_field(key, one) for key, one in value.items()), default=1)

    def _of_field(self, key: str, value: Any) -> int:
        if key in ("anyOf", "oneOf") and isinstance(value, list):
            return sum(map(self.of, value))
        if key == "$ref" and isinstance(value, str):
            if value not in self._known:
                self._known[value] = 1
                self._known[value] = self.of(self._referred(value))
            return self._known[value]
        return self.of(_decoded(value) if key == "json" and isinstance(value, str) else value)

    def _referred(self, reference: str) -> Any:
        value = self._whole
        for name in reference.removeprefix("#").split("/")[1:]:
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
        return value
