"""OpenAI's API of files and batches. Other tenants' objects are not found."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import msgspec

from glowplug.domain.batch import Batch, BatchStatus, OpenBatch, Purpose, StoredFile
from glowplug.domain.errors import BadRequest, Conflict, GlowplugError, NoCapacity, NotFound
from glowplug.services.router import api_errors, wire
from glowplug.services.router.api_errors import ApiError, refused
from glowplug.services.router.batch_paths import BATCHES, FILES
from glowplug.services.router.batches import progress
from glowplug.services.router.batches.lines import ENDPOINTS
from glowplug.services.router.batches.objects import Objects
from glowplug.services.router.batches.records import Records
from glowplug.services.router.ends import ClientSink
from glowplug.services.router.http_request import Access, HttpRequest
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.upload import Upload, Uploads
from glowplug.state.port import StoreUnavailable

# A slow call of the router's own takes an exchange's place on the client's connection.

log = logging.getLogger(__name__)
OCTETS = b"content-type: application/octet-stream\r\n"


class Answering:
    """One call. `work` returns an answer for JSON, or a file's (length, pieces)."""

    def __init__(self, client: ClientSink, request: HttpRequest, context: PortContext[Any]) -> None:
        self._client, self._request, self._context = client, request, context
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._has_left = self._has_begun = False
        client.exchange = self

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task = self._context.loop.create_task(self._run(work), name="a call about files or batches")

    async def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        keep_alive = False
        try:
            made = await work
            if isinstance(made, tuple):
                await self._write_file(*made)
                keep_alive = self._request.keep_alive and not self._context.table.stage
            else:
                keep_alive = self._respond(200, wire.encode_json(made))
        except GlowplugError as error:
            keep_alive = self._refuse(error)
        except Exception:
            log.exception("a call about files or batches failed; it gets a 500")
            keep_alive = self._refuse(api_errors.FAILED)
        finally:
            self._context.buffered_bytes -= len(self._request.body)
            if not self._has_left:
                self._client.exchange_over(keep_alive)

    def _refuse(self, error: GlowplugError) -> bool:
        if self._has_begun:
            return False
        self._context.metrics.refused(error.status)
        self._context.report_refusal(self._request, error)
        body = api_errors.body(self._request.path, error)
        more = api_errors.no_retry(error) + api_errors.retry_after(error)
        return self._respond(error.status, body, more)

    def _respond(self, status: int, body: bytes, more: bytes = b"") -> bool:
        return not self._has_left and self._client.respond(self._request, status, body, wire.JSON_HEADERS, more)

    async def _write_file(self, num_bytes: int, pieces: AsyncIterator[bytes]) -> None:
        request = self._request
        headers = OCTETS + b"x-request-id: %b\r\n" % request.request_id.encode() + self._context.access.cors(request)
        keep_alive = request.keep_alive and not self._context.table.stage
        head = wire.head(200, headers + wire.content_length(num_bytes), keep_alive=keep_alive)
        async for piece in pieces:
            await self._may_write.wait()
            if self._has_left:
                return
            self._client.write(piece if self._has_begun else head + piece)
            self._has_begun = True
        if not self._has_begun:
            self._client.write(head)

    def client_left(self) -> None:
        """Go on without a client, so that the call's changes are whole."""
        self._has_left = True
        self._may_write.set()

    def client_paused(self, paused: bool) -> None:
        (self._may_write.clear if paused else self._may_write.set)()

    def probe(self) -> bool:
        return self._has_begun


WINDOW: Final = "24h"
WINDOW_S: Final = 86_400.0
EXPIRES_S: Final = (3_600, 2_592_000)  # OpenAI's bounds of `expires_after`
MOST_LISTED: Final = {FILES: 10_000, BATCHES: 100}
MOST_OPEN: Final = 1_000  # unfinished batches of one tenant
MOST_METADATA: Final = (16, 64, 512)  # pairs, characters of a key and of a value
R = TypeVar("R", StoredFile, Batch)


