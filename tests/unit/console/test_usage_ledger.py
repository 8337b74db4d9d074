"""The usage ledger, and a database that is away for a while."""

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import SQLAlchemyError

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.domain.usage import UsageRecord
from glowplug.events import Event
from glowplug.events.facts import UsageRecorded
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.usage_api import UsageReader
from glowplug.services.console.usage_ledger import HOUR_S, UsageLedger, UsageQuery
from glowplug.services.console.usage_prices import PriceFile
from tests.waiting import until

NOON = 1_800_000_000 // HOUR_S * HOUR_S


def record(
    number: int,
    *,
    at: float = NOON,
    tenant: str = "team-a",
    model: str = "m",
    status: int = 200,
    gpu_s: float | None = None,
) -> UsageRecord:
    return UsageRecord(
        record_id=f"x-{number}",
        request_id="the same for all",
        tenant=tenant,
        key_id="abcdefgh",
        model_key=model,
        path="/v1/chat/completions",
        arrived_at=at - 1,
        finished_at=at + 0.5,
        prompt_tokens=100,
        cached_tokens=40,
        response_tokens=number,
        tokens_exact=True,
        held_s=0.25,
        cold=False,
        instance_id="i-1",
        status=status,
        gpu_s=gpu_s or 0.0,
        gpu_known=gpu_s is not None,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "console" / "usage.db"


@pytest.fixture
def ledger(path: Path) -> UsageLedger:
    return UsageLedger(f"sqlite:///{path}")


def test_a_record_counts_once_however_often_it_comes(ledger: UsageLedger, path: Path) -> None:
    batch = [record(number) for number in range(1, 6)]
    assert ledger.add(batch) == 5 and ledger.add(batch) == 0
    assert ledger.add([*batch, record(6), record(6)]) == 1
    assert UsageLedger(f"sqlite:///{path}").add(batch) == 0
    (row,) = ledger.sums(UsageQuery(start=NOON, end=NOON + HOUR_S))
    assert (row["num_requests"], row["prompt_tokens"], row["response_tokens"]) == (6, 600, 21)
    assert (row["num_exact"], row["num_failed"], row["cached_tokens"], row["held_s"]) == (6, 0, 240, 1.5)


def test_two_consoles_that_write_at_once_count_each_record_once(path: Path) -> None:
    batches = [[record(number) for number in range(start, start + 20)] for start in range(0, 200, 10)]
    ledgers = [UsageLedger(f"sqlite:///{path}?timeout=60") for _ in range(2)]
    ledgers[0].add([])
    workers = [threading.Thread(target=lambda own=own: [own.add(batch) for batch in batches]) for own in ledgers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for start in (NOON, NOON - 60):  # totals; records
        (row,) = ledgers[0].sums(UsageQuery(start=start, end=NOON + HOUR_S))
        assert (row["num_requests"], row["response_tokens"]) == (210, sum(range(210)))


def test_totals_and_records_answer_alike_by_bucket_and_group(ledger: UsageLedger) -> None:
    ledger.add([record(n, at=NOON + n * 600, tenant=f"t-{n % 2}", status=500 if n == 3 else 200) for n in range(12)])
    by_hour = ledger.sums(UsageQuery(start=NOON, end=NOON + 2 * HOUR_S, by=("tenant",), width_s=HOUR_S))
    assert [(row["bucket"], row["tenant"], row["num_requests"]) for row in by_hour] == [
        (NOON, "t-0", 3),
        (NOON, "t-1", 3),
        (NOON + HOUR_S, "t-0", 3),
        (NOON + HOUR_S, "t-1", 3),
    ]
    minutes = ledger.sums(UsageQuery(start=NOON, end=NOON + 2 * HOUR_S, by=("tenant",), width_s=60))
    assert len(minutes) == 12 and sum(row["num_failed"] for row in minutes) == 1 == sum(
        r["num_failed"] for r in by_hour
    )
    assert sum(row["response_tokens"] for row in minutes) == sum(row["response_tokens"] for row in by_hour) == 66
    few = ledger.sums(UsageQuery(start=NOON, end=NOON + HOUR_S, tenants=("t-1",), models=("m",), keys=("abcdefgh",)))
    assert [row["num_requests"] for row in few] == [3]
    assert ledger.sums(UsageQuery(start=NOON, end=NOON + HOUR_S, models=("other",))) == []


def test_seconds_of_gpu_memory_are_summed_where_they_are_known(ledger: UsageLedger) -> None:
    ledger.add([record(1), record(2, at=NOON + HOUR_S, gpu_s=1.5)])
    ledger.add([record(3, at=NOON + HOUR_S), record(4, at=NOON + HOUR_S, gpu_s=0.25)])
    for start in (NOON, NOON - 60):  # totals; records
        rows = (
            ledger.sums(UsageQuery(start=start, end=NOON + HOUR_S)),
            ledger.sums(UsageQuery(start=start, end=NOON + 2 * HOUR_S)),
        )
        assert [row["gpu_s"] for (row,) in rows] == [None, 1.75]


def test_a_ledger_of_an_older_version_gets_the_columns_that_it_lacks(ledger: UsageLedger, path: Path) -> None:
    ledger.add([record(1)])
    ledger.close()
    with sqlite3.connect(path) as old:
        for table in ("usage_records", "usage_hours"):
            old.execute(f"ALTER TABLE {table} DROP COLUMN gpu_s")
    old.close()
    for _ in range(2):
        newer = UsageLedger(f"sqlite:///{path}")
        newer.add([record(2, gpu_s=2.0)])
        (row,) = newer.sums(UsageQuery(start=NOON, end=NOON + HOUR_S))
        assert (row["num_requests"], row["gpu_s"]) == (2, 2.0)


def test_old_records_go_and_their_totals_stay(ledger: UsageLedger) -> None:
    ledger.add([record(1), record(2, at=NOON + HOUR_S)])
    assert ledger.forget(NOON + HOUR_S) == 1
    assert len(ledger.sums(UsageQuery(start=NOON, end=NOON + 2 * HOUR_S, width_s=60))) == 1
    (row,) = ledger.sums(UsageQuery(start=NOON, end=NOON + 2 * HOUR_S))
    assert row["num_requests"] == 2


async def test_a_locked_database_is_tried_again_and_nothing_is_lost(path: Path) -> None:
    ledger = UsageLedger(f"sqlite:///{path}?timeout=0.01")
    registry, broker = CollectorRegistry(), MemoryBroker()
    reader = UsageReader(ledger, ConsoleMetrics(registry), 90.0, lambda: NOON, retry_s=0.01)
    bus = MemoryBus(broker)
    data = UsageRecorded(router_id="router-1", batch=1, records=(record(1), record(2)))
    await bus.publish(Event(event_id="e", type=data.TYPE, occurred_at=NOON, issuer="router-1", data=data))
    ledger.add([])
    lock = sqlite3.connect(path)
    lock.execute("BEGIN EXCLUSIVE")
    await reader.listen(bus)  # events from before it joined
    await until(lambda: (registry.get_sample_value("glowplug_ledger_failures_total") or 0) > 1, "two failures")
    assert "locked" in reader.problem and "INSERT" not in reader.problem
    lock.rollback()
    await until(lambda: registry.get_sample_value("glowplug_usage_records_total") == 2, "both records")
    assert not reader.problem
    await bus.close()


def test_a_folder_that_is_none_is_an_error_of_the_database(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SQLAlchemyError):
        UsageLedger(f"sqlite:///{tmp_path / 'file' / 'usage.db'}").add([record(1)])


def test_prices_are_by_pattern_and_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "prices.yaml"
    row = {"model_key": "big-chat", "prompt_tokens": 3_000_000, "cached_tokens": 1_000_000, "response_tokens": 500_000}
    prices = PriceFile(str(file))
    assert prices.read().cost(row) is None and "prices" in caplog.text
    file.write_text("models: {'big-*': {prompt: 2.0, cached: 0.5, response: 8.0}, '*': {prompt: 1}}")
    assert prices.read().cost(row) == 2 * 2.0 + 0.5 + 4.0
    assert prices.read().cost(row | {"model_key": "small"}) == 3.0
    file.write_text("models: {'*': {gpu_second: 0.5}}")
    assert prices.read().cost(row | {"gpu_s": 3.0}) == 1.5 and prices.read().cost(row | {"gpu_s": None}) == 0.0
    file.write_text("models: {'big-*': {prompt: 2.0, cached: 0.5, response: 8.0}}")
    assert prices.read().cost(row) == 8.5
    file.write_text("models: {big: {promt: 1}}")
    assert prices.read().cost(row) == 8.5 and "promt" in caplog.text


async def test_deletion_of_old_records_begins_at_once(ledger: UsageLedger) -> None:
    ledger.add([record(1), record(2, at=NOON + 91 * 86400)])
    reader = UsageReader(ledger, ConsoleMetrics(CollectorRegistry()), 90.0, lambda: NOON + 91 * 86400)
    forgetting = asyncio.create_task(reader.forget())
    asked = UsageQuery(start=NOON, end=NOON + 100 * 86400, width_s=60)
    await until(lambda: len(ledger.sums(asked)) == 1, "one record left")
    forgetting.cancel()
