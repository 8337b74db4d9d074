"""Limit a download's bytes in flight.

Bytes beyond the link's capacity queue in front of it and delay all other traffic: with windows of megabytes a message
between two pipeline stages waits for tenths of a second. A window is the download's part of the link's rate over a
round trip and `QUEUE_S` more: by bandwidth and delay, as BBR does (Cardwell et al., ACM Queue 14(5), 2016), but at the
receiver, who knows the link. Windows above net.core.rmem_max are left to the kernel. A receiver offers no part of a
segment, so a window below `LEAST_SEGMENTS` moves a segment and stops (on loopback a segment has 32 KiB).
"""

import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

QUEUE_S = 0.02  # of the link's time, queued in front of it
LEAST_BYTES = 32 << 10
LEAST_SEGMENTS = 4
SLACK = 0.25  # a window stays while the wanted one differs by no more

WindowOf = Callable[[float], int]  # round trip in seconds -> bytes of one connection's window; 0: the kernel's

_MIN_RTT = struct.Struct("=148xI")  # of struct tcp_info (linux/tcp.h): tcpi_min_rtt, microseconds
_WINDOW_CLAMP, _BUF_LOCK = 10, 72  # TCP_WINDOW_CLAMP; SO_BUF_LOCK, since Linux 5.14
_NO_CLAMP = 1 << 30  # TCP's largest window (RFC 7323 section 2.3)


class ReceiveWindow:
    """One connection's window: `num_bytes`, 0 while the kernel decides. Call `follow` as bytes arrive; refusals by
    the operating system are ignored."""

    def __init__(self, connection: Any, wanted: WindowOf) -> None:
        self._socket, self._wanted, self.num_bytes = connection, wanted, 0
        self._most_bytes = _NO_CLAMP  # the kernel's limit, once it has refused more

    def follow(self) -> None:
        try:
            num_bytes = self._possible(self._wanted(self._round_trip_s()))
            if abs(num_bytes - self.num_bytes) > SLACK * self.num_bytes:
                self.num_bytes = self._set(num_bytes)
        except OSError:
            self._wanted, self.num_bytes = unlimited, 0

    def _round_trip_s(self) -> float:
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        rtt_us = _MIN_RTT.unpack(info)[0] if len(info) == _MIN_RTT.size else 0
        return rtt_us / 1e6 if rtt_us < 0xFFFF_FFFF else 0.0

    def _possible(self, num_bytes: int) -> int:
        """Allow some segments at least, and return 0 beyond the kernel's limit."""
        if num_bytes:
            segment_bytes = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            num_bytes = max(num_bytes, LEAST_SEGMENTS * segment_bytes)
        return num_bytes if num_bytes <= self._most_bytes else 0

    def _set(self, num_bytes: int) -> int:
        """Return 0 where the kernel decides."""
        if num_bytes:
            # The kernel doubles it, for its own structures.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
            given = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
            if given >= num_bytes:
                self._socket.setsockopt(socket.IPPROTO_TCP, _WINDOW_CLAMP, num_bytes)
                return num_bytes
            self._most_bytes = given
        self._socket.setsockopt(socket.IPPROTO_TCP, _WINDOW_CLAMP, _NO_CLAMP)
        self._socket.setsockopt(socket.SOL_SOCKET, _BUF_LOCK, 0)  # the kernel grows the buffer again
        return 0


def unlimited(_: float) -> int:
    return 0


def of_socket(connection: socket.socket, wanted: WindowOf | None) -> ReceiveWindow | None:
    if wanted is None or not sys.platform.startswith("linux") or connection.family == socket.AF_UNIX:
        return None
    return ReceiveWindow(connection, wanted)
