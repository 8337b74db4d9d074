"""Ports for engines out of a range that is open to the routers, where an agent was given one."""

import errno
import socket
from collections.abc import Iterable

from glowplug.domain.address import PortRange
from glowplug.domain.errors import EngineFailed


class EnginePorts:
    """Gives out free ports one after another: after a start that failed over a taken port the next one gets another.

    A range belongs to one agent of an address: an engine binds its port seconds after it was handed out.
    """

    def __init__(self, host: str, ports: PortRange | None) -> None:
        self._host, self._range = host, ports
        self._next = ports.first if ports else 0
        self._launching: dict[str, int] = {}

    def take(self, instance_id: str, held: Iterable[int]) -> int:
        """A port nobody listens on, none of `held` (those of engines that live); 0 without a range.

        Raises EngineFailed when there is none.
        """
        if self._range is None:
            return 0
        used = {*held, *self._launching.values()}
        first, size = self._range.first, len(self._range)
        for step in range(size):
            port = first + (self._next - first + step) % size
            if port not in used and self._is_free(port):
                self._next = port + 1
                self._launching[instance_id] = port
                return port
        raise EngineFailed(f"no free port in GLOWPLUG_ENGINE_PORTS={self._range}: {len(used)} are in use by engines")

    def settled(self, instance_id: str) -> None:
        """The launch of that instance is over: its handle keeps the port, or nobody does."""
        self._launching.pop(instance_id, None)

    def _is_free(self, port: int) -> bool:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self._host, port))
                sock.listen(1)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise EngineFailed(f"engines cannot listen on {self._host}: {error.strerror}") from error
                return False
        return True
