"""Pure parts of batches, and the upload's form."""

import asyncio
import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from glowplug.domain.batch import Batch, BatchStatus, LineError, OpenBatch, Parts
from glowplug.domain.errors import BadRequest
from glowplug.services.router import upload as uploading
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.batches import lines, progress
from glowplug.services.router.batches.lines import Checker, LineAnswer, LineSplitter, TooLongLine
from glowplug.services.router.batches.metrics import BatchMetrics
from glowplug.services.router.batches.progress import Pace
from glowplug.services.router.upload import Upload, Uploads

CHAT = "/v1/chat/completions"


def a_line(custom_id: Any = "a", **over: Any) -> bytes:
    asked = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}}
    return json.dumps(asked | over).encode()


def a_batch(**over: Any) -> Batch:
    known: dict[str, Any] = {
        "batch_id": "batch_1",
        "tenant": "acme",
        "key_id": "",
        "endpoint": CHAT,
        "input_file_id": "file-1",
        "created_at": 1.0,
        "expires_at": 100.0,
    }
    return Batch(**known | over)


def split(content: bytes, sizes: list[int], most: int = 1000) -> list[tuple[int, bytes]]:
    splitter, found, at = LineSplitter(most), list[tuple[int, bytes]](), 0
    for size in [*sizes, len(content)]:
        found += splitter.feed(content[at : at + size])
        at += size
    return [*found, *splitter.end()]


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), max_size=20))
def test_lines_are_the_same_however_their_bytes_come(content: bytes, sizes: list[int]) -> None:
    expected = [(k, row) for k, row in enumerate(content.split(b"\n"), start=1) if row.strip()]
    assert split(content, sizes) == expected


def test_a_line_that_is_too_long_is_not_collected() -> None:
    for content in (b"a\n" + b"x" * 11, b"a\n" + b"x" * 11 + b"\nb"):
        with pytest.raises(TooLongLine):
            split(content, [], most=10)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"[]", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b'{"custom_id": "a"', "invalid_json_line"),
        (a_line(""), "missing_required_parameter"),
        (a_line(7), "missing_required_parameter"),
        (a_line(method="GET"), "invalid_method"),
        (a_line(url="/v1/embeddings"), "mismatched_url"),
        (a_line(body="text"), "missing_required_parameter"),
        (a_line(body={"messages": []}), "missing_required_parameter"),
        (a_line(body={"model": "m", "stream": True}), "invalid_value"),
    ],
)
def test_a_faulty_line_is_named(raw: bytes, code: str) -> None:
    checker = Checker(CHAT, 10)
    checker.take(3, raw)
    (error,) = checker.end()
    assert (error.code, error.line) == (code, 3) and error.message


def test_an_input_is_bounded_and_not_empty() -> None:
    assert [error.code for error in Checker(CHAT, 10).end()] == ["empty_file"]
    checker = Checker(CHAT, 2)
    for number, custom_id in enumerate("abcd", start=1):
        checker.take(number, a_line(custom_id))
    assert [error.code for error in checker.end()] == ["too_many_lines"]
    checker = Checker(CHAT, 1000)
    for number in range(100):
        checker.take(number, a_line())
    assert checker.is_full and len(checker.end()) == lines.MAX_ERRORS


def test_a_checked_line_keeps_its_body_byte_by_byte() -> None:
    line = lines.read_line(4, b'{"custom_id":"a","method":"POST","url":"/","body":{"model": "m",  "x": 1.50}}')
    assert (line.number, line.custom_id, line.body) == (4, "a", b'{"model": "m",  "x": 1.50}')


@given(st.lists(st.tuples(st.integers(1, 10**6), st.booleans(), st.dictionaries(st.text(), st.text()))))
def test_a_part_gives_back_its_results(results: list[tuple[int, bool, dict[str, str]]]) -> None:
    rows = [
        (number, kind, lines.output_line("r", "c", LineAnswer(200, json.dumps(b).encode())))
        for number, kind, b in results
    ]
    part = b"".join(lines.part_line(number, kind, line) for number, kind, line in rows)
    assert list(lines.read_part(part)) == rows
    assert all(json.loads(line)["response"]["body"] == b for (_, _, line), (_, _, b) in zip(rows, results, strict=True))


