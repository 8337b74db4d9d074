"""Is every process of a fleet there, ready, of one version and of one mind? Pure."""

from collections.abc import Iterator

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.cli.doctor.fleet import FleetFacts, ServiceFacts
from glowplug.fleet.tables import NODE_LEASE_S
from glowplug.telemetry import semconv

MAX_SKEW_S = 2.0  # a Date header is whole seconds
MAX_SYNC_AGE_S = 15.0  # tables are read every resync_s, 2 s
MANY_RESTARTS = 3
_F = Findings("fleet")
LOGS = "glowplug logs {name}"


def check(facts: FleetFacts) -> Iterator[Finding]:
    """One finding per process, then what holds between them."""
    yield from _processes(facts)
    for service in facts.services:
        yield _alive(service)
    found = {service.service for service in facts.services}
    for name in facts.expected:
        if name not in found:
            yield _F.fail(name, "no address of it is known", f"set GLOWPLUG_{name.upper()}_URL, or start one")
    alive = [service for service in facts.services if not service.error]
    yield from _versions(facts, alive)
    yield from _clocks(alive)
    yield from _roles(alive)
    yield from _numbers(facts, alive)
    yield from _edge(facts)


def _processes(facts: FleetFacts) -> Iterator[Finding]:
    """What `glowplug up` says of what it started: NATS and Valkey too."""
    for process in facts.processes:
        name, state = process["name"], process["state"]
        if state == "crash-loop":
            yield _F.fail(name, f"keeps ending: {process['exit_reason']}", LOGS.format(name=name))
        elif problem := process.get("problem"):
            yield _F.fail(name, problem, "free space on the disk of the state directory; it goes on by itself then")
        elif state != "ready":
            yield _F.fail(
                name, f"is {state}" + (f" ({r})" if (r := process["exit_reason"]) else ""), LOGS.format(name=name)
            )
        elif process["restarts"] >= MANY_RESTARTS:
            says = f"was started again {process['restarts']} times, lately for: {process['exit_reason']}"
            yield _F.warn(name, says, LOGS.format(name=name))


def _alive(service: ServiceFacts) -> Finding:
    if service.error:
        return _F.fail(
            service.name,
            f"does not answer at {service.url}: {service.error}",
            "is its process there and its port open?",
        )
    if not service.ready:
        why = f"is not ready: {service.reason or 'it does not say why'}"
        return _F.fail(service.name, why, "what it waits for is among these findings, or in its log")
    role = f", {service.role}" if service.role in ("leader", "standby") else ""
    return _F.ok(service.name, f"ready at {service.url}{role}")


def _versions(facts: FleetFacts, alive: list[ServiceFacts]) -> Iterator[Finding]:
    by_version: dict[str, list[str]] = {}
    for service in alive:
        by_version.setdefault(service.version or "unknown", []).append(service.name)
    if len(by_version) > 1:
        mixed = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(by_version.items()))
        yield _F.warn("versions", f"mixed: {mixed}", "finish the upgrade or go back: docs/howto/upgrade.md")
    elif by_version and facts.version not in by_version:
        only = next(iter(by_version))
        yield _F.warn("versions", f"the fleet is {only}, this command {facts.version}", "use the command of the fleet")
    elif by_version:
        yield _F.ok("versions", f"every service is {facts.version}")


def _clocks(alive: list[ServiceFacts]) -> Iterator[Finding]:
    known = [service for service in alive if service.skew_s is not None]
    if not known:
        return
    worst = max(known, key=lambda service: abs(service.skew_s or 0.0))
    skew_s = worst.skew_s or 0.0
    if abs(skew_s) <= MAX_SKEW_S:
        yield _F.ok("clocks", f"within {MAX_SKEW_S:g} s of this machine's")
        return
    says = f"the clock of {worst.name} is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
    do = "synchronise the clocks of all machines (chrony, systemd-timesyncd)"
    yield (
        _F.fail("clocks", f"{says}: nodes may be taken as silent", do)
        if abs(skew_s) >= NODE_LEASE_S
        else _F.warn("clocks", says, do)
    )


