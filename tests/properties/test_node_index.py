"""The fleet's index answers and decides like a scan of every node."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.victims import Victims
from glowplug.domain.hardware import CachedWeights, Gpu, Grant, GrantOwner, Link, Node, SharedWeights
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.fleet.capacity import FleetCapacity
from glowplug.fleet.demand import Demand
from glowplug.fleet.node_index import NodeIndex
from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.eviction.turns import Shares
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.links import Fetch, LinkLedger, has_copy_on_disk, has_weights
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.registry import choose, installed
from glowplug.policies.worth import InMemory
from tests.fleet_builder import MIB, a_model, an_instance, load_report

MODELS = [
    a_model(
        f"m{n}",
        mib=mib,
        num_gpus=gpus,
        weights=WeightsRef(uri=f"file:/m{n}" if n else "", sha256=f"{n}" * 8),
        weights_bytes=mib * MIB // 2,
        kv_bytes=mib * MIB // 2,
        slo=Slo(ttft_s=ttft),
    )
    for n, (mib, gpus, ttft) in enumerate(
        ((40, 1, 0.0), (60, 1, 0.05), (100, 1, 0.0), (150, 2, 0.0), (90, 1, 0.4), (200, 4, 0.0), (300, 1, 5.0))
    )
]
SECONDS = StageSeconds(container_s=0.01, library_s=0.01, prefill_s=0.001, hop_s=0.001)
ABILITIES = (("emulated:prewarm", "emulated:stages"), ("emulated:prewarm",), ())


class Scanning(NodeIndex):
    def among(self, node_ids, num_bytes, num_gpus, engine):
        return [n for n in self._able(engine) if node_ids is None or n.node_id in node_ids]

    def candidates(
        self, needs, num_gpus, engine, count, *, drops="", loses=None, busy=(), only=None, besides=frozenset()
    ):
        return [n for n in self.among(only, 0, num_gpus, engine) if n.node_id not in besides]

    def holders(self, model):
        there = {n.node_id for n in self for c in n.cached if c.digest == model.weights.digest}
        return there if model.weights.uri else None

    def disk_holders(self, model):
        there = {n.node_id for n in self for c in n.on_disk if c.digest == model.weights.digest}
        return there if model.weights.uri else set()

    def copies(self, model):
        return tuple(row for rows in self.dormant.values() for row in rows if row.model_key == model.key)

    def num_able(self, engine: str, ability: str) -> int:
        return sum(node.can(engine, ability) for node in self._able(engine))

    def could_hold(self, num_bytes, num_gpus, engine, *, even_draining=True):
        nodes = [n for n in self if engine in n.engines and (even_draining or not n.draining)]
        return any(sum(gpu.total_bytes >= num_bytes for gpu in n.gpus) >= num_gpus for n in nodes)

    def answers(self, question, answer, nodes=None):
        for known in self._by_id.values():
            known.answers.clear()
        return super().answers(question, answer, nodes)

    def _able(self, engine: str) -> Iterator[Node]:
        return (node for node in self if not node.draining and engine in node.engines)

    def _has(self, node: Node, num_bytes: int, num_gpus: int) -> bool:
        return sum(g.free_bytes - self.reserved.get(g.gpu_id, 0) >= num_bytes for g in node.gpus) >= num_gpus


def some_weights(chance: random.Random, share: float) -> tuple[CachedWeights, ...]:
    return tuple(
        CachedWeights(digest=m.weights.digest if chance.random() < 0.8 else "old", num_bytes=1, model_keys=(m.key,))
        for m in MODELS
        if chance.random() < share
    )


def a_fleet(chance: random.Random) -> tuple[list[Node], dict[str, list[Instance]], dict[str, float], dict[str, int]]:
    nodes, dormant, scores, reserved = [], {}, {}, {}
    fullness = chance.choice((0.2, 0.5, 0.9))
    for n in range(chance.randrange(1, 30)):
        node_id, rows, gpus = f"n{n}", [], []
        sizes = ((100,) * 4, (100,) * 4, (160,) * 2, (60,) * 4, (100, 60, 100))[n % 5]
        for g, size in enumerate(sizes):
            gpu_id, grants, left = f"{node_id}/{g}", [], size
            while left > 5 and chance.random() < fullness:
                holder, mib = f"x-{n}-{g}-{len(grants)}", chance.choice((10, 20, 50, left))
                if mib > left:
                    break
                left -= mib
                is_copy = chance.random() < 0.5
                owner = GrantOwner.PREWARM if is_copy else GrantOwner.WEIGHTS
                grants.append(Grant(holder=holder, owner=owner, num_bytes=mib * MIB))
                if is_copy:
                    model = chance.choice(MODELS[:3])
                    state = chance.choice([InstanceState.PREWARMED, InstanceState.LOADING, InstanceState.SWAPPED_OUT])
                    rows.append(an_instance(holder, model.key, state, gpu_id=gpu_id, mib=mib, replica=True))
                    if chance.random() < 0.8:
                        scores[holder] = chance.choice((0.0, 0.5, 1.0, chance.random()))
            if left and chance.random() < 0.2:
                reserved[gpu_id] = chance.randrange(1, left + 1) * MIB
            gpus.append(sharing(Gpu(gpu_id=gpu_id, total_bytes=size * MIB, grants=tuple(grants)), chance))
        cached, on_disk = (some_weights(chance, share) for share in (0.3, 0.2))
        links = (
            (Link(link_id=f"{node_id}/nic", bytes_per_s=chance.choice((1e9, 2e9))),) if chance.random() < 0.5 else ()
        )
        nodes.append(
            Node(
                node_id=node_id,
                gpus=tuple(gpus),
                engines=chance.choice((("emulated",), ("emulated",), ("other",), ("emulated", "other"))),
                agent_url="",
                abilities=chance.choice(ABILITIES),
                links=links,
                cached=cached,
                on_disk=on_disk,
                disk_bytes_per_s=chance.choice((0.0, 5e8, 4e9)) if on_disk else 0.0,
                draining=chance.random() < 0.1,
            )
        )
        if rows:
            dormant[node_id] = rows
    return nodes, dormant, scores, reserved


def sharing(gpu: Gpu, chance: random.Random) -> Gpu:
    if not gpu.grants or chance.random() < 0.6:
        return gpu
    many = chance.sample(gpu.grants, chance.randint(1, len(gpu.grants)))
    key, num_bytes = chance.choice(MODELS[:3]).share_key, min(grant.num_bytes for grant in many)
    shared = SharedWeights(key=key, num_bytes=num_bytes, holders=tuple(grant.holder for grant in many))
    less = num_bytes if shared.counts else 0
    grants = tuple(replace(g, num_bytes=g.num_bytes - less) if g in many else g for g in gpu.grants)
    return replace(gpu, grants=grants, shared=(shared,))


def links_of(nodes: list[Node], chance: random.Random) -> dict[str, LinkLedger]:
    fetch = Fetch(fetch_id="f", left_bytes=1e9, deadline_at=chance.choice((10.5, 20.0)))
    return {
        n.node_id: LinkLedger(bytes_per_s=2e9, since_s=9.0, fetches=(fetch,) if chance.random() < 0.8 else ())
        for n in nodes
        if chance.random() < 0.3
    }


@pytest.mark.parametrize("name", installed("placement"))
@given(seed=st.integers(0, 10**9))
def test_a_placement_decides_as_if_it_read_every_node(name: str, seed: int) -> None:
    chance = random.Random(seed)
    nodes, dormant, scores, reserved = a_fleet(chance)
    place, links = choose("placement", name), links_of(nodes, chance)
    decided = []
    for index in (NodeIndex, Scanning):
        asked = PlacementView(
            now_s=10.0, nodes=index(nodes, reserved, dormant, scores), links=links, start_stages=SECONDS
        )
        decided.append(
            [
                place(PlaceRequest(instance_id="i", model=model, waited_s=0.1, num_required=num), asked)
                for model in MODELS
                for num in (1, 2)
            ]
        )
    assert decided[0] == decided[1]


@given(seed=st.integers(0, 10**9))
def test_an_index_kept_through_changes_is_one_made_anew(seed: int) -> None:
    chance, capacity = random.Random(seed), FleetCapacity()
    name = chance.choice(["union", "hydraserve", "serverlessllm", "first_fit", "warmserve"])
    place = choose("placement", name)
    alive: dict[str, Node] = {}
    scores: dict[str, float] = {}
    for _ in range(chance.randrange(1, 5)):
        nodes, dormant, worth, reserved = a_fleet(chance)
        for node in nodes:
            alive[node.node_id] = node
            capacity.put_node(node)
        for rows in dormant.values():
            for row in rows:
                capacity.put_row(replace(row, revision=row.revision + 1))
        for gpu_id, num_bytes in reserved.items():
            capacity.claim(f"p-{gpu_id}", {gpu_id: num_bytes})
        for node_id in [n for n in alive if chance.random() < 0.2]:
            match chance.randrange(3):
                case 0:
                    capacity.drop_node(node_id)
                    del alive[node_id]
                case 1:
                    capacity.cordon(node_id, is_cordoned=chance.random() < 0.7)
                case 2:
                    for row in list(capacity.on_node.get(node_id, {}).values()):
                        capacity.put_row(replace(row, state=InstanceState.STOPPED))
        if chance.random() < 0.6:
            scores = worth
            capacity.nodes.score(scores)
        marked = [replace(n, draining=True) if n.node_id in capacity.cordoned else n for n in alive.values()]
        anew = Scanning(marked, dict(capacity.reserved), dict(capacity.dormant), scores)
        for model in MODELS:
            request, key = PlaceRequest(instance_id="i", model=model), model.share_key
            seen = [replace(n, gpus=tuple(gpu.seen_by(key) for gpu in n.gpus)) for n in marked]
            there = Scanning(seen, dict(capacity.reserved), dict(capacity.dormant), scores)
            with capacity.seen_by(key):
                kept = place(request, PlacementView(now_s=10.0, nodes=capacity.nodes, start_stages=SECONDS))
            assert kept == place(request, PlacementView(now_s=10.0, nodes=there, start_stages=SECONDS)), model.key
            if len(kept.stages) == model.num_gpus == 1 and name != "warmserve":  # which gives a start whole GPUs
                assert_fits(capacity, alive[kept.node_id], kept, key)
        assert list(capacity.nodes) == sorted(marked, key=lambda n: n.node_id)
        assert {m.key for m in MODELS if anew.copies(m)} == set(capacity.nodes.models_with_copies())


def assert_fits(capacity: FleetCapacity, node: Node, decision: PlaceDecision, key: str) -> None:
    """Use fits once all dropped holders have left, with one copy of the shared part."""
    (gpu,) = (gpu for gpu in node.gpus if gpu.gpu_id in decision.stages[0].gpu_ids)
    rest, known = {decision.source, *decision.drops}, gpu.shares(key)
    left = gpu.used_bytes - gpu.freed_by(rest)
    stays = known is not None and any(holder not in rest for holder in known.holders)
    need = decision.stages[0].bytes_per_gpu - (known.num_bytes if known is not None and stays else 0)
    assert left + capacity.reserved.get(gpu.gpu_id, 0) + need <= gpu.total_bytes


def test_the_weights_that_a_model_had_before_are_none_of_its_weights() -> None:
    model: Model = MODELS[1]
    before = CachedWeights(digest="of before", num_bytes=1, model_keys=(model.key,))
    node = Node(node_id="n", gpus=(), engines=("emulated",), agent_url="", cached=(before,), on_disk=(before,))
    assert not NodeIndex([node]).disk_holders(model) and not has_copy_on_disk(node, model)
    assert not NodeIndex([node]).holders(model) and not has_weights(node, model)
    current = (replace(before, digest=model.weights.digest),)
    now = replace(node, cached=current, on_disk=current)
    assert NodeIndex([now]).disk_holders(model) == {"n"} and has_copy_on_disk(now, model)
    assert NodeIndex([now]).holders(model) == {"n"} and has_weights(now, model)


def test_a_model_of_a_weights_digest_is_found_where_another_name_brought_it() -> None:
    model: Model = MODELS[1]
    there = CachedWeights(digest=model.weights.digest, num_bytes=1, model_keys=("another",))
    node = Node(node_id="n", gpus=(), engines=("emulated",), agent_url="", cached=(there,))
    assert NodeIndex([node]).holders(model) == {"n"}


class GivenHoldings(Holdings):
    def of(self, row):
        return InMemory(name=row.instance_id, asked=row.ready_at % 2, climb_s=row.ready_at % 7, num_bytes=1)

    def saves_s(self, row):
        return row.ready_at % 7


class ScanningVictims(Victims):
    def _by_least_cost(self, wanted, only):
        yield from (((False,), node.node_id) for node in self.nodes)


@pytest.mark.parametrize("rule", ["oldest_use", "shortest_queue", "least_worth"])
@given(seed=st.integers(0, 10**9), evict=st.sampled_from(installed("eviction")))
def test_who_leaves_is_chosen_as_if_every_node_was_asked(rule: str, seed: int, evict: str) -> None:
    chance, capacity, loads = random.Random(seed), FleetCapacity(), Demand()
    nodes, dormant, *_ = a_fleet(chance)
    copies = {row.instance_id for rows in dormant.values() for row in rows}
    for node in nodes:
        capacity.put_node(node)
        for gpu in node.gpus:
            for grant in (grant for grant in gpu.grants if grant.holder not in copies):
                state = chance.choice([InstanceState.READY] * 6 + [InstanceState.DRAINING, InstanceState.LOADING])
                model, mib = chance.choice(MODELS), grant.num_bytes // MIB
                ready_at = float(chance.randrange(90))
                capacity.put_row(
                    an_instance(grant.holder, model.key, state, gpu_id=gpu.gpu_id, mib=mib, ready_at=ready_at)
                )
    for rows in dormant.values():
        for row in rows:
            capacity.put_row(row)
    for now_s in (100.0, 101.0, 150.0):
        known = {
            m.key: ModelLoad(num_waiting=chance.randrange(3), last_active_at=now_s - chance.randrange(60))
            for m in MODELS
            if chance.random() < 0.7
        }
        loads.apply(load_report(**known).data, now_s)
        shares = Shares(given={m.key: chance.randrange(30) for m in MODELS}) if chance.random() < 0.3 else Shares()
        fleet = Fleet({}, 1, PlacerParams(turns=chance.choice(["fair", "balanced"]), victims=rule))
        fleet.capacity, fleet.loads, fleet.models = capacity, loads, {m.key: m for m in MODELS}
        fields = (fleet, GivenHoldings(fleet, now_s), shares)
        for model in MODELS:
            wanted = Victims(*fields).wanted(model, wanting=chance.choice((0, 0, 3)), whole=chance.random() < 0.2)
            chosen = [kind(*fields).make(wanted, choose("eviction", evict)) for kind in (Victims, ScanningVictims)]
            assert chosen[0] == chosen[1]
            if chosen[0] is None and wanted.wanting:  # then nobody leaves for a weaker claim
                given = None if wanted.given is None else wanted.given + chance.randrange(30)
                less = replace(wanted, wanting=chance.randrange(wanted.wanting) + 1, given=given)
                assert (less.kind, wanted.is_eased_from(less)) == (wanted.kind, True)
                assert Victims(*fields).make(less, choose("eviction", evict)) is None
