"""Drains: their start, their KV cache, and their end as a stop, a replica, or a sleeping engine.

Papers: WarmServe section 4 (universal workers, Fig. 5; Eq. 1 in policies/prewarming/warmserve_reservation.py),
SwapServeLLM section 3 (swap out and in). Departures:
- A drained engine keeps its own weights only at the placer's request (`becomes`); WarmServe always keeps them.
- SwapServeLLM lets a victim finish its requests; here its grace bounds that.
- A real engine swapped out keeps GPU memory for a CUDA context and its allocator: 0.4 GB (RTX 3080) to 1.1 GB per GPU,
  measured with vLLM. The measured bytes are granted to it (owner `sleeper`), and give way to any start
  (AgentController._make_way); above its kind's limit it is stopped.
- A later stage of a pipeline ends after its first stage, which has the requests, or at its own deadline.
- An engine that refuses requests while asleep (EngineKind.refuses) sleeps at once unless busy. Any other drains for
  `drain_quiet_s`, in which routers learn of the drain.
- Host memory for sleeping engines is bounded (`swap_host_bytes`): by an estimate when a drain begins, on GPUs of host
  memory by what the engine keeps once it sleeps. Beyond it an engine stops; the placer ends others ahead of it.
- Eq. 1 is applied at each answer to CountInFlight, on ticks and perhaps at completions.
- The paper names a cache that became too small, "forcing the eviction of the recently loaded weights", but not when.
  Here: when less than a quarter of one request's mean share (M / C) is free. The cache then takes Eq. 1's value back,
  from free bytes first, then from replicas on its GPUs, the newest first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from glowplug.controllers.agent import adapters, lifecycle, sharing, stages
from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import COMING, DORMANT, Drain, Holding, Shares, State
from glowplug.controllers.agent.transaction import Transaction
from glowplug.controllers.effects import Tick
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import Spell, SpellName
from glowplug.domain.units import show_bytes
from glowplug.events.commands import ResumeInstance, StopInstance
from glowplug.policies.eviction.sleeping import host_bytes
from glowplug.policies.prewarming.warmserve_reservation import prewarmable_bytes

MARGIN = 4  # too small: less than M / C / MARGIN free
_DRAINED: Mapping[str, Any] = {"drain_ends_at": 0.0, "stages_busy": False}
_ABILITIES = {"prewarmed": "prewarm", "swapped_out": "swap"}


def on_stop(transaction: Transaction, holding: Holding, command: StopInstance) -> None:
    instance, becomes = holding.instance, command.becomes
    if becomes not in _ABILITIES:
        _drain(transaction, holding, command.reason, command.grace_s)
        return
    if holding.state in DORMANT or (instance.replica and instance.state.is_coming):
        return  # repeated: already dormant
    able = (
        instance.is_whole
        and not (instance.part_of or instance.host_id)
        and transaction.can(holding.model, _ABILITIES[becomes])
    )
    reason = command.reason
    if able and becomes == "swapped_out" and not holding.snapshot_bytes:
        num_bytes = instance.host_bytes or host_bytes(holding.model, instance.shared_bytes)
        lack = _lack_of_host(transaction, holding, num_bytes)
        able, reason = not lack, f"{reason}; {lack}" if lack else reason
        holding = replace(holding, snapshot_bytes=num_bytes) if able else holding
    _drain(transaction, holding, reason, command.grace_s, becomes if able else "")
    after = transaction.holdings[instance.instance_id]
    if after.snapshot_bytes and (after.drain is None or after.drain.becomes != "swapped_out"):
        transaction.keep(replace(after, snapshot_bytes=0))


def _lack_of_host(transaction: Transaction, holding: Holding, num_bytes: int) -> str:
    name, budget = holding.instance.instance_id, transaction.params.swap_host_bytes
    others = promised(h for i, h in transaction.holdings.items() if i != name)
    if budget is None or (budget and others + num_bytes <= budget):
        return ""
    most = f"the {show_bytes(budget)} that engines asleep may take (GLOWPLUG_SWAP_HOST_BYTES)"
    return f"it stops instead of sleeping: {show_bytes(num_bytes)} beside {show_bytes(others)} is more than {most}"


def promised(holdings: Iterable[Holding]) -> int:
    """Return the host memory of engines that sleep or will; one that ends leaves its own before another needs it."""
    return sum(h.snapshot_bytes for h in holdings if h.stop is None)


def on_host_leaves(transaction: Transaction, holding: Holding, host: msg.HostLeaves) -> None:
    if host.has_failed:
        lifecycle.fail(transaction, holding, "engine_failed", host.reason)
    else:
        _drain(transaction, holding, host.reason, host.grace_s)


def on_stop_asked(transaction: Transaction, holding: Holding, asked: msg.StopAsked | msg.NodeStopping) -> None:
    _drain(transaction, holding, asked.reason, asked.grace_s)


def _drain(transaction: Transaction, holding: Holding, reason: str, grace_s: float, becomes: str = "") -> None:
    """Finish running requests for at most `grace_s`, then stop, or turn into `becomes` if possible. A start under way
    is given up; a replica or a sleeper is dropped at once."""
    deadline_at = transaction.now_s + grace_s
    is_coming = holding.state in COMING or holding.state is State.RESTARTING
    if holding.state in DORMANT or (holding.instance.replica and is_coming):
        lifecycle.drop(transaction, holding, reason)
    elif is_coming:
        holding = transaction.publish(holding.enter(State.STOPPING), reason=reason)
        if holding.stop is None:
            lifecycle.stop(transaction, holding, 0.0, State.STOPPING)
    elif holding.state is State.FALLING_ASLEEP:
        if not becomes:
            lifecycle.stop(transaction, holding, transaction.params.stop_grace_s, State.STOPPING)
    elif holding.drain is not None:
        kept = becomes if holding.drain.becomes else ""  # a drain towards a stop stays so
        deadline_at = min(holding.drain.deadline_at, deadline_at)
        is_sooner = deadline_at < holding.drain.deadline_at
        drain = replace(holding.drain, deadline_at=deadline_at, becomes=kept)
        holding = transaction.keep(replace(holding, drain=drain))
        if is_sooner:  # routers move streams that would end later
            holding = transaction.publish(holding, drain_ends_at=deadline_at)
        _expire(transaction, holding)
    else:
        command = transaction.event
        may_sleep = bool(becomes) and transaction.refuses(holding.instance.engine)
        quiet_s = 0.0 if may_sleep else transaction.params.drain_quiet_s
        quiet_until = min(transaction.now_s + quiet_s, deadline_at)
        drain = Drain(
            deadline_at=deadline_at,
            quiet_until=quiet_until,
            becomes=becomes,
            reason=reason,
            traceparent=command.traceparent if command is not None else "",
            predicted_s=getattr(command.data, "predicted_s", 0.0) if command is not None else 0.0,
            began_at=transaction.now_s,
        )
        draining = holding.enter(State.DRAINING, drain=drain)
        holding = transaction.publish(draining, drain_ends_at=deadline_at, reason=reason)
        if may_sleep and transaction.now_s < deadline_at:
            _end(transaction, holding, transaction.params.stop_grace_s)
        else:
            _expire(transaction, holding)


# ticks


def on_ready_tick(transaction: Transaction, holding: Holding, _: Tick) -> None:
    stages.overdue(transaction, lifecycle.check_health(transaction, holding))


def on_drain_tick(transaction: Transaction, holding: Holding, tick: Tick) -> None:
    """End an overdue drain, else count requests; later stages run uncounted until their pipeline ends."""
    on_ready_tick(transaction, holding, tick)
    holding = transaction.holdings[holding.instance.instance_id]
    assert holding.drain is not None
    if transaction.now_s >= holding.drain.deadline_at:
        _expire(transaction, holding)
    elif transaction.now_s >= holding.drain.quiet_until and not holding.is_later_stage:
        transaction.ask(adapters.count(holding))


def on_sleep_tick(transaction: Transaction, holding: Holding, _: Tick) -> None:
    assert holding.drain is not None
    if transaction.now_s >= holding.drain.deadline_at:
        _give_up_sleep(transaction, holding, f"it was not asleep after {transaction.params.sleep_deadline_s:g} s")


def _expire(transaction: Transaction, holding: Holding) -> None:
    assert holding.drain is not None
    if transaction.now_s >= holding.drain.deadline_at:
        _end(transaction, holding, transaction.params.stop_grace_s if holding.instance.ready_at else 0.0)


def _end(transaction: Transaction, holding: Holding, grace_s: float) -> None:
    drain = holding.drain
    now_s = transaction.now_s
    if drain is not None and drain.becomes and holding.state is State.DRAINING:
        if_idle = transaction.refuses(holding.instance.engine) and now_s < drain.deadline_at
        transaction.ask(msg.SleepEngine(holding.engine, drain.becomes, if_idle))
        drain = replace(
            drain,
            deadline_at=now_s + transaction.params.sleep_deadline_s,
            drained_at=now_s,
            busy_until=drain.deadline_at if if_idle else 0.0,
        )
        transaction.keep(holding.enter(State.FALLING_ASLEEP, drain=drain))
    else:
        if drain is not None and holding.state is State.DRAINING:
            holding = _over(transaction, holding, drain, now_s)
        lifecycle.stop(transaction, holding, grace_s, State.STOPPING)


def _over(
    transaction: Transaction, holding: Holding, drain: Drain, drained_at: float, asleep_at: float = 0.0
) -> Holding:
    """Return the record with the drain, and the sleep after it, in its instance's life."""
    if not (drain.began_at and drained_at):
        return holding  # begun by an agent of an earlier version
    drained = Spell(
        name=SpellName.DRAIN,
        started_at=drain.began_at,
        ended_at=drained_at,
        reason=drain.reason or holding.instance.reason,
        traceparent=drain.traceparent,
    )
    spells = [drained]
    if asleep_at:
        spells.append(
            replace(
                drained,
                name=SpellName.SLEEP,
                started_at=drained_at,
                ended_at=asleep_at,
                predicted_s=drain.predicted_s,
            )
        )
    transaction.ask(msg.ReportDrain(model_key=holding.instance.model_key, spells=tuple(spells)))
    return holding.lived(*spells)


