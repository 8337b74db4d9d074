"""Writing to a socket at once, without the event loop's queue when that is empty.

uvloop keeps every write until the end of a loop turn, which costs one more turn (and its system calls) for each chunk
of a stream. Here what the kernel takes is gone when `write` returns; only the rest goes to the transport's own buffer,
with its limits and its pause_writing.
"""

import asyncio
import os


def file_number(transport: asyncio.Transport) -> int:
    """The socket's descriptor; valid while the transport is not closing."""
    return int(transport.get_extra_info("socket").fileno())


def write(transport: asyncio.Transport, fd: int, data: bytes) -> None:
    """Send `data` in order after what is buffered. A broken connection is left to the transport to notice."""
    if transport.is_closing():
        return
    if not transport.get_write_buffer_size():
        try:
            sent = os.write(fd, data)
        except OSError:  # EAGAIN, or broken: the transport's own write finds out
            sent = 0
        if sent == len(data):
            return
        data = data[sent:]
    transport.write(data)
