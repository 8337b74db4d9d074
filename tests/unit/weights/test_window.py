"""A download's bytes in flight over loopback. Lane: fast."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from glowplug.weights.link import LinkMeter
from glowplug.weights.window import LEAST_BYTES, QUEUE_S, ReceiveWindow, of_socket

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A small-buffered sender and a receiver, with network-sized segments."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as receiver:
        for end in (listening, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
        receiver.connect(listening.getsockname())
        sender, _ = listening.accept()
        with sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sender.setblocking(False)
            receiver.setblocking(False)
            yield sender, receiver


def buffer_bytes(receiver: socket.socket) -> int:
    return receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def clamp_bytes(receiver: socket.socket) -> int:
    return receiver.getsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP)


def on_its_way(sender: socket.socket) -> int:
    """Bytes sent before the receiver must read."""
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while num_bytes < 64 * MIB:
            num_bytes += sender.send(bytes(16384))
    return num_bytes


def drain(receiver: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while receiver.recv(MIB):
            pass


@pytest.fixture
def long_segments() -> Iterator[socket.socket]:
    """With loopback-sized segments."""
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, socket.create_connection(listening.getsockname()) as receiver:
        yield receiver


def test_a_connection_has_no_more_on_its_way_than_is_wanted(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    ReceiveWindow(receiver, lambda rtt_s: 2 * LEAST_BYTES).follow()
    on_its_way(sender)
    drain(receiver)
    assert LEAST_BYTES // 2 <= on_its_way(sender) <= 6 * LEAST_BYTES


def test_a_window_grows_again_and_small_changes_are_none(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    wanted = [LEAST_BYTES, int(LEAST_BYTES * 1.2), 8 * LEAST_BYTES]
    window = ReceiveWindow(receiver, lambda rtt_s: wanted.pop(0))
    sizes = []
    for _ in range(3):
        window.follow()
        sizes.append(buffer_bytes(receiver))
    assert sizes[0] == sizes[1] < sizes[2]


def test_a_window_that_the_kernel_does_not_allow_is_left_to_it(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    ReceiveWindow(receiver, lambda rtt_s: 1 << 30).follow()
    assert receiver.getsockopt(socket.SOL_SOCKET, 72) == 0, "the kernel may not grow it"


@pytest.mark.parametrize("later", [1 << 30, 0], ids=["more than the kernel allows", "no rate any more"])
def test_a_window_that_was_set_is_lifted_where_the_kernel_decides(
    pair: tuple[socket.socket, socket.socket], later: int
) -> None:
    _, receiver = pair
    wanted = [2 * LEAST_BYTES, later, later, 0]
    window = ReceiveWindow(receiver, lambda rtt_s: wanted.pop(0))
    window.follow()
    small = buffer_bytes(receiver)
    assert (window.num_bytes, clamp_bytes(receiver)) == (2 * LEAST_BYTES, 2 * LEAST_BYTES)
    window.follow()
    given = buffer_bytes(receiver)
    assert window.num_bytes == 0 and given >= small and clamp_bytes(receiver) >= MIB
    assert receiver.getsockopt(socket.SOL_SOCKET, 72) == 0, "the kernel may not grow it"
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 3 * LEAST_BYTES)
    window.follow()
    window.follow()
    assert buffer_bytes(receiver) == 6 * LEAST_BYTES, "it is set again, though nothing changed"


def test_a_window_holds_some_segments(long_segments: socket.socket) -> None:
    segment_bytes = long_segments.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    window = ReceiveWindow(long_segments, lambda rtt_s: LEAST_BYTES)
    window.follow()
    assert window.num_bytes == clamp_bytes(long_segments) == max(LEAST_BYTES, 4 * segment_bytes)
    assert segment_bytes > LEAST_BYTES // 4, "no loopback, where it would be slow"


def test_without_a_rate_the_kernel_decides(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    before = buffer_bytes(receiver)
    ReceiveWindow(receiver, LinkMeter("n/nic").window).follow()
    assert buffer_bytes(receiver) == before


def test_a_rate_that_was_measured_limits_no_window() -> None:
    link = LinkMeter("n/nic")
    link.rate.rates.extend([300e3] * link.rate.num_least)  # a slow source
    assert link.rate.bytes_per_s == 300e3 and link.window(0.1) == 0


def test_transfers_share_the_link_and_a_long_way_has_more_on_it() -> None:
    link = LinkMeter("n/nic", 100e6)
    alone = link.window(0.0)
    assert alone == 100e6 * QUEUE_S
    for _ in range(4):
        link.begin(MIB)
    assert link.window(0.0) == alone // 4
    assert link.window(0.1) == int(100e6 * (0.1 + QUEUE_S) / 4)
    assert LinkMeter("n/nic", 1000.0).window(0.0) == LEAST_BYTES


def test_what_is_no_tcp_connection_of_this_machine_has_no_window(pair: tuple[socket.socket, socket.socket]) -> None:
    _, receiver = pair
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert of_socket(ours, lambda rtt_s: MIB) is None
    assert of_socket(receiver, None) is None
    assert of_socket(receiver, lambda rtt_s: MIB) is not None
