"""vLLM's environment, and the driver's side of the zygote, against a stand-in."""

import asyncio
import json
import os
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import glowplug
from glowplug.domain.errors import EngineFailed, WeightsUnavailable
from glowplug.engines import process, vllm, vllm_env, vllm_sample, vllm_zygote
from glowplug.engines.port import Ability, EngineHandle
from glowplug.engines.vllm import VllmDriver, root_cause
from glowplug.engines.vllm_zygote import ZygoteLease
from tests.waiting import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

# Stand-in for vLLM's interpreter: the zygote's own loop; servers only exit with 0.
STAND_IN = textwrap.dedent(f"""\
    #!{sys.executable}
    import os, pathlib, sys
    sys.path.insert(0, {str(Path(glowplug.__file__).parents[1])!r})
    from glowplug_vllm.parked import zygote
    path = pathlib.Path(sys.argv[sys.argv.index("--socket") + 1])
    try:
        held = zygote.lock(path)
    except zygote.AlreadyParked:
        sys.exit(75)
    zygote.Zygote(path, lambda question: os._exit(0), linger_s=20.0, inherited=(held,)).run()
""")


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv(vllm_env.ENV_VARIABLE, str(tmp_path / "env"))
    return tmp_path / "env"


def install(env: Path, *names: str) -> None:
    library = env / "lib" / "python3.11" / "site-packages"
    (env / "bin").mkdir(parents=True, exist_ok=True)
    (env / "bin" / "python").touch()
    for name in names:
        (library / name).mkdir(parents=True)
        (library / name / "__init__.py").touch()


def test_the_variable_names_the_environment_and_a_setting_goes_before_it(env: Path) -> None:
    assert vllm_env.interpreter() == env / "bin" / "python"
    assert vllm_env.interpreter("/opt/py") == Path("/opt/py")


def test_each_missing_piece_is_named_with_the_command_that_mends_it(env: Path) -> None:
    python = vllm_env.interpreter()
    assert "make vllm-env" in vllm_env.missing(python) and "does not exist" in vllm_env.missing(python)
    install(env)
    assert "vLLM is not installed" in vllm_env.missing(python)
    install(env, "vllm")
    assert "glowplug-vllm is not installed" in vllm_env.missing(python)
    before = vllm_env.version(python)
    install(env, "glowplug_vllm-0.1.0.dist-info")
    assert vllm_env.missing(python) == ""
    assert vllm_env.version(python) != before


