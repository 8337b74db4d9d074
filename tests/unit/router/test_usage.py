"""The router's usage records, spool and journal. Costs half a second."""

import fcntl
import itertools
import os
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
from glowplug.services.router import usage
from glowplug.services.router.exchange_states import Answer, Attempt
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.keys import Caller
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.usage import UsageLog, UsageSender
from glowplug.services.router.usage_journal import NO_SLOT, Journal
from glowplug.services.router.usage_spool import Spool, read
from glowplug.services.router.wire import cached_tokens
from tests.contract.data_port_rig import a_model, an_instance


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