def _roles(alive: list[ServiceFacts]) -> Iterator[Finding]:
    """Where services elect a leader: one each, and all know the same one."""
    for kind in ("placer", "autoscaler", "predictor"):
        elected = [service for service in alive if service.service == kind and service.role in ("leader", "standby")]
        if not elected:
            continue
        about, leading = f"{kind} leader", [service.name for service in elected if service.role == "leader"]
        known = sorted({service.leader for service in elected if service.leader})
        if len(leading) > 1:
            says = f"{' and '.join(leading)} both say they lead"
            yield _F.fail(about, says, "wait one lease and look again; then restart the older one")
        elif len(known) > 1:
            says = f"they disagree on who leads: {' or '.join(known)}"
            yield _F.fail(about, says, "wait one lease and look again; do all of them reach the same store?")
        elif not known and not leading:
            says = f"none of {', '.join(s.name for s in elected)} leads or knows who does"
            yield _F.fail(about, says, "does the store answer? the lease is kept there")
        else:
            standing_by = sum(service.role == "standby" for service in elected)
            yield _F.ok(about, f"{(known or leading)[0]} leads, {standing_by} standing by")


def _numbers(facts: FleetFacts, alive: list[ServiceFacts]) -> Iterator[Finding]:
    """What services count about themselves."""
    for service in alive:
        metrics = service.metrics
        if stale := metrics.get(semconv.STALE_COMMANDS_TOTAL, 0):
            yield _F.warn(
                service.name,
                f"refused {stale:.0f} command(s) of an older epoch: a process that was replaced still sends",
                "look for a second placer, autoscaler or predictor with the same duty",
            )
        if malformed := metrics.get(semconv.BUS_MALFORMED_TOTAL, 0):
            yield _F.warn(
                service.name,
                f"could not read {malformed:.0f} event(s): a process of another version, or not of this fleet, writes",
                f"glowplug tap --raw; {LOGS.format(name=service.name)}",
            )
        if given_up := metrics.get(semconv.BUS_GIVEN_UP_TOTAL, 0):
            says = f"gave up {given_up:.0f} event(s): it failed at every delivery of them"
            yield _F.warn(service.name, says, LOGS.format(name=service.name))
        if unreadable := metrics.get(semconv.ROWS_UNREADABLE, 0):
            says = f"leaves out {unreadable:.0f} row(s) of its tables: it cannot read them"
            yield _F.warn(service.name, says, f"docs/runbooks.md#rowsunreadable; {LOGS.format(name=service.name)}")
        synced_at = metrics.get(semconv.TABLE_SYNC_TIMESTAMP_SECONDS, 0)
        if synced_at and (age_s := facts.now_s - synced_at) > MAX_SYNC_AGE_S:
            yield _F.warn(
                service.name, f"has not read its tables for {age_s:.0f} s", "does the store answer it? its log says"
            )
        if metrics.get(semconv.BUS_STORES, 1) == 0:
            yield _F.fail(
                service.name,
                "its bus answers and stores no events: cold models cannot be started",
                "look at the disk of NATS, and at its /healthz",
            )
        if metrics.get(semconv.STORE_WRITABLE, 1) == 0:
            yield _F.fail(
                service.name,
                "its store answers and takes no writes",
                "look at the disk and the memory of Valkey (Redis)",
            )
        if dropped := metrics.get(semconv.SPANS_DROPPED_TOTAL, 0):
            yield _F.warn(
                service.name,
                f"dropped {dropped:.0f} span(s): no exporter took them",
                "is OTEL_EXPORTER_OTLP_ENDPOINT right, and its receiver up?",
            )


def _edge(facts: FleetFacts) -> Iterator[Finding]:
    if facts.data_port:
        yield _F.fail("OpenAI API", facts.data_port, "clients get nothing until this port answers")
    elif any(service.service == "router" for service in facts.services):
        yield _F.ok("OpenAI API", "lists its models")
    if facts.console_problem:
        yield _F.warn("console", facts.console_problem, "its page is stale until then")
    if facts.num_traces is None:
        return
    served = sum(s.metrics.get(semconv.REQUESTS_TOTAL, 0) for s in facts.services if s.service == "router")
    if not facts.num_traces and served:
        yield _F.warn(
            "traces",
            f"{served:.0f} request(s) were served and the console has no trace",
            "is OTEL_EXPORTER_OTLP_ENDPOINT the console's address, and GLOWPLUG_TRACE_RATIO above 0?",
        )
    elif facts.num_traces:
        yield _F.ok("traces", "the console receives them")
    else:
        yield _F.skipped("traces", "no request yet, so no trace")
