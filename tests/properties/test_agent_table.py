"""The agent's table, walked at random: whatever comes in whatever state, a record obeys its row, and what has no row is
refused with nothing changed. Nobody here is a consistent engine: outcomes come that nobody waits for, late and twice.

The walks are driven by the table itself, so that they reach all of it: `test_the_walks_exercise_every_pair` holds that.
"""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.controllers.agent.record import COMING, DORMANT, RULES, Holding, State
from glowplug.controllers.agent.table import STIMULI, TABLE
from glowplug.controllers.agent.transaction import InvalidTransition, Transition
from glowplug.controllers.effects import Tick
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import Worker
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance
from glowplug.memory.ledger import ByteLedger
from tests.agent_steps import NODE, CheckedAgent
from tests.fleet_builder import MIB, a_model, an_event

NUM_STEPS = 200
MODEL = a_model("one", weights_bytes=60 * MIB, kv_bytes=100 * MIB, max_concurrency=8)
ENGINES = {"emulated": EngineKind(name="emulated", abilities=frozenset({"prewarm", "swap", "stages"}))}
PARAMS = AgentParams(
    start_deadline_s=90,
    keep_gone_s=60,
    stop_retry_s=2,
    max_tick_gap_s=1000,
    reservation="paper",
    reservation_step_bytes=1,
    consolidate_deadline_s=5,
    consolidate_retry_s=1,
)
COMMANDS = (StartInstance, StopInstance, JoinStages, ConsolidateInstance, ResumeInstance)
INSIDE = (aw.GivesWay, aw.TakenOver, aw.RunsElsewhere)  # the controller makes them, of a start or of the store's rows
ENDS = (
    aw.EngineExited,
    aw.EngineOverLimit,
    aw.EngineStartFailed,
    aw.WeightsFailed,
    aw.StopAsked,
    aw.NodeStopping,
    aw.Recalled,
)
Pair = tuple[State | None, type]
ALL = {(state, stimulus) for state in [None, *State] for stimulus in STIMULI if state or stimulus is StartInstance}


