"""Pipelines across nodes, and their consolidation to single workers (HydraServe section 6).

Consolidation: the rest of the model comes over the network card (or from host memory) and PCIe at background priority;
then the KV cache of the other stages follows at a still lower one, while the pipeline goes on serving. The tokens
generated meanwhile are a last, small chunk that is not charged. Bytes for a tensor group are charged to the network
card only, since each of its lanes carries just a part. A consolidation that is to fail (`failing`) does so once the
rest has come, and drops it; one that is to hang (`hanging`) then stays silent until it is abandoned.
"""

from typing import Any

from glowplug.controllers.agent import messages as aw
from glowplug_lab.simulator.hardware.engine import SimEngine
from glowplug_lab.simulator.hardware.fetching import Fetching
from glowplug_lab.simulator.hardware.server import Server


class Pipelines:
    """The pipelines that begin on one node. `handlers` has a method for each effect of the agent."""

    def __init__(self, node: Server, fetching: Fetching) -> None:
        self.node, self.run, self._fetching = node, node.run, fetching
        self.failing: list[str] = []  # models whose next consolidation fails, once per entry; "": any model
        self.hanging: list[str] = []  # ... hangs
        self.handlers: dict[type, Any] = {
            aw.ServeStages: self._serve,
            aw.ConsolidateEngine: self._consolidate,
            aw.AbandonConsolidation: self._abandon,
            aw.FinishStages: self._finish,
        }

    def _serve(self, effect: aw.ServeStages) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None:
            return
        later = (self.node.find(f"{effect.instance_id}.{r}") for r in range(1, engine.num_stages))
        stages = tuple(one for one in (engine, *later) if one is not None)
        if len(stages) < engine.num_stages:
            why = f"{len(stages)} of {engine.num_stages} stages are there"
            self.node.answer_agent(aw.EngineStartFailed(effect.instance_id, "engine_failed", why))
            return
        if engine.serving is None:
            engine.serve(self.node.server.gpu_kind, self.run.setup.params, stages)
        self.node.answer_agent(engine.ready())

    def _consolidate(self, effect: aw.ConsolidateEngine) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None or engine.num_stages == 1 or engine.transfer is not None:
            return
        model = engine.model.model
        rest = max(0, model.weights_bytes - engine.weights_bytes)
        results, node = self.run.results, self.node
        results.bytes_loaded += rest
        links = node.lanes_of(engine)
        if not self._fetching.has_all(model.weights):
            results.bytes_fetched += rest
            links = (node.network, *links) if len(links) == 1 else (node.network,)
        elif len(links) > 1:
            rest = -(-rest // len(links))
        self.node.sharing.load(engine, True)
        engine.transfer = self.run.links.start(
            f"rest of {engine.instance_id}", rest, links, lambda: self._rest_is_here(engine), priority=1
        )

    def _rest_is_here(self, engine: SimEngine) -> None:
        engine.transfer = None
        self.node.sharing.load(engine, False)
        if _struck(self.failing, engine):
            self.node.tell_agent(aw.ConsolidationFailed(engine.instance_id, "broken by a fault"))
            return
        if _struck(self.hanging, engine):
            return
        used = engine.kv_bytes_used(self.run.kernel.now_s)
        num_bytes = used * (engine.num_stages - 1) // engine.num_stages
        engine.num_migrations += 1
        self.run.results.bytes_migrated += num_bytes
        engine.transfer = self.run.links.start(
            f"KV of {engine.instance_id}", num_bytes, (self.node.network,), lambda: self._whole(engine), priority=2
        )

    def _whole(self, engine: SimEngine) -> None:
        engine.transfer = None
        self.run.results.num_consolidated += 1
        is_busy = bool(engine.tickets)
        if is_busy:
            self.node.sharing.idle(engine)
        engine.become_whole(self.node.server.gpu_kind, self.run.setup.params, self.run.kernel.now_s)
        if is_busy:
            self.node.sharing.busy(engine)
        self.node.requests.watch(engine)
        self.node.tell_agent(aw.EngineConsolidated(engine.instance_id, engine.kv_tokens))

    def _finish(self, effect: aw.FinishStages) -> None:
        """Answer at once: a simulated engine becomes whole in its own process, so no stage is left to end."""
        self.node.answer_agent(aw.StagesFinished(effect.instance_id))

    def _abandon(self, effect: aw.AbandonConsolidation) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None or engine.num_stages == 1:
            return  # gone or whole, which the agent has been notified of
        if engine.transfer is not None:
            self.run.links.stop(engine.transfer)
            engine.transfer = None
        self.node.sharing.load(engine, False)
        engine.num_migrations = 0  # the KV cache moved so far is dropped
        self.node.answer_agent(aw.ConsolidationFailed(engine.instance_id, "given up"))


def _struck(models: list[str], engine: SimEngine) -> bool:
    """Return whether a fault is due for an engine's model, or for any (""), and remove that fault."""
    doomed = next((key for key in models if key in ("", engine.model.model.key)), None)
    if doomed is None:
        return False
    models.remove(doomed)
    return True