# ends


def on_in_flight(transaction: Transaction, holding: Holding, seen: msg.InFlight) -> None:
    """End an idle engine's drain, once routers know of it; shrink a busy engine's KV cache."""
    assert holding.drain is not None
    if transaction.now_s < holding.drain.quiet_until or holding.is_later_stage:
        return
    if seen.num_in_flight == 0:
        _end(transaction, holding, transaction.params.stop_grace_s)
    elif transaction.can(holding.model, "prewarm") and not holding.instance.host_id:
        _reserve(transaction, holding, seen)


def on_asleep(transaction: Transaction, holding: Holding, seen: msg.EngineAsleep) -> None:
    """Free a sleeping engine's GPU bytes, except a replica's weights or measured remains; stop it if those exceed its
    limit."""
    drain = holding.drain
    assert drain is not None
    holding = _over(transaction, holding, drain, drain.drained_at, transaction.now_s)
    was, leaves = holding.shares, drain.becomes == "swapped_out"
    weights = {gpu_id: of_gpu.get(GrantOwner.WEIGHTS, 0) for gpu_id, of_gpu in was.items()}
    kind = transaction.engines.get(holding.instance.engine)
    most = 0 if kind is None or not kind.asleep_bytes else kind.asleep_bytes + (0 if leaves else sum(weights.values()))
    rest = _rest(seen.num_bytes, list(was)) if leaves and holding.instance.gpu_kind != "host" else {}
    is_too_much = any(sum(rest[g].values()) > sum(of_gpu.values()) for g, of_gpu in was.items() if g in rest)
    is_measured = leaves and holding.instance.gpu_kind == "host" and seen.num_bytes >= 0
    snapshot = seen.num_bytes if is_measured else holding.snapshot_bytes
    lack = _lack_of_host(transaction, holding, snapshot) if leaves else ""
    if is_too_much or lack or (most and seen.num_bytes > most):
        why = lack or f"its engine says that it sleeps, and keeps {show_bytes(seen.num_bytes)}"
        stopping = lifecycle.stop(transaction, holding, transaction.params.stop_grace_s, State.STOPPING)
        transaction.publish(stopping, reason=why, host_bytes=snapshot if lack else 0)
        return
    holding = replace(transaction.ungrant(holding), num_misses=0, snapshot_bytes=snapshot)
    if leaves:
        asleep = replace(holding.enter(State.SWAPPED_OUT), shares=rest)
        asleep = replace(asleep, instance=replace(asleep.instance, shared_bytes=0))
        asleep = transaction.grant(asleep) if rest else asleep
        transaction.publish(asleep, url="", host_bytes=snapshot, **_DRAINED, reason="it sleeps in host memory")
        return
    workers = tuple(replace(w, num_bytes=weights[w.gpu_id]) for w in holding.own_workers)
    instance = replace(holding.instance, replica=True, workers=workers, url="")
    holding = transaction.grant(holding.enter(State.PREWARMED, instance=instance))
    transaction.publish(holding, **_DRAINED, reason="it has drained, and its weights stay on the GPU")


