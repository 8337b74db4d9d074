"""How much a download has on its way at once, on connections of this machine's loopback. Lane: fast."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from glowplug.weights.link import LinkMeter
from glowplug.weights.window import GATHER_S, LEAST_BYTES, QUEUE_S, WAITED_S, Window, followed, of_stream

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A sender that keeps little for itself, and a receiver."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        receiver = socket.create_connection(listening.getsockname())
        sender, _ = listening.accept()
    with sender, receiver:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender.setblocking(False)
        receiver.setblocking(False)
        yield sender, receiver


def on_its_way(sender: socket.socket) -> int:
    """Bytes that are sent before the receiver has to read some."""
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while num_bytes < 64 * MIB:
            num_bytes += sender.send(bytes(16384))
    return num_bytes


def drain(receiver: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while receiver.recv(MIB):
            pass


def test_a_connection_has_no_more_on_its_way_than_is_wanted(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    Window(receiver, lambda rtt_s: 2 * LEAST_BYTES).follow()
    on_its_way(sender)  # what was offered before
    drain(receiver)
    assert LEAST_BYTES // 2 <= on_its_way(sender) <= 6 * LEAST_BYTES


def test_a_window_grows_again_and_small_changes_are_none(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    wanted = [LEAST_BYTES, int(LEAST_BYTES * 1.2), 8 * LEAST_BYTES]
    window = Window(receiver, lambda rtt_s: wanted.pop(0))
    sizes = []
    for _ in range(3):
        window.follow()
        sizes.append(receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
    assert sizes[0] == sizes[1] < sizes[2]


def test_a_window_that_the_kernel_does_not_allow_is_left_to_it(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    Window(receiver, lambda rtt_s: 1 << 30).follow()
    assert receiver.getsockopt(socket.SOL_SOCKET, 72) == 0, "the kernel may not grow it"


def test_without_a_rate_the_kernel_decides(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    before = receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    Window(receiver, LinkMeter("n/nic").window).follow()
    assert receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before


def test_transfers_share_the_link_and_a_long_way_has_more_on_it() -> None:
    link = LinkMeter("n/nic", 100e6)
    alone = link.window(0.0)
    assert alone == 100e6 * QUEUE_S
    for _ in range(4):
        link.begin(MIB)
    assert link.window(0.0) == alone // 4
    assert link.window(0.1) == int(100e6 * (0.1 + QUEUE_S) / 4)
    assert LinkMeter("n/nic", 1000.0).window(0.0) == LEAST_BYTES


async def test_bytes_come_in_chunks_and_reads_that_give_little_are_gathered() -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for number in range(5):
            await asyncio.sleep(2 * WAITED_S if number < 3 else 0.0)
            yield bytes([number]) * 3

    began = asyncio.get_running_loop().time()
    assert [chunk async for chunk in followed(slowly(), None, 6)] == [
        b"\0\0\0\1\1\1",
        b"\2\2\2\3\3\3",
        b"\4\4\4",
    ]
    assert asyncio.get_running_loop().time() - began > 3 * GATHER_S, "it reads on at once"

    async def at_once() -> AsyncIterator[bytes]:
        yield bytes(7)

    assert [len(chunk) async for chunk in followed(at_once(), None, 3)] == [3, 3, 1]


def test_what_is_no_tcp_connection_of_this_machine_has_no_window() -> None:
    class Stream:
        def get_extra_info(self, name: str) -> None:
            return None

    assert of_stream(None, lambda rtt_s: MIB) is None
    assert of_stream(Stream(), lambda rtt_s: MIB) is None
    assert of_stream(Stream(), None) is None
