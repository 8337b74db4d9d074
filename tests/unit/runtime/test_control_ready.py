"""What a control service says at /ready while bus or store take nothing."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.reads import Reads
from glowplug.runtime.control import ControlService
from glowplug.runtime.service import World
from glowplug.runtime.shell import Shell
from glowplug.state.memory_store import MemoryStore


def service(bus: MemoryBus, store: MemoryStore) -> ControlService:
    made = ControlService(cast(World, SimpleNamespace(bus=bus, store=store)), Reads(service="placer"))
    made.shell = cast(Shell, SimpleNamespace(restored=True))
    return made


@pytest.mark.parametrize("what", ["bus", "store"])
def test_a_service_whose_commands_or_rows_are_not_taken_is_not_ready_and_says_why(what: str) -> None:
    bus, store = MemoryBus(), MemoryStore()
    made = service(bus, store)
    assert made.not_ready() == ""
    full: Any = bus.broker if what == "bus" else store
    full.refusal = "it takes nothing: no space left on device"
    assert made.not_ready() == "it takes nothing: no space left on device"
    full.refusal = ""
    assert made.not_ready() == ""
