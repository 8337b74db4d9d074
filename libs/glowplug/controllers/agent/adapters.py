"""LoRA adapters: instances on the engine of another instance of this node, their host (Instance.host_id).

The host's engine loads the adapter's weights once they arrive. An adapter has no process and no GPU bytes of its own:
its host's grant includes its place. It leaves in the transaction in which its host stops being READY, drains as long as
its host, and fails with it.
"""

from collections.abc import Iterable
from dataclasses import replace

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import COMING, Holding, State
from glowplug.controllers.agent.transaction import Transaction

ADAPTERS = "adapters"
_INSTEAD: dict[type, type] = {msg.LoadEngine: msg.LoadAdapter, msg.StopEngine: msg.UnloadAdapter}


def on_host(transaction: Transaction, holding: Holding, host_id: str) -> Holding:
    """Put a start on the engine of `host_id`; "": leave it unchanged."""
    if not host_id:
        return holding
    host = transaction.holdings.get(host_id)
    slots = host.instance.max_concurrency if host is not None else holding.instance.max_concurrency
    workers = tuple(replace(worker, num_bytes=0) for worker in holding.instance.workers)
    instance = replace(holding.instance, host_id=host_id, max_concurrency=slots, workers=workers)
    return replace(holding, instance=instance)


def refusal(transaction: Transaction, holding: Holding) -> tuple[str, str] | None:
    """Return (code, reason) if the host cannot take the adapter."""
    host_id, model = holding.instance.host_id, holding.model
    host = transaction.holdings.get(host_id)
    if not host_id:
        return None
    if host is None or host.state is not State.READY:
        state = "not there" if host is None else host.state.value
        return "engine_unavailable", f"{host_id}, whose engine should load the adapter, is {state}"
    if host.model.key != model.base:
        return "bad_request", f"{host_id} serves {host.model.key}, and the adapter's base is {model.base}"
    if not transaction.can(host.model, ADAPTERS):
        return "engine_unavailable", f"{host.model.engine} on {transaction.node_id} takes no adapters"
    num_others = sum(h.instance.host_id == host_id and not h.is_over for h in transaction.holdings.values())
    if num_others >= host.instance.adapter_slots:
        return "engine_unavailable", f"all {host.instance.adapter_slots} places for adapters of {host_id} are taken"
    rank = host.instance.adapter_rank
    if rank and model.adapter_rank > rank:
        return (
            "engine_unavailable",
            f"{host_id} takes adapters up to rank {rank}, and this one has {model.adapter_rank}",
        )
    return None


def begin(transaction: Transaction, holding: Holding) -> None:
    start = holding.start
    assert start is not None
    transaction.keep(replace(holding, start=replace(start, is_launched=True)))
    transaction.ask(msg.AwaitWeights(holding.command, start.deadline_at))


def load(holding: Holding, path: str) -> msg.LoadAdapter | msg.LoadEngine:
    is_adapter = bool(holding.command.host_id)
    return msg.LoadAdapter(holding.command, path) if is_adapter else msg.LoadEngine(holding.engine, path)


def unload(holding: Holding) -> msg.UnloadAdapter | None:
    return msg.UnloadAdapter(holding.command) if holding.command.host_id else None


def count(holding: Holding) -> msg.CountInFlight:
    command = holding.command
    return msg.CountInFlight(command.instance_id, command if command.host_id else None)


def follow_hosts(transaction: Transaction) -> None:
    for instance_id, holding in list(transaction.holdings.items()):
        host_id, state = holding.instance.host_id, holding.state
        if not host_id or state not in COMING | {State.RESTARTING, State.READY, State.DRAINING}:
            continue
        host = transaction.holdings.get(host_id)
        if host is None or host.state in (State.FAILED, State.LOST):
            why = host.instance.reason if host is not None else "it is not known here"
            transaction.step(instance_id, msg.HostLeaves(f"its host {host_id} is gone: {why}", 0.0, has_failed=True))
        elif host.drain is not None:
            left_s = max(0.0, (host.drain.busy_until or host.drain.deadline_at) - transaction.now_s)
            if state is not State.DRAINING:
                transaction.step(instance_id, msg.HostLeaves(f"its host {host_id} drains", left_s))
        elif host.state is not State.READY:
            transaction.step(instance_id, msg.HostLeaves(f"its host {host_id} is {host.instance.state.value}", 0.0))


def lacks_host(transaction: Transaction, holding: Holding) -> bool:
    """Return whether it is an adapter whose host is not READY."""
    host = transaction.holdings.get(holding.instance.host_id)
    return bool(holding.instance.host_id) and (host is None or host.state is not State.READY)


def instead(awaited: Iterable[type]) -> set[type]:
    """Return an adapter's effects in place of these."""
    return {_INSTEAD.get(effect, effect) for effect in awaited} - {msg.LaunchEngine}


def also(asks: Iterable[type]) -> frozenset[type]:
    """Return these effects with an adapter's own."""
    return frozenset({*asks, *(_INSTEAD[effect] for effect in asks if effect in _INSTEAD)})
