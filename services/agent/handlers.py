"""Wiring: which engines this node has, what its controller is built from, and what its shell executes."""

import logging
from collections.abc import Mapping
from typing import Any

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import AgentMemory, ReportStart
from glowplug.controllers.agent.params import EngineKind
from glowplug.domain.errors import GlowplugError
from glowplug.engines import drivers
from glowplug.engines.port import EngineDriver
from glowplug.memory.discovery import EMULATED, HOST, Discovery
from glowplug.memory.ledger import ByteLedger
from glowplug.runtime.shell import Executor
from services.agent.executor import EngineExecutor
from services.agent.settings import AgentSettings
from services.agent.telemetry import StartReporter

log = logging.getLogger(__name__)


def find_engines(settings: AgentSettings) -> tuple[dict[str, EngineDriver], dict[str, EngineKind]]:
    """Drivers that can start here, and the other engines that were asked for with why they cannot, logged once."""
    asked = [name.strip() for name in settings.engines.split(",") if name.strip()] or list(drivers.NAMES)
    found: dict[str, EngineDriver] = {}
    refused: dict[str, EngineKind] = {}
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
            refused[name] = EngineKind(name=name, emulated=emulated, unavailable=why)
    return found, refused


def kinds_of(available: Mapping[str, EngineDriver], gpu_kind: str) -> dict[str, EngineKind]:
    """Engines that are all available, with what they can do on GPUs of that kind."""
    return {
        name: EngineKind(name=name, emulated=d.capabilities.emulated, abilities=frozenset(d.abilities(gpu_kind)))
        for name, d in available.items()
    }


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
