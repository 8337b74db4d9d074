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
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RouterLoadReported
from tests.golden import one
from tests.golden.one import NODE


class Script(one.Script):
    begin_s: ClassVar[float] = 100.0
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

    def do_bring(self, digest: str, num_bytes: str, *words: str) -> None:
        users = [word for word in words if "=" not in word]
        key = next((key for key, model in self.models.items() if _digest(model.weights) == digest), digest)
        self.event("prefetcher.fetch", key, digest, *users)
        self.plane.give(messages.FetchSized(digest, int(num_bytes)))
        given = {"digest": digest, "num_bytes": int(num_bytes), "whole": True, "seconds": 1.0, "source": "file"}
        how = [word for word in words if "=" in word]
        self.plane.give(self.built(messages.FetchEnded, how, given))
        self.plane.lines.clear()
        cache = self.plane.controller.cache
        self.plane.say(f"{digest} is here, {cache.used_bytes} of {cache.capacity_bytes}")

    def do_arrived(self, router_id: str, *words: str) -> None:
        counts = dict(word.split("=") for word in words)
        num_parts = int(counts.pop("parts", "1"))
        loads = {key: ModelLoad(**_arrived(*count.split("+"))) for key, count in counts.items()}
        self.plane.event(RouterLoadReported(router_id=router_id, loads=loads, num_parts=num_parts))

    def do_held(self, *digests: str) -> None:
        for digest in digests:
            self.plane.say(f"{digest}: {self.plane.controller.held(digest, self.plane.now_s) or 'may go'}")

    def do_whole(self) -> None:
        disk = self.plane.controller.disk
        rate = self.plane.text(disk.bytes_per_s)
        self.plane.say(
            f"{disk.used_bytes} bytes, {rate} a second, {self.plane.text(disk.whole)} {disk.trouble}".rstrip()
        )

    def do_placed(self) -> None:
        for placed in self.plane.controller.placed():
            self.plane.say(self.plane.words(placed))

    def do_restart(self) -> None:
        self.plane.replaced_by(self.make())


def _arrived(num: str, num_batch: str = "0") -> dict[str, int]:
    return {"num_arrived": int(num) + int(num_batch), "num_batch_arrived": int(num_batch)}


def _digest(ref: WeightsRef) -> str:
    if ref.sha256:
        raise InvalidModelFile(f"sha256 {ref.sha256} is none")
    return ref.uri.rpartition("/")[2]
