"""Fetches under way on each node's network card, and what starts have been seen to take.

Paper: HydraServe section 4.2, Eq. 3-4: a ledger of each link, kept from the fetches the placer orders itself; one is
over when its node says so, when its instance loads, serves or is gone, or when its bytes must be there by the equal
share; it is due when the first token is, less what comes after it (erratum E17). Section 4.1: the stages of a start are
learned from the starts of the same model.

Departures: the agents measure launch (container, library, context) as one; it is split as the configured defaults are.
What a start takes after the load (warm-up) is counted as context. Means are exponential.
"""

from collections.abc import Container, Iterable
from dataclasses import replace

from glowplug.controllers.placer_orders import Placement
from glowplug.controllers.placer_params import PlacerParams
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState, PhaseName
from glowplug.domain.model import Model
from glowplug.events.facts import RequestFinished
from glowplug.policies.placement.hydraserve_allocation import StageSeconds, besides_s
from glowplug.policies.placement.hydraserve_contention import Fetch, LinkLedger, begin, finish
from glowplug.policies.placement.links import network_rate
from glowplug.policies.placement.shape import bytes_per_gpu

WEIGHT_OF_NEWEST = 0.3
WEIGHT_OF_REQUEST = 0.05
WEIGHT_OF_SLOWER = 0.01


def is_cached(node: Node, model_key: str) -> bool:
    """Whether the model's weights lie in that node's host memory."""
    return any(model_key in cached.model_keys for cached in node.cached)


