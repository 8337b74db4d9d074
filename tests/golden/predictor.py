"""Words of the predictor's scripts.

policy NAME                               of the kind `prediction`; without one nothing is forecast
load ROUTER MODEL=RUNNING[+WAITING][:ID,...] ...   a router's report, with the instances that are busy
ended MODEL [FIELD=VALUE ...]             a request ends
windows MODEL, past MODEL                 its windows, the forecasts of closed ones
elect                                     a standby takes over
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RequestFinished, RouterLoadReported, RouterRequestsFinished
from glowplug.policies.prediction.baselines import Nothing
from glowplug.policies.registry import choose
from tests.golden import one


class Script(one.Script):
    policy = ""
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "RequestFinished": {
            "request_id": "r", "router_id": "router-1", "instance_id": "i-1", "status": 200, "arrived_at": 0.0,
            "finished_at": 1.5, "queue_s": 0.0, "ttft_s": 0.5, "e2e_s": 1.5, "prompt_tokens": 600,
            "response_tokens": 21, "tokens_exact": True, "cold": False,
        },
    }  # fmt: skip

    def declare_policy(self, name: str) -> None:
        self.policy = name

    def make(self) -> PredictorController:
        make = choose("prediction", self.policy) if self.policy else Nothing
        return PredictorController(self.built(PredictorParams, self.params), make)

    def begin(self) -> None:
        self.plane.restore("models")

    def do_load(self, router_id: str, *words: str) -> None:
        self.plane.event(RouterLoadReported(router_id=router_id, loads=dict(map(self._load, words))))

    def _load(self, word: str) -> tuple[str, ModelLoad]:
        key, _, load = word.partition("=")
        numbers, _, busy = load.partition(":")
        running, _, waiting = numbers.partition("+")
        num = int(running)
        ids = busy.split(",") if busy else ["i-1"] * (num > 0)
        each = dict.fromkeys(ids, 1)
        return key, ModelLoad(num_waiting=int(waiting or 0), num_in_flight=num, in_flight_by_instance=each)

    def do_ended(self, model_key: str, *words: str, count: int = 1) -> None:
        one_request = self.built(RequestFinished, words, {"model_key": model_key})
        self.plane.event(RouterRequestsFinished(router_id="router-1", requests=(one_request,) * count))

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
