"""The usage stream on a real NATS: messages of an older version, messages discarded unread, and a fleet without the
stream."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import nats
import pytest
from nats.js import JetStreamContext
from prometheus_client import CollectorRegistry

from glowplug.bus.nats_bus import NatsBus
from glowplug.bus.port import BusUnavailable
from glowplug.bus.streams import stream_configs
from glowplug.events import Event, encode
from glowplug.events.facts import UsageRecorded
from glowplug.events.subjects import FACTS_STREAM, USAGE_STREAM, facts_of
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.usage_api import UsageReader
from glowplug.services.console.usage_ledger import UsageLedger
from tests.contract.bus_rig import Listener
from tests.servers import NatsProcess
from tests.unit.console.test_usage_ledger import record
from tests.waiting import WAIT_S, until


def batch(number: int) -> Event:
    data = UsageRecorded(router_id="router-1", batch=number, records=(record(number),))
    return Event(event_id=f"usage-{number}", type=data.TYPE, occurred_at=1.0, issuer="router-1", data=data)


@pytest.fixture
async def js(own_nats: NatsProcess) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(own_nats.url)
    yield client.jetstream()
    await client.close()


async def connected(server: NatsProcess, **options: bool) -> NatsBus:
    bus = NatsBus(server.url, "test", **options)
    await asyncio.wait_for(bus.connect(), WAIT_S)
    return bus


async def test_records_of_an_older_version_and_of_this_one_reach_the_ledger(
    own_nats: NatsProcess, js: JetStreamContext, tmp_path: Path
) -> None:
    bus, registry = await connected(own_nats), CollectorRegistry()
    await js.publish("glowplug.v1.evt.usage.recorded._.router-1", encode(batch(1)))
    await bus.publish(batch(2))
    kept = [(await js.stream_info(name)).state.messages for name in (FACTS_STREAM, USAGE_STREAM)]
    ledger = UsageLedger(f"sqlite:///{tmp_path / 'usage.db'}")
    await UsageReader(ledger, ConsoleMetrics(registry), 90.0, lambda: 0.0).listen(bus)
    await until(lambda: registry.get_sample_value("glowplug_usage_records_total") == 2, "both records")
    assert kept == [1, 1]
    await bus.close()


async def test_what_the_stream_discards_before_it_is_read_is_counted_also_while_the_reader_is_away(
    own_nats: NatsProcess, js: JetStreamContext
) -> None:
    writer, reader, listener = await connected(own_nats), await connected(own_nats), Listener()
    filters = [facts_of("usage.recorded")]
    await reader.subscribe(filters, listener, durable="mine", patient=True)
    for number in (1, 2):
        await writer.publish(batch(number))
    await listener.listen(2)
    await reader.close()
    config = next(config for config in stream_configs(1) if config.name == USAGE_STREAM)
    await js.update_stream(replace(config, max_msgs=2))
    for number in range(3, 8):
        await writer.publish(batch(number))
    reader = await connected(own_nats)
    await reader.subscribe(filters, listener, durable="mine", patient=True)
    await listener.listen(4)
    assert [event.data.batch for event in listener.received[-2:]] == [6, 7] and reader.counts.num_overflowed == 3
    await writer.publish(batch(8))
    await listener.listen(5)
    assert reader.counts.num_overflowed == 3
    await reader.close()
    await writer.close()


async def test_a_router_waits_for_no_stream_of_usage_and_uses_it_once_it_is_there(
    own_nats: NatsProcess, js: JetStreamContext
) -> None:
    facts, commands, usage = stream_configs(1)
    await js.add_stream(facts)
    await js.add_stream(commands)
    bus = await connected(own_nats, makes_streams=False)
    with pytest.raises(BusUnavailable):
        await bus.publish(batch(1))
    assert not bus.refusal
    await js.add_stream(usage)
    await bus.publish(batch(1))
    await bus.close()
