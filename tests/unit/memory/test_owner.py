"""An owner lending chunks over a socket."""

import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glowplug_lab.gpu_slots import peers
from glowplug_lab.gpu_slots.copies import Copier
from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, GpuError, OutOfGpuMemory
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.owner import Owner
from glowplug_lab.gpu_slots.owner import main as owner_main
from glowplug_lab.gpu_slots.owner_client import OwnerClient, OwnerGone
from glowplug_lab.gpu_slots.peers import PeerGone, receive, send
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import Source, activate, donate, evict, prewarm
from tests.contract.gpu_memory_rig import RunningOwner
from tests.waiting import WAIT_S, wait_until

CHUNK = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "owner.sock"


@pytest.fixture
def running(path: Path) -> Iterator[RunningOwner]:
    made = RunningOwner(path)
    yield made
    made.stop()


@pytest.fixture
def client(running: RunningOwner, path: Path) -> Iterator[OwnerClient]:
    with OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=WAIT_S) as made:
        yield made


def test_descriptors_that_are_too_many_on_their_way_wait(client: OwnerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, send_fds = [errno.ETOOMANYREFS] * 2, socket.send_fds

    def seldom(*given: Any) -> int:
        if refused:
            raise OSError(refused.pop(), "Too many references")
        return send_fds(*given)

    monkeypatch.setattr(socket, "send_fds", seldom)
    assert len(client.take("m", 2)) == 2 and not refused
    refused.append(errno.ETOOMANYREFS)
    monkeypatch.setattr(peers, "_READ_S", -1.0)
    with pytest.raises(OwnerGone):
        client.take("m", 1)


def test_chunks_are_lent_in_batches_of_descriptors(path: Path) -> None:
    """The kernel takes 253 at once."""
    running = RunningOwner(path, 600)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with OwnerClient(HostMemory(CHUNK, CHUNK), path) as client:
        chunks = client.take("m", 600)
        slot = Slot(client.memory, "m", 600 * CHUNK)
        slot.grow(chunks)
        assert client.num_free == 0 and running.memory.mem_info()[0] == 0
        client.give("m", slot.close())
        assert client.num_free == 600
    running.stop()
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_open + 4, "no descriptor stays"


def test_the_socket_is_for_its_user_alone(running: RunningOwner, path: Path) -> None:
    wait_until("the owner listens", path.exists)
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(BlockingIOError):
        Owner(HostMemory(CHUNK, CHUNK), 1, path).serve()
    assert OwnerClient(HostMemory(CHUNK, CHUNK), path).num_free == 16, "the first owner serves on"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_hung_up_on_wherever_the_socket_lies(running: RunningOwner, path: Path) -> None:
    """Where its permissions are loosened, the owner asks the kernel for the peer's user."""
    wait_until("the owner listens", path.exists)
    path.chmod(0o666)
    path.parent.chmod(0o711)
    script = (
        "import os, socket; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(10);"
        f"s.connect({path.name!r}); print(len(s.recv(100)))"
    )
    asked = subprocess.run([sys.executable, "-c", script], cwd=path.parent, capture_output=True, text=True, timeout=30)
    assert asked.stdout.strip() == "0" or "ConnectionReset" in asked.stderr, asked.stderr
    assert OwnerClient(HostMemory(CHUNK, CHUNK), path).num_free == 16, "its own user is served on"


def test_more_than_there_is_is_an_error_of_its_own(client: OwnerClient) -> None:
    with pytest.raises(OutOfGpuMemory):
        client.take("m", 17)
    assert len(client.take_up_to("m", 17)) == 16


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"verb": "burn"}, "not a request"),
        ({}, "not a request"),
        ({"verb": "take"}, "num_chunks"),
        ({"verb": "take", "num_chunks": -1}, "num_chunks"),
        ({"verb": "take", "num_chunks": "many"}, "num_chunks"),
        ({"verb": "give", "ids": ["x-1"]}, "only chunks that one holds"),
        ({"verb": "publish", "name": "m", "ids": [], "num_bytes": 1}, "ids"),
        ({"verb": "attach", "name": "m"}, "nothing is published"),
        ({"verb": "adopt", "ids": [], "names": [1]}, "names"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_connection_lives(client: OwnerClient, message, why: str) -> None:
    with pytest.raises(GpuError, match=why):
        client._ask(message)
    assert client.num_free == 16


@pytest.mark.parametrize("raw", [struct.pack("<I", 1 << 30), struct.pack("<I", 2) + b"[]", struct.pack("<I", 1) + b"{"])
def test_who_speaks_something_else_is_hung_up_on(client: OwnerClient, path: Path, raw: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.sendall(raw)
        stranger.settimeout(2)
        with pytest.raises((PeerGone, ConnectionError)):
            receive(stranger)
    assert client.num_free == 16, "the others are served on"


def test_chunks_of_others_can_neither_be_given_nor_published(
    running: RunningOwner, client: OwnerClient, path: Path
) -> None:
    (chunk,) = client.take("m", 1)
    one = client._ids[chunk]
    with OwnerClient(HostMemory(CHUNK, CHUNK), path) as other:
        for message in ({"verb": "give", "ids": [one]}, {"verb": "publish", "name": "n", "ids": [one], "num_bytes": 1}):
            with pytest.raises(GpuError):
                other._ask(message)
    with pytest.raises(GpuError, match="twice"):
        client._ask({"verb": "publish", "name": "n", "ids": [one, one], "num_bytes": 1})
    client.publish("n", [chunk], 10)
    with pytest.raises(GpuError, match="published already"):
        client.publish("n", client.take("m", 1), 10)


def test_a_chunk_given_twice_is_free_once(client: OwnerClient) -> None:
    (chunk,) = client.take("m", 1)
    one = client._ids[chunk]
    assert client._ask({"verb": "give", "ids": [one, one]}) == {"num_freed": 1}
    assert client.num_free == 16 and len(set(client.take_up_to("m", 16))) == 16


class Unexportable(HostMemory):
    def export_fd(self, chunk: Chunk) -> tuple[int, int]:
        raise GpuError("export_fd", "no")


def test_what_cannot_be_exported_ends_the_client_alone(path: Path) -> None:
    running = RunningOwner(path, memory=Unexportable(16 * CHUNK, CHUNK))
    bystander = OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=WAIT_S)
    with OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=WAIT_S) as other, pytest.raises(OwnerGone):
        other.take("m", 2)
    wait_until("its chunks are free", lambda: bystander.num_free == 16, every_s=0.01)
    bystander.close()
    running.stop()


