"""Fencing: a receiver remembers the highest epoch of each issuer and refuses commands of lower ones."""

from glowplug.domain.errors import StaleEpoch
from glowplug.events.envelope import Event

COMMANDERS = ("autoscaler", "placer")  # who sends commands; epochs are counted per service


def service_of(issuer: str) -> str:
    """The service a service id speaks for: "placer" of "placer-1", "placer-7d9-x2" and "glowplug-placer-0".
    Of a name without one, its first part."""
    parts = issuer.split("-")
    return next((part for part in parts if part in COMMANDERS), parts[0])


class Fence:
    """Highest epoch seen per issuing service and kind of receiver."""

    def __init__(self, seen: dict[str, int] | None = None) -> None:
        self.seen = dict(seen or {})

    def admit(self, event: Event) -> None:
        """Raises StaleEpoch when a newer holder of the same role has spoken."""
        role = event.type.partition(".")[0] + "<" + service_of(event.issuer)
        highest = self.seen.get(role, 0)
        if event.epoch < highest:
            raise StaleEpoch(f"{event.type} from {event.issuer} at epoch {event.epoch}, newest is {highest}")
        self.seen[role] = event.epoch
