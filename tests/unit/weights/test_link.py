"""The live link: rate, order by urgency, and what is in flight."""

import asyncio

from glowplug.weights.link import LinkMeter, TokenBucket


def test_a_large_chunk_passes_and_is_paid_afterwards() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=10)
    assert bucket.wait_s(0.0) == 0.0
    bucket.spend(50)
    assert bucket.wait_s(0.0) == 0.5
    assert bucket.wait_s(0.25) == 0.25
    assert bucket.wait_s(0.5) == 0.0


def test_a_clock_that_goes_back_earns_nothing() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=10, filled_at=5.0)
    bucket.spend(100)
    assert bucket.wait_s(1.0) == 1.0
    assert bucket.wait_s(5.5) == 0.5


async def test_the_urgent_go_first_when_the_rate_binds() -> None:
    link = LinkMeter("n/nic", bytes_per_s=100_000, burst_s=0.0)
    order: list[str] = []

    async def transfer(name: str, priority: int) -> None:
        await link.take(1000, priority)
        order.append(name)

    await link.take(1000)  # the first is free: it leaves the bucket in debt
    names = [("later", 0), ("sooner", 0), ("urgent", 5)]
    await asyncio.gather(*(transfer(name, priority) for name, priority in names))
    assert order == ["urgent", "later", "sooner"]
    assert link.num_bytes_total == 4000


async def test_a_cancelled_transfer_pays_nothing_and_blocks_nobody() -> None:
    link = LinkMeter("n/nic", bytes_per_s=100_000, burst_s=0.0)
    await link.take(1000)
    waiting = asyncio.create_task(link.take(10**12, 9))
    await asyncio.sleep(0)
    waiting.cancel()
    await link.take(1000)
    assert waiting.cancelled()


async def test_bytes_in_flight_are_what_has_not_landed() -> None:
    link = LinkMeter("n/nic")
    link.begin(100)
    await link.take(40)
    assert (link.bytes_in_flight, link.num_transfers) == (60, 1)
    link.end(60)
    assert (link.bytes_in_flight, link.num_transfers) == (0, 0)