def test_weights_under_a_name_live_as_long_as_someone_has_them(running: RunningOwner, path: Path) -> None:
    loader, engine = (OwnerClient(HostMemory(CHUNK, CHUNK), path) for _ in range(2))
    chunks = loader.take("m", 3)
    loader.publish("m", chunks, 2 * CHUNK + 5)
    attached, num_bytes = engine.attach("m")
    again, _ = engine.attach("m")
    assert again == attached and num_bytes == 2 * CHUNK + 5
    loader.close()
    wait_until("the owner sees that the loader is gone", lambda: len(engine.holdings()["holders"]) == 1)
    (held,) = engine.holdings()["holders"]
    assert (held["num_chunks"], held["num_chunks_alone"], held["names"]) == (3, 3, ["m"])
    slot = Slot(engine.memory, "m", 4 * CHUNK)
    slot.grow(attached, Access.READ)
    engine.give("m", slot.close())
    assert engine.num_free == 16
    with pytest.raises(GpuError, match="nothing is published"):
        engine.attach("m")
    engine.close()


def test_a_model_is_switched_with_chunks_of_an_owner(running: RunningOwner, client: OwnerClient) -> None:
    data = bytes(range(250)) * 40
    kept = ctypes.create_string_buffer(data, len(data))
    source = Source(ctypes.addressof(kept), len(data), lambda: len(data))
    first, second = (Slot(client.memory, name, 16 * CHUNK) for name in "ab")
    for slot in (first, second):
        prewarm(slot, source, client, Copier(client.memory))
    assert list(activate(first, [second], client)) == [13 * CHUNK] and running.memory.mem_info()[0] == 0
    assert ctypes.string_at(first.address, len(data)) == data and second.num_chunks == 0
    assert donate(first, client, num_running=0, max_concurrency=4, kv_bytes_used=0) == 13 * CHUNK
    assert evict(first, client) == 3 * CHUNK and client.num_free == 16


