"""Nodes that fall silent, and nodes that an operator drains.

When the lease of a node runs out, the node has left and its instances with it. Nothing is placed on a cordoned node,
and every instance there is stopped, whenever it came; a stop is sent again until its instance drains, since a command
may be lost. A later stage of a serving pipeline is not stopped itself: the first stage is, on whatever node, or becomes
whole without it, and stages.py then ends the later ones.
"""

from dataclasses import replace

from glowplug.controllers import operator
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.messages import CORDONS, Cordon
from glowplug.controllers.placer.placement import stop
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.facts import InstanceFailed, NodeLeft
from glowplug.policies.scaling.port import needed_by_pipeline


class Nodes:
    """Leases, cordons and the drains that follow from them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._knows_cordons = False  # this placer's table has been read once
        self._stopped_at: dict[str, float] = {}  # instance of a cordoned node -> when its stop was last sent

    def expire(self, now_s: float) -> list[Effect]:
        """Take out nodes whose leases ran out, and report their instances as failed."""
        effects: list[Effect] = []
        lease_s = self.fleet.params.node_lease_s
        for node in self.fleet.nodes.expire(now_s):
            self.fleet.node_left(node.node_id)
            reason = f"{node.node_id} has given no sign of life for {lease_s:g} s"
            here = self.fleet.on_node(node.node_id)
            inputs = {"lease_s": lease_s, "instances": len(here)}
            decided = self.fleet.about_node(
                node.node_id, "expire", "node_lease", reason, "taken as left", inputs, now_s
            )
            left = Publish(NodeLeft(node_id=node.node_id, reason=reason))
            effects += [Record(decided), Remove("nodes", node.node_id), left]
            for instance in here:
                lost = replace(
                    instance,
                    state=InstanceState.FAILED,
                    reason="its node has left",
                    changed_at=now_s,
                    revision=instance.revision + 1,
                )
                self.fleet.row(lost, now_s)
                effects += [
                    Save("instances", lost.instance_id, lost),
                    Publish(InstanceFailed(instance=lost, code="node_left")),
                ]
        return effects

    def forget_gone(self, now_s: float) -> list[Effect]:
        """Forget instances long gone, and remove the rows of a node that never came back; a living agent removes
        its own rows."""
        removed: list[Effect] = []
        for instance in self.fleet.capacity.gone_before(now_s - self.fleet.params.keep_gone_s):
            self.fleet.forget(instance.instance_id)
            if instance.node_id and instance.node_id not in self.fleet.nodes.by_id:
                removed.append(Remove("instances", instance.instance_id))
        return removed

    def cordon(self, cordon: Cordon, now_s: float) -> list[Effect]:
        """Cordon a node, or lift its cordon, because an operator asked."""
        node_id, here = cordon.node_id, self.fleet.on_node(cordon.node_id)
        self.fleet.capacity.cordon(node_id, is_cordoned=cordon.cordoned)
        inputs: dict[str, float | int | str] = {"instances": len(here)}
        if cordon.cordoned:
            verb, why = "drain", f"an operator drains {node_id}, and nothing is placed there until the drain is lifted"
        else:
            verb = "undrain"
            why = f"an operator has lifted the drain of {node_id}, and instances may be placed there again"
        decided = self.fleet.about_node(node_id, "drain", operator.POLICY, why, verb, inputs, now_s)
        effects: list[Effect] = [Record(decided), Save(CORDONS, node_id, cordon)]
        if cordon.cordoned:
            return [*effects, *self.drain(now_s)]
        for instance in here:
            self._stopped_at.pop(instance.instance_id, None)
        return effects

    def restore_cordons(self, rows: dict[str, Cordon]) -> list[Effect]:
        """Take the table once, at the start; from then on write it where it differs from what this placer knows. A row
        with `cordoned` false is a lifted cordon; a missing row says nothing."""
        capacity = self.fleet.capacity
        if not self._knows_cordons:
            for node_id, row in rows.items():
                if row.cordoned != (node_id in capacity.cordoned):
                    capacity.cordon(node_id, is_cordoned=row.cordoned)
            self._knows_cordons = True
        stored = {n for n, row in rows.items() if row.cordoned}
        wrong = {n: n in capacity.cordoned for n in capacity.cordoned ^ stored}
        return [Save(CORDONS, n, Cordon(n, wrong[n])) for n in sorted(wrong)]

    def drain(self, now_s: float) -> list[Effect]:
        """Stop every instance on a cordoned node."""
        effects: list[Effect] = []
        known = self.fleet.instances.by_id
        self._stopped_at = {name: at for name, at in self._stopped_at.items() if name in known}
        for node_id in sorted(self.fleet.capacity.cordoned):
            for instance in self.fleet.on_node(node_id):
                leaves = self._who_leaves(instance)
                effects += self._stop(leaves, node_id, now_s) if leaves is not None else []
        return effects

    def _who_leaves(self, instance: Instance) -> Instance | None:
        """The instance to stop so that `instance` ends: of a serving pipeline the first stage, which has the streams.
        None while the first stage becomes whole, or as a whole instance ends what runs in its stages: the others end
        after that. A later stage that already serves for itself runs the pipeline's layers until then."""
        known = self.fleet.instances.by_id
        first = known.get(instance.part_of or needed_by_pipeline(instance.instance_id, known))
        if first is None or first.state not in (InstanceState.READY, InstanceState.DRAINING):
            return instance
        if first.is_whole:
            return None if first.stages_busy else instance
        return None if first.consolidating else first

    def _stop(self, instance: Instance, node_id: str, now_s: float) -> list[Effect]:
        last = self._stopped_at.get(instance.instance_id)
        is_going = instance.state is InstanceState.DRAINING
        if is_going or (last is not None and now_s - last < self.fleet.params.repeat_s):
            return []
        self._stopped_at[instance.instance_id] = now_s
        load, why = self.fleet.loads.of(instance.model_key), "its node is being drained"
        if instance.node_id != node_id:
            why = f"{node_id}, which runs one of its later stages, is being drained"
        command = Publish(stop(instance.node_id, instance.instance_id, why, self.fleet.params.evict_grace_s))
        if last is not None:
            return [command]
        busy = {"in_flight": load.in_flight_by_instance.get(instance.instance_id, 0)}
        decided = self.fleet.about_node(node_id, "drain", operator.POLICY, why, "drain", busy, now_s, instance)
        return [Record(decided), command]
