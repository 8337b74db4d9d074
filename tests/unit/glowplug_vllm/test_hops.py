"""Messages between stages over loopback connections. Lane: fast, no vLLM."""

import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from glowplug_vllm import hops
from glowplug_vllm.hops import Described, FromPrevious, HopBroken, ToNext
from tests.waiting import WAIT_S

SMALL = [(("hidden_states", "bfloat16", [2, 3]), b"0123456789ab"), (("residual", "bfloat16", [0, 3]), b"")]


class Store:
    """Like torch's: `get` waits for `set`."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._held[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._held, WAIT_S)
            return self._held[key]


def received(hop: FromPrevious) -> list[tuple[Described, bytes]]:
    sizes = {"hidden_states": 12, "residual": 0, "large": 3 * hops.INLINE_BYTES}
    found: list[tuple[Described, bytearray]] = []

    def buffer_of(described: Described) -> bytearray:
        found.append((described, bytearray(sizes[described[0]])))
        return found[-1][1]

    hop.receive(buffer_of)
    return [((name, kind, shape), bytes(content)) for (name, kind, shape), content in found]


def pair() -> tuple[ToNext, FromPrevious, socket.socket]:
    left, right = socket.socketpair()
    return ToNext(left), FromPrevious(right), left


def test_three_stages_meet_and_each_gives_to_the_next() -> None:
    store = Store()
    with ThreadPoolExecutor(3) as side_by_side:
        met = [
            side_by_side.submit(hops.meet, store, rank, before, after, "127.0.0.1", 5.0)
            for rank, before, after in ((4, 2, None), (2, 0, 4), (0, None, 2))
        ]
    (third, nothing_behind), (second, to_third), (nothing_before, to_second) = (one.result() for one in met)
    assert nothing_behind is None and nothing_before is None
    assert second is not None and third is not None and to_second is not None and to_third is not None
    to_second.send(SMALL)
    to_third.send(SMALL[:1])
    assert received(second) == SMALL and received(third) == SMALL[:1]


def test_who_does_not_show_the_key_is_sent_away() -> None:
    store = Store()
    with ThreadPoolExecutor(1) as aside:
        second = aside.submit(hops.meet, store, 1, 0, None, "127.0.0.1", 5.0)
        host, port, key = json.loads(store.get("glowplug-hop-1"))
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(b"x" * len(key))
            assert stranger.recv(1) == b"", "it is kept"
        _, to_second = hops.meet(store, 0, None, 1, "127.0.0.1", 5.0)
        from_first, _ = second.result()
    assert to_second is not None and from_first is not None
    to_second.send(SMALL)
    assert received(from_first) == SMALL


def test_strangers_who_reset_or_say_nothing_do_not_keep_a_stage_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "KEY_S", 0.02)
    store = Store()
    with ThreadPoolExecutor(1) as aside:
        second = aside.submit(hops.meet, store, 1, 0, None, "127.0.0.1", 5.0)
        host, port, key = json.loads(store.get("glowplug-hop-1"))
        with socket.create_connection((host, port)) as resets:
            resets.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection((host, port), 2.0) as silent:
            assert silent.recv(1) == b"", "it is kept"
        with socket.create_connection((host, port), 2.0) as slow:
            slow.sendall(key[:-1].encode())
            with suppress(ConnectionResetError):
                assert slow.recv(1) == b"", "it is kept"
        monkeypatch.setattr(hops, "KEY_S", 5.0)
        _, to_second = hops.meet(store, 0, None, 1, "127.0.0.1", 5.0)
        from_first, _ = second.result()
    assert to_second is not None and from_first is not None
    to_second.send(SMALL)
    assert received(from_first) == SMALL


def test_a_stage_whose_neighbour_does_not_connect_gives_up_though_strangers_come() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, socket.create_connection(listening.getsockname(), 2.0) as silent:
        with pytest.raises(TimeoutError, match="has not connected"):
            hops._accept(listening, "k" * 32, 0.05)
        assert silent.recv(1) == b"", "it is kept"


def test_a_stage_that_cannot_reach_the_next_one_listens_no_more() -> None:
    store = Store()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        store.set("glowplug-hop-2", json.dumps([*gone.getsockname(), "k" * 32]))
    with pytest.raises(ConnectionRefusedError):
        hops.meet(store, 1, 0, 2, "127.0.0.1", 5.0)
    host, port, _ = json.loads(store.get("glowplug-hop-1"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), 2.0)


def test_a_stage_that_the_one_before_does_not_find_leaves_the_next_one() -> None:
    store = Store()
    with ThreadPoolExecutor(1) as aside:
        third = aside.submit(hops.meet, store, 2, 1, None, "127.0.0.1", 5.0)
        with pytest.raises(TimeoutError, match="has not connected"):
            hops.meet(store, 1, 0, 2, "127.0.0.1", 0.05)
        from_second, _ = third.result()
    assert from_second is not None
    with pytest.raises(HopBroken, match="closed its connection"):
        received(from_second)


def test_a_large_message_does_not_hold_up_its_sender_and_the_next_comes_behind_it() -> None:
    to_next, from_previous, _ = pair()
    large = [(("large", "float32", [1]), bytes(range(256)) * (3 * hops.INLINE_BYTES // 256))]
    to_next.send(large)  # no reader yet
    with ThreadPoolExecutor(1) as aside:
        behind = aside.submit(to_next.send, SMALL)
        assert received(from_previous) == large and received(from_previous) == SMALL
        behind.result()


def test_a_stage_that_is_gone_is_named() -> None:
    to_next, from_previous, left = pair()
    left.close()
    with pytest.raises(HopBroken, match="closed its connection"):
        received(from_previous)
    with pytest.raises(HopBroken, match="next stage is gone"):
        to_next.send(SMALL)


def test_what_is_no_message_of_a_hop_is_refused() -> None:
    _, from_previous, left = pair()
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(HopBroken, match="a list of"):
        received(from_previous)
