"""A node's links as placements reckon with them: what is declared, else what starts have been seen to take."""

from dataclasses import replace

from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.policies.placement.hydraserve_contention import LinkLedger
from glowplug.policies.start_times import StartKind, StartTimes

_LEAST_S = 1e-6  # of a stage that took no time: a rate is bytes over seconds


def network_rate(node: Node, model: Model, times: StartTimes) -> float:
    """Bytes a second of its network card: declared, else those at which weights like this model's have come in."""
    if declared := _declared(node, "/nic"):
        return declared
    fetch_s = times.predict(model, StartKind.COLD, gpu_kind_of(node)).fetch_s
    return model.fetch_bytes / max(fetch_s, _LEAST_S)


def pcie_rate(node: Node, model: Model, times: StartTimes) -> float:
    """Bytes a second from host memory to each GPU: as its weights have been loaded, else declared, else the prior's."""
    took = times.predict(model, StartKind.CACHED, gpu_kind_of(node), declared_pcie(node))
    return model.weights_bytes / model.num_gpus / max(took.load_s, _LEAST_S)


def declared_pcie(node: Node) -> float:
    """0: it is not told, as on a live node that is given no limit."""
    return _declared(node, "/pcie")


def gpu_kind_of(node: Node) -> str:
    """Of its GPUs, which are all of one kind."""
    return node.gpus[0].kind if node.gpus else ""


def link_of(node: Node, model: Model, times: StartTimes, known: LinkLedger | None, now_s: float) -> LinkLedger:
    """The ledger of its network card, `known` where something is fetched, at the rate for that model."""
    rate = network_rate(node, model, times)
    if known is None:
        return LinkLedger(bytes_per_s=rate, since_s=now_s)
    return known if known.bytes_per_s == rate else replace(known, bytes_per_s=rate)


def _declared(node: Node, kind: str) -> float:
    return next((link.bytes_per_s for link in node.links if link.link_id.endswith(kind)), 0.0)


def has_weights(node: Node, model: Model) -> bool:
    """Whether they lie in its host memory, or there are none to bring. Models of the same weights share a copy."""
    if not model.weights.uri:
        return True
    digest = model.weights.digest
    return any(cached.digest == digest or model.key in cached.model_keys for cached in node.cached)
