"""A pipeline's life in the simulator, and its faults.

HydraServe sections 4 and 6: a cold start in two stages on two of three nodes, consolidated under its requests into one
worker (`down`) or two (`up`), and ended when idle. The same run, broken once after one of its events, is another
`Life`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glowplug.controllers.agent.params import AgentParams
from glowplug.controllers.operator import Cordon
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.instance import Instance
from glowplug.domain.model import Slo
from glowplug.events import Event
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug_lab.simulator.costs import FITTED
from glowplug_lab.simulator.run import digest_of
from glowplug_lab.simulator.setup import GB, Fault, Params, PolicyNames, ServerSetup, Setup, StartSeconds
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World, break_at
from tests.simulation import fleets

STAGES = StageSeconds(container_s=0.5, prefill_s=0.02, decode_s=0.01, hop_s=0.001)
LAST = Arrival(30.0, "m", 100, 50)
ARRIVALS = {
    "down": (Arrival(0.5, "m", 100, 400), Arrival(7.0, "m", 100, 50), LAST),
    "up": (*(Arrival(0.5 + n * 1e-3, "m", 100, 400) for n in range(12)), LAST),
}
LIFE_S, END_S = 20.0, 48.0  # the pipeline's, undisturbed; of the whole run
ANSWERED_S = 20.0  # no start is awaited until its deadline
SERVICES = ("router", "autoscaler", "placer")
QUIET = {"node.beat", "router.load_reported", "weights.progressed"}  # events that come whether or not anything happens


class Wire:
    """Carries each event once to each reader, except an `odd` one, and none while a service `dies`."""

    is_sure = False

    def __init__(self) -> None:
        self.odd: tuple[float, ...] | None = None
        self.dies = False

    def delays_s(self) -> Sequence[float]:
        return () if self.dies else (0.001,) if self.odd is None else self.odd

    def phase_s(self, period_s: float) -> float:
        return 0.0


def a_setup(becomes: str) -> Setup:
    """8 GB of weights at 2 GB/s where 4 s are allowed: two halves, with full memory where both become one."""
    start = StartSeconds(launch_s=0.5, warmup_s=0.2, stop_s=0.1)
    fields = {"max_instances": 2, "keep_alive_s": 3.0, "slo": Slo(ttft_s=4.0, tpot_s=1.0), "max_wait_s": 25.0}
    server = ServerSetup(num_servers=3, num_gpus=1, gpu_bytes=20 * GB, abilities=frozenset({"stages"}))
    params = Params(
        placer=PlacerParams(start_stages=STAGES, hole_grace_s=1.0, follows_parts=True, settle_s=0.5),
        agent=AgentParams(start_deadline_s=ANSWERED_S, consolidate_deadline_s=5.0),
        resync_s=2.0,
        heal_s=2.0,
        idle_tick_s=1.0,
        router_tick_s=0.5,
        tick_s=0.5,
        agent_tick_s=0.5,
    )
    scaling = "hydraserve:literal_code=true" if becomes == "up" else "hydraserve"
    policies = PolicyNames(placement="hydraserve", scaling=scaling)
    model = fleets.a_model("m", 8, 4, {"h800": FITTED["llama-2-7b", "h800"]}, start, **fields)
    return Setup(servers=(server,), models=(model,), policies=policies, params=params)


@dataclass(frozen=True)
class Harm:
    """`strikes(life)` right after an event, before any delivery. `ends`: permitted endings besides success."""

    strikes: "Callable[[Life], None]"
    ends: frozenset[str] = frozenset()
    at_once: bool = False  # while the event's sender is still at work

    @property
    def name(self) -> str:
        return self.strikes.__name__


HARMS: list[Harm] = []


def harm(*ends: str, at_once: bool = False) -> "Callable[[Callable[[Life], None]], Callable[[Life], None]]":
    def listed(strikes: "Callable[[Life], None]") -> "Callable[[Life], None]":
        HARMS.append(Harm(strikes, frozenset(ends), at_once))
        return strikes

    return listed


class Life(World):
    """Broken by `harm` after event number `at`, QUIET ones not counted. `outcome`: how each request ended, by
    ticket."""

    def __init__(self, becomes: str, harm: Harm | None = None, at: int = -1) -> None:
        self.harm, self.at, self.wire, self.sender = harm, at, Wire(), ""
        self.events: list[tuple[float, str]] = []
        self.outcome: dict[int, str] = {}
        self.ended_s: dict[int, float] = {}
        label = f"{becomes}, {harm.name} behind event {at}" if harm else f"{becomes}, undisturbed"
        super().__init__(a_setup(becomes), ARRIVALS[becomes], check=True, label=label, delivery=self.wire)
        self.control.on_event.append(self._published)
        self.traffic.on_end.append(self._ended)

    def _published(self, event: Event) -> None:
        self.wire.odd = None
        if event.type in QUIET or self.kernel.now_s < self.began_s:
            return
        self.events.append((self.kernel.now_s - self.began_s, event.type))
        if self.harm is None or len(self.events) - 1 != self.at:
            return
        self.label += f", {event.type} of {event.issuer}"
        self.sender = event.issuer.removesuffix("-1") if event.issuer.startswith(SERVICES) else event.issuer
        if self.harm.at_once:
            self.harm.strikes(self)
        else:
            self.kernel.after(0.0, self.harm.strikes, self)

    def _ended(self, ticket: int, how: str) -> None:
        assert ticket not in self.outcome, f"{self.label}: {ticket}: {self.outcome[ticket]}, then {how}"
        self.outcome[ticket] = how
        self.ended_s[ticket] = self.kernel.now_s - self.began_s

    @property
    def rows(self) -> dict[str, Instance]:
        return self.control.tables["instances"]

    def node_of(self, stage: int) -> str:
        """Without a pipeline, any node."""
        found = [row for row in self.rows.values() if bool(row.part_of) is bool(stage) and not row.state.is_gone]
        return found[-1].node_id if found else f"server-{stage + 1}"

    def kill_engine(self, stage: int) -> None:
        node = self.nodes[self.node_of(stage)]
        for instance_id in list(node.engines):
            node.kill(instance_id, "killed")

    def lose_node(self, stage: int) -> None:
        node_id = self.node_of(stage)
        break_at(self.nodes[node_id], Fault(at_s=0.0, node_id=node_id))

    def break_fetches(self, stage: int, code: str) -> None:
        """For the next five seconds."""
        failing, digest = self.nodes[self.node_of(stage)].fetching.failing, digest_of(self.models["m"].model.weights)
        failing[digest] = code
        self.kernel.after(5.0, failing.pop, digest, None)

    def settled(self) -> None:
        """Raises AssertionError for missing, late or impermissible answers, and for remains."""
        says, num = f"{self.label}: ", self.traffic.num_arrived
        assert self.outcome.keys() == {*range(1, num + 1)}, f"{says}answered: {self.outcome}"
        ends = {"200"} | (self.harm.ends if self.harm else frozenset())
        assert {*self.outcome.values()} <= ends, f"{says}{self.outcome}"
        assert self.outcome[num] == "200", f"{says}a later request: {self.outcome[num]}"
        late = {ticket: at for ticket, at in self.ended_s.items() if ticket < num and at > ANSWERED_S}
        assert not late, f"{says}late: {late}"
        left = {i: row.state.value for i, row in self.rows.items() if not row.state.is_gone}
        assert not left, f"{says}rows: {left}"
        for node_id, node in self.nodes.items():
            if not node.is_down:
                assert not node.engines, f"{says}{node_id} runs {[*node.engines]}"
                assert not node.agent.ledger.holders, f"{says}{node_id} grants bytes to {node.agent.ledger.holders}"
                assert not node.prefetcher.jobs, f"{says}{node_id} fetches {[*node.prefetcher.jobs]}"
        placer = self.control.placer
        assert not placer.placements, f"{says}placements: {[*placer.placements]}"
        assert not placer.fleet.network.links, f"{says}fetches: {placer.fleet.network.links}"


@functools.cache
def num_events(becomes: str) -> int:
    life = Life(becomes)
    life.run(END_S)
    life.settled()
    return sum(at < LIFE_S for at, _ in life.events)


# engines and nodes


@harm("502 engine_failed")
def the_first_engine_is_killed(life: Life) -> None:
    life.kill_engine(0)


@harm("502 engine_failed")
def a_later_engine_is_killed(life: Life) -> None:
    life.kill_engine(1)


@harm("502 engine_failed")
def the_first_node_is_lost(life: Life) -> None:
    life.lose_node(0)


@harm("502 engine_failed")
def a_later_node_is_lost(life: Life) -> None:
    life.lose_node(1)


# services


@harm()
def the_first_agent_is_killed(life: Life) -> None:
    life.control.restart(life.node_of(0))


@harm()
def a_later_agent_is_killed(life: Life) -> None:
    life.control.restart(life.node_of(1))


@harm()
def the_first_prefetcher_is_killed(life: Life) -> None:
    life.control.restart(f"prefetcher-{life.node_of(0)}")


@harm()
def a_later_prefetcher_is_killed(life: Life) -> None:
    life.control.restart(f"prefetcher-{life.node_of(1)}")


@harm("connection_lost")
def the_router_is_killed(life: Life) -> None:
    life.control.restart("router")


@harm()
def the_placer_is_killed(life: Life) -> None:
    life.control.restart("placer")


@harm()
def the_placer_is_replaced(life: Life) -> None:
    life.control.elect("placer")


@harm()
def two_placers_at_once(life: Life) -> None:
    """The replaced one does not know that."""
    life.control.elect("placer", lingers=True)


@harm()
def two_placers_that_see_different_fleets(life: Life) -> None:
    """It also takes one node for drained."""
    life.control.elect("placer", lingers=True)
    life.control.services["placer-0"].fleet.capacity.cordon("server-1", is_cordoned=True)


@harm()
def the_autoscaler_is_killed(life: Life) -> None:
    life.control.restart("autoscaler")


@harm()
def the_autoscaler_is_replaced(life: Life) -> None:
    life.control.elect("autoscaler")


@harm("connection_lost", at_once=True)
def who_sends_is_killed_in_the_midst_of_it(life: Life) -> None:
    """That event and the sender's others of the same moment are lost."""
    life.wire.dies = True

    def dies() -> None:
        life.wire.dies = False
        life.control.restart(life.sender)

    life.kernel.after(0.0, dies)


