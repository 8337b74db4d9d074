"""The object store of files' bytes: a folder, S3 or another of obstore's, which the first call loads."""

from collections.abc import AsyncIterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from glowplug.domain.errors import NotFound
from glowplug.services.router.api_errors import ApiError

CHUNK_BYTES: Final = 256 * 1024
STALL_S: Final = 20.0  # longest silence of a store


class ObjectsUnavailable(ApiError):
    """The object store did not answer (503); `message` names nothing stored."""

    def __init__(self, why: str) -> None:
        super().__init__(503, why, "service_unavailable", "files_unavailable", retry_after_s=2.0)


class NoObject(NotFound):
    """The object store has no such object (404)."""

    def __init__(self) -> None:
        super().__init__("The file has no content any more.")


class Objects:
    """Objects by name below `url`: file:///folder, s3://bucket/prefix, gs://..., az://... or memory:///."""

    def __init__(self, url: str, stall_s: float = STALL_S) -> None:
        self._url, self._stall_s = url, stall_s
        self._library: Any = None
        self._store: Any = None

    async def put(self, name: str, content: bytes | AsyncIterator[bytes]) -> None:
        """Store an object whole. Raises ObjectsUnavailable."""
        await self._ask("put_async", name, content)

    async def read(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> AsyncIterator[bytes]:
        """Yield an object's bytes. Raises NoObject and ObjectsUnavailable."""
        found = await self._ask("get_async", name)
        try:
            async for chunk in found.stream(min_chunk_size=chunk_bytes):
                view = memoryview(chunk)
                for start in range(0, len(view), chunk_bytes):
                    yield bytes(view[start : start + chunk_bytes])
        except (self._library.exceptions.BaseError, OSError) as error:
            raise _unavailable(error) from error

    async def delete(self, name: str) -> None:
        """Remove an object, if any. Raises ObjectsUnavailable."""
        try:
            await self._ask("delete_async", name)
        except NoObject:
            return

    async def _ask(self, verb: str, name: str, *given: Any) -> Any:
        library = self._open()
        try:
            return await getattr(library, verb)(self._store, name, *given)
        except (library.exceptions.NotFoundError, FileNotFoundError) as error:
            raise NoObject from error
        except (library.exceptions.BaseError, OSError) as error:
            raise _unavailable(error) from error

    def _open(self) -> Any:
        if self._store is None:
            try:
                library = import_module("obstore")
                for part in ("exceptions", "store"):
                    import_module(f"obstore.{part}")
            except ImportError as error:
                raise ObjectsUnavailable("Files need the extra glowplug[router] where the router runs.") from error
            url = urlsplit(self._url)
            try:
                if url.scheme == "file":
                    folder = Path(unquote(url.path))
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._store = library.store.LocalStore(folder)
                elif url.scheme == "memory":
                    self._store = library.store.MemoryStore()
                else:
                    self._store = library.store.from_url(self._url, **_bounds(self._stall_s))
            except (library.exceptions.BaseError, OSError, ValueError) as error:
                raise _unavailable(error) from error
            self._library = library
        return self._library


def _bounds(stall_s: float) -> dict[str, Any]:
    """Allow any time for a large file, and `stall_s` without a byte."""
    stall = timedelta(seconds=stall_s)
    client = {"allow_http": True, "connect_timeout": stall / 4, "read_timeout": stall, "timeout": timedelta(days=1)}
    return {"client_options": client, "retry_config": {"max_retries": 3, "retry_timeout": stall / 2}}


def _unavailable(error: Exception) -> ObjectsUnavailable:
    """The error's text may quote signed requests; its type does not."""
    return ObjectsUnavailable(f"The object store of GLOWPLUG_FILES_URL does not answer ({type(error).__name__}).")
