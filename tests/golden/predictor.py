"""Words of the predictor's scripts.

policy NAME                                    of the kind `prediction`; without one nothing is forecast
capacity MODEL FIELD=VALUE ...                 of one instance, measured elsewhere
load ROUTER MODEL=RUNNING[:INSTANCE,...] ...   a router's report, with the instances that are busy
ended MODEL [FIELD=VALUE ...]                  a request ends
serve MODEL COUNT EVERY_S                      COUNT requests end, one each EVERY_S, which take 2.5 s
windows MODEL, past MODEL, models              its windows, the forecasts of closed ones; all with windows
elect                                          a standby takes over
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RequestFinished, RouterLoadReported, RouterRequestsFinished
from glowplug.fleet.throughput import Capacity
from glowplug.policies.prediction.baselines import Nothing
from glowplug.policies.registry import choose
from tests.golden import one


class Script(one.Script):
    policy = ""
    given: Mapping[str, Capacity] = {}
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "RequestFinished": {
            "request_id": "r", "router_id": "router-1", "instance_id": "i-1", "status": 200, "arrived_at": 0.0,
            "finished_at": 1.5, "queue_s": 0.0, "ttft_s": 0.5, "e2e_s": 1.5, "prompt_tokens": 600,
            "response_tokens": 21, "tokens_exact": True, "cold": False,
        },
    }  # fmt: skip

    def declare_policy(self, name: str) -> None:
        self.policy = name

    def declare_capacity(self, model_key: str, *words: str) -> None:
        self.given = {model_key: self.built(Capacity, words)}

    def make(self) -> PredictorController:
        make = choose("prediction", self.policy) if self.policy else Nothing
        return PredictorController(self.built(PredictorParams, self.params), make, capacities=self.given)

    def begin(self) -> None:
        self.plane.restore("models")

    def do_load(self, router_id: str, *words: str) -> None:
        self.plane.event(RouterLoadReported(router_id=router_id, loads=dict(map(_load, words))))

    def do_ended(self, model_key: str, *words: str) -> None:
        ended = self.built(RequestFinished, words, {"model_key": model_key})
        self.plane.event(RouterRequestsFinished(router_id="router-1", requests=(ended,)))

    def do_serve(self, model_key: str, count: str, every_s: str) -> None:
        for _ in range(int(count)):
            self.plane.now_s += float(every_s)
            arrived_at = self.plane.now_s - 2.5
            self.do_ended(model_key, f"arrived_at={arrived_at}", f"finished_at={self.plane.now_s}", "e2e_s=2.5")

    def do_models(self) -> None:
        self.plane.say(self.plane.text(self.plane.controller.model_keys))

    def do_windows(self, model_key: str) -> None:
        for window in self.plane.controller.windows(model_key):
            self.plane.say(self.plane.words(window))

    def do_past(self, model_key: str) -> None:
        for forecast in self.plane.controller.past_forecasts(model_key):
            self.plane.say(self.plane.words(forecast))

    def do_elect(self) -> None:
        successor = self.make()
        successor.inherit(self.plane.controller, self.plane.now_s)
        self.plane.replaced_by(successor)


def _load(word: str) -> tuple[str, ModelLoad]:
    key, _, load = word.partition("=")
    running, _, busy = load.partition(":")
    ids = busy.split(",") if busy else ["i-1"] * (int(running) > 0)
    return key, ModelLoad(num_in_flight=int(running), in_flight_by_instance=dict.fromkeys(ids, 1))
