"""Fixtures every room of tests may use."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings

from tests.servers import Infra, NatsProcess, ValkeyProcess

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,  # the same examples each time: a failure is a report, not a rumour
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("house")


@pytest.fixture(scope="session")
def infra() -> Iterator[Infra]:
    """Real NATS (JetStream on file) and Valkey (AOF) for the whole session. Do not stop or empty them."""
    with tempfile.TemporaryDirectory(prefix="gp-infra-", ignore_cleanup_errors=True) as folder:
        both = Infra(NatsProcess(Path(folder) / "nats"), ValkeyProcess(Path(folder) / "valkey"))
        try:
            both.nats.start()
            both.valkey.start()
            yield both
        finally:
            both.nats.kill()
            both.valkey.kill()


@pytest.fixture
def own_nats() -> Iterator[NatsProcess]:
    """A NATS of this test's own, started, free to be killed and restarted."""
    with tempfile.TemporaryDirectory(prefix="gp-nats-", ignore_cleanup_errors=True) as folder:
        server = NatsProcess(Path(folder))
        try:
            yield server.start()
        finally:
            server.kill()


@pytest.fixture
def own_valkey() -> Iterator[ValkeyProcess]:
    """A Valkey of this test's own, started, free to be killed, flushed and restarted."""
    with tempfile.TemporaryDirectory(prefix="gp-valkey-", ignore_cleanup_errors=True) as folder:
        server = ValkeyProcess(Path(folder))
        try:
            yield server.start()
        finally:
            server.kill()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Tests run on asyncio's own loop; the data port is held to the same on uvloop too."""
    factories: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if item.path.name.startswith("test_data_port"):
        factories["uvloop"] = uvloop.new_event_loop
    return factories
