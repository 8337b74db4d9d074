"""Starts whose engine loads its weights while they arrive.

Paper: HydraServe section 5.1, whose fetch and load overlap. The engine reads bytes as soon as they have arrived;
whether they are right is known once all have been fetched and checked. So such a start waits for two ends, that of the
engine's load and that of its weights, in either order, and is READY (a replica PREWARMED) after both. Wrong weights end
the engine; weights that are fetched anew end it too, and the start begins again, whether the engine or the agent learns
of them first.
"""

from dataclasses import replace

from glowplug.controllers.agent import drains, lifecycle, stages
from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import Holding, State
from glowplug.controllers.agent.transaction import Transaction
from glowplug.domain.errors import WeightsDropped


def on_arriving(transaction: Transaction, holding: Holding, report: msg.WeightsArriving) -> None:
    """Note that the weights begin to arrive, and load once the process is up."""
    assert holding.start is not None
    if holding.start.weights_path is None:
        start = replace(holding.start, arriving_path=report.path)
        lifecycle.advance(transaction, replace(holding, start=start))


def on_engine_ready(transaction: Transaction, holding: Holding, report: msg.EngineReady) -> None:
    """Note that the engine is loaded; it waits until its weights are complete and checked. Ignored of a replica."""
    instance = holding.instance
    if instance.replica:
        return
    holding = _loaded(holding, report.shared_bytes)
    num_slots = 0 if holding.is_first_stage else report.num_slots  # all stages together report their number of slots
    transaction.publish(
        holding.enter(State.UNCHECKED),
        url=report.url,
        phases=(*instance.phases, *report.phases),
        max_concurrency=num_slots or instance.max_concurrency,
        kv_tokens=report.kv_tokens,
        step_s=report.step_s,
        lacks=report.lacks,
        key_id=report.key_id,
        reason="its engine is loaded, and its weights are not checked yet",
    )


def on_prewarmed(transaction: Transaction, holding: Holding, report: msg.EnginePrewarmed) -> None:
    """Note that the engine of a replica, or of a start taken over from one, is loaded."""
    if holding.instance.replica or holding.engine_id:
        why = "its weights are on the GPU, and not checked yet"
        loaded = _loaded(holding, report.shared_bytes)
        transaction.publish(loaded.enter(State.UNCHECKED), reason=why)


def _loaded(holding: Holding, shared_bytes: int) -> Holding:
    """The record with the reported shared bytes, which count once the weights are checked (sharing.py)."""
    assert holding.start is not None
    return replace(holding, start=replace(holding.start, shared_bytes=shared_bytes))


def on_weights(transaction: Transaction, holding: Holding, report: msg.WeightsComplete) -> None:
    """Count what the engine has loaded of its weights, which are complete and checked now."""
    assert holding.start is not None
    name, instance, shared_bytes = holding.instance.instance_id, holding.instance, holding.start.shared_bytes
    holding = lifecycle.with_weights(transaction, holding, report)
    if holding.engine_id:
        holding = lifecycle.activate(transaction, holding, holding.engine_id)
        transaction.publish(holding, reason="its weights are in host memory")
    elif holding.state is State.STREAMING:
        why = "its weights are in host memory, and its engine has taken those that came before the last"
        transaction.publish(holding.enter(State.LOADING), reason=why)
    elif instance.replica:
        drains.on_prewarmed(transaction, holding, msg.EnginePrewarmed(name, shared_bytes))
    else:
        said = msg.EngineReady(
            name,
            instance.url,
            kv_tokens=instance.kv_tokens,
            key_id=instance.key_id,
            lacks=instance.lacks,
            shared_bytes=shared_bytes,
        )
        stages.on_ready(transaction, holding, said)


def on_replaced(transaction: Transaction, holding: Holding, report: msg.WeightsReplaced) -> None:
    """Begin again where the engine has read weights that are fetched anew."""
    assert holding.start is not None
    if holding.state is State.STARTING:
        transaction.keep(replace(holding, start=replace(holding.start, arriving_path=None)))
        return
    _begin_again(transaction, holding, report.reason)


def on_start_failed(transaction: Transaction, holding: Holding, report: msg.EngineStartFailed) -> None:
    """Fail a start, or begin it again where the engine saw before its agent that weights were dropped."""
    if report.code == WeightsDropped.code:
        _begin_again(transaction, holding, report.reason)
    else:
        lifecycle.on_start_failed(transaction, holding, report)


def _begin_again(transaction: Transaction, holding: Holding, why: str) -> None:
    reason = f"its engine starts again, since it has loaded weights that were dropped: {why}"
    holding = transaction.publish(holding.enter(State.RESTARTING), url="", reason=reason)
    lifecycle.stop(transaction, holding, 0.0, State.RESTARTING)
