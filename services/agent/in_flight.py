"""How many requests are left in an engine that drains, and how full its KV cache is."""

import logging

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import AdapterHost, EngineDriver, EngineHandle, Sleeper

log = logging.getLogger(__name__)


async def in_flight(
    driver: EngineDriver, handle: EngineHandle, effect: msg.CountInFlight, *, reads_kv: bool
) -> msg.InFlight | None:
    """Asks the engine; None where it does not answer, which is logged. Of an adapter its own requests count."""
    name, kv_bytes_used = effect.instance_id, -1
    try:
        if effect.model is not None and isinstance(driver, AdapterHost):
            num_in_flight = await driver.num_of_adapter(handle, effect.model)
        else:
            num_in_flight = await driver.num_in_flight(handle)
    except EngineFailed as error:
        log.warning("the engine of %s does not say how many requests are left in its drain: %s", name, error.message)
        return None
    if reads_kv and isinstance(driver, Sleeper):
        try:
            kv_bytes_used = await driver.kv_bytes_used(handle)
        except EngineFailed as error:
            log.warning("the engine of %s does not say how full its KV cache is: %s", name, error.message)
    return msg.InFlight(name, num_in_flight, kv_bytes_used)
