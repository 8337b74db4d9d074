"""A controller's declaration: the tables, facts, telemetry and commands it reads, and the effects of its own.

Each package has one such declaration, `reads.py: READS`. The services subscribe by it, the simulator delivers by it,
and the rights on the bus and in the store are made from it (runtime/privileges.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from glowplug.events.subjects import commands_to, filters


class MissingExecutor(TypeError):
    """A shell has no executor for an effect that its controller may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The declaration of one service. Payloads are classes of events/facts.py and events/commands.py."""

    service: str
    tables: Mapping[str, type[Any]] = field(default_factory=dict)  # by name, the type of its rows; in reading order
    facts: tuple[type[Any], ...] = ()  # durable
    telemetry: tuple[type[Any], ...] = ()
    telemetry_if_asked: tuple[type[Any], ...] = ()  # read only where a policy in force asks for it
    commands: tuple[type[Any], ...] = ()
    effects: tuple[type[Any], ...] = ()  # of its own; every shell has those of controllers/effects.py

    def asked(self, is_asked: bool = True) -> "Reads":
        """The declaration with `telemetry_if_asked` read, where a policy in force asks for it, or left out."""
        more = self.telemetry_if_asked if is_asked else ()
        return replace(self, telemetry=(*self.telemetry, *more), telemetry_if_asked=())

    @property
    def payloads(self) -> tuple[type[Any], ...]:
        """Every payload that the service may be given."""
        return (*self.facts, *self.telemetry, *self.telemetry_if_asked, *self.commands)

    def fact_filters(self) -> list[str]:
        return filters(self.facts)

    def telemetry_filters(self) -> list[str]:
        return filters(self.telemetry)

    def command_filters(self, target: str = "any") -> list[str]:
        """The filters for the commands that are addressed to `target`, a node's id or any process of the service."""
        return [commands_to(self.service, target)] if self.commands else []

    def check_executors(self, executors: Iterable[type[Any]]) -> None:
        """Raise MissingExecutor that names the effects without an executor."""
        missing = sorted(cls.__name__ for cls in set(self.effects) - set(executors))
        if missing:
            raise MissingExecutor(f"{self.service}: nothing carries out {', '.join(missing)}")
