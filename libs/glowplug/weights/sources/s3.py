"""Weights from S3 and what speaks it, through obstore (the Rust object_store crate).

Credentials and region come from the standard AWS_* environment; without any, requests go unsigned.
"""

import os
from collections.abc import AsyncGenerator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import (
    SourceChanged,
    SourceFile,
    SourceInfo,
    SourceInterrupted,
    SourceOptions,
    check_reference,
    checked_relative,
)

obstore: Any
refused: Any
try:
    obstore, refused = import_module("obstore"), import_module("obstore.exceptions")
    import_module("obstore.store")
except ImportError:  # the extra `prefetcher` is not installed; said when an s3: address is opened
    obstore = refused = None

_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


class S3Source:
    """`s3://bucket/key`, or `s3://bucket/prefix/` (trailing slash) for a directory of files."""

    scheme = "s3"

    def __init__(self, uri: str, options: SourceOptions = SourceOptions()) -> None:
        if obstore is None:
            raise WeightsUnavailable("s3: addresses need the extra glowplug[prefetcher]", param="weights.uri")
        parts = check_reference(uri)
        self._bucket, self._key = parts.netloc, unquote(parts.path).lstrip("/")
        self._shown = f"s3://{self._bucket}/{self._key}"
        self._chunk_bytes = options.chunk_bytes
        self._store: Any = obstore.store.S3Store(
            self._bucket,
            config=_config(options),
            client_options=_client(options),
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=options.stall_timeout_s)},
        )

    async def probe(self) -> SourceInfo:
        try:
            if self._key.endswith("/"):
                return await self._probe_directory()
            meta = await obstore.head_async(self._store, self._key)
        except (refused.BaseError, OSError) as error:
            raise self._translated(error) from error
        file = SourceFile(path="", num_bytes=meta["size"], validator=meta.get("e_tag") or "")
        return SourceInfo(files=(file,), ranges=True)

    async def _probe_directory(self) -> SourceInfo:
        files: list[SourceFile] = []
        async for page in obstore.list(self._store, self._key, chunk_size=1000):
            for meta in page:
                relative = meta["path"].removeprefix(self._key)
                if relative and not relative.endswith("/"):
                    entry = checked_relative(relative)
                    files.append(SourceFile(path=entry, num_bytes=meta["size"], validator=meta.get("e_tag") or ""))
        if not files:
            raise WeightsUnavailable(f"{self._shown}: no object has this prefix")
        return SourceInfo(files=tuple(sorted(files, key=lambda f: f.path)), ranges=True)

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[bytes, None]:
        options: dict[str, Any] = {"range": (first_byte, last_byte or file.num_bytes)}
        if file.validator:
            options["if_match"] = file.validator
        try:
            result = await obstore.get_async(self._store, self._key + file.path, options=options)
            async for chunk in result.stream(min_chunk_size=self._chunk_bytes):
                yield bytes(chunk)
        except (refused.BaseError, OSError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> Exception:
        """Ours for theirs, the first line only: the rest of it may quote signed requests."""
        if isinstance(error, refused.NotFoundError | FileNotFoundError):
            return WeightsUnavailable(f"{self._shown}: no such object")
        if isinstance(error, refused.PermissionDeniedError | refused.UnauthenticatedError | PermissionError):
            return WeightsUnavailable(f"{self._shown}: access denied")
        if isinstance(error, refused.PreconditionError):
            return SourceChanged(f"{self._shown} changed while it was being read")
        line = (str(error).splitlines() or [""])[0][:200]
        return SourceInterrupted(f"{self._shown}: {type(error).__name__} {line}")

    async def close(self) -> None:
        """obstore closes idle connections itself."""


def _config(options: SourceOptions) -> dict[str, Any]:
    endpoint = options.s3_endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    config: dict[str, Any] = {"skip_signature": True} if not any(os.environ.get(c) for c in _CREDENTIALS) else {}
    if endpoint:
        # The service-specific name: obstore lets it win over `endpoint`, from the environment too.
        config |= {"aws_endpoint_url_s3": endpoint, "virtual_hosted_style_request": False}
    if region := options.s3_region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        config["region"] = region
    return config


def _client(options: SourceOptions) -> dict[str, Any]:
    return {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "read_timeout": timedelta(seconds=options.stall_timeout_s),
        "timeout": timedelta(days=1),  # a large file takes long; a stall is what read_timeout catches
    }