class Walk:
    """One agent and what it is sent. `pairs` are those that it, and the walks before it, have come across."""

    def __init__(self, seed: int, pairs: set[Pair] | None = None) -> None:
        self.random, self.now_s, self.num_ids = Random(seed), 1000.0, 0
        self.memory: aw.AgentMemory | None = None
        self.pairs: set[Pair] = set() if pairs is None else pairs
        self.agent = self.new_agent()

    def new_agent(self) -> AgentController:
        CheckedAgent.seen = self.pairs
        ledger = ByteLedger([Gpu(gpu_id=f"{NODE}/{n}", total_bytes=900 * MIB) for n in range(2)])
        return CheckedAgent(NODE, ledger, ENGINES, params=PARAMS, memory=self.memory)

    def send(self, stimulus: Any, kind: type, addressee: Holding | None) -> None:
        """A stimulus of that kind for that record (None: for whoever it concerns)."""
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
            if isinstance(effect, aw.Remember):
                self.memory = msgspec.json.decode(msgspec.json.encode(effect.memory), type=aw.AgentMemory)
                assert self.memory == effect.memory, "what is written down reads otherwise"

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            record, chance = self.some(), self.random.random()
            if record is None or chance < 0.08:
                self.start()
            elif chance < 0.10:
                self.row_of_another_node(record)
            elif chance < 0.115:
                self.kill_9()
            else:
                self.send_to(record, self.random.choice(self.kinds(record)))
        self.send(aw.NodeStopping("bye", 1.0), aw.NodeStopping, None)

    def kinds(self, record: Holding) -> list[type]:
        """What leads on, most often; else what has not been tried there, what has a row there, or whatever there is."""
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
        """A record, most often one that is not over, or whose state has been tried least."""
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
        elif kind is aw.Recalled:
            if (record.state, kind) not in self.pairs:
                self.kill_9()
        elif kind is aw.NodeStopping:
            if (record.state, kind) not in self.pairs:
                self.send(aw.NodeStopping("bye", 1.0), kind, None)
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
            given["becomes"] = self.random.choice(("stopped", "prewarmed", "swapped_out", "swapped_out"))
        return an_event(kind(**given), issuer="placer-1")

    def outcome(self, record: Holding, kind: type) -> Any:
        i = record.instance.instance_id
        given: dict[type, tuple[Any, ...]] = {
            aw.WeightsComplete: ("/w",),
            aw.WeightsFailed: ("weights_unavailable", "gone"),
            aw.EngineReady: ("http://e",),
            aw.EngineStartFailed: ("engine_failed", "broken"),
            aw.EngineExited: ("killed",),
            aw.EngineOverLimit: ("too big",),
            aw.ConsolidationFailed: ("broken",),
            aw.HealthSeen: self.random.choice(((True,),) * 9 + ((False,), (False, False))),
            aw.InFlight: self.random.choice(((0,), (2, 20 * MIB), (3, 90 * MIB))),
            aw.EngineGone: (self.random.random() < 0.7,),
            aw.StopAsked: ("an operator", self.random.choice((0.0, 5.0))),
        }
        return kind(i, *given.get(kind, ()))

    def start(self, known: str = "") -> None:
        kind = self.random.choice(("plain", "replica", "replica", "first", "first", "later", "grow", "grow"))
        self.num_ids += 1
        i = known or f"i-{self.num_ids}"
        gpu = f"{NODE}/{self.random.randrange(2)}"
        sources = [h for h in self.agent.holdings.values() if h.state in (*COMING, *DORMANT) and h.instance.replica]
        sources += [h for h in self.agent.holdings.values() if h.state is State.SWAPPED_OUT or not h.shares]
        source = ""
        if kind == "grow" and sources:
            chosen = self.random.choice(sources).instance
            source, gpu = chosen.instance_id, chosen.gpu_id
        own = (Worker(worker_id=f"{i}-0", node_id=NODE, gpu_id=gpu, num_bytes=0),)
        far = (replace(own[0], node_id="node-2", gpu_id="node-2/0"),) if kind == "first" else ()
        command = StartInstance(
            target=NODE,
            instance_id=i,
            model=MODEL,
            workers=own + far,
            decision_id="d",
            source=source,
            drops=tuple(d for d in self.agent.holdings if self.random.random() < 0.1),
            replica=kind == "replica",
            part_of="p-1" if kind == "later" else "",
            num_stages=2 if kind in ("first", "later") else 1,
            stage=int(kind == "later"),
        )
        self.send(an_event(command, issuer="placer-1"), StartInstance, self.agent.holdings.get(i))

    def row_of_another_node(self, record: Holding) -> None:
        """The store says that another node was given the instance later. It is said again at each reading."""
        other = Worker(worker_id="w", node_id="node-2", gpu_id="node-2/0", num_bytes=1)
        theirs = replace(record.instance, workers=(other,), created_at=record.instance.created_at + 1)
        rows = {h.instance.instance_id: h.instance for h in self.agent.holdings.values()}
        self.agent.restore("instances", rows | {record.instance.instance_id: theirs}, self.now_s)
        for effect in self.agent.handle(Tick(), self.now_s):
            self.memory = effect.memory if isinstance(effect, aw.Remember) else self.memory

    def kill_9(self) -> None:
        """The agent is killed and takes up what it had written down: every record, with the bytes that it held."""
        self.memory = self.agent.memory()
        holdings, grants = self.agent.holdings, self.agent.ledger.gpus
        self.agent = self.new_agent()
        assert self.agent.holdings == holdings, "a record is lost, or another one"
        held = [{(g.holder, g.owner, g.num_bytes) for g in gpu.grants} for gpu in grants]
        assert [{(g.holder, g.owner, g.num_bytes) for g in gpu.grants} for gpu in self.agent.ledger.gpus] == held
        living = frozenset(i for i in holdings if self.random.random() < 0.7)
        self.send(aw.Recalled(living), aw.Recalled, None)


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_comes_a_record_obeys_its_row(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    assert walk.pairs


UNREACHED: dict[Pair, str] = {
    (State.LOST, aw.RunsElsewhere): "the controller asks no further about what it has given up"
}


@pytest.mark.timeout(300)
def test_the_walks_exercise_every_pair() -> None:
    """Every state with every stimulus: those that have a row, and those that are refused. What the controller itself
    makes, it never makes where it has no row."""
    seen: set[Pair] = set()
    never = {(state, kind) for state, kind in ALL if kind in INSIDE and (state, kind) not in TABLE}
    for seed in range(600):
        if not (left := ALL - seen - never - UNREACHED.keys()):
            break
        Walk(seed, seen).run()
    assert {f"{state} {kind.__name__}" for state, kind in left} == set()
    assert {state for state, _ in seen if state} == set(RULES)
    assert not seen & (never | UNREACHED.keys())
