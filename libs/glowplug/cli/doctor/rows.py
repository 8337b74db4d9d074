"""Do tables, models, nodes and queues agree? Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.cli.doctor.fleet import FleetFacts
from glowplug.domain.units import show_bytes
from glowplug.fleet.tables import NODE_LEASE_S

OVERDUE_S = 5.0  # beyond max_wait_s: the router's tick and a slow machine
FUTURE_S = 60.0
STUCK_PLACEMENT_S = 60.0
_F = Findings("fleet")


def check(facts: FleetFacts) -> Iterator[Finding]:
    for group in (_tables, _nodes, _instances, _models, _weights, _waiting):
        yield from group(facts)


def _tables(facts: FleetFacts) -> Iterator[Finding]:
    for row in facts.store.unreadable:
        says = f"{row}; services leave it out"
        yield _F.fail("rows", says, "of a newer version? docs/howto/upgrade.md; else docs/runbooks.md#rowsunreadable")
    ahead_s = {name: epoch / 1000 - facts.now_s for name, epoch in facts.store.epochs.items()}
    ahead = {name: seconds for name, seconds in ahead_s.items() if seconds > FUTURE_S}
    for name, seconds in sorted(ahead.items()):
        says = f"that of the {name} is {seconds:.0f} s in the future: a clock was wrong"
        do = "nothing for this store; after restoring an older one, commands are refused until that moment"
        yield _F.warn("epochs", says, do)
    if facts.store.epochs and not ahead:
        yield _F.ok("epochs", ", ".join(f"{who} {epoch}" for who, epoch in sorted(facts.store.epochs.items())))


def _nodes(facts: FleetFacts) -> Iterator[Finding]:
    nodes = facts.store.nodes
    if not nodes and not facts.store.error and not facts.store.unknown:
        yield _F.fail("nodes", "no node has joined: nothing can be placed", "start an agent: docs/howto/nodes.md")
    for node_id in () if facts.store.error or facts.store.unknown else facts.expected_nodes:
        if node_id not in nodes:
            says = "has no row: it was silent for its lease and counts as gone, or it never joined"
            yield _F.fail(node_id, says, f"is the agent of {node_id} running, and does it reach NATS?")
    for node_id, node in sorted(nodes.items()):
        silent_s = facts.now_s - node.heartbeat_at
        said = facts.nodes.get(node_id)
        over = [gpu for gpu in node.gpus if gpu.used_bytes > gpu.total_bytes]
        if silent_s > NODE_LEASE_S:
            says = f"silent for {silent_s:.0f} s: counts as gone, its instances are placed elsewhere"
            yield _F.fail(node_id, says, f"is its agent ({node.agent_url}) running, and does it reach NATS?")
        elif silent_s > NODE_LEASE_S / 2:
            says = f"silent for {silent_s:.0f} s: at {NODE_LEASE_S:.0f} s it counts as gone"
            yield _F.warn(node_id, says, f"is its agent ({node.agent_url}) running, and does it reach NATS?")
        elif over:
            says = f"{over[0].gpu_id} has {show_bytes(over[0].used_bytes)} granted of {show_bytes(over[0].total_bytes)}"
            do = f"a budget was lowered? glowplug nodes; drain it: POST /v1/nodes/{node_id}/drain"
            yield _F.fail(node_id, says, do)
        elif said is not None and said.warnings and not _all_emulated(facts):
            yield _F.warn(node_id, said.warnings[0], "correct GLOWPLUG_GPU_KIND and GLOWPLUG_GPU_BUDGETS of its agent")
        else:
            kinds = Counter(gpu.kind for gpu in node.gpus)
            gpus = ", ".join(f"{num} {kind} GPU(s)" for kind, num in sorted(kinds.items()))
            draining = ", draining" if node.draining else ""
            yield _F.ok(node_id, f"{gpus}, engines {', '.join(node.engines) or 'none'}{draining}")
        if not node.engines:
            why = "; ".join(f"{name}: {reason}" for name, reason in (said.unavailable if said else {}).items())
            says = f"none can start: {why or 'its agent does not say why'}"
            yield _F.fail(f"{node_id} engines", says, "make install")
        if said is not None:
            yield from _cache(facts, node_id)


def _all_emulated(facts: FleetFacts) -> bool:
    """Emulated engines take no memory, so their budgets may exceed the machine's."""
    return all(model.engine == "emulated" for model in facts.store.models.values())


def _cache(facts: FleetFacts, node_id: str) -> Iterator[Finding]:
    said = facts.nodes[node_id]
    if said.cache_capacity_bytes is None:
        return
    sizes = {m.name: m.fetch_bytes for m in facts.store.models.values() if m.weights.uri}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    capacity = show_bytes(said.cache_capacity_bytes)
    if largest and sizes[largest] > said.cache_capacity_bytes:
        says = f"holds {capacity}, and {largest} has {show_bytes(sizes[largest])}"
        do = "raise GLOWPLUG_HOST_CACHE_BYTES, or give GLOWPLUG_SHM_DIR a larger file system"
        yield _F.fail(f"{node_id} weights", says, do)
    else:
        disk = f", {show_bytes(said.disk_used_bytes)} of {show_bytes(said.disk_capacity_bytes)} on disk"
        where = f"in host memory{disk if said.disk_capacity_bytes else ''}"
        yield _F.ok(f"{node_id} weights", f"{show_bytes(said.cache_used_bytes)} of {capacity} {where}")
    if said.disk_trouble:
        do = "free space there, name another GLOWPLUG_DISK_CACHE_DIR, or set GLOWPLUG_DISK_CACHE_BYTES=0"
        yield _F.warn(f"{node_id} disk", said.disk_trouble, do)


