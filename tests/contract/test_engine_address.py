"""Engines listen only on their agent's address and port."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import EngineHandle
from tests.contract.engine_rig import ENGINES, EngineCase, engine_case
from tests.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[EngineCase]:
    async with engine_case(request.param) as case:
        yield case


@pytest_asyncio.fixture(loop_scope="module")
async def case(engines: EngineCase) -> AsyncIterator[EngineCase]:
    yield engines
    await engines.stop_all()


async def answers(url: str) -> bool:
    body = {"model": "Contract/Tiny", "prompt": "The sea", "max_tokens": 2}
    try:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.post(f"{url}/v1/completions", json=body)).status_code == 200
    except httpx.ConnectError:
        return False


async def test_two_addresses_have_the_same_port_and_loopback_has_nothing(case: EngineCase) -> None:
    case.port = free_port()
    for host in ("127.0.0.2", "127.0.0.3"):
        case.host = host
        report = await case.start()
        assert report.handle.url == f"http://{host}:{case.port}"
        assert EngineHandle.from_json(report.handle.to_json()) == report.handle
        assert (await case.driver.health(report.handle)).ok and await answers(report.handle.url)
    assert not await answers(f"http://127.0.0.1:{case.port}")


async def test_every_address_is_asked_over_loopback(case: EngineCase) -> None:
    case.host, case.port = "0.0.0.0", 0
    report = await case.start()
    port = report.handle.url.rsplit(":", 1)[1]
    assert report.handle.url == f"http://127.0.0.1:{port}"
    assert await answers(f"http://127.0.0.4:{port}")


async def test_a_port_that_is_taken_fails_the_start_and_is_never_shared(case: EngineCase) -> None:
    """Shared (SO_REUSEPORT), each engine would get half of the other's requests."""
    case.host, case.port = "127.0.0.5", free_port()
    first = await case.start()
    with pytest.raises(EngineFailed):
        await case.start()
    assert (await case.driver.health(first.handle)).ok
