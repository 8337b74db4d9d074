"""A record obeys its row of the table, also under unexpected outcomes.

The table itself drives the walks, so that they reach all of it.
"""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.record import COMING, DORMANT, RULES, Holding, State
from glowplug.controllers.agent.table import STIMULI, TABLE
from glowplug.controllers.agent.transaction import InvalidTransition, Transition
from glowplug.controllers.effects import Tick
from glowplug.domain.instance import Worker
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance
from tests.agent_steps import NODE, CheckedAgent
from tests.agent_walk import ONE, PARAMS, Walk
from tests.fleet_builder import MIB, an_event

COMMANDS = (StartInstance, StopInstance, JoinStages, ConsolidateInstance, ResumeInstance)
# The controller makes them itself.
INSIDE = (msg.GivesWay, msg.TakenOver, msg.RunsElsewhere, msg.HostLeaves)
ENDS = (
    msg.EngineExited,
    msg.EngineOverLimit,
    msg.EngineStartFailed,
    msg.WeightsFailed,
    msg.StopAsked,
    msg.NodeStopping,
    msg.Recalled,
)
Pair = tuple[State | None, type]
ALL = {(state, stimulus) for state in [None, *State] for stimulus in STIMULI if state or stimulus is StartInstance}


# The controller never makes its own stimuli where they have no row.
NEVER = {(state, kind) for state, kind in ALL if kind in INSIDE and (state, kind) not in TABLE}
UNREACHED: dict[Pair, str] = {
    (State.LOST, msg.RunsElsewhere): "the controller asks no further about what it has given up"
}
UNREACHED |= {
    (state, kind): "no record of these walks is an adapter" for state, kind in TABLE if kind is msg.HostLeaves
}
TRIED = ALL - NEVER - UNREACHED.keys()
OTHER = replace(ONE, name="other", key="other")
NUM_WALKS = 24  # 17 reach all pairs


