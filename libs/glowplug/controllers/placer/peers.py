"""Which other nodes a fetch may read from beside the source of the weights."""

from dataclasses import replace

from glowplug.controllers.placer.fleet import Fleet
from glowplug.domain.hardware import Node
from glowplug.events.commands import FetchWeights

MAX_PEERS = 8  # in one command; a prefetcher asks the first ones of them


def with_peers(command: FetchWeights, fleet: Fleet) -> FetchWeights:
    """The command with the prefetchers of other nodes that hold these weights whole, those with the fewest transfers
    first, and then of those where an instance of the model is, which have some of them or bring them."""
    digest = command.weights.digest
    others = [node for node in fleet.nodes.by_id.values() if node.node_id != command.target and node.prefetcher_url]
    whole = [node for node in others if any(cached.digest == digest for cached in node.cached)]
    using = {row.node_id for row in fleet.instances.living(command.model_key).values()}
    partly = [node for node in others if node.node_id in using and node not in whole]
    ordered = [*sorted(whole, key=_load), *sorted(partly, key=_load)]
    return replace(command, peers=tuple(node.prefetcher_url for node in ordered[:MAX_PEERS]))


def _load(node: Node) -> tuple[int, str]:
    return sum(link.num_transfers for link in node.links), node.node_id
