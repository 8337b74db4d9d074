"""Candidates for one lease under a hostile clock.

At every moment at most one may act, and each term's epoch exceeds the one before.
"""

import random
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from glowplug.controllers.election import Ask, Change, Election
from glowplug.domain.lease import Lease
from glowplug.state.memory_store import MemoryStore
from glowplug_lab.simulator.kernel import Kernel
from tests.simulation.seeds import seeds

SEEDS = seeds()
LEASE_S = 3.0


def now_of(answer: Coroutine[Any, Any, Lease]) -> Lease:
    try:
        answer.send(None)
    except StopIteration as done:
        lease: Lease = done.value
        return lease
    raise AssertionError("a memory store waited")


@dataclass
class Candidate:
    name: str
    rate: float  # of its clock
    election: Election = field(init=False)
    paused_until: float = 0.0
    dead: bool = False

    def __post_init__(self) -> None:
        self.election = Election(self.name, LEASE_S)


class World:
    """It answers after random delays."""

    def __init__(self, seed: int, num: int = 3, *, drift: float = 0.03, slow_s: float = 0.3) -> None:
        self.random, self.kernel, self._slow_s = random.Random(seed), Kernel(100.0), slow_s
        self.store, self.down_until = MemoryStore(clock=lambda: self.now), 0.0
        self.terms: list[tuple[float, str, int]] = []  # when, who, epoch
        self.ends: list[tuple[float, str]] = []
        self.may_be_two = False
        self.loss = 0.02  # of the answers; a few lost in a row end a term
        self.all = [Candidate(f"c-{k}", 1 + self.random.uniform(-drift, drift)) for k in range(num)]
        for candidate in self.all:
            self.goes_on(self.lives(candidate))

    @property
    def now(self) -> float:
        return self.kernel.now_s

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due_s := self.kernel.next_s) is not None and due_s <= end:
            self.kernel.step()
            self.check()
        self.kernel.run(end)
        self.check()

    def clock(self, candidate: Candidate) -> float:
        return self.now * candidate.rate

    def acting(self) -> list[Candidate]:
        return [c for c in self.all if not c.dead and c.election.may_act(self.clock(c))]

    def check(self) -> None:
        assert self.may_be_two or len(self.acting()) <= 1, f"{[c.name for c in self.acting()]} may act at once"
        epochs = [epoch for _, _, epoch in self.terms]
        assert len(epochs) == len(set(epochs)), epochs
        assert self.may_be_two or epochs == sorted(epochs), epochs

    def goes_on(self, process: Iterator[float]) -> None:
        if (delay_s := next(process, None)) is not None:
            self.kernel.after(delay_s, self.goes_on, process)

    def lives(self, candidate: Candidate) -> Iterator[float]:
        election = candidate.election
        yield self.random.random()
        while (yield from self.awake(candidate)):
            asked_at = self.clock(candidate)
            self.changed(candidate, election.passed(asked_at))
            ask = election.ask(asked_at)
            yield self.random.uniform(0, self._slow_s)
            lease = self.at_the_store(candidate, ask)
            yield self.random.uniform(0, self._slow_s)
            if not (yield from self.awake(candidate)):
                return
            was, now = election.epoch, self.clock(candidate)
            change = election.passed(now)
            self.changed(candidate, change)
            if change is Change.NONE:
                change = election.failed(now) if lease is None else election.answered(ask, lease, asked_at, now)
                self.changed(candidate, change)
            assert change is not Change.LEAD or election.epoch > was
            yield election.wait_s(now) / candidate.rate

    def awake(self, candidate: Candidate) -> Generator[float, None, bool]:
        """Returns whether it lives."""
        while not candidate.dead and self.now < candidate.paused_until:
            yield candidate.paused_until - self.now + 0.001
        return not candidate.dead

    def at_the_store(self, candidate: Candidate, ask: Ask) -> Lease | None:
        lease, election = None, candidate.election
        if self.now >= self.down_until:
            calls = {
                Ask.SEE: lambda: self.store.see_lease("placer", election.highest_epoch),
                Ask.TAKE: lambda: self.store.take_lease("placer", candidate.name, "", LEASE_S),
                Ask.KEEP: lambda: self.store.keep_lease("placer", candidate.name, election.epoch, "", LEASE_S),
            }
            lease = now_of(calls[ask]())
        return None if self.random.random() < self.loss else lease

    def changed(self, candidate: Candidate, change: Change) -> None:
        if change is Change.LEAD:
            self.terms.append((self.now, candidate.name, candidate.election.epoch))
        elif change is Change.STEP_DOWN:
            self.ends.append((self.now, candidate.name))

    def leader(self) -> Candidate:
        (acting,) = self.acting()
        return acting


