"""A fleet in the simulator on a bad bus, with clients who come and leave at random.

The controllers have their live bounds, so repeats and tables make good any loss.
"""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from glowplug.controllers.agent.messages import AgentParams
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.model import WeightsRef
from glowplug.events import Event
from glowplug.events.commands import CancelPlacement, PlaceInstance, StartInstance, StopInstance
from glowplug_lab.simulator.clocks import Apart
from glowplug_lab.simulator.control_plane import Chaos
from glowplug_lab.simulator.costs import StepCosts
from glowplug_lab.simulator.hardware.node import SimNode
from glowplug_lab.simulator.setup import ABILITIES, ModelSetup, Params, PolicyNames, ServerSetup, Setup, StartSeconds
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import Checker, World
from glowplug_lab.systems import SYSTEMS
from tests.fleet_builder import MIB, a_model

KEEP_ALIVE_S = 3.0
COSTS = StepCosts(prefill_base_s=0.002, prefill_s_per_token=0.0, decode_base_s=0.01)
KV_MIB = 20
LIVE = {"autoscaler": AutoscalerParams(), "placer": PlacerParams(), "agent": AgentParams()}
TICKS = dict.fromkeys(("router_tick_s", "tick_s", "agent_tick_s", "idle_tick_s"), 0.5)
PARAMS = Params(**LIVE, **TICKS, resync_s=2.0, heal_s=2.0)  # type: ignore[arg-type]


def models(chance: Random, num: int, mib: int, **fields: Any) -> tuple[ModelSetup, ...]:
    """No two of their starts take the same time."""
    starts = [
        StartSeconds(
            launch_s=chance.uniform(0.02, 0.2), warmup_s=chance.uniform(0.1, 0.8), stop_s=chance.uniform(0.01, 0.3)
        )
        for _ in range(20)
    ]
    return tuple(
        ModelSetup(
            model=a_model(
                f"m{i}",
                mib=mib - KV_MIB,
                kv_bytes=KV_MIB * MIB,
                keep_alive_s=KEEP_ALIVE_S,
                weights=WeightsRef(uri=f"file:/w{i}", num_bytes=10),
                max_wait_s=60.0,
                **fields,
            ),
            costs={"any": COSTS},
            kv_bytes_per_token=1024,
            starts=tuple(starts[i:] + starts[:i]),
        )
        for i in range(num)
    )


class EveryByte(Checker):
    """No engine here gives a part of its grant back."""

    def look_at(self, node: SimNode, now_s: float) -> None:
        super().look_at(node, now_s)
        for gpu in node.agent.ledger.gpus:
            taken = sum(engine.num_bytes for engine in node.engines.values() if gpu.gpu_id in engine.gpu_ids)
            self.demand(taken <= gpu.total_bytes, f"engines on {gpu.gpu_id} hold {taken} of {gpu.total_bytes} bytes")


class Fleet(World):
    """A test steers it. Its invariants are checked after every event. `outcome`: how each request ended, by ticket,
    "open" until then. With a `system` its policies decide, over engines with every ability."""

    def __init__(
        self,
        seed: int,
        num_models: int,
        *,
        mib: int = 120,
        num_nodes: int = 2,
        lose: float = 0.05,
        double: float = 0.05,
        system: str = "",
        clocks: Apart | None = None,
        **fields: Any,
    ) -> None:
        self.random = Random(seed)
        policies, params = PolicyNames(), PARAMS
        if system:
            policies = PolicyNames(**SYSTEMS[system].policies)
            for part, given in SYSTEMS[system].params.items():
                params = replace(params, **{part: replace(getattr(params, part), **given)})
        server = ServerSetup(
            name="node",
            num_servers=num_nodes,
            num_gpus=1,
            gpu_bytes=300 * MIB,
            gpu_kind="any",
            network_bytes_per_s=20,  # 10 bytes to fetch: half a second, more with two at a time
            host_cache_bytes=10**9,
            abilities=ABILITIES if system else frozenset(),
        )
        deployed = models(self.random, num_models, mib, **fields)
        setup = Setup(servers=(server,), models=deployed, policies=policies, params=params)
        self._keeps_dormant = bool(system)
        self.outcome: dict[int, str] = {}
        self.decisions: list[DecisionRecord] = []
        self._decided: set[str] = set()
        delivery = Chaos(seed, lose=lose, double=double)
        super().__init__(setup, (), check=True, label=f"seed {seed}", delivery=delivery, clocks=clocks)
        if not system:
            self._checker = EveryByte(self, self.control, self.nodes, self.traffic)
        self.traffic.on_end.append(self._ended)
        self.control.on_decision.append(self._decision)
        self.control.on_event.append(self._event)
        self.start()

    @property
    def names(self) -> list[str]:
        return list(self.models)

    def advance(self, seconds: float) -> None:
        self.run_until(self.kernel.now_s + seconds)

    def come(self, name: str) -> int:
        """Its answer takes 0.4 s on average. Returns its ticket."""
        ticket = self.traffic.num_arrived + 1
        self.outcome[ticket] = "open"
        num_tokens = 1 + min(2000, round(self.random.expovariate(1 / 40)))
        assert self.traffic.arrive(Arrival(0.0, name, 10, num_tokens)) == ticket
        return ticket

    def load(self, seconds: float, per_second: float) -> None:
        at_s = 0.0
        while (at_s := at_s + self.random.expovariate(per_second)) < seconds:
            self.kernel.after(at_s, self._visit, self.random.choice(self.names), self.random.expovariate(1 / 30))

    def _visit(self, name: str, patience_s: float) -> None:
        self.kernel.after(patience_s, self.traffic.leave, self.come(name))

    def _ended(self, ticket: int, how: str) -> None:
        assert self.outcome[ticket] == "open", f"{self.label}: ticket {ticket}: {self.outcome[ticket]}, then {how}"
        self.outcome[ticket] = how

    def _decision(self, decision: DecisionRecord) -> None:
        self.decisions.append(decision)
        self._decided |= {decision.instance_id, *decision.chosen.split(", ")}

    def _event(self, event: Event) -> None:
        data = event.data
        if isinstance(data, PlaceInstance | CancelPlacement | StartInstance | StopInstance):
            named = {data.instance_id, data.instance_id.partition(".")[0]}  # a stage, or its pipeline
            assert named & self._decided, f"{self.label}: nothing was decided about it: {data}"

    def ends(self) -> Counter[str]:
        return Counter(self.outcome.values())

    def settle(self, seconds: float = 90.0) -> None:
        """Only a system's dormant engines are left, nothing is owed, and the tables agree."""
        self.advance(seconds + KEEP_ALIVE_S)
        left = [ticket for ticket, how in self.outcome.items() if how == "open"]
        assert not left, f"{self.label}: requests without an answer: {left}"
        rows = [i for i in self.control.tables["instances"].values() if not i.state.is_gone]
        dormant = {i.instance_id for i in rows if i.state.is_dormant} if self._keeps_dormant else set()
        for node_id, node in self.nodes.items():
            assert node.engines.keys() <= dormant, f"{self.label}: {node_id} still runs {list(node.engines)}"
            assert node.agent.ledger.holders <= dormant, f"{self.label}: {node_id} still grants bytes"
        alive = [i.instance_id for i in rows if i.instance_id not in dormant]
        assert alive == [], f"{self.label}: the table still shows {alive}"
