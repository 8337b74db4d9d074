"""Fixtures for every folder of tests."""

import asyncio
import contextlib
import functools
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import redis
import uvloop
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from tests import lanes
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S

LONGEST_ID = 40
gc.disable()  # imported and collected objects stay: scanning them takes a fifth of the collection time
os.environ["XDG_CONFIG_HOME"] = f"{tempfile.gettempdir()}/gp-config-{os.getpid()}"  # not a person's contexts
# With it jsonschema takes 2.4 s to import, for the grammar of IRIs, unused in our schemas.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# Constants of modules that happen to be imported would change examples between runs.
providers.is_local_module_file = lambda path: False
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, WAIT_S)
# Save 20 ms per client for reading a hundred certificates: most speak no TLS.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

for _lane, _num_examples in lanes.EXAMPLES.items():
    settings.register_profile(
        _lane,
        max_examples=_num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    """Unix sockets require a short path."""
    with tempfile.TemporaryDirectory(prefix=f"gp-{name}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def session_servers() -> Iterator[Infra]:
    with _folder("infra") as folder, NatsProcess(folder / "nats") as bus, ValkeyProcess(folder / "valkey") as store:
        yield Infra(bus, store)


@pytest.fixture(scope="module")
def infra(session_servers: Infra) -> Iterator[Infra]:
    """Real NATS (JetStream on file) and Valkey (AOF), shared by all files: do not stop or empty them. Tables are
    emptied after each file, else the next one's routers ask for leftover keys."""
    yield session_servers
    with redis.Redis.from_url(session_servers.valkey.url) as store:
        store.flushall()


@pytest.fixture
def own_nats() -> Iterator[NatsProcess]:
    with _folder("nats") as folder, NatsProcess(folder) as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyProcess]:
    """A test may kill, flush and restart it."""
    with _folder("valkey") as folder, ValkeyProcess(folder) as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    every = (lanes.FAST, lanes.SYSTEM, lanes.LONG)
    parser.addoption("--lane", choices=every, help="run the tests of one lane (tests/lanes.py)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.option.lane or lanes.FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of the other lane; many files have long tests."""
    path = _relative(collection_path, config)
    if collection_path.suffix != ".py" or path in lanes.BOTH or config.option.lane == lanes.LONG:
        return None
    return True if config.option.lane not in (None, lanes.lane(path)) else None


@pytest.hookimpl(tryfirst=True)  # xdist reads groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Assign groups, the longest first. Markers decide on the lane in files of both lanes."""
    ranks, others = {}, []
    for item in items:
        path = _relative(item.path, config)
        is_vllm, is_system, is_long = (item.get_closest_marker(name) is not None for name in ("vllm", "system", "long"))
        own = {lanes.LONG} if is_long else {lanes.lane(path, is_marked=is_vllm or is_system)}
        own |= {lanes.LONG} if lanes.is_property(path) else set()
        if config.option.lane and config.option.lane not in own:
            others.append(item)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(lanes.group(path, item.nodeid, is_vllm=is_vllm)))
        ranks[item] = lanes.rank(path, is_vllm=is_vllm)
    if others:
        config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: ranks[item])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without groups a file's tests would spread over processes, each building its fleet."""
    gc.freeze()
    gc.enable()
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist hands no groups to this pytest: see the versions in pyproject.toml")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name long values by their argument: bytes with a time differ between processes, and megabytes of text would fill
    the reports."""
    return argname if isinstance(val, bytes | str) and len(val) > LONGEST_ID else None


def _relative(path: Path, config: pytest.Config) -> str:
    return path.relative_to(config.rootpath).as_posix() if path.is_relative_to(config.rootpath) else path.as_posix()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Run the data port on uvloop, as in production, and its answers on both loops."""
    if not item.path.name.startswith("test_data_port"):
        return {"asyncio": asyncio.new_event_loop}
    factories: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_data_port_answers.py":
        factories["asyncio"] = asyncio.new_event_loop
    return factories
