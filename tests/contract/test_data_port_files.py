"""OpenAI's API of files and batches on a data port, with its stores in memory. Over a real fleet:
tests/integration/test_batches.py"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.domain.access import Tenant
from glowplug.domain.batch import Batch, BatchStatus, LineError, OpenBatch, Purpose, StoredFile
from glowplug.runtime.service import World
from glowplug.runtime.settings import ServiceSettings
from glowplug.services.router.batches import api
from glowplug.services.router.batches.api import BatchApi, FileRules
from glowplug.services.router.batches.objects import Objects
from glowplug.services.router.batches.records import Records
from glowplug.services.router.batches.service import Batches
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.shell import RouterShell
from glowplug.services.router.upload import Uploads
from glowplug.state.memory_store import MemoryStore
from glowplug.state.port import Fenced
from glowplug.telemetry.metrics import ShellMetrics
from tests.contract.data_port_rig import Answer, Rig, a_rig, assert_error, get, post
from tests.contract.keys_rig import KEY, a_key, bearer, tell
from tests.unit.router.test_batches import CHAT, a_batch, form

FILES, BATCHES, NOW_S, KEPT_S = "/v1/files", "/v1/batches", 1000.5, 7000.0
ASKED = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}


def uploading(
    content: bytes = b"{}\n",
    extra: bytes = b"",
    purpose: bytes = b"batch",
    expires_after: dict[str, str] | None = None,
) -> bytes:
    given = expires_after or {}
    more = [(f'name="expires_after[{name}]"', value.encode()) for name, value in given.items()]
    body = form(('name="purpose"', purpose), *more, ('name="file"; filename="in.jsonl"', content))
    head = b"POST /v1/files HTTP/1.1\r\nhost: t\r\ncontent-type: multipart/form-data; boundary=b1\r\n"
    return head + extra + b"content-length: %d\r\n\r\n%b" % (len(body), body)


class At:
    def __init__(self, rig: Rig, folder: Path, rules: FileRules) -> None:
        self.rig, self.now_s, self.store = rig, NOW_S, MemoryStore()
        self.records, self.objects = Records(self.store), Objects("memory:///")
        uploads, context = Uploads(folder, 1 << 20), rig.port.context
        self.api = BatchApi(self.records, self.objects, uploads, rules, lambda: self.now_s)
        rig.port.intake.answer_batches = self.api.take
        context.begin_upload = lambda request, length: self.api.begin_upload(request, context.access, length)

    async def ask(self, path: str, method: str = "GET", extra: bytes = b"") -> Answer:
        return await self.rig.ask(get(path, method=method, extra=extra), method)

    async def create(self, extra: bytes = b"", **over: Any) -> Answer:
        return await self.rig.ask(post(BATCHES, json.dumps(ASKED | over).encode(), extra))

    async def file(self, file_id: str = "file-1", **over: Any) -> StoredFile:
        given: dict[str, Any] = {"tenant": "default", "name": "n", "purpose": Purpose.BATCH, "num_bytes": 3}
        given |= {"created_at": NOW_S} | over
        await self.objects.put(f"files/{file_id}", b"{}\n")
        await self.records.put_file(file := StoredFile(file_id=file_id, **given))
        return file

    async def batch(self, *, cancelled_at: float | None = None, **over: Any) -> Batch:
        """Open unless `cancelled_at` is None."""
        batch = a_batch(**{"tenant": "default"} | over)
        await self.records.put_batch(batch)
        if cancelled_at is not None:
            opened = OpenBatch(batch_id=batch.batch_id, tenant=batch.tenant, created_at=1.0, cancelled_at=cancelled_at)
            await self.records.put_open(opened)
        return batch


@contextlib.asynccontextmanager
async def files_at(folder: Path, tenant_bytes: int = 0, kept_s: float = KEPT_S, **over: Any) -> AsyncIterator[At]:
    async with a_rig(**over) as rig:
        yield At(rig, folder, FileRules(tenant_bytes, kept_s))


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[At]:
    async with files_at(tmp_path) as made:
        yield made


# -- files -----------------------------------------------------------------------------------------------------------


async def test_a_file_is_stored_shown_read_and_deleted(at: At) -> None:
    made = (await at.rig.ask(uploading(b"x" * 70_000))).json()
    assert made["id"].startswith("file-") and made == {
        "id": made["id"], "object": "file", "bytes": 70_000, "created_at": 1000, "expires_at": 8000,
        "filename": "in.jsonl", "purpose": "batch", "status": "processed", "status_details": None,
    }  # fmt: skip
    path = f"{FILES}/{made['id']}"
    assert (await at.ask(path)).json() == made and (await at.ask(path, "HEAD")).status == 200
    content = await at.ask(f"{path}/content")
    assert content.body == b"x" * 70_000 and content.headers["content-type"] == "application/octet-stream"
    assert content.headers["x-request-id"] and "connection" not in content.headers
    assert (await at.ask(path, "DELETE")).json() == {"id": made["id"], "object": "file", "deleted": True}
    assert_error(await at.ask(path), 404, "not_found")
    with pytest.raises(Exception, match="no content"):
        await anext(at.objects.read(f"files/{made['id']}"))


async def test_a_connection_goes_on_after_each_answer_and_an_empty_file_has_a_head(at: At) -> None:
    client = await at.rig.sent(uploading(b""))
    made = (await client.answer()).json()
    path = f"{FILES}/{made['id']}"
    for request, status in (
        (get(f"{path}/content"), 200),
        (get(f"{FILES}/none"), 404),
        (get(FILES), 200),
        (get(f"{path}/content", extra=b"connection: close\r\n"), 200),
    ):
        await client.send(request)
        answer = await client.answer()
        assert (answer.status, answer.complete) == (status, True)
    assert answer.body == b"" and answer.headers["connection"] == "close" and await client.at_end()


async def test_a_router_that_leaves_closes_after_a_file_and_one_that_refuses_gives_none(at: At) -> None:
    await at.file()
    at.rig.table.stage = PortStage.LEAVING
    answer = await at.ask(f"{FILES}/file-1/content")
    assert answer.body == b"{}\n" and answer.headers["connection"] == "close"
    at.rig.table.stage = PortStage.REFUSING
    assert_error(await at.ask(f"{FILES}/file-1/content"), 503, "router_stopping")


@pytest.mark.parametrize(
    ("fields", "expires_at"),
    [
        ({}, None),
        ({"anchor": "created_at", "seconds": "3600"}, 4600),
        ({"anchor": "created_at", "seconds": "2592000"}, 2_593_000),
        ({"anchor": "created_at", "seconds": "3599"}, 0),
        ({"anchor": "created_at", "seconds": "2592001"}, 0),
        ({"anchor": "created_at", "seconds": "3600.5"}, 0),
        ({"anchor": "created_at", "seconds": "0" * 20 + "3600"}, 0),
        ({"anchor": "created_at", "seconds": "00000003600"}, 4600),
        ({"anchor": "created_at", "seconds": "000000003600"}, 0),
        ({"anchor": "now", "seconds": "3600"}, 0),
        ({"seconds": "3600"}, 0),
    ],
)
async def test_a_file_expires_when_its_client_says(
    tmp_path: Path, fields: dict[str, str], expires_at: int | None
) -> None:
    async with files_at(tmp_path, kept_s=0.0) as at:
        answer = await at.rig.ask(uploading(expires_after=fields))
        if expires_at == 0:
            assert answer.status == 400 and answer.json()["error"]["param"] == "expires_after"
        else:
            assert answer.json()["expires_at"] == expires_at


async def test_an_expired_file_is_gone(at: At) -> None:
    await at.file(expires_at=NOW_S + 1.0)
    at.now_s += 0.9
    assert (await at.ask(f"{FILES}/file-1")).status == 200 and (await at.ask(FILES)).json()["data"]
    at.now_s = NOW_S + 1.0
    assert (await at.ask(f"{FILES}/file-1")).status == 404 and not (await at.ask(FILES)).json()["data"]
    assert (await at.create()).status == 404


async def test_the_files_of_a_tenant_are_bounded_together(tmp_path: Path) -> None:
    async with files_at(tmp_path, tenant_bytes=10) as at:
        await at.file("file-other", tenant="other", num_bytes=9)
        assert (await at.rig.ask(uploading(b"x" * 6))).status == 200
        assert_error(await at.rig.ask(uploading(b"x" * 5)), 403, "files_quota_exceeded")
        assert (await at.rig.ask(uploading(b"x" * 4))).status == 200


@pytest.mark.parametrize(
    ("request_", "param"),
    [(uploading(purpose=b"assistants"), "purpose"), (post(FILES, b"{}"), None), (post(FILES, b""), None)],
)
async def test_what_is_no_file_of_a_batch_is_refused(at: At, request_: bytes, param: str | None) -> None:
    answer = await at.rig.ask(request_)
    assert_error(answer, 400, "bad_request")
    assert answer.json()["error"]["param"] == param
    assert not at.store.tables["files"]


async def test_a_file_that_an_open_batch_reads_stays(at: At) -> None:
    await at.file()
    await at.file("file-2")
    await at.batch(cancelled_at=0.0)
    await at.records.put_open(OpenBatch(batch_id="gone", tenant="default", created_at=1.0))
    assert_error(await at.ask(f"{FILES}/file-1", "DELETE"), 409, "conflict")
    assert (await at.ask(f"{FILES}/file-2", "DELETE")).status == 200
    await at.records.delete_open("batch_1")
    assert (await at.ask(f"{FILES}/file-1", "DELETE")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"{FILES}/file-1/content", 200),
        ("HEAD", f"{FILES}/file-1", 200),
        ("HEAD", FILES, 200),
        ("HEAD", f"{FILES}/file-1/content", 405),
        ("POST", f"{FILES}/file-1", 405),
        ("POST", f"{FILES}/file-1/content", 405),
        ("DELETE", FILES, 405),
        ("DELETE", f"{FILES}/file-1/content", 405),
        ("GET", f"{FILES}/file-1/other", 404),
        ("GET", f"{FILES}/file-1/content/x", 404),
        ("GET", f"{FILES}/file-9/content", 404),
        ("GET", f"{BATCHES}/batch_1", 200),
        ("HEAD", f"{BATCHES}/batch_1", 200),
        ("GET", f"{BATCHES}/batch_1/content", 404),
        ("GET", f"{BATCHES}/batch_1/cancel", 404),
        ("POST", f"{BATCHES}/batch_1", 405),
        ("POST", f"{BATCHES}/batch_1/cancel", 200),
        ("POST", f"{BATCHES}/batch_9/cancel", 404),
        ("DELETE", f"{BATCHES}/batch_1", 405),
        ("DELETE", BATCHES, 405),
        ("PUT", BATCHES, 405),
    ],
)
async def test_each_path_has_its_methods(at: At, method: str, path: str, status: int) -> None:
    await at.file()
    await at.batch(cancelled_at=0.0)
    assert (await at.ask(path, method)).status == status


# -- batches ---------------------------------------------------------------------------------------------------------


async def test_a_batch_is_a_row_and_an_open_row(at: At) -> None:
    await at.file()
    given: dict[str, Any] = {"output_expires_after": {"anchor": "created_at", "seconds": 3600}, "metadata": {"k": "v"}}
    made = (await at.create(**given)).json()
    assert made["id"].startswith("batch_") and made == {
        "id": made["id"], "object": "batch", "endpoint": CHAT, "errors": None, "input_file_id": "file-1",
        "completion_window": "24h", "status": "validating", "output_file_id": None, "error_file_id": None,
        "created_at": 1000, "in_progress_at": None, "expires_at": 87_400, "finalizing_at": None, "completed_at": None,
        "failed_at": None, "expired_at": None, "cancelling_at": None, "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": {"k": "v"},
    }  # fmt: skip
    assert (await at.ask(f"{BATCHES}/{made['id']}")).json() == made
    batch, opened = await at.records.batch(made["id"]), await at.records.open_batch(made["id"])
    assert batch is not None and (batch.tenant, batch.key_id, batch.output_expires_s) == ("default", "", 3600.0)
    assert opened == OpenBatch(batch_id=made["id"], tenant="default", created_at=NOW_S)
    plain = (await at.create()).json()
    assert plain["metadata"] is None and (await at.records.batches())[plain["id"]].output_expires_s == KEPT_S


@pytest.mark.parametrize(
    ("over", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-o"}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600.0}}, "expires_after"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 5}}, None),
        ({"endpoint": None}, None),
    ],
)
async def test_a_batch_with_a_wrong_field_is_refused(at: At, over: dict[str, Any], param: str | None) -> None:
    await at.file()
    await at.file("file-o", purpose=Purpose.BATCH_OUTPUT)
    answer = await at.create(**over)
    assert_error(answer, 400, "bad_request")
    assert answer.json()["error"]["param"] == param and not await at.records.batches()


async def test_metadata_up_to_its_bounds_are_taken(at: At) -> None:
    await at.file()
    pairs = {f"{n:064d}": "v" * 512 for n in range(16)}
    assert (await at.create(metadata=pairs)).json()["metadata"] == pairs


async def test_the_open_batches_of_a_tenant_are_bounded(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MOST_OPEN", 2)
    await at.file()
    await at.records.put_open(OpenBatch(batch_id="b", tenant="other", created_at=1.0))
    assert [(await at.create()).status for _ in range(2)] == [200, 200]
    refused = await at.create()
    assert_error(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "60" and len(await at.records.batches()) == 2


@pytest.mark.parametrize(
    ("status", "finalizing_at", "cancelled_at", "expected"),
    [
        (BatchStatus.VALIDATING, 0.0, 0.0, "cancelling"),
        (BatchStatus.IN_PROGRESS, 0.0, 0.0, "cancelling"),
        (BatchStatus.IN_PROGRESS, 0.0, 77.0, "cancelling"),
        (BatchStatus.CANCELLING, 5.0, 77.0, "cancelling"),
        (BatchStatus.CANCELLED, 5.0, 77.0, "cancelled"),
        (BatchStatus.CANCELLED, 5.0, None, "cancelled"),
        (BatchStatus.FINALIZING, 5.0, 0.0, ""),
        (BatchStatus.COMPLETED, 5.0, 0.0, ""),
        (BatchStatus.FAILED, 0.0, 0.0, ""),
        (BatchStatus.IN_PROGRESS, 0.0, None, ""),
    ],
)
async def test_a_batch_is_cancelled_once_and_until_it_is_finalized(
    at: At, status: BatchStatus, finalizing_at: float, cancelled_at: float | None, expected: str
) -> None:
    await at.batch(status=status, finalizing_at=finalizing_at, cancelled_at=cancelled_at)
    answer = await at.ask(f"{BATCHES}/batch_1/cancel", "POST")
    opened = await at.records.open_batch("batch_1")
    if not expected:
        assert_error(answer, 409, "conflict")
        assert opened is None or not opened.cancelled_at
        return
    assert (answer.status, answer.json()["status"]) == (200, expected)
    if status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        at_s = cancelled_at or NOW_S
        assert opened is not None and opened.cancelled_at == at_s and answer.json()["cancelling_at"] == int(at_s)


@pytest.mark.parametrize(
    ("status", "field"),
    [
        (BatchStatus.COMPLETED, "completed_at"),
        (BatchStatus.FAILED, "failed_at"),
        (BatchStatus.EXPIRED, "expired_at"),
        (BatchStatus.CANCELLED, "cancelled_at"),
        (BatchStatus.FINALIZING, None),
    ],
)
async def test_a_batch_shows_its_files_and_its_end_once_it_is_over(
    at: At, status: BatchStatus, field: str | None
) -> None:
    errors = (LineError(code="c", message="m", line=3, param="p"), LineError(code="d", message="n"))
    await at.batch(
        status=status, output_file_id="file-o", ended_at=9.5, finalizing_at=8.5, in_progress_at=7.5, errors=errors,
        num_lines=4, num_completed=2, num_failed=1,
    )  # fmt: skip
    row = (await at.ask(f"{BATCHES}/batch_1")).json()
    ends = {name: row[name] for name in ("completed_at", "failed_at", "expired_at", "cancelled_at") if row[name]}
    assert ends == ({field: 9} if field else {})
    assert (row["output_file_id"], row["error_file_id"]) == ("file-o" if field else None, None)
    assert (row["finalizing_at"], row["in_progress_at"], row["cancelling_at"]) == (8, 7, None)
    assert row["request_counts"] == {"total": 4, "completed": 2, "failed": 1}
    assert row["errors"]["data"] == [
        {"code": "c", "message": "m", "line": 3, "param": "p"},
        {"code": "d", "message": "n", "line": None, "param": None},
    ]


# -- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ("", "dcba", False),
        ("?limit=4", "dcba", False),
        ("?limit=3", "dcb", True),
        ("?limit=1&after=c", "b", True),
        ("?limit=2&after=c", "ba", False),
        ("?after=a", "", False),
        ("?order=asc", "abcd", False),
        ("?order=asc&limit=2&after=b", "cd", False),
        ("?limit=9&limit=1", "d", True),
        ("?limit=100", "dcba", False),
    ],
)
async def test_lists_come_by_page_the_newest_first(at: At, query: str, ids: str, has_more: bool) -> None:
    for number, name in enumerate("abcd"):
        await at.batch(batch_id=name, created_at=float(number // 2), cancelled_at=None if number else 5.0)
        await at.file(name, created_at=float(number // 2))
    await at.batch(batch_id="other", tenant="other")
    await at.file("other", tenant="other")
    for path in (BATCHES, FILES):
        found = (await at.ask(path + query)).json()
        assert ["".join(row["id"] for row in found["data"]), found["has_more"]] == [ids, has_more]
        assert (found["object"], found["first_id"], found["last_id"]) == (
            "list",
            *((ids[0], ids[-1]) if ids else (None, None)),
        )
        if path == BATCHES:
            assert {row["id"]: row["status"] for row in found["data"]}.get("a", "cancelling") == "cancelling"


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        (BATCHES, "limit=0", "limit"),
        (BATCHES, "limit=101", "limit"),
        (BATCHES, "limit=x", "limit"),
        (BATCHES, "limit=-1", "limit"),
        (BATCHES, "limit=0001", "limit"),
        (FILES, "limit=10001", "limit"),
        (FILES, "order=up", "order"),
        (BATCHES, "after=none", "after"),
    ],
)
async def test_a_page_that_is_none_is_refused(at: At, path: str, query: str, param: str) -> None:
    answer = await at.ask(f"{path}?{query}")
    assert_error(answer, 400, "bad_request")
    assert answer.json()["error"]["param"] == param


async def test_a_page_of_batches_has_twenty_and_files_are_chosen_by_purpose(at: At) -> None:
    for number in range(21):
        await at.batch(batch_id=f"b{number:02d}")
        await at.file(f"f{number:02d}", purpose=Purpose.BATCH_OUTPUT if number == 3 else Purpose.BATCH)
    assert len((await at.ask(BATCHES)).json()["data"]) == 20
    found = [len((await at.ask(f"{FILES}{query}")).json()["data"]) for query in ("", "?purpose=batch", "?purpose=x")]
    assert found == [21, 20, 0] and (await at.ask(f"{FILES}?limit=10000")).status == 200
    assert [row["id"] for row in (await at.ask(f"{FILES}?purpose=batch_output")).json()["data"]] == ["f03"]


# -- callers and faults ----------------------------------------------------------------------------------------------


async def test_a_tenant_sees_its_own_objects_only_and_its_key_is_that_of_the_lines(at: At) -> None:
    tell(at.rig.table.keys, Tenant(name="acme"), a_key())
    await at.file()
    await at.file("file-a", tenant="acme")
    await at.batch(cancelled_at=0.0)
    for path in (f"{FILES}/file-1", f"{BATCHES}/batch_1"):
        assert_error(await at.ask(path), 401, "invalid_api_key")
        assert_error(await at.ask(path, extra=bearer()), 404, "not_found")
    assert_error(await at.rig.ask(uploading()), 401, "invalid_api_key")
    assert (await at.rig.ask(uploading(extra=bearer()))).status == 200
    assert (await at.create(bearer())).status == 404
    made = (await at.create(bearer(), input_file_id="file-a")).json()
    assert (await at.records.batches())[made["id"]].key_id == KEY


async def test_a_page_that_is_let_in_may_send_and_read_files(tmp_path: Path) -> None:
    rules = ServiceSettings(allowed_hosts="t", allowed_origins="https://app.example").web_rules()
    origin = b"origin: https://%b.example\r\nsec-fetch-site: cross-site\r\n"
    async with files_at(tmp_path, rules=rules) as at:
        await at.file()
        for path in (f"{FILES}/file-1", f"{FILES}/file-1/content", f"{FILES}/none"):
            answer = await at.ask(path, extra=origin % b"app")
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert (await at.rig.ask(uploading(extra=origin % b"app"))).status == 200
        assert (await at.rig.ask(uploading(extra=origin % b"other"))).status == 403
        asks = b"access-control-request-method: POST\r\n"
        asked = await at.ask(FILES, "OPTIONS", origin % b"app" + asks)
        assert asked.status == 200 and "DELETE" in asked.headers["access-control-allow-methods"]


async def test_a_store_that_is_silent_is_503_and_a_fault_of_ours_500(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    at.store.down = True
    answer = await at.ask(FILES)
    assert_error(answer, 503, "no_capacity")
    assert answer.headers["retry-after"] == "2"

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(at.records, "files", fail)
    client = await at.rig.sent(get(FILES))
    assert_error(await client.answer(), 500, "internal_error")
    await client.send(get("/health"))
    assert (await client.answer()).status == 200
    assert [row["status"] for row in at.rig.reports.rows(10)] == [500, 503]


async def test_uploads_are_released_whatever_becomes_of_them(at: At) -> None:
    for _ in range(20):
        await at.rig.ask(uploading(purpose=b"x"))
    at.store.down = True
    for _ in range(20):
        assert (await at.rig.ask(uploading())).status == 503
    at.store.down = False
    assert (await at.rig.ask(uploading())).status == 200


async def test_a_call_whose_client_has_left_is_done_all_the_same(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    await at.file()
    began, go = asyncio.Event(), asyncio.Event()
    put = at.records.put_batch

    async def slow(batch: Batch) -> None:
        began.set()
        await go.wait()
        await put(batch)

    monkeypatch.setattr(at.records, "put_batch", slow)
    client = await at.rig.sent(post(BATCHES, json.dumps(ASKED).encode()))
    await began.wait()
    assert at.rig.port.context.buffered_bytes
    client.close()
    await at.rig.until(lambda: not at.rig.port.connections)
    go.set()
    await at.rig.until(lambda: bool(at.store.tables["batches_open"]))
    await at.rig.until(lambda: not at.rig.port.context.buffered_bytes)


async def test_a_file_waits_for_its_reader_and_ends_with_it(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    await at.file(num_bytes=300 * 65_536)
    num_read, closed = 0, asyncio.Event()

    async def pieces(name: str) -> AsyncIterator[bytes]:
        nonlocal num_read
        try:
            for _ in range(300):
                num_read += 1
                yield b"x" * 65_536
        finally:
            closed.set()

    monkeypatch.setattr(at.objects, "read", pieces)
    client = await at.rig.sent(get(f"{FILES}/file-1/content"))
    connection = await at.rig.connection()
    await at.rig.until(lambda: connection.write_paused)
    assert num_read < 300 and connection.exchange is not None and connection.exchange.probe()
    assert len((await client.answer()).body) == 300 * 65_536 and num_read == 300
    num_read = 0
    closed.clear()
    await client.send(get(f"{FILES}/file-1/content"))
    await at.rig.until(lambda: num_read > 0 and connection.write_paused)
    client.close()
    await at.rig.until(lambda: not at.rig.port.connections)
    assert num_read < 300


async def test_a_store_that_fails_within_a_file_cuts_it_visibly(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    await at.file(num_bytes=100)

    async def pieces(name: str) -> AsyncIterator[bytes]:
        yield b"x" * 50
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(at.objects, "read", pieces)
    client = await at.rig.sent(get(f"{FILES}/file-1/content"))
    answer = await client.answer()
    assert (answer.status, answer.body, answer.complete) == (200, b"x" * 50, False)
    assert not at.rig.reports.rows(10)


async def test_a_router_with_an_object_store_has_files_and_runs_batches_under_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_rig() as rig:
        settings = RouterSettings(service_id="router-1", state_dir=tmp_path, files_url="memory:///")
        store: Any = MemoryStore()
        bus: Any = MemoryBus()
        world = World(settings, "router", bus, store, ShellMetrics("router", CollectorRegistry()))
        shell = RouterShell(world, settings, rig.table)
        assert Batches.open(world, replace(settings, files_url=""), rig.port, shell) is None
        assert (await rig.ask(get(FILES))).status == 501
        made = Batches.open(world, settings, rig.port, shell)
        assert made is not None and (await rig.ask(uploading())).status == 200
        assert (tmp_path / "router-1" / "uploads").is_dir() and (await rig.ask(get(FILES))).json()["data"]
        terms: list[int] = []

        async def term(epoch: int) -> None:
            terms.append(epoch)

        fenced: Any = store.client()
        monkeypatch.setattr(made, "_store", fenced)
        monkeypatch.setattr(made._runner, "term", term)
        store.epochs["router"] = 8
        await made._term(7)
        with pytest.raises(Fenced):
            await fenced.put("batches", "b", b"")
        assert terms == [7]
        await made.stop()
        made.start("http://x", asyncio.Event())
        await rig.until(lambda: terms == [7, 9])
        assert store.leases
        await made.stop()
        assert not store.leases
