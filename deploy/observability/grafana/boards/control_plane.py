"""The health of the services themselves: leaders, latency, queues, bus, store, traces, processes."""

from panels import Board, Panel, per_minute, quantile, rate, stat

NOW = [
    stat("Processes up", "That answer Prometheus.", 'sum(up{job!="prometheus"})'),
    stat(
        "Processes down",
        "That should and do not.",
        'count(up{job!="prometheus"} == 0) or vector(0)',
        bounds=[("red", 1)],
    ),
    stat(
        "Without bus",
        "Processes not connected.",
        "count(glowplug_bus_connected == 0) or vector(0)",
        bounds=[("red", 1)],
    ),
    stat(
        "Without store",
        "Processes not connected.",
        "count(glowplug_store_connected == 0) or vector(0)",
        bounds=[("red", 1)],
    ),
    stat(
        "Oldest tables",
        "Of any process: seconds since it read them.",
        "max(time() - glowplug_table_sync_timestamp_seconds)",
        "s",
        bounds=[("orange", 10), ("red", 30)],
    ),
    stat(
        "Versions",
        "More than one: an upgrade is under way.",
        "count(count by (version) (glowplug_build_info))",
        bounds=[("orange", 2)],
    ),
]
LEADING = (
    "max by (service, instance) (glowplug_leader) "
    "and on (service) (sum by (service) (glowplug_leader_changes_total) > 0)"
)
LEADERS = [
    Panel(
        title="Leaders",
        about="1 leads, 0 is a standby; only services that elect a leader.",
        asks=[(LEADING, "{{service}} {{instance}}")],
        kind="state-timeline",
        base="blue",
        bounds=[("green", 1)],
        width=12,
    ),
    Panel(
        title="Decisions",
        about="Per minute, by kind and policy.",
        asks=[(per_minute("glowplug_decisions_total", "kind, policy"), "{{kind}} {{policy}}")],
        width=12,
        link="#/decisions",
    ),
]
LATENCY = [
    Panel(
        title="A controller's time per stimulus, p99",
        about="Pure computing; above 10 ms one stimulus holds up the next.",
        asks=[(quantile(0.99, "glowplug_handle_seconds", "", "service"), "{{service}}")],
        unit="s",
    ),
    Panel(
        title="Event loop lag, p95",
        about="How late each tick is. Above 0.25 s the process does not keep up.",
        asks=[(quantile(0.95, "glowplug_loop_lag_seconds", "", "job, instance"), "{{job}} {{instance}}")],
        unit="s",
        bounds=[("red", 0.25)],
    ),
    Panel(
        title="Inbox",
        about="Stimuli that wait for the controller.",
        asks=[("glowplug_inbox_stimuli", "{{job}} {{instance}}")],
    ),
    Panel(
        title="Stimuli per second",
        about="The ten most frequent.",
        asks=[(f"topk(10, {rate('glowplug_stimuli_total', 'service, type')})", "{{service}} {{type}}")],
        unit="ops",
    ),
    Panel(
        title="Effects per second",
        about="Effects that controllers ask for.",
        asks=[(f"topk(10, {rate('glowplug_effects_total', 'service, effect')})", "{{service}} {{effect}}")],
        unit="ops",
    ),
    Panel(
        title="Age of the tables",
        about="Each process reads its tables every 2 s, so changes missed on the bus are at most that old.",
        asks=[("time() - glowplug_table_sync_timestamp_seconds", "{{job}} {{instance}}")],
        unit="s",
        bounds=[("red", 30)],
    ),
]
BUS = [
    Panel(
        title="Events per second",
        about="Taken by the bus, by type.",
        asks=[(f"topk(12, {rate('glowplug_events_published_total', 'type')})", "{{type}}")],
        unit="ops",
        link="#/events",
    ),
    Panel(
        title="Waiting for delivery",
        about="Kept for a process and not yet given to it.",
        asks=[("glowplug_bus_pending", "{{job}} {{instance}}")],
    ),
    Panel(
        title="Lost, repeated, malformed",
        about="Reconnects, redeliveries and messages that are no event, per minute.",
        asks=[
            (per_minute("glowplug_bus_reconnects_total", "service"), "{{service}} reconnects"),
            (per_minute("glowplug_bus_redeliveries_total", "service"), "{{service}} redeliveries"),
            (per_minute("glowplug_bus_malformed_total", "service"), "{{service}} malformed"),
        ],
    ),
    Panel(
        title="Refused by bus and store",
        about="Per minute. Each is asked for again by the next tick.",
        asks=[
            (per_minute("glowplug_bus_publish_failures_total", "service"), "{{service}} bus"),
            (per_minute("glowplug_store_failures_total", "service"), "{{service}} store"),
        ],
    ),
    Panel(
        title="Commands refused for their epoch",
        about="Per minute. A few at a takeover are the fence at work; a steady rate is a controller that does not know "
        "it has been replaced.",
        asks=[(per_minute("glowplug_stale_commands_total", "service"), "{{service}}")],
    ),
    Panel(
        title="Telemetry routers dropped",
        about="Reports the bus did not take. Requests never wait for it.",
        asks=[(rate("glowplug_telemetry_dropped_total", "instance"), "{{instance}}")],
        unit="ops",
    ),
]
TRACES = [
    Panel(
        title="Spans",
        about="Sent by the console, and lost on the way.",
        asks=[
            (rate("glowplug_spans_exported_total", "service"), "{{service}} taken"),
            (rate("glowplug_spans_dropped_total", "service"), "{{service}} lost"),
        ],
        unit="ops",
    ),
    Panel(
        title="The console's traces",
        about="Kept; at its bound the oldest leaves.",
        asks=[("glowplug_traces_kept", "traces")],
    ),
    Panel(
        title="Open pages",
        about="And messages dropped because a page read too slowly.",
        asks=[("sum(glowplug_stream_clients)", "pages"), (rate("glowplug_stream_dropped_total"), "dropped per second")],
    ),
]
PROCESSES = [
    Panel(
        title="Memory",
        about="Resident, by process.",
        asks=[("process_resident_memory_bytes", "{{job}} {{instance}}")],
        unit="bytes",
    ),
    Panel(
        title="CPU",
        about="Cores in use; a service has one loop, so that 1 is all it can take.",
        asks=[("rate(process_cpu_seconds_total[$__rate_interval])", "{{job}} {{instance}}")],
    ),
    Panel(
        title="Open files",
        about="Share of the limit.",
        asks=[("process_open_fds / process_max_fds", "{{job}} {{instance}}")],
        unit="percentunit",
    ),
    Panel(
        title="Who runs",
        about="Each process with its version.",
        asks=[("max by (service, service_id, version) (glowplug_build_info)", "")],
        kind="table",
        width=12,
    ),
    Panel(
        title="Starts of processes",
        about="Within the last hour, beyond the first.",
        asks=[("sum by (job) (changes(process_start_time_seconds[1h]))", "{{job}}")],
        width=12,
    ),
]
BOARD = Board(
    uid="glowplug-control-plane",
    title="Glowplug: control plane health",
    about="Whether the services themselves are well.",
    rows=[
        ("Now", NOW),
        ("Leaders and decisions", LEADERS),
        ("Latency", LATENCY),
        ("Bus and store", BUS),
        ("Traces and pages", TRACES),
        ("Processes", PROCESSES),
    ],
)
