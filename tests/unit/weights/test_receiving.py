"""How much of a fetch is on its way at once. Lane: fast."""

import socket

import httpx
import pytest

from glowplug.weights.sources import receiving


@pytest.mark.parametrize(
    ("bytes_per_s", "expected"),
    [
        (0.0, 0),  # nothing is known of the link
        (1e6, receiving.LEAST_BYTES),
        (20e6, 200_000),
        (10e9, 0),  # it drains its queue by itself
    ],
)
def test_a_slow_link_has_little_on_its_way(bytes_per_s: float, expected: int) -> None:
    assert receiving.receive_bytes(bytes_per_s) == expected


class Stream:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def get_extra_info(self, info: str) -> socket.socket | None:
        return self._connection if info == "socket" else None


def test_the_connection_of_an_answer_is_bounded() -> None:
    with socket.socket() as connection:
        before = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        answer = httpx.Response(206, extensions={"network_stream": Stream(connection)})
        receiving.bound(answer, 0)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before
        receiving.bound(answer, 80_000)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) in (80_000, 160_000)  # Linux doubles it
    receiving.bound(httpx.Response(206), 80_000)  # of no socket: a test's own transport