# A handler that never runs: SIGTERM arrives between the interpreter's check and the select.
NO_TURN = "import signal; of = signal.signal; signal.signal = lambda number, _: of(number, lambda *_: None); "


@pytest.mark.parametrize("before", ["", NO_TURN])
def test_the_command_serves_until_it_is_asked_to_end(path: Path, before: str) -> None:
    code = f"{before}import sys; from glowplug_lab.gpu_slots.owner import main; sys.exit(main())"
    options = [str(path), "--total", "64KiB", "--chunk", "4KiB", "--kind", "host"]
    served = subprocess.Popen([sys.executable, "-c", code, *options])
    with OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=WAIT_S) as client:
        assert client.num_free == 16
    served.terminate()
    assert served.wait(WAIT_S) == 0


def test_without_a_gpu_the_command_says_so(path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["owner", str(path), "--total", "1GiB", "--device", "0"])
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    before = signal.getsignal(signal.SIGTERM)
    assert owner_main() == 2
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, before)
    assert "cuda-python is not installed" in capsys.readouterr().err


def test_whoever_loses_its_connection_has_lost_its_chunks(running: RunningOwner, client: OwnerClient) -> None:
    """They are lent again: rejoining would share memory between strangers."""
    client.take("m", 2)
    with pytest.raises(OwnerGone, match="does not take what is held"):
        client.rejoin()


def test_what_one_hands_in_and_gives_up_is_not_lent_while_another_may_still_use_it(path: Path) -> None:
    """The next owner does not know yet of the second engine."""
    first = RunningOwner(path)
    loader, engine = (OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=WAIT_S) for _ in range(2))
    filled = Slot(loader.memory, "m", 16 * CHUNK)
    filled.grow(loader.take("m", 3))
    ctypes.memset(filled.address, 7, 3 * CHUNK)
    loader.publish("m", loader.held, 3 * CHUNK)
    used = Slot(engine.memory, "m", 16 * CHUNK)
    used.grow(engine.attach("m")[0], Access.READ)
    first.stop()
    second = RunningOwner(path)
    loader.rejoin()
    loader.give("m", filled.cut(0))
    filled.grow(loader.take_up_to("m", 16))
    ctypes.memset(filled.address, 9, filled.num_chunks * CHUNK)
    engine.rejoin()
    assert ctypes.string_at(used.address, 3 * CHUNK) == b"\7" * 3 * CHUNK
    assert engine.holdings()["num_held"] == filled.num_chunks + 3
    for client in (loader, engine):
        client.close()
    second.stop()


def test_without_an_owner_it_says_so(path: Path) -> None:
    with pytest.raises(OwnerGone, match="no owner of GPU memory listens"):
        OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=0.05)


def test_an_owner_that_ends_is_an_error_and_the_next_one_knows_what_is_held(path: Path) -> None:
    first = RunningOwner(path)
    client = OwnerClient(HostMemory(CHUNK, CHUNK), path, timeout_s=WAIT_S)
    chunks = client.take("m", 5)
    client.publish("m", chunks, 5 * CHUNK)
    first.stop()
    with pytest.raises(OwnerGone):
        client.holdings()
    second = RunningOwner(path)
    client.rejoin()
    assert client.num_free == 11
    with OwnerClient(HostMemory(CHUNK, CHUNK), path) as other:
        assert len(other.attach("m")[0]) == 5
    client.give("m", chunks)
    wait_until("what the first owner lent is the second's", lambda: client.num_free == 16)
    send(client._connection, {"verb": "holdings"})
    assert receive(client._connection)["num_held"] == 0
    client.close()
    second.stop()
