"""The router's usage records, spool and journal. Costs half a second."""

import asyncio
import errno
import fcntl
import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.usage import UsageRecord
from glowplug.events.facts import RequestFinished
from glowplug.runtime.clock import CLOCK
from glowplug.services.router import usage, usage_spool
from glowplug.services.router.exchange_states import Answer, AnswerKind, Attempt
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.keys import Caller
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.usage import UsageLog, UsageSender
from glowplug.services.router.usage_journal import _HEADER, NO_SLOT, SLOT_BYTES, Journal, _records, has_ended
from glowplug.services.router.usage_spool import Spool, read
from glowplug.services.router.wire import cached_tokens
from tests.contract.data_port_rig import a_model, an_instance
from tests.waiting import until


def finished(number: int = 1, *, status: int = 200, instance: str = "i-1", tenant: str = "team-a") -> RequestFinished:
    return RequestFinished(
        model_key="m",
        request_id=f"r-{number}",
        router_id="router-1",
        instance_id=instance,
        status=status,
        arrived_at=1000.0,
        finished_at=1002.0,
        queue_s=0.5,
        ttft_s=1.0,
        e2e_s=2.0,
        prompt_tokens=10 + number,
        response_tokens=5,
        tokens_exact=True,
        cold=False,
        tenant=tenant,
        key_id="abcdefgh",
    )


@dataclass
class Going:
    ticket: int
    request: HttpRequest
    slot: int = NO_SLOT
    model: Model = field(default_factory=a_model)
    attempt: Attempt | None = None
    answer: Answer | None = None
    prompt_tokens: int = 30
    queue_s: float = 0.25
    cold: bool = True


