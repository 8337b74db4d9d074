"""The router's tables: models by every name they have, instances by model, newest revision kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Temperature

NUM_TOMBSTONES = 4096  # revisions remembered of instances that are gone


def is_target(instance: Instance) -> bool:
    """Whether requests may be sent there now."""
    return instance.state is InstanceState.READY and bool(instance.url) and instance.serves


@dataclass(slots=True)
class Fleet:
    """Facts and table rows come in any order and more than once; an older revision never wins.

    A row missing from the store's table is dropped only after `absent_grace_s`, so that an emptied store does not
    stop warm models: their agents write the rows again within that time.
    """

    absent_grace_s: float = 10.0
    models: dict[str, Model] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    by_model: dict[str, dict[str, Instance]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # name or alias -> model_key
    _gone: dict[str, int] = field(default_factory=dict)  # instance_id -> revision it went with
    _absent_since: dict[str, dict[str, float]] = field(default_factory=dict)  # table -> key -> when it was missed first

    def lookup(self, name: str) -> Model | None:
        """The model a client calls `name`."""
        key = self.names.get(name)
        return self.models.get(key) if key is not None else None

    def put_model(self, model: Model) -> bool:
        """True when it was news."""
        known = self.models.get(model.key)
        if known is not None and known.revision >= model.revision:
            return False
        self.models[model.key] = model
        self._index_names()
        return True

    def drop_model(self, model_key: str) -> bool:
        known = self.models.pop(model_key, None)
        self._index_names()
        return known is not None

    def _index_names(self) -> None:
        """Names win over aliases, and of equal aliases the model with the lowest key."""
        names: dict[str, str] = {}
        for key in sorted(self.models, reverse=True):
            names.update(dict.fromkeys(self.models[key].aliases, key))
        names.update({model.name: key for key, model in self.models.items()})
        self.names = names

    def put_instance(self, instance: Instance) -> bool:
        """True when it was news."""
        known = self.instances.get(instance.instance_id)
        last = known.revision if known else self._gone.get(instance.instance_id, -1)
        if instance.revision <= last:
            return False
        if instance.state.is_gone:
            self._bury(instance)
        else:
            self.instances[instance.instance_id] = instance
            self.by_model.setdefault(instance.model_key, {})[instance.instance_id] = instance
        return True

    def _bury(self, instance: Instance) -> None:
        self.instances.pop(instance.instance_id, None)
        siblings = self.by_model.get(instance.model_key, {})
        siblings.pop(instance.instance_id, None)
        if not siblings:
            self.by_model.pop(instance.model_key, None)
        self._gone[instance.instance_id] = instance.revision
        if len(self._gone) > NUM_TOMBSTONES:
            del self._gone[next(iter(self._gone))]

    def ready(self, model_key: str) -> list[Instance]:
        return [i for i in self.by_model.get(model_key, {}).values() if is_target(i)]

    def coming(self, model_key: str) -> list[Instance]:
        return [i for i in self.by_model.get(model_key, {}).values() if i.state.is_coming and i.serves]

    def temperature(self, model_key: str) -> Temperature:
        """hot: an instance is ready. warm: one sleeps, or a replica lies on its GPUs. cold: everything else, a start
        under way included."""
        if self.ready(model_key):
            return Temperature.HOT
        asleep = any(i.state.is_dormant for i in self.by_model.get(model_key, {}).values())
        return Temperature.WARM if asleep else Temperature.COLD

    def absent(self, table: str, known: Mapping[str, object], rows: Mapping[str, object], now_s: float) -> list[str]:
        """Keys of `known` that have been missing from the store for the whole grace time."""
        before = self._absent_since.get(table, {})
        absent = {key: before.get(key, now_s) for key in known if key not in rows}
        expired = [key for key, since in absent.items() if now_s - since >= self.absent_grace_s]
        self._absent_since[table] = {key: since for key, since in absent.items() if key not in expired}
        return expired

    def forget_instance(self, instance_id: str) -> str:
        """Drop an instance whose row is gone; returns its model_key. The same row may come back."""
        instance = self.instances[instance_id]
        self._bury(instance)
        del self._gone[instance_id]
        return instance.model_key