# the store and the bus


@harm()
def the_store_is_emptied(life: Life) -> None:
    life.control.empty_store()


@harm(at_once=True)
def an_event_is_lost(life: Life) -> None:
    life.wire.odd = ()


@harm(at_once=True)
def an_event_comes_twice_and_late(life: Life) -> None:
    life.wire.odd = (0.3, 3.0)


# weights


@harm("503 weights_corrupt")
def the_first_node_gets_wrong_bytes(life: Life) -> None:
    life.break_fetches(0, "weights_corrupt")


@harm("503 weights_corrupt")
def a_later_node_gets_wrong_bytes(life: Life) -> None:
    life.break_fetches(1, "weights_corrupt")


@harm("503 weights_unavailable")
def the_registry_is_away(life: Life) -> None:
    life.break_fetches(0, "weights_unavailable")
    life.break_fetches(1, "weights_unavailable")


@harm()
def nothing_comes_for_a_while(life: Life) -> None:
    """For longer than a consolidation may take."""
    card = life.nodes[life.node_of(1)].network
    life.links.start("of others", 10.0 * card.bytes_per_s, (card,), lambda: None, priority=-1)


@harm("503 no_space")
def the_first_node_has_no_space(life: Life) -> None:
    life.break_fetches(0, "no_space")


@harm("503 no_space")
def a_later_node_has_no_space(life: Life) -> None:
    life.break_fetches(1, "no_space")


# consolidation


@harm()
def consolidation_fails(life: Life) -> None:
    for node in life.nodes.values():
        node.pipelines.failing.append("")


@harm()
def consolidation_hangs(life: Life) -> None:
    for node in life.nodes.values():
        node.pipelines.hanging.append("")


# people


@harm()
def the_first_node_is_drained(life: Life) -> None:
    life.control.give("placer", Cordon(life.node_of(0), True))


@harm()
def a_later_node_is_drained(life: Life) -> None:
    life.control.give("placer", Cordon(life.node_of(1), True))


@harm("client_left")
def a_client_leaves(life: Life) -> None:
    life.traffic.leave(1)
