"""An owner, engines and an agent as processes, with random requests and kills: `python -m tests.memory_processes SEED
OPERATIONS`.

A model tracks the holders of all chunks. After each kill and every few steps the owner must agree with it; a restarted
owner must know all chunks of living engines, and a restarted agent must find the same ledger.
"""

import ctypes
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.memory.ledger import ByteLedger
from glowplug_lab.gpu_slots.copies import Copier
from glowplug_lab.gpu_slots.gpu_memory import Access, GpuError, OutOfGpuMemory
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.owner import Owner
from glowplug_lab.gpu_slots.owner_client import OwnerClient, OwnerGone
from glowplug_lab.gpu_slots.peers import receive, send
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import Source, prewarm
from tests.waiting import WAIT_S

CHUNK = 4096
NUM_CHUNKS = 64
MOST_WEIGHTS = 12
NUM_ENGINES = 4
KILL_EVERY = 40  # operations, on average
_BYTES = random.Random(11).randbytes(MOST_WEIGHTS * CHUNK + 256)


def weights_of(name: str, num_chunks: int) -> bytes:
    seed = int(name) % 256
    return _BYTES[seed : seed + num_chunks * CHUNK]


class Engine:
    """Slots have own or attached weights, each with a KV cache."""

    def __init__(self, path: Path) -> None:
        self.memory = HostMemory(CHUNK, CHUNK)  # it creates none itself
        self.client = OwnerClient(self.memory, path, WAIT_S)
        self.copier = Copier(self.memory)
        self.slots: dict[str, Slot] = {}
        self.marks: dict[str, bytes] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": getattr(self, asked.pop("verb"))(**asked)}
        except OutOfGpuMemory:
            return {"full": True}
        except OwnerGone:
            return {"lost": True}
        except GpuError as error:
            return {"refused": str(error)}

    def load(self, name: str, num_chunks: int) -> None:
        data = weights_of(name, num_chunks)
        source = ctypes.create_string_buffer(data, len(data))
        slot = Slot(self.memory, name, NUM_CHUNKS * CHUNK)
        try:
            prewarm(slot, Source(ctypes.addressof(source), len(data), lambda: len(data)), self.client, self.copier)
            slot.protect(Access.READ)
            self.client.publish(name, self.client.held[-num_chunks:], len(data))
        except (OutOfGpuMemory, OwnerGone):
            if chunks := slot.close():
                self.client.give(name, chunks)
            raise
        self.slots[name] = slot

    def attach(self, name: str) -> None:
        chunks, num_bytes = self.client.attach(name)
        slot = Slot(self.memory, name, NUM_CHUNKS * CHUNK)
        slot.grow(chunks, Access.READ)
        slot.num_weight_chunks = len(chunks)
        self.slots[name] = slot
        assert num_bytes == len(chunks) * CHUNK
        self.check()

    def grow(self, name: str, num_chunks: int) -> None:
        slot = self.slots[name]
        slot.grow(self.client.take(name, num_chunks))
        self.marks.setdefault(name, name.encode().ljust(8))
        mark = ctypes.create_string_buffer(self.marks[name], 8)
        self.memory.copy_in(slot.address + slot.weights_end, ctypes.addressof(mark), 8)

    def cut(self, name: str) -> None:
        slot = self.slots[name]
        self.marks.pop(name, None)
        self.client.give(name, slot.cut(slot.num_weight_chunks))

    def drop(self, name: str) -> None:
        self.marks.pop(name, None)
        self.client.give(name, self.slots.pop(name).close())

    def check(self) -> None:
        for name, slot in self.slots.items():
            got = ctypes.create_string_buffer(slot.weights_end)
            self.memory.copy_out(ctypes.addressof(got), slot.address, slot.weights_end)
            assert got.raw == weights_of(name, slot.num_weight_chunks), f"weights of {name} have changed"
            if mark := self.marks.get(name):
                self.memory.copy_out(ctypes.addressof(got), slot.address + slot.weights_end, 8)
                assert got.raw[:8] == mark, f"KV cache of {name} has changed"

    def rejoin(self) -> None:
        self.client.rejoin()
        self.check()


