"""A controller's declaration of its inputs (tables, facts, telemetry, commands) and its own effects.

Each package has one, `reads.py: READS`. Services subscribe by it, the simulator delivers by it, and the rights on the
bus and in the store are made from it (runtime/privileges.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from glowplug.events.subjects import commands_to, filters


class MissingExecutor(TypeError):
    """A shell has no executor for an effect of its controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Payloads are classes of events/facts.py and events/commands.py."""

    service: str
    tables: Mapping[str, type[Any]] = field(default_factory=dict)  # by name, the type of its rows; in reading order
    facts: tuple[type[Any], ...] = ()  # durable
    telemetry: tuple[type[Any], ...] = ()
    telemetry_if_asked: tuple[type[Any], ...] = ()  # read only where a policy in force asks for it
    commands: tuple[type[Any], ...] = ()
    effects: tuple[type[Any], ...] = ()  # its own; every shell has those of controllers/effects.py

    def asked(self, is_asked: bool = True) -> "Reads":
        """Move `telemetry_if_asked` to the telemetry, or leave it out."""
        more = self.telemetry_if_asked if is_asked else ()
        return replace(self, telemetry=(*self.telemetry, *more), telemetry_if_asked=())

    @property
    def payloads(self) -> tuple[type[Any], ...]:
        return (*self.facts, *self.telemetry, *self.telemetry_if_asked, *self.commands)

    def fact_filters(self) -> list[str]:
        return filters(self.facts)

    def telemetry_filters(self) -> list[str]:
        return filters(self.telemetry)

    def command_filters(self, target: str = "any") -> list[str]:
        """Filter commands to `target`, a node's id or "any" process of the service."""
        return [commands_to(self.service, target)] if self.commands else []

    def check_executors(self, executors: Iterable[type[Any]]) -> None:
        missing = sorted(cls.__name__ for cls in set(self.effects) - set(executors))
        if missing:
            raise MissingExecutor(f"{self.service}: nothing carries out {', '.join(missing)}")
