"""Weights that stay in a node's host memory, because its instances use them or an operator has pinned them.

The uses are learned twice: from fetch commands (before the instance is seen) and from the instances themselves (after
a restart).
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import KeptAt, Model, WeightsRef

GONE_REMEMBERED = 10_000


@dataclass(slots=True)
class _User:
    """An instance of this node. `digest`: the weights it was started with, "" when it needs none (or that is not
    known); `instance`: None until it has been reported, and from then on its state decides."""

    digest: str = ""
    since: float = 0.0
    instance: Instance | None = None
    has_part: bool = False  # a stage's part of the weights is here

    def holds(self, now_s: float, hold_s: float) -> bool:
        return bool(self.digest) and (self.instance is not None or now_s - self.since <= hold_s)


class Holds:
    """Instances of `node_id` and the digests that they need."""

    def __init__(self, node_id: str, digest_of: Callable[[WeightsRef], str], hold_s: float) -> None:
        self._node_id, self._digest_of, self._hold_s = node_id, digest_of, hold_s
        self._users: dict[str, _User] = {}  # instance_id -> user
        self._gone: dict[str, None] = {}  # instance ids, insertion-ordered, bounded
        self._giving_way: dict[str, float] = {}  # replicas -> when an instance was last to take their place
        self._models: dict[str, tuple[Model, str]] = {}  # model_key -> (model, its digest)

    def hold(self, instance_id: str, digest: str, now_s: float) -> None:
        """Hold weights for an instance because a fetch was asked for it."""
        if instance_id and instance_id not in self._gone:
            user = self._users.setdefault(instance_id, _User())
            user.digest, user.since, user.has_part = digest, now_s, False

    def set_instance(self, instance: Instance, now_s: float) -> str:
        """Take an instance's row, unless it is older or of another node. Returns the digest of its weights."""
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
            user.digest = ""  # weights on its GPUs or where it sleeps also serve an instance that grows from it
        elif not user.digest:
            user.digest, user.since = digest, now_s
        return digest

    def set_instances(self, rows: Mapping[str, Instance], now_s: float) -> None:
        """Take the whole table. An instance that was seen before and is missing from it is gone."""
        for instance in rows.values():
            self.set_instance(instance, now_s)
        for key, instance in self._seen():
            if key not in rows and now_s - instance.changed_at > self._hold_s:
                self._forget(key)

    def set_model(self, model: Model) -> None:
        """Take a model's row, unless it is older or has no weights."""
        known = self._models.get(model.key)
        if (known and known[0].revision > model.revision) or not model.weights.uri:
            return
        try:
            self._models[model.key] = model, self._digest_of(model.weights)
        except InvalidModelFile:
            return  # without a digest nothing can be fetched, so nothing is held

    def set_models(self, rows: Mapping[str, Model]) -> None:
        """Take the whole table of models."""
        for key in [k for k in self._models if k not in rows]:
            self.forget_model(key)
        for model in rows.values():
            self.set_model(model)

    def forget_model(self, model_key: str) -> None:
        """Forget a model that was undeployed."""
        self._models.pop(model_key, None)

    def digest_of_model(self, model_key: str) -> str:
        """The digest of a model's weights; "" where the model is not known."""
        return self._models.get(model_key, (None, ""))[1]

    def models_by_digest(self) -> dict[str, list[Model]]:
        """The known models by the digest of their weights."""
        found: dict[str, list[Model]] = {}
        for model, digest in self._models.values():
            found.setdefault(digest, []).append(model)
        return found

    def is_gone(self, instance_id: str) -> bool:
        """Return whether the instance was here and has ended."""
        return instance_id in self._gone

    def part_came(self, instance_id: str) -> None:
        """Note that a stage's part of the weights is here."""
        if (user := self._users.get(instance_id)) is not None:
            user.has_part = True

    def starting_before(self, before_s: float) -> list[tuple[Instance, Model]]:
        """Living instances that began to start before `before_s` and are not ready, with their models; no stages that
        have their part of the weights."""
        return [
            (instance, self._models[instance.model_key][0])
            for key, instance in self._seen()
            if (instance.state.is_coming if instance.is_whole else self._lacks_its_part(key))
            if instance.created_at < before_s and instance.model_key in self._models
        ]

    def _lacks_its_part(self, instance_id: str) -> bool:
        """Return whether a starting stage lacks its part of the weights; one that loads has it."""
        user = self._users[instance_id]
        is_starting = user.instance is not None and user.instance.state is InstanceState.STARTING
        return is_starting and not user.has_part

    def give_way(self, instance_ids: Iterable[str], now_s: float) -> None:
        """Note replicas that are to leave their GPUs for an instance. Any that has not left within `hold_s` stays."""
        self._giving_way |= {key: now_s for key in instance_ids if key not in self._gone}

    def has_copy(self, model_keys: Set[str]) -> bool:
        """Return whether a whole replica of one of the models lies on a GPU here, and is not to leave it."""
        return any(
            row.state is InstanceState.PREWARMED and row.model_key in model_keys and key not in self._giving_way
            for key, row in self._seen()
        )

    def expire(self, now_s: float) -> None:
        """Release weights of instances that were never reported, and forget replicas that were to leave and did not."""
        self._giving_way = {key: at for key, at in self._giving_way.items() if now_s - at <= self._hold_s}
        for key, user in list(self._users.items()):
            if user.instance is None and now_s - user.since > self._hold_s:
                del self._users[key]

    def reason(self, digest: str, model_keys: Set[str], now_s: float) -> str:
        """The reason why `digest` is needed; "" where it is not. `model_keys` asked for it before: a living instance of
        one of them counts when its own weights are not known any more."""
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
        """Return whether a dormant instance needs no weights in host memory. One that shares its weights reads them
        there: dropping them would free nothing, and instances that start later would read other pages than it does."""
        known = self._models.get(instance.model_key)
        reads_there = instance.shared_bytes or (known is not None and known[0].weights_shared)
        return instance.state.is_dormant and not reads_there

    def _seen(self) -> list[tuple[str, Instance]]:
        """The living instances of this node, in order of id."""
        return [(key, user.instance) for key, user in sorted(self._users.items()) if user.instance is not None]

    def _forget(self, instance_id: str) -> None:
        self._users.pop(instance_id, None)
        self._giving_way.pop(instance_id, None)
        self._gone[instance_id] = None
        while len(self._gone) > GONE_REMEMBERED:
            del self._gone[next(iter(self._gone))]