class Agent:
    def __init__(self, path: Path) -> None:
        self.client = OwnerClient(HostMemory(CHUNK, CHUNK), path, WAIT_S)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Bytes by pid (and "shared") and free bytes of a new ledger, and the owner's free chunks."""
        said = self._holdings()
        ledger = ByteLedger([Gpu(gpu_id="n/0", total_bytes=NUM_CHUNKS * CHUNK)])
        for one in said["holders"]:
            if one["num_chunks_alone"]:
                kv = {"n/0": {GrantOwner.KV: one["num_chunks_alone"] * CHUNK}}
                ledger.exchange((), str(one["pid"]), kv)
        if said["num_shared"]:
            ledger.exchange((), "shared", {"n/0": {GrantOwner.WEIGHTS: said["num_shared"] * CHUNK}})
        held = {holder: ledger.held_bytes(holder) for holder in ledger.holders}
        return {"ok": held, "free": ledger.gpus[0].free_bytes, "num_free": said["num_free"]}

    def _holdings(self) -> dict[str, Any]:
        try:
            return self.client.holdings()
        except OwnerGone:
            self.client.rejoin()
            return self.client.holdings()


@dataclass
class Process:
    pid: int
    socket: socket.socket

    def ask(self, **asked: Any) -> dict[str, Any]:
        send(self.socket, asked)
        return receive(self.socket)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.socket.close()


def start(make: Callable[[], Any]) -> Process:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        ours.settimeout(30)
        assert receive(ours) == {"ok": "up"}  # the child has joined the owner, which may be killed from now on
        return Process(pid, ours)
    try:  # the child never returns into the parent's code
        ours.close()
        served = make()
        send(theirs, {"ok": "up"})
        while True:
            send(theirs, served.answer(receive(theirs)))
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)


