"""Writing to a socket at once, without the event loop's queue when that is empty.

uvloop keeps every write until the end of a loop turn, which costs one more turn (and its system calls) for each chunk
of a stream. Here what the kernel takes is gone when the call returns; only the rest goes to the transport's own buffer,
with its limits and its pause_writing.
"""

import asyncio
import os
from collections.abc import Callable

Write = Callable[[bytes], None]


def writer(transport: asyncio.Transport) -> Write:
    """A function that sends bytes in order after what is buffered; nothing once the transport is closing. A broken
    connection is left to the transport to notice."""
    fd = int(transport.get_extra_info("socket").fileno())  # valid while the transport is not closing
    num_buffered, is_closing, send = transport.get_write_buffer_size, transport.is_closing, os.write

    def write(data: bytes) -> None:
        if is_closing():
            return
        if not num_buffered():
            try:
                sent = send(fd, data)
            except OSError:  # EAGAIN, or broken: the transport's own write finds out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

    return write
