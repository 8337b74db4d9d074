"""The phases of a cold start against their expectations, and the failed starts."""

from panels import MODEL, Board, Panel, mean, per_minute, quantile, rate, stat

START = "glowplug_cold_start_seconds"
PHASES = f'phase!="total", {MODEL}'
TOTAL = f'phase="total", {MODEL}'
TO_MODEL = "#/model/${__field.labels.model}"

NOW = [
    stat(
        "Starts", "That ended ready, in the time shown.", f"sum(increase(glowplug_starts_total{{{MODEL}}}[$__range]))"
    ),
    stat(
        "Failed starts",
        "In the time shown.",
        f"sum(increase(glowplug_start_failures_total{{{MODEL}}}[$__range])) or vector(0)",
        bounds=[("orange", 1), ("red", 5)],
    ),
    stat("Mean start", "Command to ready, in the time shown.", mean(START, "", TOTAL, "$__range"), "s"),
    stat(
        "From host memory",
        "Share of starts whose weights were already in their node's memory.",
        f'sum(increase(glowplug_starts_total{{weights="host", {MODEL}}}[$__range])) '
        f"/ sum(increase(glowplug_starts_total{{{MODEL}}}[$__range]))",
        "percentunit",
    ),
    stat("Under way", "Instances that start or load now.", 'sum(glowplug_instances{state=~"starting|loading"})'),
    stat(
        "Waiting for room",
        "Placements that found no GPU yet.",
        'max(glowplug_placements_pending{stage="room"})',
        bounds=[("orange", 1)],
    ),
]
PHASE = [
    Panel(
        title="Mean start by phase",
        about="decide: request to decision. room: until others gave back memory. fetch: weights to host memory. "
        "launch: engine process up. load: host memory to GPU. warmup: first readiness. fetch and launch run side by "
        "side: the sum exceeds the whole.",
        asks=[(mean(START, "phase", PHASES, "5m"), "{{phase}}")],
        unit="s",
        width=12,
        stacked=True,
        link="#/traces",
    ),
    Panel(
        title="p95 by phase",
        about="The slow ones. `total` is command to ready.",
        asks=[(quantile(0.95, START, MODEL, "phase", "5m"), "{{phase}}")],
        unit="s",
        width=12,
        link="#/traces",
    ),
    Panel(
        title="Whole starts",
        about="How the lengths are spread.",
        asks=[(f"sum by (le) (increase({START}_bucket{{{TOTAL}}}[$__rate_interval]))", "{{le}}")],
        kind="heatmap",
        unit="s",
        width=12,
    ),
    Panel(
        title="p95 of whole starts by model",
        about="Click a line to open the model in the console.",
        asks=[(quantile(0.95, START, TOTAL, "model", "5m"), "{{model}}")],
        unit="s",
        width=12,
        link=TO_MODEL,
    ),
]
LEAVING = [
    Panel(
        title="Leaving a GPU, p95",
        about="Waits for memory that others give back. drained: until the last request ended; asleep: until the engine "
        "slept after that.",
        asks=[(quantile(0.95, "glowplug_drain_seconds", MODEL, "part", "5m"), "{{part}}")],
        unit="s",
        width=12,
    ),
    Panel(
        title="Drains by model",
        about="Per minute: stopped, asleep or prewarmed at their end.",
        asks=[(per_minute("glowplug_drain_seconds_count", "model", f'part="drained", {MODEL}'), "{{model}}")],
        width=12,
        link=TO_MODEL,
    ),
]
STAGES = [
    Panel(
        title="Consolidation, p95",
        about="Seconds until a stage of a pipeline ran all of its model, by how it ended: whole, or failed. The "
        "pipeline serves meanwhile.",
        asks=[(quantile(0.95, "glowplug_consolidate_seconds", MODEL, "result", "5m"), "{{result}}")],
        unit="s",
        width=12,
    ),
    Panel(
        title="Consolidations by model",
        about="Per minute.",
        asks=[(per_minute("glowplug_consolidate_seconds_count", "model", MODEL), "{{model}}")],
        width=12,
        link=TO_MODEL,
    ),
]
EXPECTED = [
    Panel(
        title="Expected and actual, by phase",
        about="Means over 5 minutes. An expectation is the running mean of that model's earlier starts on that node; a "
        "first start has none.",
        asks=[
            (mean("glowplug_cold_start_predicted_seconds", "phase", "", "5m"), "{{phase}} expected"),
            (mean(START, "phase", 'phase!="total"', "5m"), "{{phase}} actual"),
        ],
        unit="s",
        width=12,
    ),
    Panel(
        title="How far off, p95 by phase",
        about="Difference between expected and actual, either way. The waiting times told to clients are as accurate.",
        asks=[(quantile(0.95, "glowplug_cold_start_error_seconds", "", "phase", "5m"), "{{phase}}")],
        unit="s",
        width=12,
    ),
]
COUNTS = [
    Panel(
        title="Starts by model",
        about="Per minute.",
        asks=[(per_minute("glowplug_starts_total", "model", MODEL), "{{model}}")],
        link=TO_MODEL,
    ),
    Panel(
        title="Starts by where the weights were",
        about="host: in the node's memory. fetched: they had to come from their source. Per minute.",
        asks=[(per_minute("glowplug_starts_total", "weights", MODEL), "{{weights}}")],
        stacked=True,
    ),
    Panel(
        title="Failed starts by model and reason",
        about="Per minute. ColdStartFailing's runbook has the codes.",
        asks=[(per_minute("glowplug_start_failures_total", "model, code", MODEL), "{{model}} {{code}}")],
        link=TO_MODEL,
    ),
    Panel(
        title="Engines that died after they were ready",
        about="Per minute.",
        asks=[(per_minute("glowplug_engine_deaths_total", "model, code", MODEL), "{{model}} {{code}}")],
        link=TO_MODEL,
    ),
    Panel(
        title="Fetched",
        about="Bytes that came over each node's link, by source.",
        asks=[(rate("glowplug_fetched_bytes_total", "node, source"), "{{node}} {{source}}")],
        unit="Bps",
    ),
    Panel(
        title="Whole fetches, p95",
        about="By source; a fetch answered from host memory is none.",
        asks=[(quantile(0.95, "glowplug_fetch_seconds", "", "source", "5m"), "{{source}}")],
        unit="s",
    ),
]
BOARD = Board(
    uid="glowplug-cold-starts",
    title="Glowplug: cold starts",
    about="Where the time of a cold start goes, by phase, expected and actual.",
    variables=["model"],
    rows=[
        ("Now", NOW),
        ("Phases", PHASE),
        ("Leaving", LEAVING),
        ("Pipelines", STAGES),
        ("Expected and actual", EXPECTED),
        ("Counts", COUNTS),
    ],
)