def test_output_lines_are_whole_whatever_an_engine_answers() -> None:
    pretty = json.loads(lines.output_line("r", "c", LineAnswer(200, b'{\n "a":\r\n 1\n}', "req-1")))
    assert pretty["response"] == {"status_code": 200, "request_id": "req-1", "body": {"a": 1}}
    assert b"\n" not in lines.output_line("r", "c", LineAnswer(200, b'{\n "a":\r\n 1\n}'))
    assert json.loads(lines.output_line("r", "c", LineAnswer(200, b"<html>")))["response"]["body"]["error"]
    unsent = json.loads(lines.output_line("r", "c", LineAnswer(0, code="batch_expired", message="late")))
    assert unsent["response"] is None and unsent["error"] == {"code": "batch_expired", "message": "late"}


@pytest.mark.parametrize(
    ("answer", "num_lost", "is_retried"),
    [
        (LineAnswer(429, retry_after_s=1.0), 0, True),
        (LineAnswer(503), 9, True),
        (LineAnswer(429, may_retry=False), 0, False),  # never fits
        (LineAnswer(429, may_retry=False, retry_after_s=3000.0), 0, True),  # a monthly quota
        (LineAnswer(502), 1, True),
        (LineAnswer(502), 2, False),
        (LineAnswer(400), 0, False),
        (LineAnswer(200), 0, False),
    ],
)
def test_what_is_sent_again(answer: LineAnswer, num_lost: int, is_retried: bool) -> None:
    assert lines.is_retried(answer, num_lost, 2) == is_retried


def test_a_batch_ends_as_its_lines_did() -> None:
    batch = progress.validated(a_batch(), (), 3, 5.0)
    assert batch.status is BatchStatus.IN_PROGRESS and batch.in_progress_at == 5.0
    part = progress.with_part(progress.with_part(batch, 7, 1, 1), 7, 1, 0)
    assert part.parts == (Parts(epoch=7, num=2),) and (part.num_completed, part.num_failed) == (2, 1)
    done = progress.finalizing(part, 9.0, "file-o", "file-e")
    assert done.status is BatchStatus.FINALIZING
    ended = progress.ended(done, 10.0, has_output=True, has_errors=False)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == (BatchStatus.COMPLETED, "file-o", "")
    late = progress.finalizing(batch, 9.0, "file-o", "file-e")
    assert progress.ended(late, 10.0, has_output=False, has_errors=True).status is BatchStatus.EXPIRED
    stopped = progress.finalizing(progress.cancelling(part, 6.0), 9.0, "file-o", "file-e")
    assert stopped.status is BatchStatus.CANCELLING
    assert progress.ended(stopped, 10.0, has_output=True, has_errors=True).status is BatchStatus.CANCELLED
    failed = progress.validated(a_batch(), (LineError(code="x", message="y"),), 0, 5.0)
    assert failed.status is BatchStatus.FAILED and progress.cancelling(failed, 6.0) is failed


@given(st.lists(st.sampled_from([3, 5, 8]), max_size=30))
def test_parts_of_each_holder_are_numbered_on_their_own(epochs: list[int]) -> None:
    batch = a_batch()
    names = []
    for epoch in sorted(epochs):
        names.append(progress.part_name("batch_1", epoch, progress.next_part(batch, epoch)))
        batch = progress.with_part(batch, epoch, 1, 0)
    assert list(progress.part_names(batch)) == names and len(set(names)) == len(names)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20),
    st.lists(st.sampled_from("abc"), max_size=5),
    st.integers(0, 8),
)
def test_tenants_take_turns(waiting: list[tuple[str, int]], running: list[str], most: int) -> None:
    rows = [OpenBatch(batch_id=f"w{k}", tenant=t, created_at=at) for k, (t, at) in enumerate(waiting)]
    at_work = [OpenBatch(batch_id=f"r{k}", tenant=t, created_at=0) for k, t in enumerate(running)]
    chosen = progress.next_batches(rows, at_work, most)
    assert len(chosen) == min(len(rows), max(most - len(at_work), 0))
    for batch in chosen:
        older = [row for row in rows if row.tenant == batch.tenant and row.created_at < batch.created_at]
        assert all(row in chosen for row in older)


def test_the_pace_fills_idle_engines_and_gives_way() -> None:
    pace = Pace(64)
    for _ in range(100):
        pace.answered(0.0, 0.0)
    assert pace.size == 64
    for now_s in (1.0, 1.5, 2.0):  # halved once a second
        pace.answered(5.0, now_s)
    assert pace.size == 16
    pace.answered(0.5, 9.0)
    assert pace.size == 16
    for now_s in range(10, 30):
        pace.refused(float(now_s))
    assert pace.size == 1
    pace.most = 0
    assert pace.size == 1


