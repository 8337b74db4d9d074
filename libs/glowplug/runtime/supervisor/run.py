"""`glowplug up`, without its words: lock, sweep, start, keep running until a signal, stop."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable

from glowplug.runtime.supervisor.errors import FleetError
from glowplug.runtime.supervisor.fleet import Fleet
from glowplug.runtime.supervisor.output import Output
from glowplug.runtime.supervisor.settings import FleetSettings
from glowplug.runtime.supervisor.statedir import StateDir
from glowplug.runtime.supervisor.sweep import sweep

PROGRESS_EVERY_S = 0.5


async def run_fleet(
    settings: FleetSettings, output: Output, state: StateDir, on_ready: Callable[[Fleet], Awaitable[int | None]]
) -> int:
    """Run a fleet in `state` (locked by the caller) and return the exit code.

    `on_ready` is called once everything answers; a number it returns ends the fleet with that code, None keeps it up
    until SIGINT or SIGTERM. A second signal kills without grace. Raises FleetError when the fleet does not come up.
    """
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    left = await asyncio.to_thread(sweep, state.path)
    if left:
        output.say(f"stopped {left} process(es) that an earlier run had left behind")
    fleet = Fleet(settings, output, state)

    def on_signal() -> None:
        if stopping.is_set():
            for child in fleet.children:
                child.kill()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        return await _until_stopped(fleet, output, stopping, on_ready)
    finally:
        output.show_logs = False
        output.say("stopping ...")
        await fleet.stop()
        output.say("stopped")


async def _until_stopped(
    fleet: Fleet, output: Output, stopping: asyncio.Event, on_ready: Callable[[Fleet], Awaitable[int | None]]
) -> int:
    signalled = asyncio.create_task(stopping.wait())
    progress = asyncio.create_task(_progress(fleet, output))
    start = asyncio.create_task(fleet.start())
    try:
        await asyncio.wait({start, signalled}, return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
        if not start.done():
            raise FleetError("stopped before it was ready")
        await start
        ready = asyncio.create_task(_result(on_ready, fleet))
        await asyncio.wait({ready, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            code = await ready
            if code is not None:
                return code
            await signalled
        else:
            ready.cancel()
        return 0
    finally:
        for task in (signalled, progress, start):
            task.cancel()
        await asyncio.gather(signalled, progress, start, return_exceptions=True)


async def _result(on_ready: Callable[[Fleet], Awaitable[int | None]], fleet: Fleet) -> int | None:
    return await on_ready(fleet)


async def _progress(fleet: Fleet, output: Output) -> None:
    started, last = time.monotonic(), ""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            waiting = [child.spec.name for child in fleet.children if not child.ready.is_set()]
            text = f"starting: {fleet.num_ready} of {len(fleet.children)} ready"
            if waiting and fleet.num_ready:
                text += f", waiting for {', '.join(waiting[:4])}{' ...' if len(waiting) > 4 else ''}"
            if fleet.children and text != last:
                output.progress(f"{text} ({time.monotonic() - started:.1f} s)")
                last = text
            await asyncio.sleep(PROGRESS_EVERY_S)
