"""The console process."""

import asyncio

from glowplug.runtime.key_reader import KeyReader
from glowplug.runtime.service import World, run, serve_rest
from glowplug.services.console.app import Console, build_app
from glowplug.services.console.handlers import Feed
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings


async def serve(stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, or until the server ends by itself."""
    settings = ConsoleSettings()
    world = World.open("console", settings)
    console = Console(settings, ConsoleMetrics(), keys=KeyReader(world.store))
    await asyncio.to_thread(console.open_disk)
    feed = Feed(console, world.bus, world.store, world.bus.connect, world.metrics)
    server, _ = await serve_rest(build_app(console), settings)
    feed.start(stopping)
    waiter = asyncio.create_task(stopping.wait())
    await asyncio.wait({waiter, server}, return_when=asyncio.FIRST_COMPLETED)
    await feed.stop()
    await console.history.close()
    await console.upstream.close()
    if (disk := console.traces.disk) is not None:
        await asyncio.to_thread(disk.close)
    await world.close(waiter, server)
    console.ledger.close()


def main() -> None:
    run(serve)


if __name__ == "__main__":
    main()