class _BatchAsked(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FileRules:
    """Bounds of tenants' files. `kept_s`: a file's default life; 0: for ever."""

    tenant_bytes: int
    kept_s: float


class BatchApi:
    def __init__(
        self,
        records: Records,
        objects: Objects,
        uploads: Uploads,
        rules: FileRules,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records, self._objects, self._uploads, self._rules, self._clock = records, objects, uploads, rules, clock

    def begin_upload(self, request: HttpRequest, access: Access, length: int | None) -> Upload:
        """Receive a call's file after its head. Raises GlowplugError for a caller that may not send one."""
        if (error := access.refusal(request)) is not None:
            raise error
        request.caller = access.caller(request)
        return self._uploads.begin(length)

    def take(self, client: ClientSink, request: HttpRequest, context: PortContext[Any]) -> None:
        Answering(client, request, context).start(self._answer(request))

    async def _answer(self, request: HttpRequest) -> Any:
        try:
            return await self._call(request)
        except StoreUnavailable as error:
            raise NoCapacity("The store of files and batches does not answer now.", retry_after_s=2.0) from error
        finally:
            if request.upload is not None:
                request.upload.close()

    async def _call(self, request: HttpRequest) -> Any:
        base = FILES if request.path.startswith(FILES) else BATCHES
        _, _, query = request.target.partition(b"?")
        words = request.path[len(base) :].decode("ascii", "replace").strip("/").split("/")
        ident, verb = words[0], "/".join(words[1:])
        tenant, method = request.caller.tenant, request.method
        if base == FILES and (method, bool(ident)) == (b"POST", False):
            return await self._upload(request, tenant)
        if base == FILES and (method, verb) == (b"DELETE", "") and ident:
            return await self._delete(await self._file(ident, tenant))
        if base == BATCHES and (method, bool(ident)) == (b"POST", False):
            return await self._create(request, tenant)
        if base == BATCHES and (method, verb) == (b"POST", "cancel"):
            return await self._cancel(await self._batch(ident, tenant))
        if verb and (base, verb) != (FILES, "content"):
            raise NotFound("There is nothing at this path.")
        if method != b"GET" and (method != b"HEAD" or verb):
            raise refused(405, f"{method.decode('ascii', 'replace')} is not allowed here.", "method_not_allowed")
        if not ident:
            return await self._list(base, query, tenant)
        if base == BATCHES:
            return batch_row(*await self._batch(ident, tenant))
        file = await self._file(ident, tenant)
        return (file.num_bytes, self._objects.read(f"files/{file.file_id}")) if verb else file_row(file)

    # -- files ---------------------------------------------------------------------------------------------------

    async def _file(self, file_id: str, tenant: str) -> StoredFile:
        file = await self._records.file(file_id)
        if file is None or file.tenant != tenant or self._is_expired(file):
            raise NotFound(f"There is no file `{file_id[:80]}`.", param="file_id")
        return file

    def _is_expired(self, file: StoredFile) -> bool:
        return bool(file.expires_at) and file.expires_at <= self._clock()

    async def _upload(self, request: HttpRequest, tenant: str) -> dict[str, Any]:
        upload = request.upload
        if upload is None:
            raise BadRequest("The body is expected as multipart/form-data, with the fields `purpose` and `file`.")
        form = await upload.form(request.headers.get(b"content-type", b""))
        if (purpose := form.fields.get("purpose")) != Purpose.BATCH:
            raise BadRequest(f"purpose: only `batch` is possible, not `{str(purpose)[:40]}`.", param="purpose")
        kept_s = self._rules.kept_s
        if "expires_after[seconds]" in form.fields:
            anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields["expires_after[seconds]"]
            kept_s = _expires_s(
                {"anchor": anchor, "seconds": int(seconds) if seconds.isdecimal() and len(seconds) < 12 else 0}
            )
        used = sum(file.num_bytes for file in (await self._records.files()).values() if file.tenant == tenant)
        num_bytes = form.end - form.start
        if self._rules.tenant_bytes and used + num_bytes > self._rules.tenant_bytes:
            text = f"The tenant's files would exceed {self._rules.tenant_bytes} bytes; delete some."
            raise ApiError(403, text, "invalid_request_error", "files_quota_exceeded")
        now_s, file_id = self._clock(), f"file-{secrets.token_hex(12)}"
        await self._objects.put(f"files/{file_id}", upload.content(form))
        file = StoredFile(
            file_id=file_id,
            tenant=tenant,
            name=form.file_name,
            purpose=Purpose.BATCH,
            num_bytes=num_bytes,
            created_at=now_s,
            expires_at=now_s + kept_s if kept_s else 0.0,
        )
        await self._records.put_file(file)
        return file_row(file)

    async def _delete(self, file: StoredFile) -> dict[str, Any]:
        for batch_id in await self._records.open_batches():
            batch = await self._records.batch(batch_id)
            if batch is not None and batch.input_file_id == file.file_id:
                raise Conflict(f"The batch {batch_id} still reads this file.")
        await self._records.delete_file(file.file_id)
        await self._objects.delete(f"files/{file.file_id}")
        return {"id": file.file_id, "object": "file", "deleted": True}

    # -- batches -------------------------------------------------------------------------------------------------

    async def _batch(self, batch_id: str, tenant: str) -> tuple[Batch, OpenBatch | None]:
        opened = await self._records.open_batch(batch_id)  # first: its row disappears at the batch's end
        batch = await self._records.batch(batch_id)
        if batch is None or batch.tenant != tenant:
            raise NotFound(f"There is no batch `{batch_id[:80]}`.", param="batch_id")
        return batch, opened

    async def _create(self, request: HttpRequest, tenant: str) -> dict[str, Any]:
        try:
            asked = msgspec.json.decode(request.body, type=_BatchAsked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"The body is not a batch: {error}") from error
        if asked.endpoint not in ENDPOINTS:
            raise BadRequest(f"endpoint: one of {', '.join(ENDPOINTS)}.", param="endpoint")
        if asked.completion_window != WINDOW:
            raise BadRequest(f"completion_window: only `{WINDOW}` is possible.", param="completion_window")
        metadata = asked.metadata or {}
        _check_metadata(metadata)
        output_s = _expires_s(asked.output_expires_after) if asked.output_expires_after else self._rules.kept_s
        file = await self._file(asked.input_file_id, tenant)
        if file.purpose is not Purpose.BATCH:
            raise BadRequest("input_file_id: the file's purpose is not `batch`.", param="input_file_id")
        opened = await self._records.open_batches()
        if sum(row.tenant == tenant for row in opened.values()) >= MOST_OPEN:
            text = f"The tenant has {MOST_OPEN} batches that are not over."
            raise ApiError(429, text, "requests", "rate_limit_exceeded", retry_after_s=60.0)
        now_s = self._clock()
        batch = Batch(
            batch_id=f"batch_{secrets.token_hex(12)}",
            tenant=tenant,
            key_id=request.caller.key_id,
            endpoint=asked.endpoint,
            input_file_id=file.file_id,
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
            output_expires_s=output_s,
            metadata=metadata,
        )
        await self._records.put_batch(batch)
        await self._records.put_open(OpenBatch(batch_id=batch.batch_id, tenant=tenant, created_at=now_s))
        return batch_row(batch, None)

    async def _cancel(self, found: tuple[Batch, OpenBatch | None]) -> dict[str, Any]:
        batch, opened = found
        if opened is None or batch.status.is_over or batch.finalizing_at:
            if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return batch_row(batch, opened)
            raise Conflict(f"The batch is {batch.status.value} and cannot be cancelled.")
        if not opened.cancelled_at:
            opened = replace(opened, cancelled_at=self._clock())
            await self._records.put_open(opened)
        return batch_row(batch, opened)

    # -- lists ---------------------------------------------------------------------------------------------------

    async def _list(self, base: bytes, query: bytes, tenant: str) -> dict[str, Any]:
        given = {key: values[-1] for key, values in parse_qs(query.decode("ascii", "replace")).items()}
        limit = _limit(given.get("limit"), MOST_LISTED[base])
        if base == BATCHES:
            opened = await self._records.open_batches()
            batches = [batch for batch in (await self._records.batches()).values() if batch.tenant == tenant]
            batches, has_more = _page(batches, lambda batch: batch.batch_id, given, limit)
            return _listed([batch_row(batch, opened.get(batch.batch_id)) for batch in batches], has_more)
        files = [file for file in (await self._records.files()).values() if file.tenant == tenant]
        purpose = given.get("purpose")
        files = [file for file in files if not self._is_expired(file) and purpose in (None, file.purpose)]
        files, has_more = _page(files, lambda file: file.file_id, given, limit)
        return _listed([file_row(file) for file in files], has_more)


def _limit(given: str | None, most: int) -> int:
    if given is None:
        return min(most, 20) if most <= 100 else most
    if not given.isdecimal() or len(given) > len(str(most)) or not 0 < int(given) <= most:
        raise BadRequest(f"limit: 1 to {most}.", param="limit")
    return int(given)


def _page(rows: Iterable[R], id_of: Callable[[R], str], given: dict[str, str], limit: int) -> tuple[list[R], bool]:
    """Return (the page after `after`, newest first, whether more follow)."""
    order = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: asc or desc.", param="order")
    found = sorted(rows, key=lambda row: (row.created_at, id_of(row)), reverse=order == "desc")
    if after := given.get("after"):
        ids = [id_of(row) for row in found]
        if after not in ids:
            raise BadRequest("after: no object has this id.", param="after")
        found = found[ids.index(after) + 1 :]
    return found[:limit], len(found) > limit


def _listed(rows: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"object": "list", "data": rows, "first_id": first, "last_id": last, "has_more": has_more}


def _expires_s(given: dict[str, Any]) -> float:
    least, most = EXPIRES_S
    seconds = given.get("seconds")
    if given.get("anchor") != "created_at" or type(seconds) is not int or not least <= seconds <= most:
        text = f"expires_after: anchor `created_at` and {least} to {most} seconds are needed."
        raise BadRequest(text, param="expires_after")
    return float(seconds)


def _check_metadata(metadata: dict[str, str]) -> None:
    pairs, key_chars, value_chars = MOST_METADATA
    if len(metadata) > pairs or any(len(k) > key_chars or len(v) > value_chars for k, v in metadata.items()):
        text = f"metadata: at most {pairs} pairs, keys of {key_chars} and values of {value_chars} characters."
        raise BadRequest(text, param="metadata")


def file_row(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at) or None,
        "filename": file.name,
        "purpose": file.purpose.value,
        "status": "processed",
        "status_details": None,
    }


def batch_row(batch: Batch, opened: OpenBatch | None) -> dict[str, Any]:
    """Return a batch in OpenAI's shape. `opened`: its open row, the first to know of a cancellation."""
    if opened is not None and opened.cancelled_at:
        batch = progress.cancelling(batch, opened.cancelled_at)
    status, ends = batch.status, {batch.status: int(batch.ended_at)} if batch.status.is_over else {}
    errors = [
        {"code": e.code, "message": e.message, "line": e.line or None, "param": e.param or None} for e in batch.errors
    ]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": status.value,
        "output_file_id": (batch.output_file_id or None) if status.is_over else None,
        "error_file_id": (batch.error_file_id or None) if status.is_over else None,
        "created_at": int(batch.created_at),
        "in_progress_at": int(batch.in_progress_at) or None,
        "expires_at": int(batch.expires_at),
        "finalizing_at": int(batch.finalizing_at) or None,
        "completed_at": ends.get(BatchStatus.COMPLETED),
        "failed_at": ends.get(BatchStatus.FAILED),
        "expired_at": ends.get(BatchStatus.EXPIRED),
        "cancelling_at": int(batch.cancelling_at) or None,
        "cancelled_at": ends.get(BatchStatus.CANCELLED),
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "metadata": dict(batch.metadata) or None,
    }
