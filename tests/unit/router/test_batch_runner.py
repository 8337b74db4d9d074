"""Runs of batches on memory stores, with scripted answers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.domain.batch import Batch, BatchStatus, OpenBatch, Parts, Purpose, StoredFile
from glowplug.services.router.batches import lines, progress, runner
from glowplug.services.router.batches.lines import LineAnswer
from glowplug.services.router.batches.metrics import BatchMetrics
from glowplug.services.router.batches.objects import NoObject, Objects, ObjectsUnavailable
from glowplug.services.router.batches.records import Records
from glowplug.services.router.batches.runner import BatchRun, Means, Runner
from glowplug.state.memory_store import MemoryStore
from glowplug.state.port import Fenced, StoreUnavailable
from tests.unit.router.test_batches import CHAT, a_batch, a_line
from tests.waiting import until

NOW_S, EPOCH = 50.0, 7
OPENED = OpenBatch(batch_id="batch_1", tenant="acme", created_at=1.0)


async def hang(number: int) -> LineAnswer:
    await asyncio.Event().wait()
    raise AssertionError


class Rig:
    def __init__(self) -> None:
        self.now_s, self.registry = NOW_S, CollectorRegistry()
        self.store = MemoryStore()
        self.records, self.objects = Records(self.store), Objects("memory:///")
        self.metrics = BatchMetrics(self.registry)
        self.means = Means(self.records, self.objects, self, self.metrics, lambda: self.now_s, 100, 1000)
        self.sent: list[int] = []
        self.at_once = self.most_at_once = 0
        self.reply: Callable[[int], Any] = lambda number: LineAnswer(200, b'{"n":%d}' % number)

    async def send(self, tenant: str, key_id: str, endpoint: str, body: bytes) -> LineAnswer:
        assert (tenant, key_id, endpoint) == ("acme", "k", CHAT)
        number = json.loads(body)["n"]
        self.sent.append(number)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            answer = self.reply(number)
            return answer if isinstance(answer, LineAnswer) else await answer
        finally:
            self.at_once -= 1

    async def put(self, num: int = 0, *, content: bytes | None = None, **over: Any) -> Batch:
        """An open batch whose line N has the body {"n": N}."""
        rows = [a_line(f"c-{n}", body={"model": "m", "n": n}) for n in range(1, num + 1)]
        batch = a_batch(**{"key_id": "k"} | over)
        await self.objects.put(f"files/{batch.input_file_id}", b"\n".join(rows) if content is None else content)
        await self.records.put_batch(batch)
        await self.records.put_open(replace(OPENED, batch_id=batch.batch_id))
        return batch

    async def part(self, name: str, **kinds: bool) -> None:
        """Results of lines, each with whether it succeeded."""
        rows = [
            lines.part_line(int(n[1:]), ok, lines.output_line("r", f"c-{n[1:]}", LineAnswer(200 if ok else 400, b"{}")))
            for n, ok in kinds.items()
        ]
        await self.objects.put(name, b"".join(rows))

    def run(self, opened: OpenBatch = OPENED, at_once: int = 4) -> BatchRun:
        run = BatchRun(self.means, opened, EPOCH)
        run.pace.most = at_once
        return run

    async def over(self, opened: OpenBatch = OPENED) -> Batch:
        await self.run(opened).run()
        assert await self.records.open_batch("batch_1") is None
        return await self.batch()

    async def batch(self) -> Batch:
        batch = await self.records.batch("batch_1")
        assert batch is not None
        return batch

    async def read(self, name: str) -> bytes | None:
        try:
            return b"".join([chunk async for chunk in self.objects.read(name)])
        except NoObject:
            return None

    async def file(self, file_id: str) -> dict[str, Any]:
        """Its lines by custom_id."""
        content, file = await self.read(f"files/{file_id}"), await self.records.file(file_id)
        assert content is not None and file is not None and content.endswith(b"\n")
        assert (file.num_bytes, file.tenant, file.purpose) == (len(content), "acme", Purpose.BATCH_OUTPUT)
        rows = [json.loads(row) for row in content.splitlines()]
        assert all(row["id"].startswith("batch_req_") or row["id"] == "r" for row in rows)
        assert len({row["custom_id"] for row in rows}) == len(rows)
        return {row["custom_id"]: row for row in rows}

    def num_lines(self, outcome: str) -> float:
        return self.registry.get_sample_value("glowplug_batch_lines_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def rig() -> Rig:
    return Rig()


# -- a run -----------------------------------------------------------------------------------------------------------


async def test_a_batch_ends_with_a_file_of_its_answers_and_one_of_its_errors(rig: Rig) -> None:
    await rig.put(5, output_expires_s=9.0)
    rig.reply = lambda n: LineAnswer(404 if n == 2 else 200, b'{"n":%d}' % n)
    done = await rig.over()
    assert (done.status, done.num_lines, done.num_completed, done.num_failed) == (BatchStatus.COMPLETED, 5, 4, 1)
    assert done.in_progress_at == done.finalizing_at == done.ended_at == NOW_S and sorted(rig.sent) == [1, 2, 3, 4, 5]
    output, errors = await rig.file(done.output_file_id), await rig.file(done.error_file_id)
    assert {name: row["response"]["body"]["n"] for name, row in output.items()} == {
        "c-1": 1, "c-3": 3, "c-4": 4, "c-5": 5
    }  # fmt: skip
    assert errors["c-2"]["response"]["status_code"] == 404
    file = await rig.records.file(done.output_file_id)
    assert file is not None and (file.name, file.created_at, file.expires_at) == (
        "batch_1_output.jsonl",
        NOW_S,
        NOW_S + 9.0,
    )
    assert done.parts == (Parts(epoch=EPOCH, num=1),) and await rig.read(f"batches/batch_1/{EPOCH}-0") is None
    assert rig.registry.get_sample_value("glowplug_batches_ended_total", {"state": "completed"}) == 1
    assert (rig.num_lines("completed"), rig.num_lines("failed"), rig.num_lines("retried")) == (4, 1, 0)
    assert rig.most_at_once == 4


@pytest.mark.parametrize(("status", "has_output"), [(200, True), (404, False)])
async def test_an_empty_file_is_none_and_without_an_end_it_stays(rig: Rig, status: int, has_output: bool) -> None:
    await rig.put(1)
    rig.reply = lambda n: LineAnswer(status, b"{}")
    names, put = list[str](), rig.objects.put

    async def noted(name: str, content: Any) -> None:
        names.append(name)
        await put(name, content)

    rig.objects.put = noted  # type: ignore[method-assign]
    done = await rig.over()
    assert len(names) == 2, "a part and a file"
    assert (bool(done.output_file_id), bool(done.error_file_id)) == (has_output, not has_output)
    (file,) = (await rig.records.files()).values()
    assert file.file_id == done.output_file_id + done.error_file_id and file.expires_at == 0.0


async def test_a_row_without_its_batch_is_dropped_and_an_ended_batch_is_only_cleared(rig: Rig) -> None:
    await rig.records.put_open(OPENED)
    await rig.run().run()
    assert not await rig.records.open_batches()
    ended = await rig.put(1, status=BatchStatus.COMPLETED, parts=(Parts(epoch=3, num=1),), ended_at=9.0)
    await rig.part("batches/batch_1/3-0", n1=True)
    assert await rig.over() == ended and not rig.sent and await rig.read("batches/batch_1/3-0") is None


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", 0),
        (b"no json", "invalid_json_line", 1),
        (b"\n" + b"x" * 1001, "line_too_long", 2),
        (b"\n".join(a_line(f"c-{n}") for n in range(101)), "too_many_lines", 0),
        (b"no json\n" * 60, "invalid_json_line", 1),
    ],
)
async def test_an_input_that_cannot_be_used_fails_its_batch(rig: Rig, content: bytes, code: str, line: int) -> None:
    await rig.put(content=content)
    done = await rig.over()
    assert (done.status, done.errors[0].code, done.errors[0].line) == (BatchStatus.FAILED, code, line)
    assert len(done.errors) <= lines.MAX_ERRORS and not rig.sent and not await rig.records.files()


async def test_an_input_that_is_gone_fails_its_batch_and_a_hundred_lines_do_not(rig: Rig) -> None:
    await rig.put(1)
    await rig.objects.delete("files/file-1")
    assert [error.code for error in (await rig.over()).errors] == ["input_not_found"]
    await rig.put(100)
    assert (await rig.over()).num_completed == 100


async def test_a_run_goes_on_behind_the_parts_that_count(rig: Rig) -> None:
    parts = (Parts(epoch=3, num=2), Parts(epoch=EPOCH, num=1))
    await rig.put(6, status=BatchStatus.IN_PROGRESS, num_lines=6, parts=parts, num_completed=77, num_failed=77)
    await rig.part("batches/batch_1/3-0", n1=True)
    await rig.part("batches/batch_1/3-1", n2=False, n1=True)  # a line counts once
    await rig.part("batches/batch_1/3-2", n3=True)  # of a holder that was fenced off
    await rig.part(f"batches/batch_1/{EPOCH}-0", n4=True)
    done = await rig.over()
    assert sorted(rig.sent) == [3, 5, 6] and (done.num_completed, done.num_failed) == (5, 1)
    assert done.parts == (Parts(epoch=3, num=2), Parts(epoch=EPOCH, num=2)) and done.status is BatchStatus.COMPLETED
    assert len(await rig.file(done.output_file_id)) == 5 and set(await rig.file(done.error_file_id)) == {"c-2"}


async def test_a_batch_that_was_being_finalized_sends_nothing_more(rig: Rig) -> None:
    await rig.put(
        2,
        status=BatchStatus.FINALIZING,
        num_lines=2,
        parts=(Parts(epoch=3, num=1),),
        finalizing_at=40.0,
        output_file_id="file-o",
        error_file_id="file-e",
    )
    await rig.part("batches/batch_1/3-0", n1=True, n2=True)
    done = await rig.over()
    assert not rig.sent and (done.status, done.finalizing_at) == (BatchStatus.COMPLETED, 40.0)
    assert len(await rig.file("file-o")) == 2 and (done.output_file_id, done.error_file_id) == ("file-o", "")


# -- ends before the last line ---------------------------------------------------------------------------------------


async def test_a_batch_whose_window_is_over_says_so_for_each_line_left(rig: Rig) -> None:
    await rig.put(3, status=BatchStatus.IN_PROGRESS, num_lines=3, parts=(Parts(epoch=3, num=1),), expires_at=NOW_S)
    await rig.part("batches/batch_1/3-0", n2=True)
    done = await rig.over()
    assert (done.status, rig.sent, done.num_completed) == (BatchStatus.EXPIRED, [], 1)
    errors = await rig.file(done.error_file_id)
    assert {name: row["error"]["code"] for name, row in errors.items()} == dict.fromkeys(
        ("c-1", "c-3"), "batch_expired"
    )


async def test_a_window_that_ends_during_a_run_keeps_what_was_answered(rig: Rig) -> None:
    await rig.put(3, expires_at=NOW_S + 0.05)
    rig.reply = lambda n: LineAnswer(200, b"{}") if n == 2 else hang(n)
    done = await rig.over()
    assert (done.status, done.num_completed, rig.at_once) == (BatchStatus.EXPIRED, 1, 0)
    assert set(await rig.file(done.error_file_id)) == {"c-1", "c-3"}


async def test_a_cancelled_batch_keeps_its_results_and_names_the_other_lines(rig: Rig) -> None:
    await rig.put(9)
    rig.reply = lambda n: LineAnswer(200, b"{}") if n == 2 else hang(n)
    run = rig.run()
    task = asyncio.create_task(run.run())
    await until(lambda: len(rig.sent) == 5)
    assert run.status is BatchStatus.IN_PROGRESS
    run.cancel(44.0)
    await task
    done = await rig.batch()
    assert (done.status, done.cancelling_at, done.ended_at) == (BatchStatus.CANCELLED, 44.0, NOW_S)
    assert set(await rig.file(done.output_file_id)) == {"c-2"} and rig.at_once == 0 and len(rig.sent) == 5
    assert {row["error"]["code"] for row in (await rig.file(done.error_file_id)).values()} == {"batch_cancelled"}


async def test_an_input_that_is_wrong_is_not_read_once_its_batch_is_cancelled(rig: Rig) -> None:
    await rig.put(content=b"no json")
    done = await rig.over(replace(OPENED, cancelled_at=45.0))
    assert (done.status, done.errors) == (BatchStatus.CANCELLED, ())


@pytest.mark.parametrize("status", [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS])
async def test_a_batch_that_was_cancelled_before_its_run_sends_nothing(rig: Rig, status: BatchStatus) -> None:
    num_lines = 2 if status is BatchStatus.IN_PROGRESS else 0
    await rig.put(2, status=status, num_lines=num_lines)
    done = await rig.over(replace(OPENED, cancelled_at=45.0))
    assert (done.status, done.cancelling_at, rig.sent) == (BatchStatus.CANCELLED, 45.0, [])
    assert len(await rig.records.files()) == (1 if num_lines else 0), "an unread input names no lines"


async def test_a_cancellation_ends_the_reading_of_an_input(rig: Rig) -> None:
    await rig.put(100)
    run, reads = rig.run(), 0
    read = rig.objects.read

    async def reading(name: str, chunk_bytes: int = 0) -> AsyncIterator[bytes]:
        nonlocal reads
        async for chunk in read(name):
            for row in chunk.splitlines(keepends=True):
                reads += 1
                if reads == 3:
                    run.cancel(45.0)
                yield row

    rig.objects.read = reading  # type: ignore[method-assign]
    await run.run()
    done = await rig.batch()
    assert (done.status, done.num_lines, reads) == (BatchStatus.CANCELLED, 0, 3)


async def test_an_input_that_is_gone_at_the_end_only_leaves_lines_unnamed(rig: Rig) -> None:
    await rig.put(3, status=BatchStatus.IN_PROGRESS, num_lines=3)
    await rig.objects.delete("files/file-1")
    done = await rig.over()
    assert (done.status, done.output_file_id, done.error_file_id) == (BatchStatus.EXPIRED, "", "")


# -- lines -----------------------------------------------------------------------------------------------------------


async def test_a_line_is_sent_again_after_the_pause_it_is_told_and_after_lost_engines_twice(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[float | None, int]] = []

    def wait_s(after_s: float | None, num: int) -> float:
        waits.append((after_s, num))
        return 0.0

    monkeypatch.setattr(progress, "wait_s", wait_s)
    await rig.put(2)
    refused = iter([LineAnswer(429, retry_after_s=3.0), LineAnswer(503), LineAnswer(200, b"{}")])
    rig.reply = lambda n: next(refused) if n == 1 else LineAnswer(502, b"{}")
    done = await rig.over()
    assert (done.num_completed, done.num_failed, sorted(rig.sent)) == (1, 1, [1, 1, 1, 2, 2, 2])
    assert sorted(waits, key=str) == sorted([(3.0, 0), (None, 1), (None, 0), (None, 1)], key=str)
    assert (rig.num_lines("retried"), rig.num_lines("completed"), rig.num_lines("failed")) == (4, 1, 1)


@pytest.mark.parametrize(
    ("answer", "size"), [(LineAnswer(200, held_s=0.0), 5), (LineAnswer(200, held_s=0.5), 4), (LineAnswer(429), 2)]
)
async def test_the_pace_follows_the_answers(rig: Rig, answer: LineAnswer, size: int) -> None:
    await rig.put(1)
    run = rig.run(at_once=9)
    rig.reply = lambda n: answer if len(rig.sent) == 1 else LineAnswer(200, held_s=0.5)
    answer = replace(answer, retry_after_s=0.01) if answer.status == 429 else answer
    await run.run()
    assert run.pace.size == size


async def test_a_fault_in_sending_ends_the_run_after_its_answers_are_stored(rig: Rig) -> None:
    await rig.put(3)

    async def fail(number: int) -> LineAnswer:
        await until(lambda: len(rig.sent) == 3 and rig.at_once == 1)
        raise RuntimeError("a fault of ours")

    rig.reply = lambda n: fail(n) if n == 2 else LineAnswer(200, b"{}")
    with pytest.raises(RuntimeError, match="of ours"):
        await rig.run().run()
    kept = await rig.batch()
    assert (kept.status, kept.num_completed) == (BatchStatus.IN_PROGRESS, 2) and await rig.records.open_batches()
    rig.reply = lambda n: LineAnswer(200, b"{}")
    assert (await rig.over()).num_completed == 3 and rig.sent[3:] == [2]


async def test_a_fault_ends_the_run_also_while_lines_wait_for_their_turn(rig: Rig) -> None:
    await rig.put(30)

    async def fail(number: int) -> LineAnswer:
        raise RuntimeError("a fault of ours")

    rig.reply = fail
    with pytest.raises(RuntimeError, match="of ours"):
        await rig.run(at_once=1).run()
    assert len(rig.sent) < 30


async def test_a_file_of_results_is_written_by_slices_of_whole_lines(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.put(8)
    rig.reply = lambda n: LineAnswer(200, b"{}")
    size = len(lines.output_line(f"batch_req_{'0' * 24}", "c-1", LineAnswer(200, b"{}"))) + 1
    monkeypatch.setattr(runner, "SLICE_BYTES", 2 * size + 1)
    sizes, put = list[int](), rig.objects.put

    async def noted(name: str, content: Any) -> None:
        if name.startswith("files/"):
            pieces = [piece async for piece in content]
            sizes.extend(len(piece) for piece in pieces)
            content = b"".join(pieces)
        await put(name, content)

    rig.objects.put = noted  # type: ignore[method-assign]
    done = await rig.over()
    assert sizes == [3 * size, 3 * size, 2 * size] and len(await rig.file(done.output_file_id)) == 8


# -- parts -----------------------------------------------------------------------------------------------------------


async def test_results_are_stored_in_parts_as_they_come_and_none_is_sent_beyond_two(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PART_LINES", 3)
    monkeypatch.setattr(runner, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(runner, "SLICE_BYTES", 300)
    await rig.put(20)
    held: list[int] = []
    put = rig.objects.put

    async def slow(name: str, content: Any) -> None:
        await until(lambda: rig.at_once == 0)
        held.append(len(rig.sent))
        await put(name, content)

    rig.objects.put = slow  # type: ignore[method-assign]
    done = await rig.over()
    assert done.num_completed == 20 and len(await rig.file(done.output_file_id)) == 20
    assert held[0] <= 6 + 4 and done.parts[0].num >= 3


@pytest.mark.parametrize(
    ("field", "most", "sizes"), [("PART_LINES", 2, (5, 5)), ("PART_BYTES", 10, (5, 5)), ("PART_S", 0.0, (5,))]
)
def test_a_part_is_due_by_lines_bytes_or_age(
    monkeypatch: pytest.MonkeyPatch, field: str, most: float, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(runner, field, most)
    pending = runner._Pending()
    assert not pending.is_due
    for number, size in enumerate(sizes, 1):
        pending.add(b"x" * size, is_completed=number == 1)
        assert pending.is_due == (number == len(sizes))
    assert (pending.num_completed, pending.num_failed, pending.num_bytes) == (1, len(sizes) - 1, 5 * len(sizes))
    assert pending.rows == [b"x" * size for size in sizes]


def test_a_part_is_as_old_as_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("glowplug.services.router.batches.runner.time.monotonic", lambda: now)
    pending = runner._Pending()
    pending.add(b"x", is_completed=True)
    now += runner.PART_S - 0.1
    pending.add(b"x", is_completed=True)
    assert not pending.is_due
    now += 0.1
    assert pending.is_due


async def test_what_comes_while_a_part_is_stored_is_of_the_next(rig: Rig) -> None:
    run = rig.run()
    run._take(await rig.put(4, status=BatchStatus.IN_PROGRESS, num_lines=4))
    put = rig.objects.put

    async def late(name: str, content: Any) -> None:
        rig.objects.put = put  # type: ignore[method-assign]
        run._keep(3, "c-3", LineAnswer(400, b"{}"))
        run._keep(4, "c-4", LineAnswer(200, b"{}"))
        await put(name, content)

    rig.objects.put = late  # type: ignore[method-assign]
    run._keep(1, "c-1", LineAnswer(200, b"{}"))
    run._keep(2, "c-2", LineAnswer(400, b"{}"))
    first = run._pending.num_bytes
    await run._store_part()
    rest = run._pending
    assert (run.batch.num_completed, run.batch.num_failed) == (1, 1) and rest.num_bytes == first == len(
        b"".join(rest.rows)
    )
    assert (len(rest.rows), rest.num_completed, rest.num_failed) == (2, 1, 1) and run._done == {1, 2, 3, 4}
    await run._store_part()
    await run._store_part()
    assert (run.batch.parts, run.batch.num_completed) == ((Parts(epoch=EPOCH, num=2),), 2)
    assert [n async for n, _, _ in run._results()] == [1, 2, 3, 4]


async def test_a_part_that_is_not_due_waits_for_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "STORE_RETRY_S", 0.002)
    looks, is_due = list[bool](), runner._Pending.is_due.fget  # type: ignore[attr-defined]

    def looked(pending: Any) -> bool:
        looks.append(is_due(pending))
        return looks[-1]

    monkeypatch.setattr(runner._Pending, "is_due", property(looked))
    await rig.put(3)
    go = asyncio.Event()

    async def late(number: int) -> LineAnswer:
        await go.wait()
        return LineAnswer(200, b"{}")

    rig.reply = lambda n: LineAnswer(200, b"{}") if n < 3 else late(n)
    run = rig.run()
    running = asyncio.create_task(run.run())
    await until(lambda: len(run._pending.rows) == 2)
    looks.clear()
    await until(lambda: len(looks) >= 3)
    assert not run.batch.parts
    go.set()
    await running
    assert (await rig.batch()).parts == (Parts(epoch=EPOCH, num=1),)


async def test_no_line_is_sent_while_two_parts_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PART_LINES", 3)
    monkeypatch.setattr(runner, "STORE_RETRY_S", 0.002)
    await rig.put(20)
    put = rig.records.put_batch

    tries = 0

    async def silent(batch: Batch) -> None:
        nonlocal tries
        if batch.parts:
            tries += 1
            raise StoreUnavailable("down")
        await put(batch)

    rig.records.put_batch = silent  # type: ignore[method-assign]
    run = rig.run(at_once=1)
    running = asyncio.create_task(run.run())
    await until(lambda: len(run._pending.rows) == 6)
    tries = 0
    await until(lambda: tries >= 3)
    assert len(rig.sent) == 6
    rig.records.put_batch = put  # type: ignore[method-assign]
    await running
    assert (await rig.batch()).num_completed == 20


async def test_a_silent_store_is_asked_again_and_a_fence_ends_the_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PART_LINES", 1)
    monkeypatch.setattr(runner, "STORE_RETRY_S", 0.01)
    await rig.put(2)
    go = asyncio.Event()

    async def late(number: int) -> LineAnswer:
        await go.wait()
        return LineAnswer(200, b"{}")

    rig.reply = lambda n: LineAnswer(200, b"{}") if n == 1 else late(n)
    put, num = rig.records.put_batch, 0
    error: StoreUnavailable = StoreUnavailable("down")

    async def failing(batch: Batch) -> None:
        nonlocal num
        if batch.parts and num < 3:
            num += 1
            raise error
        await put(batch)

    rig.records.put_batch = failing  # type: ignore[method-assign]
    task = asyncio.create_task(rig.run().run())
    await until(lambda: num == 3)
    go.set()
    await task
    assert (await rig.batch()).num_completed == 2
    num, error = 0, Fenced("another holds the lease")
    await rig.put(2)
    go.clear()
    with pytest.raises(Fenced):
        await rig.run().run()
    assert num > 0 and rig.at_once == 0


# -- the runner ------------------------------------------------------------------------------------------------------


def a_runner(rig: Rig, *, kept_s: float = 1000.0, lines_at_once: int = 64) -> Runner:
    return Runner(
        rig.records,
        rig.objects,
        rig,
        rig.metrics,
        lines_at_once=lines_at_once,
        max_lines=100,
        max_line_bytes=1000,
        kept_s=kept_s,
        is_ready=lambda: True,
        clock=lambda: rig.now_s,
    )


async def put_many(rig: Rig, num: int) -> None:
    for k in range(num):
        await rig.put(2, batch_id=f"batch_{k}")
        await rig.records.put_open(OpenBatch(batch_id=f"batch_{k}", tenant="acme", created_at=float(k)))


async def end(made: Runner) -> None:
    await made._leave()


def num_of(rig: Rig, state: str) -> float | None:
    return rig.registry.get_sample_value("glowplug_batches", {"state": state})


async def test_a_round_begins_as_many_as_may_run_and_shares_the_lines_among_them(rig: Rig) -> None:
    made = a_runner(rig)
    rig.reply = hang
    await put_many(rig, runner.MOST_RUNNING + 2)
    await made._round(EPOCH)
    assert len(made._running) == runner.MOST_RUNNING and "batch_17" not in made._running
    assert {run.pace.most for _, run, _ in made._running.values()} == {64 // runner.MOST_RUNNING}
    assert num_of(rig, "validating") == runner.MOST_RUNNING + 2
    await until(lambda: all(run.status is BatchStatus.IN_PROGRESS for _, run, _ in made._running.values()))
    await made._round(EPOCH)
    assert (num_of(rig, "validating"), num_of(rig, "in_progress")) == (2, runner.MOST_RUNNING)
    await end(made)
    assert not made._running and num_of(rig, "in_progress") is None and rig.at_once == 0
    few = a_runner(rig, lines_at_once=3)
    await few._round(EPOCH)
    assert {run.pace.most for _, run, _ in few._running.values()} == {1}
    await end(few)


async def test_an_ended_run_gives_its_place_and_a_failed_one_is_tried_again_after_a_while(rig: Rig) -> None:
    made = a_runner(rig)
    await put_many(rig, 1)

    async def fail(number: int) -> LineAnswer:
        raise RuntimeError("a fault of ours")

    rig.reply = fail
    await made._round(EPOCH)
    ((_, _, task),) = made._running.values()
    await asyncio.wait((task,))
    await made._round(EPOCH)
    rig.now_s += runner.RETRY_S - 0.1
    await made._round(EPOCH)
    assert not made._running and num_of(rig, "validating") == 1
    rig.now_s = NOW_S + runner.RETRY_S
    rig.reply = lambda n: LineAnswer(200, b"{}")
    await made._round(EPOCH)
    ((_, _, task),) = made._running.values()
    assert not made._not_before
    await task
    await made._round(EPOCH)
    assert not made._running and not made._not_before and num_of(rig, "validating") == 0


async def test_a_cancellation_reaches_its_run(rig: Rig) -> None:
    made = a_runner(rig)
    rig.reply = hang
    await rig.put(2)
    await made._round(EPOCH)
    ((_, _, task),) = made._running.values()
    await until(lambda: bool(rig.sent))
    await made._round(EPOCH)
    assert not task.done()
    await rig.records.put_open(replace(OPENED, cancelled_at=48.0))
    await made._round(EPOCH)
    await task
    assert (await rig.batch()).cancelling_at == 48.0


async def test_expired_files_and_old_batches_are_removed_once_a_minute(rig: Rig) -> None:
    made = a_runner(rig, kept_s=10.0)

    async def put(file_id: str, expires_at: float) -> None:
        row = StoredFile(
            file_id=file_id,
            tenant="acme",
            name="x",
            purpose=Purpose.BATCH,
            num_bytes=1,
            created_at=1.0,
            expires_at=expires_at,
        )
        await rig.objects.put(f"files/{file_id}", b"x")
        await rig.records.put_file(row)

    await put("file-ever", 0.0)
    await put("file-now", NOW_S)
    await put("file-later", NOW_S + 0.1)
    for batch_id, status, ended_at in (
        ("old", BatchStatus.COMPLETED, NOW_S - 10.1),
        ("new", BatchStatus.FAILED, NOW_S - 10.0),
        ("going", BatchStatus.IN_PROGRESS, 0.0),
    ):
        await rig.records.put_batch(a_batch(batch_id=batch_id, status=status, ended_at=ended_at))
    await made._clean()
    assert set(await rig.records.files()) == {"file-ever", "file-later"}
    assert await rig.read("files/file-now") is None and await rig.read("files/file-later") == b"x"
    assert set(await rig.records.batches()) == {"new", "going"}
    rig.now_s += runner.CLEAN_EVERY_S - 0.1
    await made._clean()
    assert set(await rig.records.files()) == {"file-ever", "file-later"}
    rig.now_s += 0.1
    await made._clean()
    assert set(await rig.records.files()) == {"file-ever"} and set(await rig.records.batches()) == {"going"}


async def test_without_a_bound_ended_batches_stay(rig: Rig) -> None:
    rig.now_s = 1e9
    await rig.records.put_batch(a_batch(status=BatchStatus.COMPLETED, ended_at=1.0))
    await a_runner(rig, kept_s=0.0)._clean()
    assert set(await rig.records.batches()) == {"batch_1"}


async def test_a_batch_without_its_open_row_is_opened_again_after_a_while(rig: Rig) -> None:
    rig.now_s = 1000.0
    before = rig.now_s - runner.CLEAN_EVERY_S
    for batch_id, status, created_at in (
        ("lost", BatchStatus.IN_PROGRESS, before - 0.1),
        ("young", BatchStatus.VALIDATING, before),
        ("over", BatchStatus.FAILED, before - 0.1),
        ("open", BatchStatus.IN_PROGRESS, before - 0.1),
    ):
        await rig.records.put_batch(a_batch(batch_id=batch_id, status=status, created_at=created_at))
    kept = OpenBatch(batch_id="open", tenant="acme", created_at=1.0, cancelled_at=2.0)
    await rig.records.put_open(kept)
    await a_runner(rig, kept_s=0.0)._clean()
    lost = OpenBatch(batch_id="lost", tenant="acme", created_at=before - 0.1)
    assert await rig.records.open_batches() == {"open": kept, "lost": lost}


async def test_a_term_waits_for_stores_and_stores_its_answers_when_it_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ROUND_S", 0.005)
    made = a_runner(rig)
    await rig.put(2)
    rig.reply = lambda n: LineAnswer(200, b"{}") if n == 1 else hang(n)
    rig.store.down, asked, load = True, list[str](), rig.store.load

    async def noted(table: str) -> dict[str, bytes]:
        asked.append(table)
        return await load(table)

    rig.store.load = noted  # type: ignore[method-assign]
    term = asyncio.create_task(made.term(EPOCH))
    await until(lambda: len(asked) >= 3)
    assert not term.done() and not rig.sent
    rig.store.down = False
    await until(lambda: len(rig.sent) == 2)
    term.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await term
    kept = await rig.batch()
    assert (kept.status, kept.num_completed, kept.parts) == (
        BatchStatus.IN_PROGRESS,
        1,
        (Parts(epoch=EPOCH, num=1),),
    )
    assert rig.at_once == 0 and not made._running and num_of(rig, "in_progress") is None


async def test_nothing_runs_before_keys_and_models_are_known(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ROUND_S", 0.001)
    await rig.put(1)
    made, looks = a_runner(rig), list[bool]()

    def is_ready() -> bool:
        looks.append(False)
        return False

    made._is_ready = is_ready
    term = asyncio.create_task(made.term(EPOCH))
    await until(lambda: len(looks) >= 3)
    term.cancel()
    await asyncio.gather(term, return_exceptions=True)
    assert not rig.sent and (await rig.batch()).status is BatchStatus.VALIDATING


@pytest.mark.parametrize("error", [StoreUnavailable("down"), ObjectsUnavailable("down"), RuntimeError("a fault")])
async def test_whatever_stops_a_run_stops_no_other(rig: Rig, error: Exception) -> None:
    made = a_runner(rig)
    await put_many(rig, 2)

    async def fail(number: int) -> LineAnswer:
        raise error

    rig.reply = fail
    await made._round(EPOCH)
    await asyncio.wait([task for _, _, task in made._running.values()])
    await made._round(EPOCH)
    assert not made._running and set(made._not_before) == {"batch_0", "batch_1"}
