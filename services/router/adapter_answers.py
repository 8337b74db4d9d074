"""Answers of an adapter from an engine that calls itself by its base's name: they carry the adapter's name instead.

The name stands as a value of the answer's JSON, where no text of an answer can look like it: quotes within a string
are escaped there.
"""

from glowplug.services.router import api_errors, messages_as_chat
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json, is_anthropic


class Renaming:
    """The change of what the engine says, before any translation of it."""

    def __init__(self, base: str, name: str) -> None:
        self._base, self._name = (b'"model":' + encode_json(one) for one in (base, name))

    def __call__(self, said: bytes) -> bytes:
        """Whole events or a whole answer, with the adapter's name for the base's."""
        return said.replace(self._base, self._name)


class AsItIs(SameApi):
    """The translation of an answer to a request of `path` that only its Renaming changes."""

    def __init__(self, path: bytes, *, streams: bool) -> None:
        super().__init__(streams)
        self._path, self._has_error = path, False

    def events(self, events: bytes) -> bytes:
        """The events unchanged; the last one is the stream's own end, or an error."""
        self._has_error = self._has_error or b"event: error\n" in events
        return events

    def end(self) -> bytes:
        """Nothing: the stream has ended."""
        return b""

    def whole(self, answer: bytes) -> bytes:
        """The answer unchanged."""
        return answer

    def error(self, error: bytes) -> bytes:
        """The error object, in the shape of the API of its path."""
        is_other = is_anthropic(self._path) and error.startswith(b'{"error"')
        return messages_as_chat.anthropic_error(error) if is_other else error

    def error_event(self, error: bytes) -> bytes:
        """The event that carries an error and ends the stream, unless one has come."""
        return b"" if self._has_error else api_errors.event(self._path, self.error(error))
