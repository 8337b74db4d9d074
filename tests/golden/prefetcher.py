"""Words of the prefetcher's scripts. Weights are named as their digests, and are the model's of that name, if any.

RegionsFound, UseRegion ...   messages.py
held WEIGHTS                  why they must stay
placed                        where weights lie
restart                       another process, without memory
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from glowplug.controllers.prefetcher import messages
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.model import WeightsRef
from tests.golden import one
from tests.golden.one import NODE


class Script(one.Script):
    stimuli: ClassVar[Sequence[Any]] = (messages,)
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "FetchWeights": {"target": NODE},
        "DropWeights": {"target": NODE, "reason": "asked"},
        "DropAsked": {"reason": "asked"},
    }

    def make(self) -> PrefetcherController:
        params = self.built(PrefetcherParams, self.params)
        return PrefetcherController(NODE, params, digest_of=_digest)

    def value(self, hint: Any, text: str, beside: Mapping[str, Any]) -> Any:
        if hint is messages.Want:
            event = self.plane.events[text]
            return messages.Want(event.data, event)
        return super().value(hint, text, beside)

    def do_held(self, digest: str) -> None:
        self.plane.say(f"{digest}: {self.plane.controller.held(digest, self.plane.now_s) or 'may go'}")

    def do_placed(self) -> None:
        for placed in self.plane.controller.placed():
            self.plane.say(self.plane.words(placed))

    def do_restart(self) -> None:
        self.plane.replaced_by(self.make())


def _digest(ref: WeightsRef) -> str:
    if ref.sha256:
        raise InvalidModelFile(f"sha256 {ref.sha256} is none")
    return ref.uri.rpartition("/")[2]
