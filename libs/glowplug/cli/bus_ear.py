"""A command's ear on the bus: everything of some planes, until somebody has heard enough."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence

import nats
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from glowplug.bus.nats_storing import CHECK_HEADER
from glowplug.cli.client import FleetClient
from glowplug.cli.options import CliError
from glowplug.domain.errors import GlowplugError
from glowplug.events.subjects import ROOT
from glowplug.runtime.privileges import inbox_of

Hear = Callable[[str, bytes], bool]  # subject and bytes of an event; whether that was enough
CONNECT_TIMEOUT_S = 3


def listen(fleet: FleetClient, name: str, planes: Sequence[str], hear: Hear, seconds: float = 0) -> None:
    """Tell `hear` of every event of the planes until it has enough, `seconds` (0: without end) have passed, the bus is
    gone, or a person (Ctrl-C) or a service manager (SIGTERM) ends it. Raises CliError where no bus answers."""
    if not fleet.nats_url:
        raise CliError("this fleet has no bus address: set GLOWPLUG_NATS_URL")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_listen(fleet.nats_url, name, planes, hear, seconds))


async def _listen(url: str, name: str, planes: Sequence[str], hear: Hear, seconds: float) -> None:
    over = asyncio.Event()

    failed: list[Exception] = []

    async def on_message(msg: Msg) -> None:
        try:
            if not over.is_set() and CHECK_HEADER not in (msg.headers or {}) and hear(msg.subject, msg.data):
                over.set()
        except OSError as error:  # the client would only log it: `glowplug tap | head`, a full disk
            failed.append(error)
            over.set()

    async def gone() -> None:
        over.set()

    async def refused(error: Exception) -> None:
        if "permissions violation" in str(error):
            failed.append(CliError("the bus lets this user not watch: use the address of `reader` (docs/network.md)"))
            over.set()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        client = await nats.connect(
            url,
            name=name,
            connect_timeout=CONNECT_TIMEOUT_S,
            allow_reconnect=False,
            closed_cb=gone,
            error_cb=refused,
            inbox_prefix=inbox_of(url),
        )
    except (OSError, NatsError, TimeoutError) as error:
        raise CliError("the bus does not answer") from error
    for plane in planes:
        await client.subscribe(f"{ROOT}.{plane}.>", cb=on_message)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds or None)
    with contextlib.suppress(NatsError, GlowplugError):
        await client.close()
    if failed:
        raise failed[0]
