"""Ports: taken ones are named with who needs and who has them; a free block is free."""

import os
import socket

import pytest

from glowplug.runtime.supervisor.child import backoff_s
from glowplug.runtime.supervisor.probe import check_ports, free_block, http_status, is_free
from glowplug.runtime.supervisor.settings import PortInUse


def test_a_taken_port_names_port_owner_holder_and_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} .*needed by the placer.*--port-base") as refused:
            check_ports("127.0.0.1", [(port, "the placer")])
        assert f"pid {os.getpid()}" in str(refused.value)
        assert "\n" not in str(refused.value)
    check_ports("127.0.0.1", [(port, "the placer")])


def test_a_free_block_has_no_taken_port_in_it() -> None:
    base = free_block("127.0.0.1", 8, start_at=11)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 3))
        taken.listen()
        other = free_block("127.0.0.1", 8, start_at=11)
        assert other != base
        assert all(is_free("127.0.0.1", other + k) for k in range(8))


async def test_nobody_there_is_status_zero() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert await http_status(f"http://127.0.0.1:{sock.getsockname()[1]}/ready", timeout_s=1) == 0


def test_backoff_grows_to_its_cap_and_starts_almost_at_once() -> None:
    waits = [backoff_s(n, longest_s=10) for n in range(1, 50)]
    assert waits[0] <= 0.1
    assert waits == sorted(waits)
    assert waits[-1] == 10