def test_the_pace_counts_by_thresholds() -> None:
    def paced(*held_s: float, at: float = 10.0) -> int:
        pace = Pace(64)
        for held in held_s:
            pace.answered(held, at)
        return pace.size

    assert [paced(held) for held in (0.24, 0.25, 1.0, 1.01)] == [5, 4, 4, 2]
    assert paced(5.0, 5.0) == 2 and paced(5.0, 0.0) == 3
    pace = Pace(2)
    assert pace.size == 2
    pace.answered(0.0, 1.0)
    pace.most = 9
    assert pace.size == 2
    pace.refused(1.0)
    pace.refused(1.9)
    assert pace.size == 1
    pace.answered(0.0, 1.9)
    pace.refused(2.0)
    assert pace.size == 1


@pytest.mark.parametrize(
    ("retry_after_s", "num_refused", "expected"),
    [(None, 0, 1.0), (None, 2, 4.0), (None, 5, 32.0), (None, 9, 32.0), (0.0, 1, 2.0), (0.01, 1, 0.1), (99.0, 1, 60.0)],
)
def test_a_refused_line_waits_as_told_or_twice_as_long_each_time(
    retry_after_s: float | None, num_refused: int, expected: float
) -> None:
    assert progress.wait_s(retry_after_s, num_refused) == expected


def test_the_tenant_with_the_fewest_batches_is_next_and_the_oldest_of_its_batches() -> None:
    def row(name: str, at: float = 0.0) -> OpenBatch:
        return OpenBatch(batch_id=name, tenant=name[0], created_at=at)

    waiting = [row("a1", 1.0), row("a0", 1.0), row("b1", 9.0), row("a2", 0.0), row("c1", 10.0)]
    running = [row("c8"), row("c9")]
    chosen = [one.batch_id for one in progress.next_batches(waiting, running, 6)]
    assert chosen == ["a2", "b1", "a0", "a1"]
    assert progress.next_batches(waiting, running, 2) == []


@pytest.mark.parametrize("status", BatchStatus)
def test_only_a_batch_that_still_sends_can_be_cancelled(status: BatchStatus) -> None:
    batch = a_batch(status=status)
    found = progress.cancelling(batch, 6.0)
    if status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        assert (found.status, found.cancelling_at) == (BatchStatus.CANCELLING, 6.0)
    else:
        assert found is batch


def test_a_batch_keeps_its_dates_and_counts_as_it_ends() -> None:
    batch = progress.finalizing(a_batch(num_lines=3, num_completed=1, num_failed=2), 9.0, "file-o", "file-e")
    assert (batch.status, batch.finalizing_at, batch.ends_as) == (BatchStatus.FINALIZING, 9.0, BatchStatus.COMPLETED)
    ended = progress.ended(batch, 10.0, has_output=False, has_errors=True)
    assert (ended.ended_at, ended.output_file_id, ended.error_file_id) == (10.0, "", "file-e")
    failed = progress.validated(a_batch(), (LineError(code="x", message="y"),), 3, 5.0)
    assert (failed.ended_at, failed.num_lines, failed.in_progress_at) == (5.0, 0, 0.0)
    first = progress.with_part(a_batch(num_completed=1, num_failed=1), 7, 2, 3)
    assert (first.num_completed, first.num_failed, progress.next_part(first, 7)) == (3, 4, 1)
    assert progress.next_part(first, 8) == progress.next_part(a_batch(), 7) == 0


def test_a_line_may_have_all_the_bytes_of_a_request() -> None:
    assert split(b"x" * 10 + b"\n" + b"y" * 10, [3], most=10) == [(1, b"x" * 10), (2, b"y" * 10)]
    for content, number in ((b"x" * 11 + b"\ny", 1), (b"\n\n" + b"x" * 11, 3)):
        with pytest.raises(TooLongLine) as error:
            split(content, [], most=10)
        assert error.value.number == number


def test_lines_are_checked_to_their_bounds() -> None:
    checker = Checker(CHAT, 3)
    for number, line in enumerate(
        (a_line("x" * 512), a_line("x" * 513), a_line("a", body={"model": "", "stream": None}))
    ):
        checker.take(number + 5, line)
        assert not checker.is_full
    (error,) = checker.end()
    assert (error.line, error.param, checker.num_lines) == (6, "custom_id", 3)
    checker.take(9, a_line("a"))
    assert [one.code for one in checker.end()] == ["missing_required_parameter", "duplicate_custom_id"]
    checker.too_long(10, 77)
    assert (checker.end()[-1].code, checker.end()[-1].line) == ("line_too_long", 10)
    exact = Checker(CHAT, 2)
    for number, custom_id in enumerate("ab"):
        exact.take(number, a_line(custom_id))
    assert exact.end() == ()
    gone = Checker(CHAT, 2)
    gone.errors.append(LineError(code="input_not_found", message="x"))
    assert [one.code for one in gone.end()] == ["input_not_found"]


