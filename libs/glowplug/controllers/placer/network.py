"""Measurements of the placer: fetches under way on each node's network card, start times, and warm requests.

Paper: HydraServe section 4.2, Eq. 3-4: a ledger of each link's fetches, as ordered by the placer. A fetch ends when its
node says so, when its instance loads, serves or is gone, or when the equal share has brought its bytes; it is due when
the first token is, less what comes after the fetch (erratum E17). Section 4.1: stages of a start are learned from
earlier starts (fleet/start_times.py), t_p and t_d from requests that found a warm instance.

Departure: means of requests are exponential.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placement import Placement
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events.facts import RequestFinished
from glowplug.fleet.start_times import KEPT, MAX_ROWS, PRIORS, UNKNOWN, Prior, StartKind, StartRow, StartTimes
from glowplug.policies.placement.expect import STREAMS
from glowplug.policies.placement.hydraserve_allocation import StageSeconds, besides_s
from glowplug.policies.placement.links import Fetch, LinkLedger, begin, finish, found_at, gpu_kind_of, network_rate
from glowplug.policies.placement.shape import bytes_per_gpu, parts_of

WEIGHT_OF_NEWEST = 0.3
WEIGHT_OF_REQUEST = 0.05
WEIGHT_OF_SLOWER = 0.01
REST = "/rest"


class Network:
    def __init__(self, params: PlacerParams, priors: Mapping[str, Prior] = PRIORS) -> None:
        self._params = params
        self.links: dict[str, LinkLedger] = {}
        prior = configured(params.start_stages)
        self.times = StartTimes(
            priors=priors if prior is None else {},
            otherwise=prior or UNKNOWN,
            network_bytes_per_s=params.network_bytes_per_s,
            pcie_bytes_per_s=params.pcie_bytes_per_s,
        )
        self.stage_bytes: dict[str, tuple[int, ...]] = {}  # weights digest -> bytes that its stages fetch, as nodes say
        self.seconds: dict[str, StageSeconds] = {}
        self.quickest_s: dict[str, float] = {}
        self.first_token_s: dict[str, float] = {}  # model_key -> from READY to the first token of a waiting request
        self._first_tokens: dict[str, dict[str, float]] = {}
        self._leaving_since: dict[str, float] = {}
        self._left: dict[tuple[str, str], tuple[float, ...]] = {}  # (model_key, next state) -> seconds
        self._fetching: dict[str, tuple[str, str]] = {}  # -> node_id, digest of the weights that come
        self._ordered: dict[str, None] = {}

    def ordered(self, placement: Placement, nodes: dict[str, Node], now_s: float) -> None:
        model = placement.command.model
        sent = placement.sent
        if sent is None or not model.weights.uri or sent.source:
            return
        slo_s = model.slo.ttft_s or float("inf")
        whole, stages = model.fetch_bytes, sent.stages
        num_full = sum(stage.bytes_per_gpu >= bytes_per_gpu(model) for stage in stages)
        slo_s -= besides_s(self.seconds.get(model.key, self._params.start_stages), len(stages), num_full)
        self._ordered |= {placement.stage_id(number): None for number in range(len(stages))}
        for number, stage in enumerate(stages):
            node, fetch_id = nodes.get(stage.node_id), placement.stage_id(number)
            if node is None or found_at(node, model) is not StartKind.COLD:
                continue
            due = max(now_s, placement.command.wanted_at + slo_s - self._after_fetch_s(node, model, len(stages)))
            fetch = Fetch(fetch_id=fetch_id, left_bytes=stage.part_bytes or stage.fetch_bytes or whole, deadline_at=due)
            self._begin(fetch, node, model, now_s)

    def _begin(self, fetch: Fetch, node: Node, model: Model, now_s: float) -> None:
        rate = network_rate(node, model, self.times)
        ledger = self.links.get(node.node_id) or LinkLedger(bytes_per_s=rate, since_s=now_s)
        self.links[node.node_id] = begin(replace(ledger, bytes_per_s=rate), fetch, now_s)
        self._fetching[fetch.fetch_id] = node.node_id, model.weights.digest

    def found(self, row: Instance, model: Model, node: Node, now_s: float) -> None:
        """Add the fetch of a start that an earlier placer ordered, with the bytes that the node's link reports."""
        if row.instance_id in self._ordered or row.source or row.state is not InstanceState.STARTING:
            return
        self._ordered[row.instance_id] = None
        if found_at(node, model) is not StartKind.COLD:
            return
        part = self._part_bytes(model, row) or -(-model.fetch_bytes // row.num_stages)
        nic = next((link for link in node.links if link.link_id.endswith("/nic")), None)
        moving = nic.bytes_in_flight if nic is not None and nic.num_transfers else part
        wanted_at = min((phase.started_at for phase in row.phases), default=row.created_at)
        stages = self.seconds.get(model.key, self._params.start_stages)
        num_full = row.num_stages if row.workers and row.workers[0].num_bytes >= bytes_per_gpu(model) else 0
        besides = besides_s(stages, row.num_stages, num_full) + self._after_fetch_s(node, model, row.num_stages)
        due = max(now_s, wanted_at + (model.slo.ttft_s or float("inf")) - besides)
        left = min(part, moving)
        self._begin(Fetch(fetch_id=row.instance_id, left_bytes=left, deadline_at=due), node, model, now_s)

    def rest(self, row: Instance, model: Model, node: Node, now_s: float) -> None:
        part = self._part_bytes(model, row) or model.fetch_bytes // row.num_stages
        left = max(0, model.fetch_bytes - part)
        fetch = Fetch(fetch_id=rest_of(row), left_bytes=left, deadline_at=float("inf"), is_background=True)
        if fetch.fetch_id not in self._fetching:
            self._begin(fetch, node, model, now_s)

    def cached(self, node: Node) -> None:
        for one in node.cached:
            if one.stage_bytes and self.stage_bytes.get(one.digest) != one.stage_bytes:
                self.stage_bytes[one.digest] = one.stage_bytes
                if len(self.stage_bytes) > MAX_ROWS:
                    del self.stage_bytes[next(iter(self.stage_bytes))]

    def _part_bytes(self, model: Model, row: Instance) -> int:
        parts = parts_of(self.stage_bytes.get(model.weights.digest, ()), row.num_stages)
        return parts[row.stage] if parts and row.stage < len(parts) else 0

    def _after_fetch_s(self, node: Node, model: Model, num_stages: int) -> float:
        gpu_kind = gpu_kind_of(node)
        took = self.times.predict(model, StartKind.COLD, gpu_kind)
        streams = node.can(model.engine, STREAMS)
        load_s = self.times.tail_s(model, gpu_kind) if streams else took.load_s / num_stages
        return load_s + took.warmup_s + took.rest_s

    def fetched(self, node_id: str, digest: str, ids: Iterable[str], now_s: float) -> None:
        """End the fetches that bring these weights; word of earlier ones ends none."""
        for fetch_id in ids:
            if self._fetching.get(fetch_id) == (node_id, digest):
                self._end(fetch_id, now_s)

    def _end(self, fetch_id: str, now_s: float) -> None:
        node_id, _ = self._fetching.pop(fetch_id)
        ledger = self.links.get(node_id)
        if ledger is not None:
            left = finish(ledger, fetch_id, now_s)
            if left.fetches:
                self.links[node_id] = left
            else:
                del self.links[node_id]

    def forget(self, fetch_id: str) -> None:
        if fetch_id in self._fetching:
            ledger = self.links.get(self._fetching[fetch_id][0])
            self._end(fetch_id, ledger.since_s if ledger else 0.0)

    def is_fetching(self, node_id: str) -> bool:
        return any(at == node_id and not fetch_id.endswith(REST) for fetch_id, (at, _) in self._fetching.items())

    def drop_node(self, node_id: str) -> None:
        self.links.pop(node_id, None)
        self._fetching = {fetch_id: one for fetch_id, one in self._fetching.items() if one[0] != node_id}

    def keep(self, models: Container[str], instances: Container[str]) -> None:
        measured: list[dict[str, Any]] = [self.seconds, self.quickest_s, self.first_token_s, self._first_tokens]
        for known in measured:
            for key in [k for k in known if k not in models]:
                del known[key]
        self._left = {key: seen for key, seen in self._left.items() if key[0] in models}
        self._leaving_since = {i: since for i, since in self._leaving_since.items() if i in instances}
        self._ordered = {i: None for i in self._ordered if i in instances or i in self._fetching}

    def saw(self, row: Instance, model: Model | None, now_s: float) -> StartRow | None:
        if row.state is not InstanceState.STARTING and row.instance_id in self._fetching:
            self._end(row.instance_id, now_s)
        if (row.state.is_gone or not row.consolidating) and rest_of(row) in self._fetching:
            self._end(rest_of(row), now_s)
        self._watch_leaving(row)
        return self.times.learn(row, model) if model is not None else None

    def _watch_leaving(self, row: Instance) -> None:
        if row.state is InstanceState.DRAINING:
            self._leaving_since.setdefault(row.instance_id, row.changed_at)
            return
        since = self._leaving_since.pop(row.instance_id, None)
        if since is None or row.state in (InstanceState.READY, InstanceState.FAILED) or row.changed_at < since:
            return
        key = (row.model_key, row.state.value)
        self._left[key] = (*self._left.get(key, ()), row.changed_at - since)[-KEPT:]

    def leave_s(self, model: Model, becomes: str) -> tuple[float, int] | None:
        """Return median seconds from a drain's begin until the instance became `becomes`, and the number of drains.
        None where this process has seen none."""
        seen = self._left.get((model.key, becomes))
        return (median(seen), len(seen)) if seen else None

    def sleep_s(self, model: Model, becomes: str) -> float:
        """Return the least seconds of `leave_s`, as of an idle instance. 0 where none has been seen."""
        return min(self._left.get((model.key, becomes), ()), default=0.0)

    def served(self, fact: RequestFinished, by: Instance) -> None:
        """Learn t_p and t_d from a warm request (section 4.1: stages are learned from history), and the seconds from
        READY to the first token from one that waited for a start."""
        self._waited(fact, by)
        if fact.cold or fact.error_code or fact.response_tokens < 2 or not fact.ttft_s:
            return
        known = self.seconds.get(fact.model_key)
        prefill_s = max(0.0, fact.ttft_s - fact.queue_s)
        decode_s = max(0.0, fact.e2e_s - fact.ttft_s) / (fact.response_tokens - 1)
        self.quickest_s[fact.model_key] = min(prefill_s, self.quickest_s.get(fact.model_key, prefill_s))
        self.seconds[fact.model_key] = replace(
            known or self._params.start_stages,
            prefill_s=_mean(known.prefill_s, prefill_s, WEIGHT_OF_REQUEST) if known else prefill_s,
            decode_s=_low(known.decode_s, decode_s) if known else decode_s,
        )

    def _waited(self, fact: RequestFinished, by: Instance) -> None:
        if not fact.cold or fact.error_code or not fact.ttft_s or not fact.arrived_at < by.ready_at:
            return
        after_s = fact.arrived_at + fact.ttft_s - by.ready_at
        if after_s <= 0:  # clocks that differ
            return
        mine = self._first_tokens.setdefault(fact.model_key, {})
        mine[by.instance_id] = min(after_s, mine.get(by.instance_id, after_s))  # the first request did not queue
        if len(mine) > KEPT:
            del mine[next(iter(mine))]
        self.first_token_s[fact.model_key] = median(mine.values())

    def load_seconds(self, model: Model) -> float:
        """Return T_c of WarmServe Eq. 7-8: measured, else bytes on each GPU over the PCIe rate (erratum E6)."""
        return self.times.predict(model, StartKind.CACHED).load_s


def rest_of(row: Instance) -> str:
    return row.instance_id + REST


def configured(stages: StageSeconds) -> Prior | None:
    """Return the start times set by an operator, which replace every engine's prior; None where none are set."""
    launch_s = stages.container_s + stages.cuda_s + stages.library_s
    if not launch_s:
        return None
    return Prior(launch_s=launch_s, library_s=stages.library_s, warmup_s=stages.warmup_s, prefill_s=stages.prefill_s)


def _low(known: float, newest: float) -> float:
    """Mean that falls fast and rises slowly: seconds of a token with no other request's prefill in between."""
    return _mean(known, newest, WEIGHT_OF_NEWEST if newest < known else WEIGHT_OF_SLOWER)


def _mean(known: float, newest: float, weight: float) -> float:
    return known + weight * (newest - known)