@dataclass
class Fleet:
    folder: Path
    done: Counter[str] = field(default_factory=Counter)
    engines: dict[int, Process] = field(default_factory=dict)
    weights: dict[int, set[str]] = field(default_factory=dict)  # engine -> names in its slots
    kv: dict[int, dict[str, int]] = field(default_factory=dict)  # engine -> name -> chunks
    sizes: dict[str, int] = field(default_factory=dict)  # name -> chunks
    next_name: int = 0

    def __post_init__(self) -> None:
        self.path = self.folder / "owner.sock"
        self.owner = self._start_owner()
        self.agent = start(lambda: Agent(self.path))
        for number in range(NUM_ENGINES):
            self._start_engine(number)

    def close(self) -> None:
        for process in (*self.engines.values(), self.agent):
            process.kill()
        self._end_owner()

    @property
    def num_held(self) -> int:
        return sum(self.sizes[name] for name in self.published) + sum(sum(of.values()) for of in self.kv.values())

    @property
    def published(self) -> set[str]:
        return set().union(*self.weights.values())

    def step(self, chance: random.Random) -> None:
        number = chance.randrange(NUM_ENGINES)
        if chance.randrange(KILL_EVERY) == 0:
            chance.choice([self._kill_owner, self._kill_agent, self._kill_engine])(number, chance)
            self._check()
            return
        verb = chance.choice(["load", "attach", "attach", "grow", "cut", "drop", "drop", "check"])
        {
            "load": self._load,
            "attach": self._attach,
            "grow": self._grow,
            "cut": self._cut,
            "drop": self._drop,
            "check": self._compare,
        }[verb](number, chance)
        self.done[verb] += 1
        if self.done.total() % 8 == 0:
            self._check()

    def _load(self, number: int, chance: random.Random) -> None:
        name, num_chunks = str(self.next_name), chance.randint(1, MOST_WEIGHTS)
        self.next_name += 1
        if self._asked(number, num_chunks, verb="load", name=name, num_chunks=num_chunks):
            self.weights[number].add(name)
            self.sizes[name] = num_chunks

    def _attach(self, number: int, chance: random.Random) -> None:
        there = sorted(self.published - self.weights[number])
        name = chance.choice(there) if there else "999999"
        answer = self.engines[number].ask(verb="attach", name=name)
        assert ("ok" in answer) == bool(there), answer
        if there:
            self.weights[number].add(name)

    def _grow(self, number: int, chance: random.Random) -> None:
        if not self.weights[number]:
            return
        name, num_chunks = chance.choice(sorted(self.weights[number])), chance.randint(1, 12)
        if self._asked(number, num_chunks, verb="grow", name=name, num_chunks=num_chunks):
            self.kv[number][name] = self.kv[number].get(name, 0) + num_chunks

    def _cut(self, number: int, chance: random.Random) -> None:
        if self.kv[number]:
            name = chance.choice(sorted(self.kv[number]))
            self._asked(number, 0, verb="cut", name=name)
            del self.kv[number][name]

    def _drop(self, number: int, chance: random.Random) -> None:
        if self.weights[number]:
            name = chance.choice(sorted(self.weights[number]))
            self._asked(number, 0, verb="drop", name=name)
            self.weights[number].discard(name)
            self.kv[number].pop(name, None)

    def _compare(self, number: int, _: random.Random | None = None) -> None:
        answer = self.engines[number].ask(verb="check")
        assert answer == {"ok": None}, (number, answer)

    def _kill_engine(self, number: int, chance: random.Random) -> None:
        if chance.random() < 0.5:
            send(self.engines[number].socket, {"verb": "load", "name": str(self.next_name), "num_chunks": 5})
            self.next_name += 1
            time.sleep(chance.random() * 0.002)
        self.engines[number].kill()
        self._start_engine(number)
        self.done["engines killed"] += 1

    def _kill_agent(self, number: int, chance: random.Random) -> None:
        self.agent.kill()
        self.agent = start(lambda: Agent(self.path))
        self.done["agents killed"] += 1

    def _kill_owner(self, number: int, chance: random.Random) -> None:
        """Kill it at rest or in mid-request. Engines live on, find the new owner and report their chunks."""
        if chance.random() < 0.5:
            self._lose_owner(number, chance)
        self._end_owner()
        for number in self.engines:
            self._compare(number)
        self.owner = self._start_owner()
        for number in chance.sample(sorted(self.engines), NUM_ENGINES):
            assert self.engines[number].ask(verb="rejoin") == {"ok": None}, number
        self.done["owners killed"] += 1

    def _lose_owner(self, number: int, chance: random.Random) -> None:
        """Kill it in an engine's request. The engine must report whether that took effect; released chunks stay
        released."""
        engine, kv = self.engines[number], self.kv[number]
        if kv and chance.random() < 0.5:
            asked = {"verb": "cut", "name": chance.choice(sorted(kv))}
        else:
            asked = {"verb": "load", "name": str(self.next_name), "num_chunks": chance.randint(1, MOST_WEIGHTS)}
            self.next_name += 1
        send(engine.socket, asked)
        time.sleep(chance.random() * 0.001)
        self._end_owner()
        answer = receive(engine.socket)
        if asked["verb"] == "cut":
            assert answer in ({"ok": None}, {"lost": True}), answer
            del kv[asked["name"]]
        elif answer == {"ok": None}:
            self.weights[number].add(asked["name"])
            self.sizes[asked["name"]] = asked["num_chunks"]
        self.done["requests lost"] += answer == {"lost": True}

    def _end_owner(self) -> None:
        if self.owner:
            os.kill(self.owner, signal.SIGKILL)
            os.waitpid(self.owner, 0)
        self.owner = 0

    def _asked(self, number: int, needs: int, **asked: Any) -> bool:
        """The request must succeed exactly if there is memory. Returns whether it did."""
        answer = self.engines[number].ask(**asked)
        fits = needs <= NUM_CHUNKS - self.num_held
        assert answer == ({"ok": None} if fits else {"full": True}), (answer, asked, self.num_held)
        self.done["full"] += not fits
        return fits

    def _check(self) -> None:
        wanted = (NUM_CHUNKS - self.num_held) * CHUNK
        alone = {str(self.engines[n].pid): self._num_alone(n) * CHUNK for n in self.engines if self._num_alone(n)}
        deadline = time.monotonic() + WAIT_S
        while True:
            said = self.agent.ask()
            held = {pid: num for pid, num in said["ok"].items() if pid != "shared"}
            if said["free"] == said["num_free"] * CHUNK == wanted and held == alone:
                return
            assert time.monotonic() < deadline, (said, wanted, alone)
            time.sleep(0.002)

    def _num_alone(self, number: int) -> int:
        others = set().union(*(names for other, names in self.weights.items() if other != number))
        alone = sum(self.sizes[name] for name in self.weights[number] - others)
        return alone + sum(self.kv[number].values())

    def _start_engine(self, number: int) -> None:
        self.engines[number] = start(lambda: Engine(self.path))
        self.weights[number], self.kv[number] = set(), {}

    def _start_owner(self) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            Owner(HostMemory(NUM_CHUNKS * CHUNK, CHUNK), NUM_CHUNKS, self.path).serve()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(1)


def run(seed: int, num_operations: int) -> dict[str, int]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gp-memory-") as folder:
        fleet = Fleet(Path(folder))
        try:
            for _ in range(num_operations):
                fleet.step(chance)
        finally:
            fleet.close()
    return dict(fleet.done)


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]))))
