"""Words of the placer's scripts, beside a leader's.

policy KIND NAME                          where it is not the union's: placement, eviction or prewarming
node ID GPUS BYTES [FIELD=VALUE ...]      it joins; BYTES of each GPU
beat [ID ...]                             nodes report the bytes that their instances hold; all of them
holds NODE [MODEL[:disk] ...]             weights in its host memory or on its disk, as its beat says
ask ID MODEL [FIELD=VALUE ...]            the autoscaler wants an instance, since now; @epoch=N and @issuer=ID
tick SECONDS                              time passes, with a tick each half second
forecast MODEL MEAN [PEAK]                concurrent requests in the five minutes that begin now
instance.STATE ID [MODEL] [on=GPU[:BYTES],...]         with the model's bytes, unless it says how many
A number may end in G, for 10^9.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from glowplug.controllers import operator
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.reads import READS
from glowplug.controllers.reads import Reads
from glowplug.domain.hardware import CachedWeights, Gpu, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.snapshot import Forecast
from glowplug.events.commands import PlaceInstance
from glowplug.events.facts import ForecastMade, NodeBeat, NodeJoined
from glowplug.policies.registry import choose
from glowplug.policies.systems import UNION
from tests.golden import leader

TICK_S = 0.5
KINDS = ("placement", "eviction", "prewarming")


class Script(leader.Script):
    stimuli: ClassVar[Sequence[Any]] = (operator,)
    reads: ClassVar[Reads] = READS
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "CancelPlacement": {"reason": "nobody asks for it"},
        "WeightsFetched": {"digest": "", "num_bytes": 1, "seconds": 1.0, "source": "s"},
        "WeightsPartFetched": {"digest": "", "num_bytes": 1, "seconds": 1.0, "source": "s"},
        "WeightsFetchFailed": {"digest": "", "message": "no"},
    }

    def declare_policy(self, kind: str, name: str) -> None:
        self.policies[kind] = name

    def declare_model(self, name: str, *words: str) -> None:
        super().declare_model(name, *words)
        model = self.models[name]
        if not model.weights.num_bytes:
            weights = replace(model.weights, num_bytes=model.weights_bytes)
            self.models[name] = replace(model, weights=weights)

    def __init__(self, declarations: Sequence[str]) -> None:
        self.policies = {kind: UNION.policies[kind] for kind in KINDS}
        self.nodes: dict[str, Node] = {}
        super().__init__(declarations)

    def make(self) -> PlacerController:
        given = PlacerParams(settle_s=0.0, node_lease_s=1e9, forget_s=1e9, **UNION.params["placer"])
        place, evict, prewarm = (choose(kind, self.policies[kind]) for kind in KINDS)
        params = self.built(PlacerParams, self.params, given)
        return PlacerController(place, evict, self.policies, self.epoch, params, prewarm=prewarm, priors={})

    def begin(self) -> None:
        super().begin()
        self.plane.tick()

    def do_tick(self, seconds: str = "0", count: str = "1") -> None:
        end = self.plane.now_s + float(seconds) * int(count)
        self.plane.tick(min(TICK_S, end - self.plane.now_s))
        while self.plane.now_s < end:
            self.plane.tick(min(TICK_S, end - self.plane.now_s))

    def do_node(self, node_id: str, gpus: str, num_bytes: str, *words: str) -> None:
        found = tuple(
            Gpu(gpu_id=f"{node_id}/{n}", total_bytes=self.value(int, num_bytes, {})) for n in range(int(gpus))
        )
        given = {
            "node_id": node_id, "gpus": found, "engines": ("emulated",), "agent_url": f"http://{node_id}", 
            "prefetcher_url": f"http://{node_id}:p",
            "abilities": ("emulated:prewarm", "emulated:swap", "emulated:stages", "emulated:adapters"), "revision": 1,
        }  # fmt: skip
        self.nodes[node_id] = self.built(Node, words, self.nodes.get(node_id, given))
        self._report(NodeJoined, node_id)

    def do_beat(self, *node_ids: str) -> None:
        for node_id in node_ids or list(self.nodes):
            self._report(NodeBeat, node_id)

    def do_holds(self, node_id: str, *words: str) -> None:
        held: dict[str, list[CachedWeights]] = {"cached": [], "on_disk": []}
        for key, _, where in (word.partition(":") for word in words):
            weights = self.models[key].weights
            one = CachedWeights(digest=weights.digest, num_bytes=weights.num_bytes, model_keys=(key,))
            held["on_disk" if where == "disk" else "cached"].append(one)
        found = {name: tuple(many) for name, many in held.items()}
        self.nodes[node_id] = replace(self.nodes[node_id], **found)
        self._report(NodeBeat, node_id)

    def _report(self, fact: type[Any], node_id: str) -> None:
        node, rows = self.nodes[node_id], self.plane.store.get("instances", {}).values()
        held = [
            (worker, row)
            for row in rows
            for worker in row.workers
            if not (row.state.is_gone or row.state is InstanceState.SWAPPED_OUT or row.host_id)
            and (worker is row.workers[0] or row.num_stages == 1)
        ]
        gpus = tuple(
            replace(
                gpu,
                grants=tuple(
                    Grant(holder=row.instance_id, owner=GrantOwner.WEIGHTS, num_bytes=worker.num_bytes)
                    for worker, row in held
                    if worker.gpu_id == gpu.gpu_id and worker.num_bytes
                ),
            )
            for gpu in node.gpus
        )
        self.nodes[node_id] = node = replace(node, gpus=gpus, revision=node.revision + 1)
        self.plane.store.setdefault("nodes", {})[node_id] = node
        self.plane.event(fact(node=node), issuer=f"agent-{node_id}")

    def event(self, kind: str, *words: str) -> None:
        """Of the weights that the model has now, unless it names others."""
        is_bare = kind.startswith("weights.") and not any(word.startswith("digest=") for word in words)
        super().event(kind, *words, *([f"digest={self.models[words[1]].weights.digest}"] if is_bare else []))

    def put(self, instance_id: str, state: InstanceState, words: Sequence[str]) -> Instance:
        words = [word.replace("on=", "workers=", 1) if word.startswith("on=") else word for word in words]
        row = super().put(instance_id, state, words)
        is_copy = row.replica or row.state is InstanceState.PREWARMED
        model = self.models[row.model_key]
        most = (model.weights_bytes if is_copy else model.memory_bytes) // model.num_gpus
        sized = tuple(replace(one, num_bytes=one.num_bytes or most) for one in row.workers)
        self.plane.store["instances"][instance_id] = row = replace(row, workers=sized)
        return row

    def do_ask(self, instance_id: str, model: str, *words: str) -> None:
        envelope = dict(word[1:].split("=") for word in words if word.startswith("@"))
        given = {
            "instance_id": instance_id, "model": self.models[model], "reason": "a request waits",
            "wanted_at": self.plane.now_s, "is_awaited": True,
        }  # fmt: skip
        command = self.built(PlaceInstance, [word for word in words if not word.startswith("@")], given)
        issuer, epoch = envelope.get("issuer", "autoscaler-1"), int(envelope.get("epoch", "1"))
        self.plane.event(command, issuer=issuer, epoch=epoch)

    def do_forecast(self, model: str, mean: str, peak: str = "") -> None:
        now = self.plane.now_s
        window = Forecast(
            made_at=now, starts_at=now, window_s=300.0, concurrency_mean=float(mean),
            concurrency_peak=float(peak or mean), source="test",
        )  # fmt: skip
        self.plane.event(ForecastMade(model_key=model, forecasts=(window,)), issuer="predictor-1")

    def value(self, hint: Any, text: str, beside: Mapping[str, Any]) -> Any:
        if text.endswith("G") and text[:-1].replace(".", "").isdigit():
            text = str(round(float(text[:-1]) * 1e9))
        return super().value(hint, text, beside)

    def workers(self, instance_id: str, places: str) -> tuple[Worker, ...]:
        sized = [
            f"{gpu}:{self.value(int, size, {})}" if size else gpu
            for gpu, _, size in (one.partition(":") for one in places.split(","))
        ]
        return super().workers(instance_id, ",".join(sized))
