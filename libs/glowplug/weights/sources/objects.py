"""Weights from object stores, S3-compatible or Google's, through obstore (the Rust object_store crate).

S3: credentials and region come from the standard AWS_* environment; without any, requests are unsigned. Google:
credentials come from GOOGLE_APPLICATION_CREDENTIALS and object_store's other variables, then the machine's account.
GOOGLE_SKIP_SIGNATURE=true leaves requests unsigned, GOOGLE_BASE_URL names another server.
"""

import os
from collections.abc import AsyncGenerator
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import (
    Chunk,
    SourceChanged,
    SourceFile,
    SourceInfo,
    SourceInterrupted,
    SourceOptions,
    check_reference,
    checked_relative,
    scheme_of,
)

_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@cache
def library() -> Any:
    """Return None where it is not installed."""
    try:
        for part in ("exceptions", "store"):
            import_module(f"obstore.{part}")
        return import_module("obstore")
    except ImportError:
        return None


class ObjectSource:
    """`s3://bucket/key` or `gs://bucket/key`; with `prefix/` (trailing slash) for a directory of files."""

    def __init__(self, uri: str, options: SourceOptions = SourceOptions()) -> None:
        self.scheme = scheme_of(uri)
        self._library = library()
        if self._library is None:
            raise WeightsUnavailable(
                f"{self.scheme}: addresses need the extra glowplug[prefetcher]", param="weights.uri"
            )
        parts = check_reference(uri)
        self._bucket, self._key = parts.netloc, unquote(parts.path).lstrip("/")
        self._shown = f"{self.scheme}://{self._bucket}/{self._key}"
        self._chunk_bytes = options.chunk_bytes
        given = {
            "client_options": _client(options),
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=options.stall_timeout_s)},
        }
        try:
            self._store: Any = (
                self._library.store.S3Store(self._bucket, config=_s3_config(options), **given)
                if self.scheme == "s3"
                else self._library.store.GCSStore(self._bucket, **given)
            )
        except (self._library.exceptions.BaseError, OSError) as error:
            raise WeightsUnavailable(f"{self._shown}: {_first_line(error)}") from error

    async def measure(self) -> SourceInfo:
        return await self.probe()

    async def probe(self) -> SourceInfo:
        try:
            if self._key.endswith("/"):
                return await self._probe_directory()
            meta = await self._library.head_async(self._store, self._key)
        except (self._library.exceptions.BaseError, OSError) as error:
            raise self._translated(error) from error
        file = SourceFile(path="", num_bytes=meta["size"], validator=meta.get("e_tag") or "")
        return SourceInfo(files=(file,), ranges=True)

    async def _probe_directory(self) -> SourceInfo:
        files: list[SourceFile] = []
        async for page in self._library.list(self._store, self._key, chunk_size=1000):
            for meta in page:
                relative = meta["path"].removeprefix(self._key)
                if relative and not relative.endswith("/"):
                    entry = checked_relative(relative)
                    files.append(SourceFile(path=entry, num_bytes=meta["size"], validator=meta.get("e_tag") or ""))
        if not files:
            raise WeightsUnavailable(f"{self._shown}: no object has this prefix")
        return SourceInfo(files=tuple(sorted(files, key=lambda f: f.path)), ranges=True)

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        options: dict[str, Any] = {"range": (first_byte, last_byte or file.num_bytes)}
        if file.validator:
            options["if_match"] = file.validator
        try:
            result = await self._library.get_async(self._store, self._key + file.path, options=options)
            async for chunk in result.stream(min_chunk_size=self._chunk_bytes):
                yield memoryview(chunk)
        except (self._library.exceptions.BaseError, OSError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        """Quote the first line only: the rest may hold signed requests."""
        refused = self._library.exceptions
        if isinstance(error, refused.NotFoundError | FileNotFoundError):
            return WeightsUnavailable(f"{self._shown}: no such object")
        if isinstance(error, refused.PermissionDeniedError | refused.UnauthenticatedError | PermissionError):
            return WeightsUnavailable(f"{self._shown}: access denied")
        if isinstance(error, refused.PreconditionError):
            return SourceChanged(f"{self._shown} changed while it was being read")
        return SourceInterrupted(f"{self._shown}: {_first_line(error)}")

    async def close(self) -> None:
        """obstore closes idle connections itself."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {(str(error).splitlines() or [''])[0][:200]}"


def _s3_config(options: SourceOptions) -> dict[str, Any]:
    endpoint = options.s3_endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    config: dict[str, Any] = {"skip_signature": True} if not any(os.environ.get(c) for c in _CREDENTIALS) else {}
    if endpoint:
        # The service-specific name: obstore prefers it to `endpoint`, from the environment too.
        config |= {"aws_endpoint_url_s3": endpoint, "virtual_hosted_style_request": False}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        config["region"] = region
    return config


def _client(options: SourceOptions) -> dict[str, Any]:
    return {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "read_timeout": timedelta(seconds=options.stall_timeout_s),
        "timeout": timedelta(days=1),  # for large files; read_timeout catches stalls
    }
