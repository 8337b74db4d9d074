"""Weights in host memory that no start asks for: an operator's, brought to a node, dropped from nodes, or pinned; and
those of a replacement, brought ahead of the start for which the old instance leaves.

A fetch is repeated until the node shows the weights or reports a failure; a drop too, because a prefetcher refuses it
while an instance reads the weights. Pinned weights are fetched where no node has them, with a longer pause after each
failure; prefetchers keep them (controllers/prefetcher/controller.py).
"""

from dataclasses import dataclass

from glowplug.controllers import operator
from glowplug.controllers.backoff import backoff_s
from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.operator import DropFromHost, FetchToHost
from glowplug.controllers.placer.fleet import Fleet
from glowplug.domain.errors import BadRequest, Conflict, NoCapacity, NotFound
from glowplug.domain.hardware import Node
from glowplug.domain.model import KeptAt, Model
from glowplug.domain.units import show_bytes
from glowplug.events.commands import DropWeights, FetchWeights
from glowplug.events.facts import WeightsFetchFailed
from glowplug.fleet.tables import find_model
from glowplug.policies.placement.links import has_copy_on_disk, has_weights

FIRST_BACKOFF_S = 2.0
MAX_BACKOFF_S = 60.0


@dataclass(slots=True)
class _Fetch:
    digest: str
    sent_at: float


@dataclass(slots=True)
class _Drop:
    digest: str
    asked_at: float
    sent_at: float


@dataclass(slots=True)
class _Failed:
    num: int = 0
    not_before: float = 0.0


