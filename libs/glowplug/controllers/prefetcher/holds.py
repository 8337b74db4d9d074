"""Which weights the instances of one node use, or an operator has pinned: those stay in host memory, whoever else wants
the bytes.

It is learned twice: from fetch commands (before the instance is seen) and from the instances themselves (after a
restart).
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import KeptAt, Model, WeightsRef

GONE_REMEMBERED = 10_000


@dataclass(slots=True)
class _User:
    """An instance of this node. `digest` is what it was started with, "" when it needs nothing (or that is not known);
    `instance` is None until it has shown itself, and from then on its state decides."""

    digest: str = ""
    since: float = 0.0
    instance: Instance | None = None
    has_part: bool = False  # of a stage: its part of the weights is here

    def holds(self, now_s: float, hold_s: float) -> bool:
        return bool(self.digest) and (self.instance is not None or now_s - self.since <= hold_s)


class Holds:
    """Instances of `node_id` and the digests they need."""

    def __init__(self, node_id: str, digest_of: Callable[[WeightsRef], str], hold_s: float) -> None:
        self._node_id, self._digest_of, self._hold_s = node_id, digest_of, hold_s
        self._users: dict[str, _User] = {}  # instance_id -> user
        self._gone: dict[str, None] = {}  # instance ids, insertion-ordered, bounded
        self._giving_way: dict[str, float] = {}  # copies on GPUs -> when somebody was last to take their place
        self._models: dict[str, tuple[Model, str]] = {}  # model_key -> (model, its digest)

    def hold(self, instance_id: str, digest: str, now_s: float) -> None:
        """A fetch was asked for that instance."""
        if instance_id and instance_id not in self._gone:
            user = self._users.setdefault(instance_id, _User())
            user.digest, user.since, user.has_part = digest, now_s, False

    def set_instance(self, instance: Instance, now_s: float) -> str:
        """Take in one state of one instance; older revisions and other nodes are ignored. Returns its digest."""
        key = instance.instance_id
        if all(w.node_id != self._node_id for w in instance.workers) or key in self._gone:
            return ""
        user = self._users.get(key) or _User()
        if user.instance and user.instance.revision > instance.revision:
            return ""
        digest = user.digest or self.digest_of_model(instance.model_key)
        if instance.state.is_gone:
            self._forget(key)
            return digest
        self._users[key] = user
        user.instance = instance
        if self._has_own_copy(instance):
            user.digest = ""  # it has its weights, on its GPUs or where it sleeps; what grows from it, too
        elif not user.digest:
            user.digest, user.since = digest, now_s
        return digest

    def set_instances(self, rows: Mapping[str, Instance], now_s: float) -> None:
        """The whole table. An instance that is missing from it, and was seen before, is gone."""
        for instance in rows.values():
            self.set_instance(instance, now_s)
        for key, instance in self._seen():
            if key not in rows and now_s - instance.changed_at > self._hold_s:
                self._forget(key)

    def set_model(self, model: Model) -> None:
        """Take in one row of the models; older revisions and those without weights are ignored."""
        known = self._models.get(model.key)
        if (known and known[0].revision > model.revision) or not model.weights.uri:
            return
        try:
            self._models[model.key] = model, self._digest_of(model.weights)
        except InvalidModelFile:
            return  # nothing can be fetched for it, so nothing is held

    def set_models(self, rows: Mapping[str, Model]) -> None:
        """The whole table."""
        for key in [k for k in self._models if k not in rows]:
            self.forget_model(key)
        for model in rows.values():
            self.set_model(model)

    def forget_model(self, model_key: str) -> None:
        """It is undeployed."""
        self._models.pop(model_key, None)

    def digest_of_model(self, model_key: str) -> str:
        """The weights of a model; "" where it is not known."""
        return self._models.get(model_key, (None, ""))[1]

    def models_by_digest(self) -> dict[str, list[Model]]:
        """The models that are known, by their weights."""
        found: dict[str, list[Model]] = {}
        for model, digest in self._models.values():
            found.setdefault(digest, []).append(model)
        return found

    def is_gone(self, instance_id: str) -> bool:
        """Whether that instance was here and has ended."""
        return instance_id in self._gone

    def part_came(self, instance_id: str) -> None:
        """What a stage of a pipeline needs is here."""
        if (user := self._users.get(instance_id)) is not None:
            user.has_part = True

    def starting_before(self, before_s: float) -> list[tuple[Instance, Model]]:
        """Living instances that began to start before then and are not ready, with their models; no stages of a
        pipeline that have their part of the weights."""
        return [
            (instance, self._models[instance.model_key][0])
            for key, instance in self._seen()
            if (instance.state.is_coming if instance.is_whole else self._lacks_its_part(key))
            if instance.created_at < before_s and instance.model_key in self._models
        ]

    def _lacks_its_part(self, instance_id: str) -> bool:
        """A stage that loads has it, whoever brought it."""
        user = self._users[instance_id]
        is_starting = user.instance is not None and user.instance.state is InstanceState.STARTING
        return is_starting and not user.has_part

    def give_way(self, instance_ids: Iterable[str], now_s: float) -> None:
        """Those copies are to leave their GPUs for an instance that starts. One that has not within `hold_s` stays."""
        self._giving_way |= {key: now_s for key in instance_ids if key not in self._gone}

    def has_copy(self, model_keys: Set[str]) -> bool:
        """Whether a replica of one of them lies on a GPU here, whole, and gives way to nobody."""
        return any(
            row.state is InstanceState.PREWARMED and row.model_key in model_keys and key not in self._giving_way
            for key, row in self._seen()
        )

    def expire(self, now_s: float) -> None:
        """Release what was held for instances that never showed up, and forget who was to leave and did not."""
        self._giving_way = {key: at for key, at in self._giving_way.items() if now_s - at <= self._hold_s}
        for key, user in list(self._users.items()):
            if user.instance is None and now_s - user.since > self._hold_s:
                del self._users[key]

    def reason(self, digest: str, model_keys: Set[str], now_s: float) -> str:
        """Who needs `digest`; "" for nobody. `model_keys` asked for it before: a living instance of one of them
        counts when what it was started with is not known any more."""
        for model, needed in self._models.values():
            if needed == digest and model.kept_at is KeptAt.HOST:
                return f"{model.name} is pinned in host memory"
        for key, user in sorted(self._users.items()):
            if user.digest == digest and user.holds(now_s, self._hold_s):
                return f"{key} uses it"
        for key, instance in self._seen():
            is_unknown = not self._users[key].digest and not self._has_own_copy(instance)
            if is_unknown and instance.model_key in model_keys:
                return f"{key} uses it"
        return ""

    def _has_own_copy(self, instance: Instance) -> bool:
        """Whether it needs nothing of host memory until it serves. One that shares its weights reads them there: their
        memory would not come free, and who starts later would read other pages than it does."""
        known = self._models.get(instance.model_key)
        reads_there = instance.shared_bytes or (known is not None and known[0].weights_shared)
        return instance.state.is_dormant and not reads_there

    def _seen(self) -> list[tuple[str, Instance]]:
        """Living instances of this node, by id."""
        return [(key, user.instance) for key, user in sorted(self._users.items()) if user.instance is not None]

    def _forget(self, instance_id: str) -> None:
        self._users.pop(instance_id, None)
        self._giving_way.pop(instance_id, None)
        self._gone[instance_id] = None
        while len(self._gone) > GONE_REMEMBERED:
            del self._gone[next(iter(self._gone))]
