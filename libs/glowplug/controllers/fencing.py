"""Fencing: a receiver remembers the highest epoch of each issuer and refuses commands of lower ones."""

from collections.abc import Mapping

from glowplug.domain.errors import StaleEpoch
from glowplug.domain.lease import Leader
from glowplug.events.envelope import Event

LEADERS = "leaders"  # table: service -> Leader
COMMANDERS = ("autoscaler", "placer")  # services that send commands; epochs are counted per service


def service_of(issuer: str) -> str:
    """Return the service of an id: "placer" of "placer-1", "placer-7d9-x2" and "glowplug-placer-0"; else its first
    part."""
    parts = issuer.split("-")
    return next((part for part in parts if part in COMMANDERS), parts[0])


class Fence:
    def __init__(self, seen: dict[str, int] | None = None) -> None:
        self.seen = dict(seen or {})
        self._leading: dict[str, int] = {}  # service -> epoch of its leader, which may have sent nothing yet

    def raise_to(self, leaders: Mapping[str, Leader]) -> None:
        for service, leader in leaders.items():
            self._leading[service] = max(leader.epoch, self._leading.get(service, 0))

    def admit(self, event: Event) -> None:
        """Note the epoch of a command. Raises StaleEpoch when a newer holder of the same role has sent one."""
        service = service_of(event.issuer)
        role = event.type.partition(".")[0] + "<" + service
        highest = max(self.seen.get(role, 0), self._leading.get(service, 0))
        if event.epoch < highest:
            raise StaleEpoch(f"{event.type} from {event.issuer} at epoch {event.epoch}, newest is {highest}")
        self.seen[role] = event.epoch
