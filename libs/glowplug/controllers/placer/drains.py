"""Which instances of cordoned nodes have been told to go: told again until they drain, since a command may be lost."""

from collections.abc import Iterable

from glowplug.domain.instance import Instance, InstanceState


class Drains:
    """instance_id -> when its stop was last sent."""

    def __init__(self, repeat_s: float) -> None:
        self._repeat_s = repeat_s
        self._sent_at: dict[str, float] = {}

    def due(self, here: Iterable[Instance], now_s: float) -> list[tuple[Instance, bool]]:
        """Of the instances on one cordoned node those to be told now, and whether it is for the first time."""
        told = []
        for instance in here:
            instance_id = instance.instance_id
            if instance.state.is_gone or instance.state is InstanceState.DRAINING:
                continue
            last = self._sent_at.get(instance_id)
            if last is None or now_s - last >= self._repeat_s:
                self._sent_at[instance_id] = now_s
                told.append((instance, last is None))
        return told

    def forget(self, gone: Iterable[str]) -> None:
        """Instances that are no more, or may stay."""
        for instance_id in gone:
            self._sent_at.pop(instance_id, None)

    @property
    def instance_ids(self) -> frozenset[str]:
        """Those told to go."""
        return frozenset(self._sent_at)
