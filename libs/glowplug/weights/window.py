"""How many bytes of a download are on their way at once.

TCP asks a sender for as much as there is memory for. What the link into a node cannot carry at once waits in front of
it, and so does everything else that the node is sent: with windows of megabytes a message between two stages of a
pipeline waits for tenths of a second while weights come. A download asks for what its part of the link carries in a
round trip and `QUEUE_S` more: by bandwidth and delay, as BBR does (Cardwell et al., ACM Queue 14(5), 2016), but at the
receiver, who knows the link. Windows larger than the kernel lets a program ask for (net.core.rmem_max) are left to the
kernel. A window holds `LEAST_SEGMENTS` at least: a receiver offers no part of a segment, so a smaller one moves a
segment and stops (on loopback a segment has 32 KiB).
"""

import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

QUEUE_S = 0.02  # of the link's time, that may wait in front of it
LEAST_BYTES = 32 << 10  # of a window
LEAST_SEGMENTS = 4  # of a connection, that a window holds
SLACK = 0.25  # a window is left as it is while what is wanted differs by no more

WindowOf = Callable[[float], int]  # round trip in seconds -> bytes of one connection's window; 0: as the kernel has it

_MIN_RTT = struct.Struct("=148xI")  # of struct tcp_info (linux/tcp.h): tcpi_min_rtt, microseconds
_WINDOW_CLAMP, _BUF_LOCK = 10, 72  # TCP_WINDOW_CLAMP; SO_BUF_LOCK, since Linux 5.14
_NO_CLAMP = 1 << 30  # the largest window that TCP can offer (RFC 7323 section 2.3)


class Window:
    """Of one connection: `num_bytes`, 0 while the kernel decides. `follow` is called as bytes come; what the operating
    system refuses changes nothing."""

    def __init__(self, connection: Any, wanted: WindowOf) -> None:
        self._socket, self._wanted, self.num_bytes = connection, wanted, 0
        self._most_bytes = _NO_CLAMP  # that the kernel lets a program ask for, once it has refused more

    def follow(self) -> None:
        try:
            num_bytes = self._possible(self._wanted(self._round_trip_s()))
            if abs(num_bytes - self.num_bytes) > SLACK * self.num_bytes:
                self.num_bytes = self._set(num_bytes)
        except OSError:  # it is closed
            self._wanted, self.num_bytes = unlimited, 0

    def _round_trip_s(self) -> float:
        """The shortest that the kernel has seen; 0.0 before one."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        rtt_us = _MIN_RTT.unpack(info)[0] if len(info) == _MIN_RTT.size else 0
        return rtt_us / 1e6 if rtt_us < 0xFFFF_FFFF else 0.0

    def _possible(self, num_bytes: int) -> int:
        """What of it this connection can have: some segments at least, and 0 for what the kernel does not allow."""
        if num_bytes:
            segment_bytes = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            num_bytes = max(num_bytes, LEAST_SEGMENTS * segment_bytes)
        return num_bytes if num_bytes <= self._most_bytes else 0

    def _set(self, num_bytes: int) -> int:
        """The window that it has from now on; 0 where the kernel decides, as before the first one."""
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


def of_socket(connection: socket.socket, wanted: WindowOf | None) -> Window | None:
    """The window of a connection; None where there is none to set."""
    if wanted is None or not sys.platform.startswith("linux") or connection.family == socket.AF_UNIX:
        return None
    return Window(connection, wanted)
