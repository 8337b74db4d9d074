"""Do the bus and the store answer, and would they survive a crash with what was written? Pure."""

from collections.abc import Iterator

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.cli.doctor.fleet import BusFacts, FleetFacts, StoreFacts, StreamFacts
from glowplug.domain.units import show_bytes

FULL_RATIO = 0.9
MANY_EVENTS = 1000
_F = Findings("fleet")


def check(facts: FleetFacts) -> Iterator[Finding]:
    """The store, then the bus."""
    yield from _store(facts.store)
    yield from _bus(facts.bus)


def _store(store: StoreFacts) -> Iterator[Finding]:
    if store.unknown:
        yield _F.skipped("store", store.unknown, "set GLOWPLUG_REDIS_URL")
        return
    if store.error:
        yield _F.fail(
            "store",
            f"Redis does not answer: {store.error}",
            "start it: warm models are served meanwhile, nothing new is placed",
        )
        return
    if store.role in ("slave", "replica"):
        yield _F.fail("store", "the address is that of a replica, which takes no writes", "name the primary")
    yield _F.ok("store", f"{store.version} answers")
    if store.is_shared:
        says = "its address names no user of one service: who takes over a service may write every table"
        yield _F.warn("store rights", says, "a user per service: docs/network.md tells how")
    yield _persistence(store)
    if store.max_bytes and store.used_bytes > FULL_RATIO * store.max_bytes:
        says = f"{show_bytes(store.used_bytes)} of {show_bytes(store.max_bytes)} used"
        yield _F.fail("store memory", says, "raise maxmemory; is something else keeping keys there?")
    elif store.max_bytes and store.policy not in ("", "noeviction"):
        says = f"maxmemory-policy is {store.policy}: a full server would throw away tables"
        yield _F.fail("store memory", says, "set maxmemory-policy noeviction")
    else:
        limit = f" of {show_bytes(store.max_bytes)}" if store.max_bytes else ", without a limit"
        yield _F.ok("store memory", f"{show_bytes(store.used_bytes)}{limit}")


def _persistence(store: StoreFacts) -> Finding:
    if store.append_only is None:
        return _F.skipped("store on disk", "this server does not tell how it persists", "ask its operator for AOF")
    if not store.append_only:
        return _F.warn(
            "store on disk",
            "no append-only file: a restart forgets pins, drains and models deployed over REST",
            "set appendonly yes and appendfsync everysec",
        )
    if store.aof_problem:
        return _F.fail("store on disk", store.aof_problem, "is its disk full? its log says")
    if store.fsync == "no":
        return _F.warn("store on disk", "appendfsync no: a power cut loses half a minute", "set appendfsync everysec")
    return _F.ok("store on disk", f"append-only file, fsync {store.fsync or 'unknown'}")


def _bus(bus: BusFacts) -> Iterator[Finding]:
    if bus.unknown:
        yield _F.skipped("bus", bus.unknown, "set GLOWPLUG_NATS_URL")
        return
    if bus.error:
        yield _F.fail(
            "bus",
            f"NATS does not answer: {bus.error}",
            "start it: warm models are served meanwhile, cold ones wait",
        )
        return
    yield _F.ok("bus", f"NATS {bus.version} answers, {bus.cluster_size} server(s)")
    if bus.is_shared:
        says = "its address names no user of one service: who takes over a service may publish every command"
        yield _F.warn("bus rights", says, "a user per service: docs/network.md tells how")
    if bus.sync == "":
        yield _F.skipped(
            "bus on disk", "its sync_interval cannot be seen from here", "jetstream { sync_interval: always }"
        )
    elif bus.sync == "always":
        yield _F.ok("bus on disk", "synced on every write")
    else:
        says = f"sync_interval is {bus.sync}: a power cut loses what was acknowledged since"
        yield _F.warn("bus on disk", says, "set jetstream { sync_interval: always }")
    if bus.storing:
        do = "free space on its disk; then it must be started again, which `glowplug up` does by itself"
        yield _F.fail("bus storage", f"NATS answers and stores no events: {bus.storing}", do)
    for stream in bus.streams:
        yield _stream(stream, bus)
    late = {name: num for name, num in bus.backlog.items() if num > MANY_EVENTS}
    for name, num in sorted(late.items()):
        yield _F.warn("bus", f"{name} is {num} events behind", f"is its process alive? glowplug logs {name}")


def _stream(stream: StreamFacts, bus: BusFacts) -> Finding:
    about = f"stream {stream.name.removeprefix('GLOWPLUG_').lower()}"
    if stream.problem:
        return _F.fail(about, stream.problem, "any service makes it when it connects: restart one")
    if not stream.on_file:
        return _F.fail(about, "is kept in memory: a restart forgets it", "delete it; services make it again, on file")
    if stream.replicas_current < stream.replicas:
        says = f"{stream.replicas_current} of {stream.replicas} replicas are current"
        return _F.fail(about, says, "is every server of the NATS cluster up? nats stream info " + stream.name)
    if bus.cluster_size >= 3 and stream.replicas < 3:
        says = f"{stream.replicas} replica(s) in a cluster of {bus.cluster_size}"
        return _F.warn(about, says, "set GLOWPLUG_NATS_REPLICAS=3 for every service and restart them")
    if abs(stream.max_age_s - stream.wanted_age_s) > 1:
        says = f"keeps events for {stream.max_age_s:g} s, not {stream.wanted_age_s:g} s"
        return _F.warn(about, says, f"made by another version? nats stream edit {stream.name}")
    kept = f"{show_bytes(stream.num_bytes)} of {show_bytes(stream.max_bytes)}"
    return _F.ok(about, f"{stream.replicas} replica(s), keeps {stream.max_age_s:g} s, {kept}")