def on_busy(transaction: Transaction, holding: Holding, _: msg.EngineBusy) -> None:
    """Drain on, up to the drain's own deadline."""
    drain = holding.drain
    assert drain is not None
    if drain.busy_until:
        drain = replace(drain, deadline_at=drain.busy_until, busy_until=0.0, drained_at=0.0)
        _expire(transaction, transaction.keep(holding.enter(State.DRAINING, drain=drain)))


def on_sleep_failed(transaction: Transaction, holding: Holding, report: msg.SleepFailed) -> None:
    _give_up_sleep(transaction, holding, report.reason)


def _give_up_sleep(transaction: Transaction, holding: Holding, why: str) -> None:
    """Stop an engine not asleep; its bytes stay granted until its process is gone."""
    assert holding.drain is not None
    holding = _over(transaction, holding, holding.drain, holding.drain.drained_at)
    stopping = lifecycle.stop(transaction, holding, 0.0, State.STOPPING)
    transaction.publish(stopping, reason=f"its engine could not be put to sleep and is stopped: {why}")


def _rest(num_bytes: int, gpu_ids: list[str]) -> Shares:
    if num_bytes <= 0 or not gpu_ids:
        return {}
    return {gpu_id: {GrantOwner.SLEEPER: -(-num_bytes // len(gpu_ids))} for gpu_id in gpu_ids}


def on_prewarmed(transaction: Transaction, holding: Holding, seen: msg.EnginePrewarmed) -> None:
    if not holding.instance.replica:
        return
    try:
        holding = sharing.seen(transaction, holding, seen.figures.shared_bytes)
    except OutOfMemory as error:
        lifecycle.fail(transaction, holding, error.code, error.message)
        return
    seconds = transaction.now_s - holding.instance.created_at
    why = f"its weights came to the GPU within {seconds:.2f} s{sharing.said(transaction, holding)}"
    transaction.publish(holding.enter(State.PREWARMED), ready_at=transaction.now_s, reason=why)


def on_resume(transaction: Transaction, holding: Holding, command: ResumeInstance) -> None:
    """Take back a drain. The KV cache regains its bytes; where they are lacking, the drain continues, as does that of
    an adapter whose host leaves."""
    instance = holding.instance
    if transaction.node_stops or not instance.url or adapters.lacks_host(transaction, holding):
        return
    whole = holding.shares_on(transaction.node_id)
    if holding.consolidation is None and holding.shares != whole:
        try:
            holding = transaction.grant(replace(holding, shares={}), (instance.instance_id,))
        except OutOfMemory as error:
            why = f"it cannot serve on, since its KV cache was given away: {error.message}"
            if instance.reason != why:
                transaction.publish(holding, reason=why)
            return
        transaction.ask(msg.LimitKv(instance.instance_id, sum(_kv_of(whole).values())))
    transaction.publish(holding.enter(State.READY, snapshot_bytes=0), drain_ends_at=0.0, reason=command.reason)


# the KV cache during a drain


def _reserve(transaction: Transaction, holding: Holding, seen: msg.InFlight) -> None:
    """Keep the KV cache that running requests may need (at least the used bytes); free the rest."""
    instance = holding.instance
    if not transaction.params.reservation or holding.consolidation is not None or seen.kv_bytes_used < 0:
        return
    whole = _kv_of(holding.shares_on(transaction.node_id))
    held = _kv_of(holding.shares)
    total = sum(whole.values())  # M
    used = min(seen.kv_bytes_used, total)  # K
    literal = transaction.params.reservation == "literal_code"
    running = min(seen.num_in_flight, instance.max_concurrency)  # R of C, with those waiting inside
    kept = total - prewarmable_bytes(running, instance.max_concurrency, used, total, literal_code=literal)
    wanted = {gpu_id: -(-num_bytes * kept // max(total, 1)) for gpu_id, num_bytes in whole.items()}
    if sum(held.values()) - sum(wanted.values()) >= max(1, transaction.params.reservation_step_bytes):
        wanted = {gpu_id: min(n, held[gpu_id]) for gpu_id, n in wanted.items()}
        for gpu_id, num_bytes in wanted.items():
            transaction.ledger.shrink(gpu_id, instance.instance_id, GrantOwner.KV, num_bytes)
        _limit(transaction, holding, wanted)
    elif sum(wanted.values()) > sum(held.values()):
        margin = total // instance.max_concurrency // MARGIN
        if running and seen.kv_bytes_used + margin > sum(held.values()):
            _restore(transaction, holding, {gpu_id: max(n, held[gpu_id]) for gpu_id, n in wanted.items()})


def _restore(transaction: Transaction, holding: Holding, wanted: dict[str, int]) -> None:
    """Grow the KV cache from free bytes, then by dropping replicas."""
    instance_id, held = holding.instance.instance_id, _kv_of(holding.shares)
    for replica in _replicas(transaction, wanted):
        free = {gpu.gpu_id: gpu.free_bytes for gpu in transaction.ledger.gpus}
        short = {gpu_id for gpu_id, n in wanted.items() if n > held[gpu_id] + free[gpu_id]}
        if short & replica.shares.keys():
            why = f"its bytes go back to the KV cache of {instance_id}"
            transaction.step(replica.instance.instance_id, msg.GivesWay(why))
    free = {gpu.gpu_id: gpu.free_bytes for gpu in transaction.ledger.gpus}
    given = {gpu_id: min(n, held[gpu_id] + free[gpu_id]) for gpu_id, n in wanted.items()}
    if given != held:
        transaction.ledger.exchange((instance_id,), instance_id, _with_kv(holding, given), holding.shared)
        _limit(transaction, holding, given)


def _replicas(transaction: Transaction, gpu_ids: dict[str, int]) -> list[Holding]:
    there = (h for h in transaction.holdings.values() if h.instance.replica and h.stop is None)
    on_them = [h for h in there if h.shares.keys() & gpu_ids.keys()]
    return sorted(on_them, key=lambda h: (-h.instance.created_at, h.instance.instance_id))


def _limit(transaction: Transaction, holding: Holding, kv: dict[str, int]) -> None:
    transaction.ask(msg.LimitKv(holding.instance.instance_id, sum(kv.values())))
    transaction.keep(replace(holding, shares=_with_kv(holding, kv)))


def _kv_of(shares: Shares) -> dict[str, int]:
    return {gpu_id: of_gpu.get(GrantOwner.KV, 0) for gpu_id, of_gpu in shares.items()}


def _with_kv(holding: Holding, kv: dict[str, int]) -> Shares:
    return {gpu_id: {**of_gpu, GrantOwner.KV: kv[gpu_id]} for gpu_id, of_gpu in holding.shares.items()}
