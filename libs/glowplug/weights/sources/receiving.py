"""How much of an answer may be on its way to this node at once.

A sender fills a slow link as far as the receiver's buffer lets it, and what waits before the link then waits for that
buffer too: requests, the stages of a pipeline, whose first packets are dropped where the queue is full and come again
after a second. On a link whose rate is declared, each connection of a fetch has a hundredth of a second in its buffer.
"""

import socket

import httpx

LINK_S = 0.01
LEAST_BYTES = 64 << 10
MOST_BYTES = 4 << 20  # a fast link drains its queue by itself, and a small buffer would slow it down


def receive_bytes(link_bytes_per_s: float) -> int:
    """Of one connection's receive buffer; 0 leaves it to the kernel."""
    num_bytes = int(link_bytes_per_s * LINK_S)
    return max(LEAST_BYTES, num_bytes) if 0 < num_bytes <= MOST_BYTES else 0


def bound(response: httpx.Response, num_bytes: int) -> None:
    """Before its body is read. 0 bytes, or an answer of no socket, is left as it is."""
    stream = response.extensions.get("network_stream") if num_bytes else None
    connection = stream.get_extra_info("socket") if stream is not None else None
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
