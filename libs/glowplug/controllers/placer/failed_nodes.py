"""Nodes that lately failed to get weights: starts with the same weights avoid them for a while.

A refused fetch, a full disk or wrong bytes may be the trouble of one node alone. Where another node could run the
model, the next start is tried there: `tries_left` of the failed instance tells routers not to refuse waiting requests,
and the autoscaler not to pause. A start is tried on at most `max_start_nodes`, even where each try outlasts the
avoidance. A node is tried again after `avoid_node_s`, once it has the weights, once its model is deployed anew, or
where every other node has failed too.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted, listed
from glowplug.policies.placement.links import has_weights
from glowplug.policies.placement.shape import bytes_per_gpu


@dataclass(frozen=True, slots=True)
class FailedNode:
    code: str
    at: float


@dataclass(frozen=True, slots=True)
class TriesLeft:
    """Number of other nodes for a start that failed at time `at`. It serves for the next start alone, and no longer
    than a node is avoided: a running start carries its own number."""

    num: int
    at: float


@dataclass(slots=True)
class FailedNodes:
    """weights digest -> node_id -> the last failure there; and tries left by the last failed start."""

    params: PlacerParams
    by_digest: dict[str, dict[str, FailedNode]] = field(default_factory=dict)
    left_by_digest: dict[str, TriesLeft] = field(default_factory=dict)

    def failed(self, model: Model, node_id: str, code: str, at: float, tries_left: int) -> None:
        digest = model.weights.digest
        if model.weights.uri and node_id:
            self.by_digest.setdefault(digest, {})[node_id] = FailedNode(code, at)
        if tries_left:
            self.left_by_digest[digest] = TriesLeft(tries_left, at)
        else:
            self.left_by_digest.pop(digest, None)

    def inherit(self, earlier: "FailedNodes") -> None:
        self.by_digest, self.left_by_digest = earlier.by_digest, earlier.left_by_digest

    def forget(self, digest: str, node_id: str = "") -> None:
        """Forget the failures on a node that has the weights now; "": on all, since the model was deployed anew."""
        known = self.by_digest.get(digest)
        if known is not None and node_id:
            known.pop(node_id, None)
        if not known or not node_id:
            self.by_digest.pop(digest, None)
        self.left_by_digest.pop(digest, None)

    def expire(self, now_s: float, is_known: Callable[[str], bool]) -> None:
        for digest, known in list(self.by_digest.items()):
            left = {n: one for n, one in known.items() if is_known(n) and now_s - one.at < self.params.avoid_node_s}
            self.by_digest[digest] = left
            if not left:
                del self.by_digest[digest]
        avoid_s, tries = self.params.avoid_node_s, self.left_by_digest
        self.left_by_digest = {digest: left for digest, left in tries.items() if now_s - left.at < avoid_s}

    def of(self, model: Model, now_s: float) -> dict[str, FailedNode]:
        if not self.by_digest:
            return {}
        known = self.by_digest.get(model.weights.digest, {})
        return {node_id: one for node_id, one in known.items() if now_s - one.at < self.params.avoid_node_s}

    def tries_left(
        self, model: Model, failed: Collection[str], begins_on: Collection[str], nodes: Iterable[Node]
    ) -> int:
        """Return the number of further nodes for a start on `begins_on`, should its weights not be had there. `failed`:
        the nodes to avoid (`of`)."""
        num_tried = len(set(failed) - set(begins_on)) + 1
        most = self.params.max_start_nodes - num_tried
        if before := self.left_by_digest.get(model.weights.digest):
            most = min(most, before.num - 1)
        if most <= 0 or not model.weights.uri:
            return 0
        left = (n for n in others(model, nodes, failed) if n.node_id not in begins_on)
        return sum(1 for _ in islice(left, most))

    def said(self, failed: Mapping[str, FailedNode], tries_left: int) -> str:
        if not failed:
            return ""
        names = [f"{node_id} ({one.code})" for node_id, one in sorted(failed.items())]
        more = f"; if they cannot here either, {counted(tries_left, 'more node')} may be tried"
        return f"; its weights could not be fetched on {listed(names)} in the last {self.params.avoid_node_s:g} s{more}"


def others(model: Model, nodes: Iterable[Node], failed: Collection[str]) -> Iterator[Node]:
    """Return nodes that could run the model and whose fetch has not failed lately, or which have the weights by now."""
    return (n for n in nodes if could_run(n, model) and (n.node_id not in failed or has_weights(n, model)))


def could_run(node: Node, model: Model) -> bool:
    need = bytes_per_gpu(model)
    is_able = not node.draining and model.engine in node.engines
    return is_able and sum(gpu.total_bytes >= need for gpu in node.gpus) >= model.num_gpus