class TableWalk(Walk):
    """`pairs`: those met by this walk and the walks before it."""

    params = replace(PARAMS, start_deadline_s=90, swap_host_bytes=None, consolidate_deadline_s=5)
    mib = 400

    def __init__(self, seed: int, pairs: set[Pair], *, is_thorough: bool = False) -> None:
        self.pairs, self.is_thorough = pairs, is_thorough
        super().__init__(seed)

    def new_agent(self) -> AgentController:
        CheckedAgent.seen = self.pairs
        return super().new_agent()

    def send(self, stimulus: Any, kind: type, addressee: Holding | None) -> None:
        """None: any record it concerns."""
        self.now_s += self.random.choice((0.1, 0.1, 1.0))
        pair = (addressee.state, kind) if addressee is not None else None
        before = dict(self.agent.holdings), self.agent.ledger.gpus
        self.pairs |= {pair} if pair is not None else {(h.state, kind) for h in self.agent.holdings.values()}
        try:
            effects = self.agent.handle(stimulus, self.now_s)
        except InvalidTransition as error:
            assert pair not in TABLE and pair == (error.state, error.stimulus) and error.instance_id in str(error)
            assert before == (self.agent.holdings, self.agent.ledger.gpus), "a refused stimulus has changed something"
            return
        assert pair is None or pair in TABLE, f"{pair} was taken and has no row"
        for effect in effects:
            if isinstance(effect, msg.Remember):
                self.memory = msgspec.json.decode(msgspec.json.encode(effect.memory), type=msg.AgentMemory)
                assert self.memory == effect.memory, "what is written down reads otherwise"

    def run(self) -> None:
        for _ in range(200):
            if self.is_thorough:
                self.try_all()
            record, chance = self.some(), self.random.random()
            if record is None or chance < 0.08:
                self.start()
            elif chance < 0.10 or (chance < 0.20 and (record.state, msg.RunsElsewhere) not in self.pairs):
                self.row_of_another_node(record)
            elif chance > 0.985:
                self.kill_9()
            else:
                self.send_to(record, self.random.choice(self.kinds(record)))
        self.send(msg.NodeStopping("bye", 1.0), msg.NodeStopping, None)

    def try_all(self) -> None:
        """Each in a throwaway copy of the agent: meeting a rare state again for each would take hundreds of walks."""
        for instance_id, record in list(self.agent.holdings.items()):
            for kind in STIMULI:
                if (record.state, kind) in TRIED and (record.state, kind) not in self.pairs:
                    other = copy.copy(self)
                    other.agent = copy.deepcopy(self.agent)
                    other.provoke(other.agent.holdings[instance_id], kind)

    def provoke(self, record: Holding, kind: type) -> None:
        """For the controller's own stimuli, cause their source."""
        i, gpu = record.instance.instance_id, int(record.instance.gpu_id.rpartition("/")[2])
        if kind is msg.RunsElsewhere:
            self.row_of_another_node(record)
        elif kind is msg.GivesWay and record.state is State.SWAPPED_OUT:
            for number in range(3):
                self.send(self.start_of("plain", f"other-{number}", OTHER, (gpu,)), StartInstance, None)
        elif kind in INSIDE:
            fields = {"source": i} if kind is msg.TakenOver else {"drops": (i,)}
            self.send(self.start_of("plain", "other", ONE, (gpu,), **fields), StartInstance, None)
        else:
            self.send_to(record, kind)

    def kinds(self, record: Holding) -> list[type]:
        """Mostly those that lead on, else untried ones, ones with a row, or any."""
        chance, ends = self.random.random(), ENDS + (StopInstance,) * (record.state in COMING)
        if chance < 0.3:
            new = [k for k in STIMULI if k not in INSIDE and (record.state, k) not in self.pairs]
            if new:
                return new
        if chance > 0.9:
            return [kind for kind in STIMULI if kind not in INSIDE]
        rows = [k for (state, k), row in TABLE.items() if state is record.state and k not in INSIDE]
        leads = [k for k in rows if k not in ends and isinstance(TABLE[record.state, k], Transition)]
        return leads if leads and chance < 0.8 else rows

    def some(self) -> Holding | None:
        """Mostly one that is not over, or whose state has been tried least."""
        known = list(self.agent.holdings.values())
        if known and self.random.random() < 0.3:
            tried = Counter(state for state, _ in self.pairs)
            return min(known, key=lambda h: tried[h.state])
        living = [h for h in known if not h.is_over]
        return self.random.choice((living if self.random.random() < 0.9 else known) or known or [None])

    def send_to(self, record: Holding, kind: type) -> None:
        if kind is Tick:
            self.now_s += self.random.choice((0.1, 0.1, 1.0, 1.0, 3.0, 100.0))
            self.send(Tick(), kind, None)
        elif kind is msg.Recalled:
            if (record.state, kind) not in self.pairs:
                self.kill_9()
        elif kind is msg.NodeStopping:
            if (record.state, kind) not in self.pairs:
                self.send(msg.NodeStopping("bye", 1.0), kind, None)
        elif kind is StartInstance:
            self.start(record.instance.instance_id)
        elif kind in COMMANDS:
            self.send(self.command(record, kind), kind, record)
        else:
            i, is_gone = record.instance.instance_id, record.instance.state.is_gone
            taker = next((h for h in self.agent.holdings.values() if is_gone and h.engine_id == i), record)
            self.send(self.outcome(record, kind), kind, taker)

    def command(self, record: Holding, kind: type) -> Any:
        given: dict[str, Any] = {"target": NODE, "instance_id": record.instance.instance_id}
        if kind is not JoinStages:
            given["reason"] = "r"
        if kind is StopInstance:
            given["grace_s"] = self.random.choice((0.0, 5.0))
            given["becomes"] = self.random.choice(("stopped", "prewarmed", *("swapped_out",) * 4))
        return an_event(kind(**given), issuer="placer-1", epoch=1)

    def outcome(self, record: Holding, kind: type) -> Any:
        i = record.instance.instance_id
        held = sum(sum(of_gpu.values()) for of_gpu in record.shares.values())
        given: dict[type, tuple[Any, ...]] = {
            msg.WeightsComplete: ("/w",),
            msg.WeightsArriving: ("/w",),
            msg.WeightsReplaced: ("its source has changed",),
            msg.WeightsFailed: ("weights_unavailable", "gone"),
            msg.EngineReady: ("http://e",),
            msg.EngineStartFailed: ("engine_failed", "broken"),
            msg.EngineExited: ("killed",),
            msg.EngineOverLimit: ("too big",),
            msg.ConsolidationFailed: ("broken", self.random.choice(("", "", "weights_corrupt"))),
            msg.SleepFailed: ("it will not",),
            msg.EngineBusy: (1,),
            msg.HealthSeen: self.random.choice(((True,),) * 9 + ((False,), (False, False))),
            msg.InFlight: self.random.choice(((0,), (2, 20 * MIB), (3, 90 * MIB))),
            msg.EngineAsleep: (self.random.choice((-1, held // 8, held, held, 2 * held)),),
            msg.EngineGone: (self.random.random() < 0.7,),
            msg.StopAsked: ("an operator", self.random.choice((0.0, 5.0))),
        }
        return kind(i, *given.get(kind, ()))

    def start(self, known: str = "") -> None:
        kind = self.random.choice(("plain", "replica", "replica", "first", "first", "later", "grow", "grow"))
        self.num_ids += 1
        i, gpu, source = known or f"i-{self.num_ids}", self.random.randrange(2), ""
        sources = [h for h in self.agent.holdings.values() if h.state in (*COMING, *DORMANT) and h.instance.replica]
        sources += [h for h in self.agent.holdings.values() if h.state is State.SWAPPED_OUT or not h.shares]
        if kind == "grow" and sources:
            new = [h for h in sources if (h.state, msg.TakenOver) in TABLE.keys() - self.pairs]
            chosen = self.random.choice(new or sources).instance
            source, gpu = chosen.instance_id, int(chosen.gpu_id.rpartition("/")[2])
        drops = tuple(d for d in self.agent.holdings if self.random.random() < 0.1)
        asleep = [h.instance for h in self.agent.holdings.values() if h.state is State.SWAPPED_OUT]
        if asleep and self.random.random() < 0.4:
            kind, sleeper = self.random.choice(("grow", "plain", "plain")), self.random.choice(asleep)
            source, gpu = sleeper.instance_id if kind == "grow" else "", int(sleeper.gpu_id.rpartition("/")[2])
        event = self.start_of(kind, i, ONE, (gpu,), source=source, drops=drops)
        self.send(event, StartInstance, self.agent.holdings.get(i))

    def row_of_another_node(self, record: Holding) -> None:
        """Another node got the instance later; each reading repeats it."""
        other = Worker(worker_id="w", node_id="node-2", gpu_id="node-2/0", num_bytes=1)
        theirs = replace(record.instance, workers=(other,), created_at=record.instance.created_at + 1)
        rows = {h.instance.instance_id: h.instance for h in self.agent.holdings.values()}
        self.agent.restore("instances", rows | {record.instance.instance_id: theirs}, self.now_s)
        for effect in self.agent.handle(Tick(), self.now_s):
            self.memory = effect.memory if isinstance(effect, msg.Remember) else self.memory

    def kill_9(self) -> None:
        self.memory = self.agent.memory()
        holdings, grants = self.agent.holdings, self.agent.ledger.gpus
        self.agent = self.new_agent()
        assert self.agent.holdings == holdings, "a record is lost, or another one"
        held = [{(g.holder, g.owner, g.num_bytes) for g in gpu.all_grants} for gpu in grants]
        assert [{(g.holder, g.owner, g.num_bytes) for g in gpu.all_grants} for gpu in self.agent.ledger.gpus] == held
        living = frozenset(i for i in holdings if self.random.random() < 0.7)
        self.send(msg.Recalled(living), msg.Recalled, None)


@pytest.mark.timeout(300)
def test_whatever_comes_a_record_obeys_its_row_and_every_pair_comes() -> None:
    seen: set[Pair] = set()
    for seed in range(NUM_WALKS):
        TableWalk(seed, seen, is_thorough=True).run()
        TableWalk(seed, set()).run()
    assert {f"{state} {kind.__name__}" for state, kind in TRIED - seen} == set()
    assert {state for state, _ in seen if state} == set(RULES)
    assert not seen - TRIED
