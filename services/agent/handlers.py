"""Wiring: which engines this node has, what its controller is built from, and what its shell executes."""

import logging
from collections.abc import Mapping
from typing import Any

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import AgentMemory, ReportStart
from glowplug.controllers.agent.params import EngineKind
from glowplug.domain.errors import GlowplugError
from glowplug.engines import drivers
from glowplug.engines.port import EngineDriver, Sleeper, Stager
from glowplug.memory.discovery import EMULATED, HOST, Discovery
from glowplug.memory.ledger import ByteLedger
from glowplug.runtime.shell import Executor
from services.agent.executor import EngineExecutor
from services.agent.settings import AgentSettings
from services.agent.telemetry import StartReporter

log = logging.getLogger(__name__)


def find_engines(settings: AgentSettings) -> tuple[dict[str, EngineDriver], dict[str, EngineKind]]:
    """Drivers that can start here, and every engine asked for with why it cannot, logged once."""
    asked = [name.strip() for name in settings.engines.split(",") if name.strip()] or list(drivers.NAMES)
    found: dict[str, EngineDriver] = {}
    kinds: dict[str, EngineKind] = {}
    for name in asked:
        try:
            driver = drivers.driver(name, settings.engine_settings())
            why, emulated = driver.unavailable(), driver.capabilities.emulated
        except (GlowplugError, ImportError) as error:
            driver, why, emulated = None, str(error), False
        if driver is not None and not why:
            found[name] = driver
        else:
            log.info("engine %s is not available on %s: %s", name, settings.node, why)
        abilities = abilities_of(driver) if driver is not None else frozenset()
        kinds[name] = EngineKind(name=name, emulated=emulated, unavailable=why, abilities=abilities)
    return found, kinds


def kinds_of(available: Mapping[str, EngineDriver]) -> dict[str, EngineKind]:
    """Engines that are all available."""
    return {
        name: EngineKind(name=name, emulated=d.capabilities.emulated, abilities=abilities_of(d))
        for name, d in available.items()
    }


def abilities_of(driver: EngineDriver) -> frozenset[str]:
    """What its engines can do besides serving, by the names of Node.can. No driver of a real engine is a Stager yet."""
    sleeps, known = isinstance(driver, Sleeper), driver.capabilities
    can = {"prewarm": sleeps and known.prewarm, "swap": sleeps and known.sleep, "stages": isinstance(driver, Stager)}
    return frozenset(ability for ability, is_there in can.items() if is_there)


def gpu_kind(asked: str, available: Mapping[str, EngineDriver]) -> str:
    """Budgets of host memory are emulated where nothing but emulated engines can be granted them."""
    only_emulated = bool(available) and all(driver.capabilities.emulated for driver in available.values())
    return EMULATED if asked == HOST and only_emulated else asked


def make_controller(
    settings: AgentSettings, found: Discovery, kinds: Mapping[str, EngineKind], memory: AgentMemory
) -> AgentController:
    return AgentController(
        settings.node,
        ByteLedger(found.gpus),
        kinds,
        agent_url=settings.agent_url,
        params=settings.params(),
        memory=memory,
    )


def executors(engines: EngineExecutor, reporter: StartReporter) -> dict[type[Any], Executor]:
    return {**engines.executors(), ReportStart: reporter.execute}
