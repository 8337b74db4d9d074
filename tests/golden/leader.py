"""Words of the scripts of controllers that one process of several leads, and that read the routers' load.

load ROUTER MODEL=RUNNING[+WAITING][:ID*NUM,...] ...   a report of all models, with the instances that are busy
model NAME FIELD=VALUE ...                it is declared anew, for the commands that follow
late TABLE                                the controller reads a table as it was before the last command
restart, elect                            a new process reads the store; a standby takes over
A model is active while it has requests, and when its last one ends. A row is created when it is first named, and READY
since it is.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from glowplug.controllers.reads import Reads
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RouterLoadReported
from tests.golden import one


class Script(one.Script):
    begin_s: ClassVar[float] = 100.0
    reads: ClassVar[Reads]
    epoch = 1

    def begin(self) -> None:
        self.active: dict[str, tuple[int, float]] = {}
        for table in self.reads.tables:
            self.plane.restore(table)

    def run(self, command: str) -> list[str]:
        if not command.startswith("late "):
            self.earlier = {table: dict(rows) for table, rows in self.plane.store.items()}
        return super().run(command)

    def put(self, instance_id: str, state: InstanceState, words: Sequence[str]) -> Instance:
        now, before = self.plane.now_s, self.plane.store.get("instances", {}).get(instance_id)
        is_first = {
            "created_at": before is None,
            "ready_at": state is InstanceState.READY and (before is None or not before.ready_at),
        }
        given = [f"{name}={now}" for name, first in is_first.items() if first and not any(name in w for w in words)]
        return super().put(instance_id, state, [*words, *given])

    def do_load(self, router_id: str, *words: str) -> None:
        self.plane.event(RouterLoadReported(router_id=router_id, loads=dict(map(self._load, words))), issuer=router_id)

    def do_model(self, name: str, *words: str) -> None:
        self.declare_model(name, *words)

    def do_late(self, table: str) -> None:
        self.plane.restore(table, self.earlier[table])

    def do_restart(self) -> None:
        self.epoch += 1
        self.plane.replaced_by(self.make())
        self._read()

    def do_elect(self) -> None:
        self.epoch += 1
        successor: Any = self.make()
        successor.inherit(self.plane.controller, self.plane.now_s)
        self.plane.replaced_by(successor)
        self._read()

    def _read(self) -> None:
        for table in self.reads.tables:
            self.plane.restore(table)

    def _load(self, word: str) -> tuple[str, ModelLoad]:
        key, _, load = word.partition("=")
        numbers, _, busy = load.partition(":")
        running, _, waiting = numbers.partition("+")
        num = int(running) + int(waiting or 0)
        before, at = self.active.get(key, (0, 0.0))
        self.active[key] = num, self.plane.now_s if num or before else at
        each = {name: int(share or 1) for name, _, share in (one.partition("*") for one in busy.split(",") if one)}
        return key, ModelLoad(
            num_waiting=int(waiting or 0),
            num_in_flight=int(running),
            in_flight_by_instance=each,
            last_active_at=self.active[key][1],
        )
