"""NATS and Valkey as the supervisor runs them: killed, on a full disk, with their secrets."""

import asyncio
import os
import signal
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from glowplug.bus.streams import stream_configs
from glowplug.runtime.privileges import USERS, inbox_of
from glowplug.runtime.supervisor import embedded
from glowplug.runtime.supervisor.child import Child, ChildState
from tests.integration.conftest import Children, up
from tests.small_disk import small_disk
from tests.waiting import WAIT_S, until


async def _killed(process: Child) -> None:
    num = process.num_restarts
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: process.num_restarts > num and process.ready.is_set())


SUBJECT = "glowplug.v1.evt.node.left._.node-1"
PASSWORDS = {user: f"secret-of-{user}" for user in USERS}


async def connected(url: str) -> Client:
    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, inbox_prefix=inbox_of(url))


async def test_nats_comes_back_on_its_port_with_its_streams_and_asks_who_comes(
    children: Children, tmp_path: Path
) -> None:
    folder = tmp_path / "Zürich" / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    server = embedded.EmbeddedNats(embedded.find_nats(), folder, PASSWORDS)
    process = children.make(server.spec(os.environ))
    await up(process)
    client = await connected(url := server.url("placer"))
    stream = stream_configs(1)[0]
    await client.jetstream().add_stream(stream)
    await client.jetstream().publish(SUBJECT, b"kept")
    await _killed(process)
    assert server.url("placer") == url
    await until(lambda: client.is_connected)
    assert (await client.jetstream().stream_info(str(stream.name))).state.messages == 1
    await client.close()
    for wrong in ("", "placer:wrong@", f"placer:{PASSWORDS['router']}@"):
        with pytest.raises(Exception, match=r"(?i)authorization|no servers"):
            await nats.connect(
                url.replace(f"placer:{PASSWORDS['placer']}@", wrong), allow_reconnect=False, connect_timeout=2
            )
    assert (folder / "nats.conf").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("folder", ["Zürich", "x" * 120])
async def test_valkey_keeps_what_it_took_over_kill_9(children: Children, tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    server = embedded.EmbeddedValkey(embedded.find_valkey(), place, PASSWORDS)
    assert len(str(server.socket)) <= embedded.SOCKET_PATH_LIMIT
    process = children.make(server.spec(os.environ))
    await up(process)
    redis = Redis.from_url(server.url("agent"))
    await redis.hset("glowplug:v1:nodes", "k", "v")
    aof = place / "appendonlydir"
    await until(lambda: any(b"\r\nk\r\n" in f.read_bytes() for f in aof.glob("*.aof")))
    await redis.aclose()
    await _killed(process)
    redis = Redis.from_url(server.url("agent"))
    assert await redis.hget("glowplug:v1:nodes", "k") == b"v"
    await redis.aclose()
    await process.stop(grace_s=5)
    server.remove()
    assert not server.socket.exists()


def test_valkey_listens_on_no_port_and_no_password_stands_on_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text("of an earlier run")
    (tmp_path / "users.acl").chmod(0o644)
    argv = list(embedded.EmbeddedValkey(Path("valkey-server"), tmp_path, PASSWORDS).argv())
    assert argv[argv.index("--port") + 1] == "0"
    argv += embedded.EmbeddedNats(Path("nats-server"), tmp_path, PASSWORDS).argv()
    assert not [word for word in argv for password in PASSWORDS.values() if password in word]
    for name in ("nats.conf", "users.acl"):
        text = (tmp_path / name).read_text()
        assert all(password in text for password in PASSWORDS.values())
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


async def _stored(context: nats.js.JetStreamContext) -> bool:
    try:
        await context.publish(SUBJECT, b"x" * 1000, timeout=0.5)
    except (nats.errors.Error, TimeoutError):
        return False
    return True


async def test_nats_stores_again_once_a_full_disk_has_space_again(children: Children, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        server = embedded.EmbeddedNats(embedded.find_nats(), disk.path, PASSWORDS)
        process = children.make(server.spec(os.environ), live_poll_s=0.05)
        await up(process)
        client = await connected(server.url("placer"))
        context = client.jetstream()
        await context.add_stream(stream_configs(1)[0])
        disk.fill()
        async with asyncio.timeout(WAIT_S):
            while await _stored(context):
                pass
        await until(lambda: process.state is ChildState.FAILING)
        assert "no space left on device" in process.problem
        assert process.num_restarts == 0, "a start on a full disk would not help"
        disk.free()
        await until(lambda: process.num_restarts == 1 and process.ready.is_set())
        await until(lambda: _stored(context))
        assert not process.problem and process.state is ChildState.READY
        await client.close()
        await process.stop(grace_s=5)


async def test_valkey_says_that_its_disk_is_full_and_writes_again_by_itself(children: Children, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        server = embedded.EmbeddedValkey(embedded.find_valkey(), disk.path, PASSWORDS)
        process = children.make(server.spec(os.environ), live_poll_s=0.05)
        await up(process)
        redis = Redis.from_url(server.url("agent"))
        disk.fill()

        async def refuses() -> bool:
            try:
                await redis.hset("glowplug:v1:nodes", "k", "x" * 10_000)
            except ResponseError as error:
                return "MISCONF" in str(error)
            return False

        await until(refuses)
        await until(lambda: process.state is ChildState.FAILING)
        assert "append-only file" in process.problem
        disk.free()
        await until(lambda: process.state is ChildState.READY)
        assert not await refuses() and process.num_restarts == 0
        await redis.aclose()
        await process.stop(grace_s=5)
        server.remove()
