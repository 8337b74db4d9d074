"""Fencing: a receiver remembers the highest epoch of each issuer and refuses commands of lower ones."""

from glowplug.domain.errors import StaleEpoch
from glowplug.events.envelope import Event


class Fence:
    """Highest epoch seen per issuing service (the part of `issuer` before the last dash-number is the service)."""

    def __init__(self, seen: dict[str, int] | None = None) -> None:
        self.seen = dict(seen or {})

    def admit(self, event: Event) -> None:
        """Raises StaleEpoch when a newer holder of the same role has spoken."""
        role = event.type.partition(".")[0] + "<" + event.issuer.partition("-")[0]
        highest = self.seen.get(role, 0)
        if event.epoch < highest:
            raise StaleEpoch(f"{event.type} from {event.issuer} at epoch {event.epoch}, newest is {highest}")
        self.seen[role] = event.epoch