class Network:
    """node_id -> its link's ledger; model_key -> measured stages, and seconds to load its weights onto its GPUs."""

    def __init__(self, params: PlacerParams) -> None:
        self._params = params
        self.links: dict[str, LinkLedger] = {}
        self.seconds: dict[str, StageSeconds] = {}
        self.load_s: dict[str, float] = {}
        self.quickest_s: dict[str, float] = {}  # model_key -> the shortest prefill of a warm request
        self.growth_s: dict[str, float] = {}  # model_key -> the quickest start from a replica
        self._started: set[str] = set()  # models whose starts have been measured
        self._served: set[str] = set()  # ... and whose requests
        self._fetching: dict[str, str] = {}  # instance or stage id -> node_id

    def ordered(self, placement: Placement, nodes: dict[str, Node], now_s: float) -> None:
        """Its fetches have been asked for."""
        model = placement.command.model
        if not model.weights.uri or placement.source:
            return
        slo_s = model.slo.ttft_s or float("inf")
        whole, stages = model.weights.num_bytes or model.weights_bytes, placement.stages
        num_full = sum(stage.bytes_per_gpu >= bytes_per_gpu(model) for stage in stages)
        slo_s -= besides_s(self.seconds.get(model.key, self._params.start_stages), len(stages), num_full)
        for number, stage in enumerate(stages):
            node, fetch_id = nodes.get(stage.node_id), placement.stage_id(number)
            if node is None or is_cached(node, model.key):
                continue
            rate = network_rate(node, self._params.network_bytes_per_s)
            ledger = self.links.get(node.node_id) or LinkLedger(bytes_per_s=rate, since_s=now_s)
            due = max(now_s, placement.command.wanted_at + slo_s)
            fetch = Fetch(fetch_id=fetch_id, left_bytes=stage.fetch_bytes or whole, deadline_at=due)
            self.links[node.node_id] = begin(replace(ledger, bytes_per_s=rate), fetch, now_s)
            self._fetching[fetch_id] = node.node_id

    def fetched(self, node_id: str, ids: Iterable[str], now_s: float) -> None:
        """Those fetches of that node are over, well or not."""
        for fetch_id in ids:
            ledger = self.links.get(node_id)
            if self._fetching.pop(fetch_id, None) is not None and ledger is not None:
                self.links[node_id] = finish(ledger, fetch_id, now_s)

    def forget(self, fetch_id: str) -> None:
        """A fetch that was ordered for a start that is not to be."""
        node_id = self._fetching.get(fetch_id, "")
        if node_id in self.links:
            self.fetched(node_id, [fetch_id], self.links[node_id].since_s)

    def drop_node(self, node_id: str) -> None:
        """It has left, and its fetches with it."""
        self.links.pop(node_id, None)
        self._fetching = {fetch_id: at for fetch_id, at in self._fetching.items() if at != node_id}

    def keep_models(self, models: Container[str]) -> None:
        """Forget what was measured of any other."""
        for known in (self.seconds, self.load_s, self.quickest_s, self.growth_s):
            for key in [k for k in known if k not in models]:
                del known[key]
        self._started = {k for k in self._started if k in models}
        self._served = {k for k in self._served if k in models}

    def saw(self, row: Instance, now_s: float) -> None:
        """A row changed: its fetch may be over, and a start that is over is learned from."""
        if row.state is not InstanceState.STARTING and row.instance_id in self._fetching:
            self.fetched(self._fetching[row.instance_id], [row.instance_id], now_s)
        if row.state is InstanceState.READY or row.state is InstanceState.PREWARMED:
            self._learn(row)

    def _learn(self, row: Instance) -> None:
        took = {phase.name: phase.actual_s for phase in row.phases if phase.actual_s >= 0}
        if (load_s := took.get(PhaseName.LOAD)) is not None and not row.source and row.num_stages == 1:
            self.load_s[row.model_key] = _mean(self.load_s.get(row.model_key), load_s)
        launch_s = took.get(PhaseName.LAUNCH)
        if launch_s is None or row.source:
            return
        known, default = self.seconds.get(row.model_key), self._params.start_stages
        is_first = row.model_key not in self._started
        self._started.add(row.model_key)
        warmup_s = took.get(PhaseName.WARMUP, 0.0)
        whole = default.container_s + default.cuda_s + default.library_s
        shares = (default.container_s, default.cuda_s, default.library_s)
        container_s, cuda_s, library_s = (launch_s * s / whole for s in shares) if whole else (launch_s, 0.0, 0.0)
        before = known if known is not None and not is_first else None
        self.seconds[row.model_key] = replace(
            known or default,
            container_s=_mean(before.container_s if before else None, container_s),
            cuda_s=_mean(before.cuda_s if before else None, cuda_s + warmup_s),
            library_s=_mean(before.library_s if before else None, library_s),
        )

    def grew(self, row: Instance) -> None:
        """A replica has become an instance. The quickest is kept: that one waited for no weights."""
        took = [phase.actual_s for phase in row.phases if phase.name is PhaseName.LOAD and phase.actual_s >= 0]
        if took:
            self.growth_s[row.model_key] = min(took[-1], self.growth_s.get(row.model_key, took[-1]))

    def served(self, fact: RequestFinished) -> None:
        """t_p and t_d of a warm request (section 4.1: stages are learned from history)."""
        if fact.cold or fact.error_code or fact.response_tokens < 2 or not fact.ttft_s:
            return
        known = self.seconds.get(fact.model_key, self._params.start_stages)
        prefill_s = max(0.0, fact.ttft_s - fact.queue_s)
        decode_s = max(0.0, fact.e2e_s - fact.ttft_s) / (fact.response_tokens - 1)
        self.quickest_s[fact.model_key] = min(prefill_s, self.quickest_s.get(fact.model_key, prefill_s))
        is_first = fact.model_key not in self._served
        self._served.add(fact.model_key)
        self.seconds[fact.model_key] = replace(
            known,
            prefill_s=prefill_s if is_first else _mean(known.prefill_s, prefill_s, WEIGHT_OF_REQUEST),
            decode_s=decode_s if is_first else _low(known.decode_s, decode_s),
        )

    def load_seconds(self, model: Model) -> float:
        """T_c of WarmServe Eq. 7-8: measured, else bytes on each GPU over the PCIe rate (erratum E6)."""
        measured = self.load_s.get(model.key)
        return (
            measured if measured is not None else model.weights_bytes / model.num_gpus / self._params.pcie_bytes_per_s
        )


def _low(known: float, newest: float) -> float:
    """Falls fast and rises slowly: what a token takes when nobody else's prefill is in between."""
    return _mean(known, newest, WEIGHT_OF_NEWEST if newest < known else WEIGHT_OF_SLOWER)


def _mean(known: float | None, newest: float, weight: float = WEIGHT_OF_NEWEST) -> float:
    return newest if known is None else known + weight * (newest - known)