def harm(world: World, kinds: list[str], seconds: float) -> None:
    chance, end = world.random, world.now + seconds

    def once() -> None:
        victim, kind = chance.choice(world.all), chance.choice(kinds)
        if "pause" in kind:
            victim.paused_until = world.now + chance.uniform(0.5, 4 * LEASE_S)
        if kind == "outage":
            world.down_until = world.now + chance.uniform(0.1, 3 * LEASE_S)
        if "empty" in kind:
            world.store.empty()
        if world.now < end:
            world.kernel.after(chance.expovariate(1 / 5), once)

    world.kernel.after(2.0, once)
    world.run(seconds + 30.0)
    world.loss = 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_never_two_whatever_happens_and_one_again_when_it_is_over(seed: int) -> None:
    world = World(seed)
    harm(world, ["pause", "outage"], 300.0)
    world.run(10 * LEASE_S)
    assert len(world.acting()) == 1 and len(world.terms) > 3, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_emptied_store_and_a_pause_at_once_end_with_one_leader_and_a_new_epoch(seed: int) -> None:
    """Such a store cannot keep two apart: the epochs do, and time ends it."""
    world = World(seed)
    world.may_be_two = True
    harm(world, ["pause", "outage", "empty", "empty and pause"], 300.0)
    world.run(10 * LEASE_S)
    assert len(world.acting()) == 1, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dead_leader_is_replaced_within_a_lease_and_a_little(seed: int) -> None:
    world = World(seed, num=2, slow_s=0.02)
    world.run(10.0)
    assert len(world.terms) == 1 and world.ends == []
    world.leader().dead = True
    died_at = world.now
    world.run(3 * LEASE_S)
    taken_at = world.terms[-1][0]
    assert len(world.terms) == 2 and taken_at - died_at < LEASE_S * 1.1 + 0.2, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leader_in_calm_leads_for_ever(seed: int) -> None:
    world = World(seed, slow_s=0.02)
    world.run(600.0)
    assert len(world.terms) == 1, f"seed {seed}: {world.terms}"


@pytest.mark.parametrize("seed", SEEDS)
def test_an_emptied_store_leaves_the_lead_where_it_was(seed: int) -> None:
    world = World(seed, slow_s=0.02)
    world.run(10.0)
    before = world.leader()
    for _ in range(5):
        world.run(world.random.uniform(LEASE_S, 3 * LEASE_S))
        world.store.empty()
    world.run(10.0)
    assert world.leader() is before and len(world.terms) == 1, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_paused_leader_may_not_act_when_it_wakes_up(seed: int) -> None:
    world = World(seed, num=2, slow_s=0.02)
    world.run(10.0)
    old = world.leader()
    old.paused_until = world.now + 2 * LEASE_S
    world.run(2 * LEASE_S)
    assert not old.election.may_act(world.clock(old)) and old.election.leads  # it does not know yet
    assert world.leader() is not old
    world.run(10.0)
    assert not old.election.leads and world.ends[-1][1] == old.name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_short_outage_of_the_store_changes_nothing_a_long_one_ends_the_term(seed: int) -> None:
    world = World(seed, num=2, slow_s=0.02)
    world.run(10.0)
    world.down_until = world.now + LEASE_S / 3
    world.run(10.0)
    assert len(world.terms) == 1 and world.ends == [], f"seed {seed}"
    world.down_until = world.now + 3 * LEASE_S
    world.run(2 * LEASE_S)
    assert world.acting() == [] and len(world.ends) == 1
    world.run(3 * LEASE_S)
    assert len(world.acting()) == 1 and len(world.terms) == 2, f"seed {seed}"