class HostMemory:
    """Fetches and drops, both by (model_key, node_id); and failures of pins."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._fetches: dict[tuple[str, str], _Fetch] = {}
        self._drops: dict[tuple[str, str], _Drop] = {}
        self._failed: dict[str, _Failed] = {}

    def model(self, model_key: str) -> Model:
        """Return the deployed model. Raises ModelNotFound."""
        return find_model(self.fleet.models, model_key)

    def where(self, model: Model, now_s: float, node_id: str = "") -> Node:
        """Prefer the named node, else one with the weights in host memory, else one with a copy on disk, else the most
        free GPU memory. Raises BadRequest, NotFound and NoCapacity."""
        if not model.weights.uri:
            raise BadRequest(f"{model.name} has no weights to fetch: its engine needs none", param="to")
        nodes = [node for node in self.fleet.alive(now_s) if node_id in ("", node.node_id)]
        if node_id and not nodes:
            raise NotFound(f"no node {node_id!r}", param="node")
        able = [n for n in nodes if model.engine in n.engines and n.prefetcher_url and not n.draining]
        if not able:
            raise NoCapacity(f"no node with a prefetcher takes engine {model.engine} now", retry_after_s=2)
        free = self.fleet.capacity.free_bytes

        def rank(node: Node) -> tuple[bool, bool, int, str]:
            is_far = not has_copy_on_disk(node, model)
            return not has_weights(node, model), is_far, -sum(free(gpu.gpu_id) for gpu in node.gpus), node.node_id

        return min(able, key=rank)

    def holders(self, model: Model, now_s: float, node_id: str = "") -> list[Node]:
        if not model.weights.uri:
            return []
        return [n for n in self.fleet.alive(now_s) if node_id in ("", n.node_id) and has_weights(n, model)]

    def fetch(self, asked: FetchToHost, now_s: float) -> list[Effect]:
        model = self.model(asked.model_key)
        node = self.where(model, now_s, asked.node_id)
        self._drops.pop((model.key, node.node_id), None)
        if has_weights(node, model):
            return []
        return self._bring(model, node, f"an operator wants the weights of {model.name} there", operator.POLICY, now_s)

    def bring_ahead(self, model: Model, node_id: str, now_s: float) -> list[Effect]:
        node = self.fleet.nodes.by_id.get(node_id)
        if node is None or has_weights(node, model):
            return []
        why = f"{model.name} has been declared anew, and its weights come before the instance leaves that it replaces"
        return self._bring(model, node, why, "declared", now_s)

    def is_coming(self, model: Model, node_id: str) -> bool:
        fetch = self._fetches.get((model.key, node_id))
        return fetch is not None and fetch.digest == model.weights.digest

    def drop(self, asked: DropFromHost, now_s: float) -> list[Effect]:
        """Drop a model's weights from host memory for an operator. Raises Conflict where they are kept."""
        model = self.model(asked.model_key)
        if model.kept_at is KeptAt.HOST:
            raise Conflict(f"{model.name} is pinned in host memory: `glowplug unpin` it first", param="from")
        digest = model.weights.digest
        shared = [m.name for m in self.fleet.models.values() if m.key != model.key and m.weights.digest == digest]
        if model.weights.uri and shared:
            raise Conflict(f"{model.name} shares its weights with {', '.join(sorted(shared))}", param="from")
        effects = self._withdraw(model, asked.node_id)
        for node in self.holders(model, now_s, asked.node_id):
            self._drops[model.key, node.node_id] = _Drop(digest, now_s, now_s)
            why = f"an operator wants the weights of {model.name} out of host memory"
            num_bytes = sum(cached.num_bytes for cached in node.cached if cached.digest == digest)
            chosen = f"{show_bytes(num_bytes)} leave"
            decided = self.fleet.decided("evict", operator.POLICY, why, now_s, node_id=node.node_id, chosen=chosen)
            effects += [decided, Publish(_drop_command(node.node_id, digest))]
        return effects

    def _withdraw(self, model: Model, node_id: str) -> list[Effect]:
        effects: list[Effect] = []
        for here in [k for k in self._fetches if k[0] == model.key and node_id in ("", k[1])]:
            digest = self._fetches.pop(here).digest
            mine = (row for row in self.fleet.on_node(here[1]) if row.model_key == model.key)
            if not any(row.state.is_coming for row in mine) and not self.fleet.network.is_fetching(here[1]):
                effects.append(Publish(_drop_command(here[1], digest)))
        return effects

    def keep_models(self) -> None:
        self._failed = {key: failed for key, failed in self._failed.items() if key in self.fleet.models}

    def failed(self, fact: WeightsFetchFailed, now_s: float) -> None:
        """Note a failed fetch, unless it brought other weights. The fact answers an operator; a pin tries again
        later."""
        fetch, model = self._fetches.get((fact.model_key, fact.node_id)), self.fleet.models.get(fact.model_key)
        if fetch is None or fetch.digest != fact.digest:
            return
        del self._fetches[fact.model_key, fact.node_id]
        if model is not None and model.weights.digest == fact.digest and model.kept_at is KeptAt.HOST:
            known = self._failed.setdefault(model.key, _Failed())
            known.num += 1
            known.not_before = now_s + backoff_s(known.num, FIRST_BACKOFF_S, MAX_BACKOFF_S)

    def work(self, now_s: float) -> list[Effect]:
        return [*self._repeat_fetches(now_s), *self._repeat_drops(now_s), *self._keep(now_s)]

    def _repeat_fetches(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for (model_key, node_id), fetch in list(self._fetches.items()):
            model, node = self.fleet.models.get(model_key), self.fleet.nodes.by_id.get(node_id)
            is_over = model is None or node is None or has_weights(node, model)
            if is_over or not self.fleet.nodes.is_alive(node_id, now_s):
                del self._fetches[model_key, node_id]
                self._failed.pop(model_key, None)
            elif model is not None and self._is_due(fetch, model, now_s):
                self._fetches[model_key, node_id] = _Fetch(model.weights.digest, now_s)
                effects.append(Publish(self.fleet.with_peers(_fetch_command(model, node_id))))
        return effects

    def _is_due(self, fetch: _Fetch, model: Model, now_s: float) -> bool:
        return fetch.digest != model.weights.digest or now_s - fetch.sent_at >= self.fleet.params.give_up_s

    def _repeat_drops(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for (model_key, node_id), drop in list(self._drops.items()):
            node = self.fleet.nodes.by_id.get(node_id)
            is_gone = node is None or all(cached.digest != drop.digest for cached in node.cached)
            if is_gone or now_s - drop.asked_at > self.fleet.params.evict_grace_s:
                del self._drops[model_key, node_id]
            elif now_s - drop.sent_at >= self.fleet.params.repeat_s:
                drop.sent_at = now_s
                effects.append(Publish(_drop_command(node_id, drop.digest)))
        return effects

    def _keep(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for model in self.fleet.models.values():
            if model.kept_at is not KeptAt.HOST or not model.weights.uri:
                continue
            is_coming = any(key == model.key for key, _ in self._fetches)
            failed = self._failed.get(model.key)
            if is_coming or (failed and now_s < failed.not_before) or not self.fleet.is_settled(now_s):
                continue
            if self.holders(model, now_s):
                continue
            try:
                node = self.where(model, now_s)
            except NoCapacity:
                continue  # the next tick tries again
            why = f"{model.name} is pinned in host memory, and its weights are on no node"
            effects += self._bring(model, node, why, "kept", now_s)
        return effects

    def _bring(self, model: Model, node: Node, why: str, rule: str, now_s: float) -> list[Effect]:
        self._fetches[model.key, node.node_id] = _Fetch(model.weights.digest, now_s)
        chosen, inputs = f"fetch to {node.node_id}", {"fetch_bytes": model.fetch_bytes}
        decided = self.fleet.decided("prefetch", rule, why, now_s, node_id=node.node_id, chosen=chosen, inputs=inputs)
        return [decided, Publish(self.fleet.with_peers(_fetch_command(model, node.node_id)))]


def _fetch_command(model: Model, node_id: str) -> FetchWeights:
    return FetchWeights(target=node_id, model_key=model.key, weights=model.weights, priority=model.priority)


def _drop_command(node_id: str, digest: str) -> DropWeights:
    return DropWeights(target=node_id, digest=digest, reason="an operator wants them out of host memory")
