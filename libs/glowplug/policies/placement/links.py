"""A node's links as placements reckon with them: what is declared, else the view's defaults."""

from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.policies.placement.hydraserve_contention import LinkLedger
from glowplug.policies.placement.port import PlacementView


def link_of(node: Node, view: PlacementView) -> LinkLedger:
    """The ledger of its network card; an empty one where nothing is fetched."""
    known = view.links.get(node.node_id)
    if known is not None:
        return known
    return LinkLedger(bytes_per_s=network_rate(node, view.network_bytes_per_s), since_s=view.now_s)


def network_rate(node: Node, default: float) -> float:
    """Bytes a second of its network card."""
    return _declared(node, "/nic") or default


def pcie_rate(node: Node, view: PlacementView) -> float:
    """Bytes a second from host memory to one GPU."""
    return _declared(node, "/pcie") or view.pcie_bytes_per_s


def _declared(node: Node, kind: str) -> float:
    """0: it is not told, as on a live node that is given no limit."""
    return next((link.bytes_per_s for link in node.links if link.link_id.endswith(kind)), 0.0)


def has_weights(node: Node, model: Model) -> bool:
    """Whether they lie in its host memory, or there are none to bring."""
    return not model.weights.uri or any(model.key in cached.model_keys for cached in node.cached)