def test_elsewhere_than_on_linux_another_engine_is_named(env: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert "llamacpp" in vllm_env.missing(vllm_env.interpreter())


def test_the_sample_is_not_converted_without_an_environment(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOWPLUG_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(WeightsUnavailable, match="make vllm-env"):
        vllm_sample.prepare()
    assert vllm_sample.main([]) == 1


def test_a_converted_sample_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_CACHE_DIR", str(tmp_path))
    vllm_sample.sample_dir().mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert not vllm_sample.is_prepared()
        (vllm_sample.sample_dir() / name).touch()
    assert vllm_sample.prepare() == tmp_path / vllm_sample.NAME


def test_parked_processes_of_another_version_have_another_place() -> None:
    places = {vllm_zygote.default_dir(Path("/p"), v) for v in ("1", "2")} | {vllm_zygote.default_dir(Path("/q"), "1")}
    assert len(places) == 3
    assert all(len(str(place / "zygote.sock")) < 100 for place in places)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    vllm_zygote.make_private(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o077 == 0
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(EngineFailed, match="remove it"):
        vllm_zygote.make_private(tmp_path / "open")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("INFO fine\n(EngineCore pid=5) ERROR x] ValueError: no such dtype\nRuntimeError: ... See root cause above.",
         "ValueError: no such dtype"),
        ("vllm: error: unrecognized arguments: --foo", "error: unrecognized arguments: --foo"),
        ("torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("INFO all is well", ""),
        ("(APIServer pid=5) WARNING x] it can cause `OSError: [Errno 24]`\nFooError: no",
         "FooError: no"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_first_error_is_the_cause(log: str, cause: str) -> None:
    assert root_cause(log) == cause


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    return script(tmp_path / "python", STAND_IN)


async def test_the_first_to_ask_parks_and_the_others_share_it(interpreter: Path, tmp_path: Path) -> None:
    three = [ZygoteLease(interpreter, tmp_path / "z", {}, 30.0) for _ in range(3)]
    await asyncio.gather(*(zygote.ensure() for zygote in three))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    pids = [await zygote.start(run_dir, run_dir / "log", {}) for zygote in three]
    assert len(set(pids)) == 3
    log = tmp_path / "z" / "zygote.log"
    await until(lambda: all(f'{{"exited": {pid}, "code": 0}}' in log.read_text() for pid in pids))
    for zygote in three:
        await zygote.close()
    assert not three[0].socket_path.exists()


async def test_a_refusal_is_told(interpreter: Path, tmp_path: Path) -> None:
    zygote = ZygoteLease(interpreter, tmp_path / "z", {}, 30.0)
    with pytest.raises(EngineFailed, match="refuses: "):
        await zygote.start(tmp_path, tmp_path / "log", {"A": 5})  # type: ignore[dict-item]
    await zygote.close()


async def test_a_parking_that_fails_says_why(tmp_path: Path) -> None:
    failing = script(tmp_path / "python", "#!/bin/sh\necho ImportError: no module named vllm >&2\nexit 3\n")
    with pytest.raises(EngineFailed, match=r"status 3\)\n.*no module named vllm"):
        await ZygoteLease(failing, tmp_path / "z", dict(os.environ), 30.0).ensure()


async def test_a_parking_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    slow = script(tmp_path / "python", "#!/bin/sh\nexec sleep 5\n")
    with pytest.raises(EngineFailed, match=r"did not park within 0\.2 s"):
        await ZygoteLease(slow, tmp_path / "z", {}, 0.2).ensure()


async def test_giving_back_what_was_never_held_is_harmless(interpreter: Path, tmp_path: Path) -> None:
    zygote = ZygoteLease(interpreter, tmp_path / "z", {}, 30.0)
    await zygote.close()
    assert not (tmp_path / "z").exists()


class FakeServer:
    """Answers like our plug-in; records (method and path, key, body)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.answer: tuple[int, Any] = (200, {"seconds": 0.1, "used_bytes": 7})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head.split(" HTTP/")[0]
        self.asked.append((path, headers.get("authorization", ""), json.loads(body) if body else None))
        status, text = self.answer[0], json.dumps(self.answer[1]).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(text)) + text)
        await writer.drain()
        writer.close()


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[tuple[FakeServer, EngineHandle]]:
    fake = FakeServer()
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    handle = EngineHandle(
        engine="vllm",
        instance_id="i-1",
        pid=1,
        pid_started_at=0.0,
        run_dir=str(tmp_path),
        log_path=str(tmp_path / "log"),
        url=url,
        api_key="k",
    )
    async with server:
        yield fake, handle


async def test_it_sleeps_and_wakes_by_routes_that_ask_for_its_key(engine: tuple[FakeServer, EngineHandle]) -> None:
    server, handle = engine
    driver = VllmDriver()
    await driver.sleep(handle, "swapped_out")
    await driver.wake(handle, ["weights"])
    await driver.wake(handle, ["kv_cache"])
    await driver.sleep(handle, "prewarmed")
    await driver.wake(handle)
    await driver.limit_kv(handle, 64)
    assert await driver.kv_bytes_used(handle) == 7
    assert [(path, body) for path, _, body in server.asked] == [
        ("POST /glowplug/sleep", {"becomes": "swapped_out"}),
        ("POST /glowplug/wake", {"tags": ["weights"]}),
        ("POST /glowplug/wake", {"tags": ["kv_cache"]}),
        ("POST /glowplug/sleep", {"becomes": "prewarmed"}),
        ("POST /glowplug/wake", {}),
        ("POST /glowplug/kv", {"num_bytes": 64}),
        ("GET /glowplug/kv", None),
    ]
    assert {key for _, key, _ in server.asked} == {"bearer k"}


@pytest.mark.parametrize(
    "body",
    [{"error": {"message": "CannotSleep: odd", "code": 500}}, {"detail": "CannotSleep: odd"}],
    ids=["vllm", "ours"],
)
async def test_why_it_does_not_sleep_is_the_reason(engine: tuple[FakeServer, EngineHandle], body: Any) -> None:
    server, handle = engine
    server.answer = (500, body)
    with pytest.raises(EngineFailed, match="vllm i-1: sleep: CannotSleep: odd"):
        await VllmDriver().sleep(handle, "swapped_out")
    with pytest.raises(EngineFailed, match="does not answer"):
        await VllmDriver().wake(replace(handle, url="http://127.0.0.1:9"))


def test_what_it_holds_and_shares_depends_on_the_device() -> None:
    able = {kind: VllmDriver().abilities(kind) for kind in ("host", "cuda")}
    assert able["host"] - able["cuda"] == {Ability.FIRST_LAYERS, Ability.SHARE, Ability.STAGES}
    assert able["cuda"] == {Ability.ADAPTERS, Ability.PREWARM, Ability.SWAP, Ability.STREAM}


def test_weights_that_cannot_be_shared_are_the_models_fault(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("glowplug_vllm.cpu_weights.SharingError: weights_shared: x differs between its files and memory\n")
    handle = EngineHandle(
        engine="vllm", instance_id="i-1", pid=1, pid_started_at=0.0, run_dir=str(tmp_path), log_path=str(log)
    )
    found = VllmDriver()._failure(handle, "the process ended before it was ready")
    assert found.code == "engine_misconfigured" and "SharingError" in found.message


def of_stage(tmp_path: Path) -> EngineHandle:
    """Stage and whole engine are this process."""
    pid = os.getpid()
    at = process.started_at(pid) or 0.0
    stage = EngineHandle(
        engine="vllm", instance_id="i-1", pid=pid, pid_started_at=at, run_dir=str(tmp_path), log_path=""
    )
    return replace(stage, data={vllm.OF_STAGE: stage.to_json().decode()})


@pytest.mark.parametrize("body", [b"", b"\xff", b"null", b"{}", b'{"num_requests": []}', b'{"num_requests": "many"}'])
async def test_a_stage_that_says_something_else_than_what_runs_has_not_answered(
    tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: Any, **__: Any) -> tuple[int, bytes]:
        return 200, body

    driver = VllmDriver()
    monkeypatch.setattr(driver, "_ask", answer)
    with pytest.raises(EngineFailed, match="did not report its requests"):
        await driver.is_stage_over(of_stage(tmp_path))


REQUEST = b'{"num_bytes": 8, "num_computed": 4}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"requests": null, "pause_s": 0.1, "export_s": 0.2}',
        b'{"requests": [{"num_computed": 4}], "pause_s": 0.1, "export_s": 0.2}',
        b'{"requests": [{"num_bytes": -8, "num_computed": 4}], "pause_s": 0.1, "export_s": 0.2}',
        b'{"requests": [' + REQUEST + b'], "pause_s": "short", "export_s": 0.2}',
        b'{"requests": [' + REQUEST + b'], "pause_s": 0.1}',
    ],
)
async def test_stages_that_do_not_say_what_they_have_written_have_moved_nothing(
    tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller recomputes then (services/agent/executor.py)."""
    driver, given = VllmDriver(), [(200, body)]

    async def answer(*_: Any, **__: Any) -> tuple[int, bytes]:
        return given[0]

    monkeypatch.setattr(driver, "_ask", answer)
    with pytest.raises(EngineFailed, match="did not report what it exported"):
        await driver.move_requests(of_stage(tmp_path))
    given[0] = 200, b'{"requests": [' + REQUEST + b', {"num_bytes": 0}], "pause_s": 0, "export_s": 0.2, "more": 1}'
    moved = await driver.move_requests(of_stage(tmp_path))
    assert (moved.num_requests, moved.num_pulled, moved.num_tokens, moved.num_bytes) == (2, 1, 4, 8)


def test_a_process_beside_an_engine_is_one_of_it_while_it_lives(tmp_path: Path) -> None:
    driver, whole = VllmDriver(), of_stage(tmp_path)
    stage = vllm.stage_of(whole)
    assert stage is not None and driver.processes(whole) == (stage.pid,)
    assert driver.processes(stage) == ()
    (tmp_path / vllm.WHOLE).mkdir()
    (tmp_path / vllm.WHOLE / vllm.HANDLE).write_bytes(stage.to_json())
    assert driver.processes(stage) == (stage.pid,)
    other = replace(stage, pid_started_at=stage.pid_started_at - 60.0)
    (tmp_path / vllm.WHOLE / vllm.HANDLE).write_bytes(other.to_json())
    assert driver.processes(stage) == (), "its pid is another's by now"


def test_a_later_stage_is_silent_once_its_file_stays_as_it_was_seen(tmp_path: Path) -> None:
    """However far the clock of its files is off."""
    driver, handle = VllmDriver(), of_stage(tmp_path)
    assert driver.health_of_later(handle, 0.0).reason == "not loaded yet"
    sign = tmp_path / "loaded-0.json"
    sign.touch()
    for modified_at in (10**6, 10**12):
        os.utime(sign, ns=(modified_at, modified_at))
        assert driver.health_of_later(handle, 0.0).ok
        assert driver.health_of_later(handle, 60.0).ok
        assert "silent for" in driver.health_of_later(handle, 0.0).reason