def test_many_wrong_lines_fill_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_ERRORS", 2)
    checker = Checker(CHAT, 10)
    for number in range(2):
        assert not checker.is_full
        checker.take(number, b"x")
    assert checker.is_full
    checker.take(3, b"x")
    assert len(checker.end()) == 2


@pytest.mark.parametrize(
    ("head", "seconds"), [(b"server-timing: queue;dur=1500.0, router;dur=2", 1.5), (b"x: dur=5", 0.0), (b"", 0.0)]
)
def test_the_time_in_the_queue_is_read_from_a_head(head: bytes, seconds: float) -> None:
    assert lines.queue_s(head) == seconds


def test_an_answer_without_a_body_has_none() -> None:
    assert json.loads(lines.output_line("r", "c", LineAnswer(204)))["response"]["body"] is None
    assert lines.part_line(3, False, b"x") == b"3 e x\n" and list(lines.read_part(b"\n3 e x y\n")) == [
        (3, False, b"x y")
    ]
    assert [lines.is_lost(LineAnswer(status)) for status in (499, 500, 501, 502, 503, 504)] == [
        False, True, False, True, False, True
    ]  # fmt: skip


def test_the_batches_of_each_state_are_shown_while_they_run() -> None:
    registry = CollectorRegistry()
    metrics = BatchMetrics(registry)

    def shown(state: str) -> float | None:
        return registry.get_sample_value("glowplug_batches", {"state": state})

    metrics.states([BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.IN_PROGRESS], 3)
    assert [shown(state) for state in ("validating", "in_progress", "finalizing", "cancelling")] == [4, 2, 0, 0]
    metrics.states([], -1)
    assert (shown("validating"), shown("in_progress")) == (0, 0)
    metrics.forget_states()
    assert shown("validating") is None


def form(*parts: tuple[str, bytes], boundary: str = "b1") -> bytes:
    rows = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    ]
    return b"".join(rows) + f"--{boundary}--\r\n".encode()


async def received(
    tmp_path: Path, body: bytes, most: int = 1 << 20, step: int = 7
) -> tuple[dict[str, str], str, bytes]:
    uploads = Uploads(tmp_path, most)
    upload = uploads.begin(None)
    for at in range(0, len(body), step):
        upload.feed(body[at : at + step])
    found = await upload.form(b"multipart/form-data; boundary=b1")
    content = b"".join([piece async for piece in upload.content(found)])
    upload.close()
    return found.fields, found.file_name, content


async def test_a_form_gives_its_fields_and_its_file(tmp_path: Path) -> None:
    content = b"--b\r\nx\r\n--b\r\n" * 50_000
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="../a/in.jsonl"\r\nContent-Type: x/y', content))
    assert await received(tmp_path, body, step=65_536) == ({"purpose": "batch"}, "in.jsonl", content)
    body = form(('name="file"; filename="in"', b""), ('name="purpose"', b"batch"))
    assert await received(tmp_path, body) == ({"purpose": "batch"}, "in", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "body", [b"", b"--b2\r\n", form(('name="purpose"', b"batch")), form(('name="file"', b"x"))[:-20]]
)
async def test_what_is_no_form_is_refused(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(BadRequest):
        await received(tmp_path, body)


async def test_uploads_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="larger"):
        await received(tmp_path, b"x" * 200_000, most=1000, step=1000)
    uploads = Uploads(tmp_path, 1000)
    with pytest.raises(ApiError, match="larger"):
        uploads.begin(1 << 20)
    held = [uploads.begin(None) for _ in range(16)]
    with pytest.raises(ApiError, match="Too many"):
        uploads.begin(None)
    held.pop()
    uploads.begin(None)


FILE = ('name="file"; filename="in"', b"x")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (b"multipart/form-data; boundary=b1", True),
        (b'Multipart/Form-Data; Boundary="b1"', True),
        (b"multipart/form-data", False),
        (b"multipart/form-data; boundary=b2", False),
        (b"application/json; boundary=b1", False),
    ],
)
async def test_a_form_is_known_by_its_type_and_its_boundary(tmp_path: Path, kind: bytes, names: bool) -> None:
    upload = Uploads(tmp_path, 1000).begin(None)
    upload.feed(form(FILE))
    if names:
        assert (await upload.form(kind)).file_name == "in"
    else:
        with pytest.raises(BadRequest):
            await upload.form(kind)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ('name="file"', "file"),
        ('name="file"; filename=""', "file"),
        ('filename="a"; name="file"', "a"),
        ('name=file; filename="c:\\\\b\\\\a.jsonl"', "a.jsonl"),
        (f'name="file"; filename="{"a" * 300}"', "a" * 255),
    ],
)
async def test_a_file_has_a_plain_name(tmp_path: Path, head: str, name: str) -> None:
    assert await received(tmp_path, form((head, b"x"))) == ({}, name, b"x")