class Rig:
    """A usage log with its spool, and a sender to an in-memory bus."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.registry, self.tickets = CollectorRegistry(), itertools.count(1)
        self.metrics = RouterMetrics(self.registry)
        self.spool = Spool(folder, max_bytes, self.metrics.usage_lost.inc)
        self.journal = Journal(folder, 4)
        self.log = UsageLog(self.spool, self.metrics, self.journal)
        self.broker = MemoryBroker()
        self.sender = UsageSender(self.spool, MemoryBus(self.broker), "router-1", self.metrics)

    def take(self, *facts: RequestFinished) -> None:
        for fact in facts:
            self.log.take(fact, next(self.tickets), b"/v1/chat/completions", 4)

    def stored(self) -> list[UsageRecord]:
        return [record for event in self.broker.of_type("usage.recorded") for record in event.data.records]

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def die(self) -> None:
        """Leave segment and journal as after a kill."""
        for fd in (self.spool._fd, self.journal._fd):
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def keep(self, ticket: int, instance: Instance | None = None) -> "Going":
        caller = Caller(tenant="team-a", key_id="abcdefgh")
        request = HttpRequest(path=b"/v1/chat/completions", request_id=f"r-{ticket}", caller=caller, complete_at=1000.0)
        going = Going(ticket, request, attempt=Attempt(instance, 0.0) if instance is not None else None)
        (self.journal.held if instance is None else self.journal.sent)(going)
        return going


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def ids(records: Sequence[UsageRecord]) -> list[str]:
    return [record.request_id for record in records]


async def test_a_record_says_who_used_what_and_is_removed_once_stored(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "usage")
    rig.take(finished())
    assert rig.spool.num_bytes > 100 and await rig.sender.send()
    (record,) = rig.stored()
    assert (record.tenant, record.key_id, record.model_key, record.path) == (
        "team-a",
        "abcdefgh",
        "m",
        "/v1/chat/completions",
    )
    assert (record.prompt_tokens, record.cached_tokens, record.response_tokens, record.held_s) == (11, 4, 5, 0.5)
    assert rig.spool.num_bytes == 0 and not segments(tmp_path / "usage")
    assert await rig.sender.send() and len(rig.stored()) == 1


def test_refused_requests_have_no_record_and_those_an_engine_refused_no_tokens(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.take(
        finished(1, status=429, instance=""),
        finished(2, status=503, instance=""),
        finished(3, status=400),
        finished(4, status=499, instance=""),
        finished(5, status=499),
        finished(6, status=502),
    )
    records, _, _ = read(rig.spool.seal()[0], 0, 100)
    assert [(r.request_id, r.prompt_tokens, r.response_tokens) for r in records] == [
        ("r-3", 0, 0),
        ("r-4", 0, 0),
        ("r-5", 15, 5),
        ("r-6", 16, 5),
    ]


async def test_what_the_bus_does_not_take_stays_and_comes_in_order(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.broker.down = True
    rig.take(finished(1))
    assert not await rig.sender.send()
    rig.broker.down, rig.broker.refusal = False, "the disk is full"
    assert not await rig.sender.send()
    rig.broker.refusal = ""
    rig.take(finished(2))
    assert await rig.sender.send() and ids(rig.stored()) == ["r-1", "r-2"]


async def test_a_killed_router_leaves_its_records_to_the_next_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    first.take(finished(1), finished(2))
    second = Rig(tmp_path)
    second.take(finished(3))
    assert await second.sender.send() and ids(second.stored()) == ["r-3"]
    first.die()
    with segments(tmp_path)[0].open("ab") as file:
        file.write(b'{"record_id": "cut sh')
    second.spool.adopt()
    assert await second.sender.send() and ids(second.stored()) == ["r-3", "r-1", "r-2"]
    assert second.value("glowplug_usage_lost_total") == 1 and not segments(tmp_path)
    assert len({record.record_id for record in second.stored()}) == 3


async def test_a_batch_sent_twice_has_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "BATCH", 2)
    rig = Rig(tmp_path)
    rig.take(*map(finished, range(5)))
    (segment,) = rig.spool.seal()
    kept = segment.read_bytes()
    assert await rig.sender.send()
    segment.write_bytes(kept)  # killed before its removal
    again = Rig(tmp_path)
    again.sender = UsageSender(again.spool, MemoryBus(rig.broker), "router-1", again.metrics)
    assert await again.sender.send()
    assert [len(event.data.records) for event in rig.broker.of_type("usage.recorded")] == [2, 2, 1]


def test_a_full_spool_and_a_folder_that_is_none_lose_records_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, max_bytes=1000)
    rig.take(*map(finished, range(10)))
    lost = rig.value("glowplug_usage_lost_total")
    assert lost and 5 < lost < 10 and rig.spool.num_bytes <= 1000
    assert len([record for record in caplog.records if "loses them" in record.message]) == 1
    rig.spool.remove(rig.spool.seal()[0])
    rig.take(finished(11))
    assert "keeps usage records" in caplog.text and not rig.spool.problem
    (tmp_path / "file").write_text("")
    other = Rig(tmp_path / "file" / "usage")
    other.take(finished())
    assert other.value("glowplug_usage_lost_total") == 1


def test_fifty_tenants_have_series_of_their_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.take(*(finished(number, tenant=f"t-{number}") for number in range(60)))
    assert rig.value("glowplug_tenant_requests_total", tenant="t-49") == 1
    assert rig.value("glowplug_tenant_requests_total", tenant="t-50") is None
    assert rig.value("glowplug_tenant_requests_total", tenant="other") == 10
    assert rig.value("glowplug_tenant_tokens_total", tenant="t-3", kind="prompt") == 13
    assert rig.value("glowplug_tenant_tokens_total", tenant="other", kind="response") == 50


async def test_requests_of_a_killed_router_have_a_record_each_with_the_tokens_seen(tmp_path: Path) -> None:
    killed = Rig(tmp_path / "router-1" / "usage")
    killed.keep(1)
    streamed = killed.keep(2)
    instance = an_instance("i-1", "http://127.0.0.1:1")
    streamed.attempt = Attempt(instance, 0.0)
    killed.journal.sent(streamed)
    killed.journal.words[streamed.slot] = 7
    answered = killed.keep(3, instance)
    killed.journal.words[answered.slot] = 9
    killed.journal.counted(answered.slot, 21, 4, 8)
    over = killed.keep(4, instance)
    killed.log.take(finished(4), over.ticket, b"/v1/chat/completions", 0)
    killed.journal.clear(over)
    again = killed.keep(5, instance)
    killed.log.take(finished(5), again.ticket, b"/v1/chat/completions", 0)  # killed before emptying the slot
    beside = Rig(tmp_path / "router-2" / "usage")
    beside.log.adopt(tmp_path)
    assert await beside.sender.send() and not beside.stored(), "what a living router is at is its own"
    killed.die()
    beside.log.adopt(tmp_path)
    assert await beside.sender.send()
    found = {record.record_id: record for record in reversed(beside.stored())}
    assert len(beside.stored()) == 6 and len(found) == 5
    lost = [
        (r.request_id, r.instance_id, r.prompt_tokens, r.cached_tokens, r.response_tokens, r.tokens_exact)
        for r in found.values()
        if r.error_code == "router_lost"
    ]
    assert sorted(lost) == [
        ("r-1", "", 0, 0, 0, False),
        ("r-2", "i-1", 30, 0, 7, False),
        ("r-3", "i-1", 21, 4, 8, True),
    ]
    (one,) = [r for r in found.values() if r.request_id == "r-2"]
    assert (one.tenant, one.key_id, one.model_key, one.status, one.cold) == ("team-a", "abcdefgh", "m", 500, True)
    assert one.held_s == 0.25 and one.finished_at > one.arrived_at and not one.gpu_known
    assert [path.name for path in (tmp_path / "router-1" / "usage").iterdir()] == []
    beside.log.adopt(tmp_path)
    assert await beside.sender.send() and len(beside.stored()) == 6


def test_a_journal_that_is_full_or_has_no_folder_costs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path / "usage")
    going = [rig.keep(ticket) for ticket in range(1, 7)]
    assert [one.slot == NO_SLOT for one in going] == [False] * 4 + [True] * 2
    for one in going:
        rig.journal.words[one.slot] = 5
        rig.journal.counted(one.slot, 1, 1, 1)
        rig.journal.clear(one)
    rig.journal.close(keeps_file=False)
    assert not list((tmp_path / "usage").iterdir())
    (tmp_path / "file").write_text("")
    none = Rig(tmp_path / "file" / "usage")
    assert none.keep(1).slot == NO_SLOT and "keeps no journal" in caplog.text


@pytest.mark.parametrize(
    ("tail", "num"),
    [
        (b'"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens": 7}}', 7),
        (b'"usage":{"input_tokens":9,"cache_read_input_tokens":3,"cache_creation_input_tokens":1}', 3),
        (b'"timings":{"cache_n":5,"prompt_n":2}', 5),
        (b'"content":"\\"cached_tokens\\": 8"', -1),
    ],
)
def test_cached_tokens_are_read_from_what_engines_tell(tail: bytes, num: int) -> None:
    assert cached_tokens(tail) == num


def records_of(spool: Spool) -> list[UsageRecord]:
    return [record for path in spool.seal() for record in read(path, 0, 100)[0]]


@pytest.mark.parametrize(
    ("status", "instance", "tokens"),
    [(200, "i-1", 11), (399, "i-1", 11), (400, "i-1", 0), (498, "i-1", 0), (499, "i-1", 11), (499, "", 0)],
)
def test_tokens_count_where_an_engine_made_some(tmp_path: Path, status: int, instance: str, tokens: int) -> None:
    rig = Rig(tmp_path)
    rig.take(finished(1, status=status, instance=instance))
    (record,) = records_of(rig.spool)
    assert (record.prompt_tokens, record.cached_tokens) == (tokens, min(4, tokens))
    assert rig.value("glowplug_tenant_tokens_total", tenant="team-a", kind="prompt") == tokens


@pytest.mark.parametrize(
    ("cached", "gpu_s", "expected"),
    [(-1, math.nan, (0, 0.0, False)), (11, 1.23456789, (11, 1.234568, True)), (12, 0.0, (11, 0.0, True))],
)
def test_a_record_keeps_known_figures_and_is_dated_by_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: int, gpu_s: float, expected: tuple[int, float, bool]
) -> None:
    monkeypatch.setattr(CLOCK, "behind_s", 7.0)
    rig = Rig(tmp_path)
    rig.log.take(finished(), 9, b"/v1/completions", cached, gpu_s)
    (record,) = records_of(rig.spool)
    assert (record.cached_tokens, record.gpu_s, record.gpu_known) == expected
    assert (record.arrived_at, record.finished_at) == (1007.0, 1009.0)
    assert record.record_id == f"{rig.journal.prefix}-9"


async def test_an_event_of_records_names_its_place_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "BATCH", 2)
    monkeypatch.setattr(CLOCK, "behind_s", 7.0)
    monkeypatch.setattr(usage, "now_s", lambda: 5.0)
    rig = Rig(tmp_path)
    published = list[str]()
    monkeypatch.setattr(rig.metrics, "published", published.append)
    rig.take(*map(finished, range(3)))
    (segment,) = rig.spool.seal()
    lines = segment.read_bytes().splitlines(keepends=True)
    assert await rig.sender.send()
    first, second = rig.broker.of_type("usage.recorded")
    assert [event.event_id for event in (first, second)] == [
        f"usage-{segment.stem}-0",
        f"usage-{segment.stem}-{len(lines[0]) + len(lines[1])}",
    ]
    assert [event.data.batch for event in (first, second)] == [1, 2] and first.occurred_at == 12.0
    assert published == ["usage.recorded"] * 2


async def test_records_that_cannot_be_read_or_removed_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path)
    rig.take(finished())
    (segment,) = rig.spool.seal()
    kept = segment.read_bytes()
    segment.unlink()
    assert not await rig.sender.send() and rig.spool.num_bytes == len(kept)
    segment.write_bytes(kept)
    assert await rig.sender.send() and rig.spool.num_bytes == 0


async def test_the_end_of_a_router_sends_its_records_or_leaves_them_with_a_journal_to_others(tmp_path: Path) -> None:
    for is_down in (False, True):
        folder = tmp_path / f"{is_down}"
        rig = Rig(folder)
        rig.sender = UsageSender(rig.spool, MemoryBus(rig.broker), "router-1", rig.metrics, rig.log)
        rig.take(finished())
        rig.broker.down = is_down
        await rig.sender.finish()
        assert len(rig.stored()) == (0 if is_down else 1)
        assert sorted(path.suffix for path in folder.iterdir()) == ([".journal", ".jsonl"] if is_down else [])
        other = Spool(tmp_path / "other", 1 << 20)
        other.adopt_all(folder)
        assert bool(other.seal()) is is_down, "nothing is locked any more"


async def test_a_sender_beats_sends_and_looks_for_ended_routers_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "SEND_EVERY_S", 0.001)
    monkeypatch.setattr(usage, "ADOPT_EVERY", 3)
    rig = Rig(tmp_path / "router-1" / "usage")
    rig.sender = UsageSender(rig.spool, MemoryBus(rig.broker), "router-1", rig.metrics, rig.log, tmp_path)
    seen: list[str] = []
    monkeypatch.setattr(rig.journal, "beat", lambda: seen.append("beat"))
    monkeypatch.setattr(rig.log, "adopt", lambda folder: seen.append(folder.name))
    rig.take(finished())
    running = asyncio.create_task(rig.sender.run())
    await until(lambda: len(seen) >= 8 and rig.stored())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert seen[:8] == ["beat", "beat", "beat", tmp_path.name] * 2
    assert rig.value("glowplug_usage_spool_bytes") == 0


def test_a_router_takes_over_only_what_has_ended_and_goes_on_after_a_fault(tmp_path: Path) -> None:
    ended, empty, living = (Rig(tmp_path / name / "usage") for name in ("a", "b", "c"))
    for rig in (ended, living):
        rig.take(finished())
        rig.keep(7)
    for path in empty.spool.folder.iterdir():
        path.unlink()
    ended.die()
    assert [has_ended(ended.spool.folder) for _ in range(2)] == [True, True], "a look locks nothing"
    assert not has_ended(living.spool.folder) and not has_ended(empty.spool.folder)
    earlier = Rig(tmp_path / "me" / "usage")
    earlier.keep(8)
    earlier.die()
    own = Rig(tmp_path / "me" / "usage")
    (tmp_path / "0" / "usage").mkdir(parents=True)
    (tmp_path / "0" / "usage" / "x.journal").mkdir()  # cannot be opened as a file
    own.log.adopt(tmp_path)
    assert sorted(record.request_id for record in records_of(own.spool)) == ["r-1", "r-7", "r-8"]
    assert not list(ended.spool.folder.iterdir()) and len(list(living.spool.folder.iterdir())) == 2
    assert own.value("glowplug_tenant_requests_total", tenant="team-a") == 2


def test_a_journal_stays_while_its_records_find_no_room(tmp_path: Path) -> None:
    ended = Rig(tmp_path / "a" / "usage")
    ended.keep(7)
    ended.die()
    full = Rig(tmp_path / "me" / "usage", max_bytes=10)
    full.log.adopt(tmp_path)
    assert [path.suffix for path in ended.spool.folder.iterdir()] == [".journal"]
    assert full.value("glowplug_tenant_requests_total", tenant="team-a") is None
    room = Rig(tmp_path / "me2" / "usage")
    room.log.adopt(tmp_path)
    assert len(records_of(room.spool)) == 1 and not list(ended.spool.folder.iterdir())


# -- the slots of a journal ----------------------------------------------------------------------


def left(rig: Rig) -> tuple[list[UsageRecord], int]:
    """What another process would read, without a kill."""
    (path,) = rig.spool.folder.glob("*.journal")
    return _records(path.read_bytes())


def test_a_slot_has_the_counts_of_its_request_alone(tmp_path: Path) -> None:
    rig, instance = Rig(tmp_path), an_instance("i-1", "http://x", emulated=True)
    first = rig.keep(1, instance)
    rig.journal.counted(first.slot, 3, 9, 4)
    (record,), bad = left(rig)
    assert (record.prompt_tokens, record.cached_tokens, record.response_tokens, bad) == (3, 3, 4, 0)
    assert (record.record_id, record.emulated, record.tokens_exact) == (f"{rig.journal.prefix}-1", True, True)
    rig.journal.clear(first)
    assert first.slot == NO_SLOT and left(rig) == ([], 0)
    again = rig.keep(2, instance)
    (record,), _ = left(rig)
    assert (record.record_id, record.tokens_exact) == (f"{rig.journal.prefix}-2", False)
    assert (record.prompt_tokens, record.cached_tokens, record.response_tokens) == (30, 0, 0)
    begun = Answer(AnswerKind.STREAM, 200, 0.0, num_events=6)
    again.answer = begun
    rig.journal.sent(again)
    rig.keep(3)
    records, _ = left(rig)
    assert [(r.request_id, r.prompt_tokens, r.response_tokens, r.emulated) for r in records] == [
        ("r-3", 0, 0, False),
        ("r-2", 30, 6, True),
    ]
    rig.journal.counted(NO_SLOT, 1, 1, 1)
    assert len(left(rig)[0]) == 2


def test_a_held_request_keeps_its_first_slot_and_all_slots_can_be_used_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    going = rig.keep(1)
    slot = going.slot
    rig.journal.held(going)
    assert going.slot == slot
    rig.journal.sent(going)
    assert going.slot != slot
    rig.journal.clear(going)
    rig.journal.clear(going)
    many = [rig.keep(ticket) for ticket in range(10, 14)]
    assert NO_SLOT not in [one.slot for one in many] and rig.keep(20).slot == NO_SLOT
    assert sorted(record.request_id for record in left(rig)[0]) == [f"r-{ticket}" for ticket in range(10, 14)]


@pytest.mark.parametrize("more", [0, 1])
def test_a_request_whose_text_fills_more_than_a_slot_has_none(tmp_path: Path, more: int) -> None:
    rig = Rig(tmp_path)
    going = rig.keep(1)
    num_chars = rig.journal.words[going.slot + 5]  # of its text
    rig.journal.clear(going)
    going.request.request_id += "x" * (SLOT_BYTES - 40 - num_chars + more)
    rig.journal.held(going)
    assert (going.slot == NO_SLOT) is bool(more) and len(left(rig)[0]) == 1 - more


@pytest.mark.parametrize(("instance", "held_s"), [(None, 5.0), ("i-1", 0.25)])
def test_a_lost_request_ended_with_the_last_sign_of_life(tmp_path: Path, instance: str | None, held_s: float) -> None:
    rig = Rig(tmp_path)
    rig.keep(1, an_instance(instance, "http://x") if instance else None)
    for alive_at, finished_at in ((1005.0, 1005.0), (900.0, 1000.0)):
        _HEADER.pack_into(rig.journal._memory, 0, b"GPUSAGE1", rig.journal.prefix.encode(), alive_at)
        (record,), _ = left(rig)
        assert record.finished_at == finished_at and record.arrived_at == 1000.0
        assert record.held_s == (held_s if instance or alive_at > 1000 else 0.0)
    rig.journal.beat()
    assert left(rig)[0][0].finished_at == pytest.approx(time.time(), abs=100)


def test_of_a_request_between_two_slots_the_one_with_its_instance_counts(tmp_path: Path) -> None:
    for order in ((1, 2), (2, 1)):
        rig = Rig(tmp_path / f"{order}")
        made = [rig.keep(5, an_instance("i-1", "http://x") if number == 1 else None) for number in order]
        assert len({one.slot for one in made}) == 2
        (record,), _ = left(rig)
        assert record.instance_id == "i-1"


def test_slots_that_cannot_be_read_are_counted_and_other_files_have_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    broken, _ = rig.keep(1), rig.keep(2)
    rig.journal._memory[broken.slot * 4 + 32] = 0  # of its text
    records, bad = left(rig)
    assert ([record.request_id for record in records], bad) == (["r-2"], 1)
    (path,) = tmp_path.glob("*.journal")
    whole = path.read_bytes()
    assert len(whole) == 5 * SLOT_BYTES
    assert _records(whole[: 3 * SLOT_BYTES])[0] == records and _records(whole[: 3 * SLOT_BYTES - 1])[0] == []
    assert _records(whole[: SLOT_BYTES - 1]) == _records(b"") == _records(b"x" + whole[1:]) == ([], 0)
    assert _records(whole[:SLOT_BYTES]) == ([], 0)
    rig.die()
    other = Rig(tmp_path / "other")
    other.log.adopt(tmp_path.parent)
    other.log._adopt_journal(path)
    assert other.value("glowplug_usage_lost_total") == 1


@pytest.mark.parametrize("keeps_file", [True, False])
def test_a_closed_journal_has_no_slots(tmp_path: Path, keeps_file: bool) -> None:
    rig = Rig(tmp_path)
    assert not has_ended(tmp_path)
    rig.journal.close(keeps_file=keeps_file)
    rig.journal.close(keeps_file=False)
    assert rig.keep(1).slot == NO_SLOT
    assert len(list(tmp_path.iterdir())) == keeps_file


def test_a_journal_is_only_its_owners_and_a_fault_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "deep" / "usage")
    (path,) = rig.spool.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size == 5 * SLOT_BYTES
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError("full")))
    none = Rig(tmp_path / "full")
    assert none.keep(1).slot == NO_SLOT and not list((tmp_path / "full").iterdir())
    assert Journal(tmp_path / "no", 0)._fd == -1 and not (tmp_path / "no").exists()


# -- the bytes of a spool ----------------------------------------------------------------------


def test_a_spool_takes_a_record_that_just_fits_sealed_ones_included(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a")
    rig.take(finished(1))
    size = rig.spool.num_bytes
    for most, num in ((2 * size, 2), (2 * size - 1, 1), (size - 1, 0)):
        other = Rig(tmp_path / f"{most}", max_bytes=most)
        other.take(finished(1))
        other.spool.seal()
        other.take(finished(2), finished(3))
        assert len(records_of(other.spool)) == num and other.value("glowplug_usage_lost_total") == 3 - num
        assert other.spool.num_bytes == num * size


def no_space(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, "no space left")


def test_a_full_disk_loses_records_until_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_spool, "SEGMENT_BYTES", 600)
    rig = Rig(tmp_path)
    rig.take(finished(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", no_space)
        rig.take(finished(2))
    assert rig.spool.problem and rig.value("glowplug_usage_lost_total") == 1 and len(segments(tmp_path)) == 1
    rig.take(finished(3))
    assert not rig.spool.problem and len(segments(tmp_path)) == 2
    assert ids(records_of(rig.spool)) == ["r-1", "r-3"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in segments(tmp_path))
    assert rig.spool.num_bytes == sum(path.stat().st_size for path in segments(tmp_path))


def test_a_record_that_a_kill_cut_short_does_not_count(tmp_path: Path) -> None:
    killed = Rig(tmp_path)
    killed.take(finished(1))
    memory, at = killed.spool._memory, killed.spool.num_bytes
    assert memory is not None
    memory[at : at + 9] = b'{"record_'
    killed.die()
    other = Rig(tmp_path)
    assert ids(records_of(other.spool)) == ["r-1"]


def test_segments_are_adopted_once_and_not_while_they_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Rig(tmp_path / "a")
    first.take(finished(1))
    first.spool.adopt()
    size = first.spool.num_bytes
    assert len(first.spool.seal()) == 1 and first.spool.num_bytes == size
    first.spool.adopt()
    assert first.spool.num_bytes == size and len(first.spool.seal()) == 1
    assert [len(Spool(tmp_path / "a", 1).seal()) for _ in range(2)] == [1, 1], "a look locks nothing"
    (path,) = first.spool.seal()
    path.unlink()
    first.spool.remove(path)
    assert first.spool.num_bytes == 0 and first.spool.seal() == []
    silent = Rig(tmp_path / "b", max_bytes=0)
    silent.take(finished(1))
    assert silent.spool.problem and not segments(tmp_path / "b") and not caplog.records


def test_records_are_read_in_pages_and_what_is_none_is_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.take(*map(finished, range(3)))
    (path,) = rig.spool.seal()
    whole = path.read_bytes()
    path.write_bytes(b"x\n" + whole + b"cut")
    records, at, bad = read(path, 0, 2)
    assert (ids(records), bad) == (["r-0", "r-1"], 1)
    records, end, bad = read(path, at, 2)
    assert (ids(records), bad, end) == (["r-2"], 1, len(whole) + 5)
    assert read(path, end, 2) == ([], end, 0)
