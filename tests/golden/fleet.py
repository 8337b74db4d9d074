"""Runs golden scripts of a fleet under the union (see form.py), with the services' own controllers and simulated
engines: decisions, messages and engines' work follow each command.

    python -m tests.golden.fleet      rewrites the traces; read the diff before the commit

The first block declares the fleet (sizes in GB; `gb=` of a model's KV cache):
    servers NAME COUNT GPUS GB [FIELD=VALUE ...]    model NAME GB [gb=KV] [FIELD=VALUE ...]    of Model or StartSeconds
    tenant NAME [FIELD=VALUE ...]                   policies SYSTEM, where it is not the union
Commands of the blocks after it (times in seconds):
    request NAME MODEL [TOKENS] [COUNT] [TENANT]   requests NAME (NAME-1 ...) come, each for an answer of TOKENS
    leave NAME                             its client leaves
    after SECONDS                          time passes
    operator load MODEL [RUNG] [NODE], unload MODEL [RUNG], pin MODEL [RUNG], sleep|drain|unpin|remove MODEL
    operator fetch|drop MODEL [NODE]       to or from host memory
    change MODEL FIELD=VALUE ...           it is declared anew; weights=URI of as many bytes
    cordon NODE, uncordon NODE
    kill NODE [MODEL]                      a node dies, or the oldest engine of a model there
    fail NODE MODEL                        the next stage there that is to become whole does not
    lose TYPE [COUNT], double TYPE [COUNT] the next messages of a type reach nobody, or arrive twice
    restart SERVICE, elect SERVICE [lingers]   a process is killed and comes back; a standby takes over
    empty                                  the store loses its rows
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.agent import messages as aw
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.operator import Cordon
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.prefetcher import messages as pw
from glowplug.controllers.router import messages as rw
from glowplug.domain.access import Priority, Tenant
from glowplug.domain.errors import GlowplugError
from glowplug.domain.model import Model, OnCold, Rung, Slo, WeightsRef
from glowplug.events import facts
from glowplug.events.commands import StartInstance
from glowplug.events.envelope import COMMANDS, Event
from glowplug_lab.simulator.control_plane import Executor
from glowplug_lab.simulator.costs import FITTED
from glowplug_lab.simulator.setup import (
    GB,
    QUIET_AGENT,
    Fault,
    ModelSetup,
    Params,
    PolicyNames,
    ServerSetup,
    Setup,
    StartSeconds,
)
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World, break_at
from glowplug_lab.systems import SYSTEMS
from tests.golden.form import SCRIPTS, rewrite

BEAT_S, RESYNC_S, HEAL_S = 1.0, 2.0, 2.0  # as in the services' settings
SHOWN = ("source", "host_id", "drops", "becomes", "replica", "if_idle", "waits")
HIDDEN = (
    facts.NodeBeat, facts.RouterLoadReported, facts.RouterRequestsFinished, facts.RequestWaiting, facts.RequestFinished,
    facts.RequestRejected, facts.WeightsFetched, facts.WeightsPartFetched, facts.WeightsProgressed, facts.DecisionMade,
    facts.ForecastMade, facts.ModelDeployed,
)  # fmt: skip
ENGINE_WORK = (
    aw.LaunchEngine, aw.LoadEngine, aw.LoadAdapter, aw.UnloadAdapter, aw.ActivateEngine, aw.ServeStages,
    aw.ConsolidateEngine, aw.AbandonConsolidation, aw.FinishStages, aw.SleepEngine, aw.StopEngine,
    pw.StartFetch, pw.StopFetch, pw.DropRegion,
)  # fmt: skip


class Script:
    """Delivery to each reader at once, but for what the script loses."""

    is_sure = True

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()
        self.doubled: Counter[str] = Counter()
        self.now_told = ""

    def delays_s(self) -> Sequence[float]:
        if self.lost[self.now_told] > 0:
            self.lost[self.now_told] -= 1
            return ()
        if self.doubled[self.now_told] > 0:
            self.doubled[self.now_told] -= 1
            return (0.0, 0.0)
        return (0.0,)

    def phase_s(self, period_s: float) -> float:
        return 0.0


class Watched:
    """An executor that says first which of `shown` effects it executes."""

    def __init__(self, inner: Executor, say: Callable[[Any], None]) -> None:
        self._inner, self._say, self.executes, self.restarted = inner, say, inner.executes, inner.restarted

    def execute(self, effect: Any) -> None:
        self._say(effect)
        self._inner.execute(effect)


class Fleet:
    """The declared fleet, and the lines of its trace since the last command."""

    def __init__(self, declarations: Sequence[str]) -> None:
        declared: dict[str, list[list[str]]] = {"servers": [], "model": [], "tenant": [], "policies": []}
        for line in declarations:
            verb, *words = line.split()
            declared[verb].append(words)
        system = SYSTEMS[next((words[0] for words in declared["policies"]), "union")]
        setup = Setup(
            servers=tuple(_servers(*words) for words in declared["servers"]),
            models=tuple(_model(*words) for words in declared["model"]),
            tenants=tuple(Tenant(name=name, **_fields(given)) for name, *given in declared["tenant"]),
            policies=PolicyNames(**system.policies),
            params=Params(
                agent=replace(QUIET_AGENT, beat_s=BEAT_S, **system.params["agent"]),
                autoscaler=AutoscalerParams(**system.params["autoscaler"]),
                placer=PlacerParams(settle_s=0.0, **system.params["placer"]),
                idle_tick_s=BEAT_S,
                resync_s=RESYNC_S,
                heal_s=HEAL_S,
            ),
        )
        self.script, self.lines = Script(), list[str]()
        self.tickets: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.world = World(setup, [], delivery=self.script)
        control = self.control = self.world.control
        control.on_event.append(self._told)
        control.on_decision.append(lambda made: self._say(f"decide {made.kind} ({made.policy}): {made.reason}"))
        for name, executor in list(control._executors.items()):
            control._executors[name] = Watched(executor, partial(self._works, name))
        self.world.traffic.on_end.append(lambda ticket, how: self._say(f"{self.names[ticket]} ends: {how}"))
        self.world.start()

    def run(self, command: str) -> list[str]:
        verb, *words = command.split()
        getattr(self, f"do_{verb}")(*words)
        self.world.run_until(self.world.kernel.now_s)
        lines, self.lines = self.lines, []
        return lines

    def do_request(self, name: str, model: str, tokens: str = "8", count: str = "1", tenant: str = "") -> None:
        for number in range(int(count)):
            mine = name if count == "1" else f"{name}-{number + 1}"
            ticket = self.tickets[mine] = self.world.traffic.num_arrived + 1
            self.names[ticket] = mine
            self.world.traffic.arrive(Arrival(self.now_s, model, 16, int(tokens), tenant=tenant))

    def do_leave(self, name: str) -> None:
        self.world.traffic.leave(self.tickets[name])

    def do_after(self, seconds: str) -> None:
        self.world.run_until(self.world.kernel.now_s + float(seconds))

    def do_operator(self, verb: str, key: str, *given: str) -> None:
        rung = Rung(given[0]) if given and verb in ("load", "unload", "pin") else None
        node_id = given[-1] if given and given[-1] not in tuple(Rung) else ""
        asked = {
            "load": operator.Load(key, rung or Rung.READY, node_id), "unload": operator.Unload(key, rung),
            "sleep": operator.Sleep(key), "drain": operator.Suspend(key),
            "pin": operator.Pin(key, True, rung or Rung.READY), "unpin": operator.Pin(key, False),
            "remove": operator.Undeploy(key),
            "fetch": operator.FetchToHost(key, node_id), "drop": operator.DropFromHost(key, node_id),
        }  # fmt: skip
        try:
            self.control.give("placer" if verb in ("fetch", "drop") else "autoscaler", asked[verb])
        except GlowplugError as error:
            self._say(f"the operator is refused: {error.message}")

    def do_change(self, key: str, *given: str) -> None:
        model = self.control.services["autoscaler"].models[key]
        fields = _fields(given)
        if uri := fields.pop("weights", ""):
            fields["weights"] = replace(model.weights, uri=uri)
        self.control.give("autoscaler", operator.Deploy(model=replace(model, **fields)))

    def do_cordon(self, node_id: str) -> None:
        self.control.give("placer", Cordon(node_id, True))

    def do_uncordon(self, node_id: str) -> None:
        self.control.give("placer", Cordon(node_id, False))

    def do_kill(self, node_id: str, model: str = "") -> None:
        break_at(self.world.nodes[node_id], Fault(at_s=0.0, node_id=node_id, model=model))

    def do_fail(self, node_id: str, model: str) -> None:
        fault = Fault(at_s=0.0, node_id=node_id, model=model, kind="consolidation")
        break_at(self.world.nodes[node_id], fault)

    def do_lose(self, kind: str, count: str = "1") -> None:
        self.script.lost[kind] = int(count)

    def do_double(self, kind: str, count: str = "1") -> None:
        self.script.doubled[kind] = int(count)

    def do_restart(self, service: str) -> None:
        self.control.restart(service)

    def do_elect(self, service: str, lingers: str = "") -> None:
        self.control.elect(service, lingers=bool(lingers))

    def do_empty(self) -> None:
        self.control.empty_store()

    @property
    def now_s(self) -> float:
        return self.world.kernel.now_s - self.world.began_s

    def _told(self, event: Event) -> None:
        self.script.now_told = event.type
        if not isinstance(event.data, HIDDEN):
            is_lost = " (lost)" if self.script.lost[event.type] > 0 else ""
            is_double = " (twice)" if self.script.doubled[event.type] > 0 else ""
            self._say(f"{event.type} {_words(event.data)}{is_lost or is_double}")

    def _works(self, name: str, effect: Any) -> None:
        if isinstance(effect, ENGINE_WORK):
            self._say(f"{name}: {type(effect).__name__} {_words(effect)}")
        elif isinstance(effect, rw.Dispatch):
            self._say(f"router sends {self.names[effect.ticket]} to {effect.instance.instance_id}")
        elif isinstance(effect, rw.Hold):
            self._say(f"router holds {self.names[effect.ticket]} for some {effect.eta_s:.1f} s")
        elif isinstance(effect, rw.Reject):
            error = effect.error
            self._say(f"router rejects {self.names[effect.ticket]}: {error.status} {error.code}: {error.message}")
        elif isinstance(effect, rw.Recall | rw.MoveStream):
            self._say(f"router: {type(effect).__name__} {self.names[effect.ticket]}: {effect.reason}")

    def _say(self, line: str) -> None:
        self.lines.append(f"{self.now_s:7.2f}  {line}")


def _servers(name: str, count: str, gpus: str, gb: str, *given: str) -> ServerSetup:
    abilities = {"abilities": frozenset({"prewarm", "swap"})}
    return ServerSetup(
        name=name,
        num_servers=int(count),
        num_gpus=int(gpus),
        gpu_bytes=round(float(gb) * GB),
        **abilities | _fields(given),
    )


def _model(name: str, gb: str, *given: str) -> ModelSetup:
    found = _fields(given)
    weights_bytes, kv_bytes = round(float(gb) * GB), round(found.pop("gb", 0 if "base" in found else 4) * GB)
    objectives = {field.name: found.pop(field.name) for field in fields(Slo) if field.name in found}
    start = {field.name: found.pop(field.name) for field in fields(StartSeconds) if field.name in found}
    model = Model(
        name=name, key=name, engine="emulated", weights=WeightsRef(uri=f"s3://weights/{name}", num_bytes=weights_bytes),
        weights_bytes=weights_bytes, kv_bytes=kv_bytes, slo=Slo(**objectives),
        **{"max_concurrency": 8, "keep_alive_s": 30.0} | found,
    )  # fmt: skip
    costs = {"h800": FITTED["llama-2-7b", "h800"]}
    return ModelSetup(model=model, costs=costs, kv_bytes_per_token=500_000, start=StartSeconds(**start))


def _fields(given: Sequence[str]) -> dict[str, Any]:
    return {name: _value(value) for name, value in (one.split("=") for one in given)}


def _value(text: str) -> Any:
    if "," in text or text in ("stages", "adapters"):
        return frozenset(text.split(","))
    if text in ("true", "false"):
        return text == "true"
    if text in (*OnCold, *Priority):
        return OnCold(text) if text in tuple(OnCold) else Priority(text)
    if not text.replace(".", "").lstrip("-").isdecimal():
        return text
    return float(text) if "." in text else int(text)


def _words(payload: Any) -> str:
    """Ids, and what differs from the default. A command's reason is in its decision, an effect's command above it."""
    source = getattr(payload, "instance", payload)
    source = getattr(source, "command", getattr(source, "want", source))
    source = getattr(source, "command", source)
    names = [getattr(source, name, "") for name in ("target", "instance_id", "model_key", "node_id")]
    if source is not payload:
        names = [names[1] or names[2]]
    shown = {name: getattr(payload, name, "") for name in SHOWN}
    if getattr(payload, "TYPE", "") not in (*COMMANDS, ""):
        shown = {name: getattr(source, name, "") for name in (*SHOWN, "reason")}
    if isinstance(payload, StartInstance):
        shown["stage"] = f"{payload.stage + 1}/{payload.num_stages}" if payload.num_stages > 1 else ""
        shown["gpus"] = ",".join(f"{worker.gpu_id}:{worker.num_bytes / GB:g}GB" for worker in payload.workers)
    words = [f"{name}={value!r}" if " " in str(value) else f"{name}={value}" for name, value in shown.items() if value]
    return " ".join([*dict.fromkeys(filter(None, names)), *words])


if __name__ == "__main__":
    for changed in rewrite(SCRIPTS, Fleet):
        sys.stdout.write(f"{changed}\n")
