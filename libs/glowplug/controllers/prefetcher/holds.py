"""Which weights the instances of one node use: those stay in host memory whatever else wants the room.

Learned twice: from fetch commands (before the instance is seen) and from the instances themselves (after a restart).
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, WeightsRef

GONE_REMEMBERED = 10_000


@dataclass(slots=True)
class _Hold:
    digest: str
    since: float
    seen: bool  # the instance has shown itself: its state decides from here on


class Holds:
    """Instances of `node_id` and the digests they need."""

    def __init__(self, node_id: str, digest_of: Callable[[WeightsRef], str], hold_s: float) -> None:
        self._node_id, self._digest_of, self._hold_s = node_id, digest_of, hold_s
        self._holds: dict[str, _Hold] = {}
        self._instances: dict[str, Instance] = {}  # living ones of this node
        self._gone: dict[str, None] = {}  # insertion-ordered, bounded
        self._models: dict[str, Model] = {}
        self._digests: dict[str, str] = {}  # model_key -> digest

    def hold(self, instance_id: str, digest: str, now_s: float) -> None:
        """A fetch was asked for that instance."""
        if instance_id and instance_id not in self._gone:
            self._holds[instance_id] = _Hold(digest, now_s, instance_id in self._instances)

    def set_instance(self, instance: Instance, now_s: float) -> str:
        """Take in one state of one instance; older revisions and other nodes are ignored. Returns its digest."""
        key = instance.instance_id
        if all(w.node_id != self._node_id for w in instance.workers) or key in self._gone:
            return ""
        known = self._instances.get(key)
        if known and known.revision > instance.revision:
            return ""
        hold = self._holds.get(key)
        digest = hold.digest if hold else self._digests.get(instance.model_key, "")
        if instance.state.is_gone:
            self._forget(key)
            return digest
        self._instances[key] = instance
        if instance.state.is_dormant:
            self._holds.pop(key, None)  # it has its weights, on its GPUs or where it sleeps; what grows from it, too
        elif hold:
            hold.seen = True
        elif digest:
            self._holds[key] = _Hold(digest, now_s, True)
        return digest

    def set_instances(self, rows: Mapping[str, Instance], now_s: float) -> None:
        """The whole table. An instance that is missing from it, and was seen before, is gone."""
        for instance in rows.values():
            self.set_instance(instance, now_s)
        for key in [k for k in self._instances if k not in rows]:
            if now_s - self._instances[key].changed_at > self._hold_s:
                self._forget(key)

    def set_model(self, model: Model) -> None:
        known = self._models.get(model.key)
        if known and known.revision > model.revision:
            return
        if not model.weights.uri:
            return  # an engine that needs no weights
        try:
            self._digests[model.key] = self._digest_of(model.weights)
        except InvalidModelFile:
            return  # nothing can be fetched for it, so nothing is held
        self._models[model.key] = model

    def set_models(self, rows: Mapping[str, Model]) -> None:
        for key in [k for k in self._models if k not in rows]:
            self.forget_model(key)
        for model in rows.values():
            self.set_model(model)

    def forget_model(self, model_key: str) -> None:
        self._models.pop(model_key, None)
        self._digests.pop(model_key, None)

    def is_gone(self, instance_id: str) -> bool:
        return instance_id in self._gone

    def starting_before(self, before_s: float) -> list[tuple[Instance, WeightsRef]]:
        """Living instances that began to start before then and are not ready, with the weights they need. No stages of
        a pipeline: which part of the weights one needs, only its fetch says."""
        return [
            (instance, self._models[instance.model_key].weights)
            for _, instance in sorted(self._instances.items())
            if instance.state.is_coming and instance.is_whole and instance.created_at < before_s
            if instance.model_key in self._models
        ]

    def has_copy(self, model_keys: Set[str]) -> bool:
        """Whether a replica of one of them lies on a GPU here, whole."""
        rows = self._instances.values()
        return any(row.state is InstanceState.PREWARMED and row.model_key in model_keys for row in rows)

    def expire(self, now_s: float) -> None:
        """Release what was held for instances that never showed up."""
        for key, hold in list(self._holds.items()):
            if not hold.seen and now_s - hold.since > self._hold_s:
                del self._holds[key]

    def reason(self, digest: str, model_keys: Set[str], now_s: float) -> str:
        """Who needs `digest`; "" for nobody. `model_keys` asked for it before: a living instance of one of them
        counts when what it was started with is not known any more."""
        for key, hold in sorted(self._holds.items()):
            if hold.digest == digest and (hold.seen or now_s - hold.since <= self._hold_s):
                return f"{key} uses it"
        for key, instance in sorted(self._instances.items()):
            is_held = key not in self._holds and not instance.state.is_dormant
            if is_held and instance.model_key in model_keys:
                return f"{key} uses it"
        return ""

    def _forget(self, instance_id: str) -> None:
        self._holds.pop(instance_id, None)
        self._instances.pop(instance_id, None)
        self._gone[instance_id] = None
        while len(self._gone) > GONE_REMEMBERED:
            del self._gone[next(iter(self._gone))]