async def test_fields_are_bounded_and_each_has_a_name(tmp_path: Path) -> None:
    most = b"y" * uploading.MOST_FIELD_BYTES
    assert (await received(tmp_path, form(('name="a"', most), FILE)))[0] == {"a": most.decode()}
    many = [(f'name="{number}"', b"") for number in range(62)]
    assert len((await received(tmp_path, form(*many, FILE)))[0]) == 62
    for parts in ((('name="a"', most + b"y"), FILE), (("x=1", b""), FILE), (('name="' + "a" * 5000, b""), FILE)):
        with pytest.raises(BadRequest):
            await received(tmp_path, form(*parts), step=1000)
    body = form(FILE)
    for cut in (body[:-10], body.replace(b"\r\n\r\n", b"\r\n"), b"x" + body):
        with pytest.raises(BadRequest):
            await received(tmp_path, cut)


@pytest.mark.parametrize("beyond", [-7, -6, -4, -2, 0, 1, 10])
async def test_a_boundary_is_found_wherever_it_stands(tmp_path: Path, beyond: int) -> None:
    content = b"\r\n--b" * ((uploading._PIECE + beyond) // 5) + b"-" * ((uploading._PIECE + beyond) % 5)
    body = form(('name="file"; filename="in"', content), ('name="purpose"', b"batch"))
    assert await received(tmp_path, body, most=1 << 22, step=1 << 19) == ({"purpose": "batch"}, "in", content)


def an_upload(file: IO[bytes], most: int, writer: ThreadPoolExecutor, ends: list[int]) -> Upload:
    made = Upload(file, most, writer, lambda: ends.append(1))
    made.pause = lambda paused: ends.append(2 + paused)
    return made


async def test_a_client_that_outruns_the_disk_waits_for_it() -> None:
    told, gate = list[int](), threading.Event()
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(1) as writer:
        writer.submit(gate.wait)
        upload = an_upload(file, 1 << 23, writer, told)
        upload.feed(b"a" * (uploading.WRITE_BYTES - 1))
        assert upload._writing is None
        upload.feed(b"b")
        assert upload._writing is not None and not upload._buffer
        upload.feed(b"c" * uploading.MOST_BUFFERED)
        assert not told
        upload.feed(b"d")
        upload.feed(b"e")
        assert told == [3]
        gate.set()
        while upload._writing is not None:
            await asyncio.wait((upload._writing,))
            await asyncio.sleep(0)
        assert told == [3, 2] and not upload._buffer
        upload.feed(b"f")
        with pytest.raises(BadRequest):
            await upload.form(b"multipart/form-data; boundary=b1")
        assert file.seek(0, 2) == upload.num_bytes == uploading.WRITE_BYTES + uploading.MOST_BUFFERED + 3
        upload.close()
        upload.close()
        assert told == [3, 2, 1]


async def test_a_full_disk_is_told_and_takes_no_memory(tmp_path: Path) -> None:
    told, path = list[int](), tmp_path / "file"
    path.touch()
    with path.open("rb") as file, ThreadPoolExecutor(1) as writer:
        upload = an_upload(file, 1 << 23, writer, told)
        upload.feed(b"a" * uploading.WRITE_BYTES)
        with pytest.raises(ApiError) as caught:
            await upload.form(b"multipart/form-data; boundary=b1")
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "no_space", 5)
        assert not upload._buffer and not told
    with pytest.raises(ApiError) as caught:
        Uploads(path / "below", 1000).begin(None)
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "no_space", 5.0)


async def test_an_upload_may_be_as_long_as_its_bound_and_a_form(tmp_path: Path) -> None:
    most, uploads = 1000 + uploading._FORM, Uploads(tmp_path / "a" / "b", 1000)
    upload = uploads.begin(most)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    upload.feed(b"x" * most)
    with pytest.raises(ApiError) as caught:
        upload.feed(b"x")
    assert (caught.value.status, "1000 bytes" in caught.value.message) == (413, True)
    with pytest.raises(ApiError):
        uploads.begin(most + 1)
