"""Fixtures that every folder of tests may use."""

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
gc.disable()  # what is imported and collected stays: looking through it takes a fifth of the time of collecting
os.environ["XDG_CONFIG_HOME"] = f"{tempfile.gettempdir()}/gp-config-{os.getpid()}"  # not the contexts of a person
# With this package jsonschema takes 2.4 s of CPU to import, for the grammar of IRIs, which no schema of ours has.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# Constants of the modules that happen to be imported would make other examples from run to run.
providers.is_local_module_file = lambda path: False
# A busy machine takes longer than the five seconds that httpx waits where a test says nothing.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, WAIT_S)
# Nor is 20 ms of CPU for each client, most of whom speak no TLS, which reads the certificates of a hundred authorities.
httpx._transports.default.create_ssl_context = functools.cache(httpx._transports.default.create_ssl_context)
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

for _lane, _num_examples in lanes.EXAMPLES.items():
    settings.register_profile(
        _lane,
        max_examples=_num_examples,
        deadline=None,
        derandomize=True,  # the same examples each time, so that failures are reproducible
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    """A temporary folder with a short path, since the path of a Unix socket must not be long."""
    with tempfile.TemporaryDirectory(prefix=f"gp-{name}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def session_servers() -> Iterator[Infra]:
    with _folder("infra") as folder, NatsProcess(folder / "nats") as bus, ValkeyProcess(folder / "valkey") as store:
        yield Infra(bus, store)


@pytest.fixture(scope="module")
def infra(session_servers: Infra) -> Iterator[Infra]:
    """Real NATS (JetStream on file) and Valkey (AOF), the same for all files. Do not stop or empty them. Tables are
    emptied behind a file: routers of the next one would ask for the keys that it left."""
    yield session_servers
    with redis.Redis.from_url(session_servers.valkey.url) as store:
        store.flushall()


@pytest.fixture
def own_nats() -> Iterator[NatsProcess]:
    """A NATS of this test's own, started, free to be killed and restarted."""
    with _folder("nats") as folder, NatsProcess(folder) as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyProcess]:
    """A Valkey of this test's own, started, free to be killed, flushed and restarted."""
    with _folder("valkey") as folder, ValkeyProcess(folder) as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    every = (lanes.FAST, lanes.SYSTEM, lanes.LONG)
    parser.addoption("--lane", choices=every, help="run the tests of one lane (tests/lanes.py)")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(config.option.lane or lanes.FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of the other lane; the long lane has tests in many files."""
    path = _relative(collection_path, config)
    if collection_path.suffix != ".py" or path in lanes.BOTH or config.option.lane == lanes.LONG:
        return None
    return True if config.option.lane not in (None, lanes.lane(path)) else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its group, and sort the longest first. Markers decide on the lane in files of both lanes."""
    ranks, others = {}, []
    for item in items:
        path = _relative(item.path, config)
        is_vllm, is_system, is_long = (item.get_closest_marker(name) is not None for name in ("vllm", "system", "long"))
        own = {lanes.LONG} if is_long else {lanes.lane(path, is_marked=is_vllm or is_system)}
        own |= {lanes.LONG} if lanes.is_property(path) else set()
        if config.option.lane and config.option.lane not in own:
            others.append(item)
        if item.get_closest_marker("xdist_group") is None:  # the test names no group itself
            item.add_marker(pytest.mark.xdist_group(lanes.group(path, item.nodeid, is_vllm=is_vllm)))
        ranks[item] = lanes.rank(path, is_vllm=is_vllm)
    if others:
        config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: ranks[item])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if tests lack their groups: then a file's tests would run in any process, and each would build its fleet."""
    gc.freeze()
    gc.enable()
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist hands no groups to this pytest: see the versions in pyproject.toml")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name long values by their argument: bytes that each process packs anew (with a time) would give other names, and
    a text of megabytes would go to the reports, once for each thing that is said of its test."""
    return argname if isinstance(val, bytes | str) and len(val) > LONGEST_ID else None


def _relative(path: Path, config: pytest.Config) -> str:
    return path.relative_to(config.rootpath).as_posix() if path.is_relative_to(config.rootpath) else path.as_posix()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Run tests on asyncio's own loop, those of the data port on uvloop as in production, and its answers on both."""
    if not item.path.name.startswith("test_data_port"):
        return {"asyncio": asyncio.new_event_loop}
    factories: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_data_port_answers.py":
        factories["asyncio"] = asyncio.new_event_loop
    return factories
