"""Fixtures that every folder of tests may use."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings

from tests import lanes
from tests.servers import Infra, NatsProcess, ValkeyProcess

LONGEST_ID = 40
LoopFactory = Callable[[], asyncio.AbstractEventLoop]

settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,  # the same examples each time: a failure is a report, not a rumour
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("house")


@contextlib.contextmanager
def _folder(name: str) -> Iterator[Path]:
    """Short, since a path to a Unix socket may not be long."""
    with tempfile.TemporaryDirectory(prefix=f"gp-{name}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def infra() -> Iterator[Infra]:
    """Real NATS (JetStream on file) and Valkey (AOF) for the whole session. Do not stop or empty them."""
    with _folder("infra") as folder, NatsProcess(folder / "nats") as bus, ValkeyProcess(folder / "valkey") as store:
        yield Infra(bus, store)


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of the other lane is not even read."""
    path = _relative(collection_path, config)
    if collection_path.suffix != ".py" or path in lanes.BOTH:
        return None
    wanted = lanes.SYSTEM if config.option.lane == lanes.LONG else config.option.lane
    return True if wanted not in (None, lanes.lane(path)) else None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test gets its group; what takes longest comes first; in files of both lanes the marker `vllm` decides."""
    ranks, others = {}, []
    for item in items:
        path = _relative(item.path, config)
        is_vllm = item.get_closest_marker("vllm") is not None
        own = lanes.lane(path, is_vllm=is_vllm) if item.get_closest_marker("long") is None else lanes.LONG
        if config.option.lane not in (None, own):
            others.append(item)
        item.add_marker(pytest.mark.xdist_group(lanes.group(path, item.nodeid, is_vllm=is_vllm)))
        ranks[item] = lanes.rank(path, is_vllm=is_vllm)
    if others:
        config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: ranks[item])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without its group a test runs in any process, and the fleet of its file is built anew in each."""
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist hands no groups to this pytest: see the versions in pyproject.toml")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long bytes make no name: what is packed anew in each process (with its time of day) would differ there."""
    return argname if isinstance(val, bytes) and len(val) > LONGEST_ID else None


def _relative(path: Path, config: pytest.Config) -> str:
    return path.relative_to(config.rootpath).as_posix() if path.is_relative_to(config.rootpath) else path.as_posix()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Tests run on asyncio's own loop; the data port runs on uvloop, as in production, and its answers on both."""
    if not item.path.name.startswith("test_data_port"):
        return {"asyncio": asyncio.new_event_loop}
    factories: dict[str, LoopFactory] = {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_data_port_answers.py":
        factories["asyncio"] = asyncio.new_event_loop
    return factories
