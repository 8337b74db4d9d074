"""Words of the router's scripts, beside a leader's.

ask TICKET MODEL [FIELD=VALUE ...]        a request arrives (RequestArrived)
end TICKET ...                            answers are over, each after a second
sent                                      the router's own load report
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from glowplug.controllers.reads import Reads
from glowplug.controllers.router import messages
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from glowplug.controllers.router.reads import READS
from glowplug.domain.instance import Instance, InstanceState
from glowplug.policies.registry import choose
from glowplug.policies.systems import UNION
from tests.golden import leader


class Script(leader.Script):
    stimuli: ClassVar[Sequence[Any]] = (messages,)
    reads: ClassVar[Reads] = READS

    def make(self) -> RouterController:
        routing, fairness = (choose(kind, UNION.policies[kind]) for kind in ("routing", "fairness"))
        return RouterController(self.built(RouterParams, self.params), routing, fairness, priors={})

    def put(self, instance_id: str, state: InstanceState, words: Sequence[str]) -> Instance:
        is_known = instance_id in self.plane.store.get("instances", {})
        given = [] if is_known or any(word.startswith("url=") for word in words) else [f"url=http://{instance_id}"]
        row = super().put(instance_id, state, [*words, *given])
        self.plane.given.append(row)
        return row

    def do_ask(self, ticket: str, model: str, *words: str) -> None:
        given = {"ticket": int(ticket), "name": model, "request_id": f"r-{ticket}"}
        self.plane.give(self.built(messages.RequestArrived, words, given))

    def do_end(self, *tickets: str) -> None:
        for ticket in tickets:
            self.plane.give(messages.RequestEnded(int(ticket), 1.0, 10))

    def do_sent(self) -> None:
        for key, load in self.plane.controller.loads().items():
            self.plane.say(f"{key}: {self.plane.words(load)}")