def _instances(facts: FleetFacts) -> Iterator[Finding]:
    store = facts.store
    living = {i.instance_id: i for i in store.instances.values() if not i.state.is_gone}
    num_bad = 0
    for instance in living.values():
        if instance.node_id not in store.nodes:
            num_bad += 1
            where = instance.node_id or "no node"
            says = f"{instance.instance_id} of {instance.model_key} is on {where}, which does not exist"
            yield _F.fail("instances", says, "start that node's agent again, or wait until it counts as gone")
        elif instance.model_key not in store.models and instance.state.value != "draining":
            num_bad += 1
            says = f"{instance.instance_id} serves {instance.model_key}, which is not deployed"
            do = f"glowplug ps; POST /v1/instances/{instance.instance_id}/stop at its agent"
            yield _F.warn("instances", says, do)
    for node in store.nodes.values():
        for gpu in node.gpus:
            lost = [grant.holder for grant in gpu.grants if grant.holder not in store.instances]
            if lost:
                num_bad += 1
                says = f"{gpu.gpu_id} keeps bytes for {', '.join(sorted(set(lost)))}, which have no row"
                yield _F.warn("instances", says, "a start under way? look again; else restart the node's agent")
    if not num_bad and store.nodes:
        yield _F.ok("instances", f"{len(living)} running, each on a live node")


def _models(facts: FleetFacts) -> Iterator[Finding]:
    for file, reason in sorted(facts.file_errors.items()):
        yield _F.fail("model files", f"{file} is not in force: {reason}", "correct it; it is reread automatically")
    for file, reason in sorted(facts.missing_files.items()):
        yield _F.warn("model files", f"{file}: {reason}", "put it back, or glowplug undeploy the model")
    if facts.models is None:
        return
    wrong = [finding for row in facts.models if (finding := _model(facts, row))]
    yield from wrong
    if not facts.models:
        yield _F.warn("models", "none is deployed", "glowplug deploy FILE: docs/howto/models.md")
    elif not wrong and not facts.file_errors:
        yield _F.ok("models", f"{len(facts.models)} deployed, each fits a GPU of a node that has its engine")


def _model(facts: FleetFacts, row: Mapping[str, Any]) -> Finding | None:
    name = row["name"]
    if row.get("last_failure"):
        says = f"its last start failed: {row['last_failure'].splitlines()[0]}"
        return _F.fail(f"model {name}", says, f"glowplug why {name}; glowplug logs {name}")
    if row.get("config_error"):
        return _F.fail(f"model {name}", f"an older file is in force: {row['config_error']}", "correct the file")
    nodes = facts.store.nodes
    if not nodes:
        return None
    able = [node for node in nodes.values() if row["engine"] in node.engines]
    if not able:
        reasons = {n.unavailable[row["engine"]] for n in facts.nodes.values() if n.unavailable.get(row["engine"])}
        why = f": {sorted(reasons)[0]}" if reasons else ""
        says = f"no node can start {row['engine']}{why}"
        return _F.fail(f"model {name}", says, "repair the engine, or change `engine`")
    largest_bytes = max((gpu.total_bytes for node in able for gpu in node.gpus), default=0)
    if row["memory_bytes"] > largest_bytes:
        needed, largest = show_bytes(row["memory_bytes"]), show_bytes(largest_bytes)
        says = f"needs {needed}, and the largest GPU with {row['engine']} has {largest}"
        return _F.fail(f"model {name}", says, "lower kv_bytes or context_tokens, or add a larger GPU")
    return None


def _weights(facts: FleetFacts) -> Iterator[Finding]:
    for name, problem in sorted(facts.weights.items()):
        do = "restore them: docs/howto/weights.md; they are never served like this"
        yield _F.fail(f"weights of {name}", problem, do)
    if facts.num_weights_checked and not facts.weights:
        says = f"{facts.num_weights_checked} local file(s) exist, with the declared size and checksum"
        yield _F.ok("weights", says)


def _waiting(facts: FleetFacts) -> Iterator[Finding]:
    if facts.queues is None:
        do = "set GLOWPLUG_ROUTER_URL and the admin token"
        yield _F.skipped("held requests", "no router reports its held requests", do)
        return
    bad = 0
    for queue in facts.queues:
        waited_s, longest_s = float(queue["oldest_waiting_s"]), float(queue["max_wait_s"])
        if queue["num_waiting"] and waited_s > longest_s + OVERDUE_S:
            bad += 1
            says = f"{queue['num_waiting']} held, the oldest for {waited_s:.0f} s of at most {longest_s:g} s"
            yield _F.fail(f"requests of {queue['model']}", says, "the router hangs: glowplug logs router-1")
        elif queue["num_waiting"] >= queue["max_queue"] > 0:
            bad += 1
            says = f"its queue is full ({queue['num_waiting']}): more are refused with 429"
            yield _F.warn(f"requests of {queue['model']}", says, "raise max_instances or max_queue, or add nodes")
    for waiting in facts.placements:
        if not waiting["started"] and waiting["waited_s"] > STUCK_PLACEMENT_S:
            bad += 1
            says = f"an instance of {waiting['model_key']} has waited {waiting['waited_s']:.0f} s for free memory"
            do = f"glowplug why {waiting['model_key']}; glowplug nodes shows who has the bytes"
            yield _F.warn("placements", says, do)
    if not bad:
        num = sum(int(queue["num_waiting"]) for queue in facts.queues)
        yield _F.ok("held requests", f"{num} held, none longer than its model allows")
