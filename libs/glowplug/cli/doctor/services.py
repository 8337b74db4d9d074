"""Check that a fleet's processes run, are ready, share a version and agree on leaders. Pure."""

from collections.abc import Iterator

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.cli.doctor.fleet import FleetFacts, ServiceFacts
from glowplug.telemetry import semconv

MAX_SKEW_S = 2.0  # a Date header has whole seconds
MAX_SYNC_AGE_S = 15.0  # tables are read every resync_s, 2 s
MANY_RESTARTS = 3
_F = Findings("fleet")
LOGS = "glowplug logs {name}"
COUNTS = (
    (
        semconv.STALE_COMMANDS_TOTAL,
        "refused {num:.0f} command(s) of an older epoch: a process that was replaced still sends",
        "look for a second placer, autoscaler or predictor with the same duty",
    ),
    (
        semconv.BUS_MALFORMED_TOTAL,
        "could not read {num:.0f} event(s): a process of another version, or not of this fleet, writes",
        f"glowplug tap --raw; {LOGS}",
    ),
    (
        semconv.BUS_OVERFLOWED_TOTAL,
        "has lost {num:.0f} event(s) of usage: the bus discarded them before they were read",
        "keep a console running: the bus keeps 7 days and 256 MiB",
    ),
    (semconv.BUS_GIVEN_UP_TOTAL, "gave up {num:.0f} event(s): every delivery failed", LOGS),
    (
        semconv.ROWS_UNREADABLE,
        "skips {num:.0f} row(s) of its tables that it cannot read",
        f"docs/runbooks.md#rowsunreadable; {LOGS}",
    ),
    (
        semconv.SPANS_DROPPED_TOTAL,
        "dropped {num:.0f} span(s): no exporter took them",
        "is OTEL_EXPORTER_OTLP_ENDPOINT right, and its receiver up?",
    ),
)
SIGNS = (
    (
        semconv.BUS_STORES,
        "its bus answers but stores no events: cold models cannot be started",
        "look at the disk of NATS, and at its /healthz",
    ),
    (
        semconv.STORE_WRITABLE,
        "its store answers but accepts no writes",
        "look at the disk and the memory of Valkey (Redis)",
    ),
)


def check(facts: FleetFacts) -> Iterator[Finding]:
    yield from _processes(facts)
    for service in facts.services:
        yield _alive(service)
    found = {service.service for service in facts.services}
    for name in facts.expected:
        if name not in found:
            yield _F.fail(name, "this command has no address for it", f"set GLOWPLUG_{name.upper()}_URL, or start one")
    alive = [service for service in facts.services if not service.error]
    yield from _versions(facts, alive)
    yield from _clocks(alive)
    yield from _roles(alive)
    yield from _numbers(facts, alive)
    yield from _edge(facts)


def _processes(facts: FleetFacts) -> Iterator[Finding]:
    for process in facts.processes:
        name, state = process["name"], process["state"]
        if state == "crash-loop":
            yield _F.fail(name, f"keeps ending: {process['exit_reason']}", LOGS.format(name=name))
        elif problem := process.get("problem"):
            yield _F.fail(name, problem, "free space on the disk of the state directory; it then resumes by itself")
        elif state != "ready":
            why = f" ({process['exit_reason']})" if process["exit_reason"] else ""
            yield _F.fail(name, f"is {state}{why}", LOGS.format(name=name))
        elif process["restarts"] >= MANY_RESTARTS:
            says = f"was restarted {process['restarts']} times, last for: {process['exit_reason']}"
            yield _F.warn(name, says, LOGS.format(name=name))


def _alive(service: ServiceFacts) -> Finding:
    if service.error:
        says = f"does not answer at {service.url}: {service.error}"
        return _F.fail(service.name, says, "is its process there and its port open?")
    if not service.ready:
        why = f"is not ready: {service.reason or 'it does not say why'}"
        return _F.fail(service.name, why, "the cause is among these findings, or in its log")
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
    known = {service.name: service.skew_s for service in alive if service.skew_s is not None}
    if not known:
        return
    worst, skew_s = max(known.items(), key=lambda item: abs(item[1]))
    if abs(skew_s) <= MAX_SKEW_S:
        yield _F.ok("clocks", f"within {MAX_SKEW_S:g} s of this machine's")
        return
    says = f"the clock of {worst} is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
    do = "synchronise the clocks of all machines (chrony, systemd-timesyncd)"
    yield _F.warn("clocks", f"{says}: keys end early or late there, and times are shown by it", do)


def _roles(alive: list[ServiceFacts]) -> Iterator[Finding]:
    """One leader per service, known to all its processes."""
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
    for name, metrics in ((service.name, service.metrics) for service in alive):
        for metric, says, do in COUNTS:
            if num := metrics.get(metric, 0):
                yield _F.warn(name, says.format(num=num), do.format(name=name))
        for metric, says, do in SIGNS:
            if metrics.get(metric, 1) == 0:
                yield _F.fail(name, says, do)
        synced_at = metrics.get(semconv.TABLE_SYNC_TIMESTAMP_SECONDS, 0)
        if synced_at and (age_s := facts.now_s - synced_at) > MAX_SYNC_AGE_S:
            says = f"has not read its tables for {age_s:.0f} s"
            yield _F.warn(name, says, "look in its log whether the store answers")


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
        do = "the console receives no reports of the routers; look in its log whether the bus answers"
        yield _F.warn("traces", f"{served:.0f} request(s) were served and the console has no trace", do)
    elif facts.num_traces:
        yield _F.ok("traces", "the console draws them")
    else:
        yield _F.skipped("traces", "no request yet, so no trace")
