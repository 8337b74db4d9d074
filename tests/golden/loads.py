"""Words about load in scripts of controllers that read the routers' reports."""

from collections.abc import Mapping
from typing import Any

from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RouterLoadReported


class Loads:
    """`load ROUTER MODEL=RUNNING[+WAITING][:ID*NUM,...] ...`, a router's whole report. Instances that are named run
    the requests, one each without a number. A model is active while it has requests, and when its last one ends."""

    plane: Any

    def do_load(self, router_id: str, *words: str) -> None:
        self.plane.event(RouterLoadReported(router_id=router_id, loads=dict(map(self._load, words))), issuer=router_id)

    def _load(self, word: str) -> tuple[str, ModelLoad]:
        key, _, load = word.partition("=")
        numbers, _, busy = load.partition(":")
        running, _, waiting = numbers.partition("+")
        num = int(running) + int(waiting or 0)
        active: dict[str, tuple[int, float]] = self.__dict__.setdefault("active", {})
        before, at = active.get(key, (0, 0.0))
        active[key] = num, self.plane.now_s if num or before else at
        each: Mapping[str, int] = {
            name: int(share or 1) for name, _, share in (one.partition("*") for one in busy.split(",") if one)
        }
        return key, ModelLoad(
            num_waiting=int(waiting or 0), num_in_flight=int(running), in_flight_by_instance=each,
            last_active_at=active[key][1],
        )  # fmt: skip
