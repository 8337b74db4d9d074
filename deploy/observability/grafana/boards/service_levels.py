"""Service levels of clients: first tokens, tokens, objectives met, requests and their ends."""

from panels import MODEL, Board, Panel, quantile, quantiles, rate, stat

TTFT, TPOT = "glowplug_request_ttft_seconds", "glowplug_request_tpot_seconds"
TO_MODEL = "#/model/${__field.labels.model}"


def attainment(level: str) -> str:
    chosen = f'level="{level}", {MODEL}'
    missed, asked = (
        f"sum(increase(glowplug_slo_{kind}_total{{{chosen}}}[$__range]))" for kind in ("missed", "requests")
    )
    return f"1 - {missed} / {asked}"


ENDED = rate("glowplug_requests_total", "", MODEL)
FAILED = rate("glowplug_requests_total", "", f'code=~"5..", {MODEL}')
NOW = [
    stat(
        "Kept TTFT",
        "Share of requests, in the time shown, whose first token came within the `slo.ttft_s` of their model. "
        "Failed and refused ones count as missed. Empty: no model sets one, or nothing was asked.",
        attainment("ttft"),
        "percentunit",
        bounds=[("red", 0), ("orange", 0.95), ("green", 0.99)],
    ),
    stat(
        "Kept TPOT",
        "The same for `slo.tpot_s`, seconds per token after the first.",
        attainment("tpot"),
        "percentunit",
        bounds=[("red", 0), ("orange", 0.95), ("green", 0.99)],
    ),
    stat("Requests per second", "Ended per second, of every code.", ENDED, "reqps"),
    stat(
        "Failing",
        "Share of requests that end with a 5xx.",
        f"({FAILED} or vector(0)) / {ENDED}",
        "percentunit",
        bounds=[("orange", 0.01), ("red", 0.05)],
    ),
    stat(
        "Held now",
        "Requests that wait for an instance.",
        f"sum(glowplug_requests_held{{{MODEL}}})",
        bounds=[("orange", 20), ("red", 200)],
    ),
    stat("Hot models", "Models with an instance ready.", 'max(glowplug_models{temperature="hot"})'),
]
FIRST = [
    Panel(
        title="TTFT",
        about="Arrival to first byte, of all chosen models, cold ones included.",
        asks=quantiles(TTFT, MODEL),
        unit="s",
    ),
    Panel(
        title="TTFT p95 by model",
        about="Which model is slow. Click a line to open the model in the console.",
        asks=[(quantile(0.95, TTFT, MODEL, "model"), "{{model}}")],
        unit="s",
        link=TO_MODEL,
    ),
    Panel(
        title="TTFT p95, hot and cold",
        about="hot: an instance was ready. cold: the request waited for a start, see Cold starts.",
        asks=[(quantile(0.95, TTFT, MODEL, "temperature"), "{{temperature}}")],
        unit="s",
    ),
    Panel(
        title="Requests by start temperature",
        about="How often clients pay for a start.",
        asks=[(rate(f"{TTFT}_count", "temperature", MODEL), "{{temperature}}")],
        unit="reqps",
        stacked=True,
    ),
    Panel(
        title="Time in the queue",
        about="Arrival to dispatch; near 0 for warm models with room.",
        asks=quantiles("glowplug_request_queue_seconds", MODEL),
        unit="s",
    ),
    Panel(
        title="Router's own time",
        about="Time that the router adds to a request, queue excluded. Above 5 ms it is short of CPU.",
        asks=quantiles("glowplug_router_overhead_seconds"),
        unit="s",
    ),
]
TOKENS = [
    Panel(
        title="TPOT",
        about="Seconds per token after the first, one value per answer.",
        asks=quantiles(TPOT, MODEL),
        unit="s",
    ),
    Panel(
        title="TPOT p95 by model",
        about="Which engine is slow.",
        asks=[(quantile(0.95, TPOT, MODEL, "model"), "{{model}}")],
        unit="s",
        link=TO_MODEL,
    ),
    Panel(
        title="Tokens per second",
        about="Read (prompt) and written (response). Prompt tokens only where the engine tells them.",
        asks=[
            (rate("glowplug_prompt_tokens_total", "", MODEL), "prompt"),
            (rate("glowplug_response_tokens_total", "", MODEL), "response"),
        ],
    ),
]
KEPT = [
    Panel(
        title="Kept TTFT by model",
        about="Over 5 minutes; the objective is 99 %.",
        asks=[(f'1 - glowplug:slo_missed:ratio_rate5m{{level="ttft", {MODEL}}}', "{{model}}")],
        unit="percentunit",
        width=12,
        link=TO_MODEL,
    ),
    Panel(
        title="Burn rate of the error budget, 1 h",
        about="1 uses up the budget of 1 % in exactly 30 days. HighTTFT warns at 6 and wakes somebody at 14.4.",
        asks=[(f"glowplug:slo_missed:ratio_rate1h{{{MODEL}}} / 0.01", "{{model}} {{level}}")],
        width=12,
        bounds=[("orange", 6), ("red", 14.4)],
    ),
]
REQUESTS = [
    Panel(
        title="Requests by model",
        about="Ended per second.",
        asks=[(rate("glowplug_requests_total", "model", MODEL), "{{model}}")],
        unit="reqps",
        link=TO_MODEL,
    ),
    Panel(
        title="Requests by code",
        about="429: a queue was too long. 499: the client left. 502: an engine failed. 503: no instance in time.",
        asks=[(rate("glowplug_requests_total", "code", MODEL), "{{code}}")],
        unit="reqps",
        stacked=True,
    ),
    Panel(
        title="Errors by model and code",
        about="Without 2xx and 499.",
        asks=[(rate("glowplug_requests_total", "model, code", f'code!~"2..|499", {MODEL}'), "{{model}} {{code}}")],
        unit="reqps",
        link="#/requests",
    ),
    Panel(
        title="Held and in flight",
        about="Held requests wait at a router; those in flight are at an engine.",
        asks=[
            (f"sum(glowplug_requests_held{{{MODEL}}})", "held"),
            (f"sum(glowplug_requests_in_flight{{{MODEL}}})", "in flight"),
        ],
    ),
    Panel(
        title="Held by model",
        about="Who waits.",
        asks=[(f"sum by (model) (glowplug_requests_held{{{MODEL}}}) > 0", "{{model}}")],
        stacked=True,
        link=TO_MODEL,
    ),
    Panel(
        title="Blocks of prompts tracked",
        about="Blocks that routers expect in KV caches (routing by prefix); about 0.4 KB of a router's memory each.",
        asks=[(f"sum by (model) (glowplug_router_prefix_blocks{{{MODEL}}})", "{{model}}")],
    ),
    Panel(
        title="Refused before a model was known",
        about="Malformed, unauthorised, of an unknown model, too large; by code.",
        asks=[(rate("glowplug_requests_refused_total", "code"), "{{code}}")],
        unit="reqps",
    ),
    Panel(
        title="Whole request",
        about="Arrival to last byte.",
        asks=quantiles("glowplug_request_e2e_seconds", MODEL),
        unit="s",
    ),
    Panel(
        title="Engines lost before a first byte",
        about="Each such request is sent elsewhere or held again; the client notices only the delay.",
        asks=[(rate("glowplug_upstream_retries_total"), "retries")],
        unit="ops",
    ),
    Panel(
        title="Streams whose engine was lost or drains",
        about="Continued: another instance went on after a pause. Refused and failed ones end with an error, those that"
        " are drained or moved later than others; stayed: another was asked and did not begin.",
        asks=[(rate("glowplug_stream_continuations_total", "reason, outcome"), "{{reason}}, {{outcome}}")],
        unit="ops",
    ),
    Panel(
        title="Client connections",
        about="Open at each router.",
        asks=[("sum by (instance) (glowplug_connections)", "{{instance}}")],
    ),
]
TENANTS = [
    Panel(
        title="Requests by tenant",
        about="Ended per second, of requests that reached an engine. The first 50 tenants; the rest is other.",
        asks=[(rate("glowplug_tenant_requests_total", "tenant"), "{{tenant}}")],
        unit="reqps",
        stacked=True,
    ),
    Panel(
        title="Tokens by tenant",
        about="Of prompts and answers, per second.",
        asks=[(rate("glowplug_tenant_tokens_total", "tenant"), "{{tenant}}")],
        stacked=True,
    ),
    Panel(
        title="Usage records on their way",
        about="Bytes at the routers that the bus has not stored yet, and records lost per second to a full disk: 0.",
        asks=[
            ("sum(glowplug_usage_spool_bytes)", "bytes waiting"),
            (rate("glowplug_usage_lost_total"), "lost per second"),
        ],
    ),
    Panel(
        title="Lines of batches",
        about="Per second, at the router that runs batches: answered, failed, and refused for the moment.",
        asks=[(rate("glowplug_batch_lines_total", "outcome"), "{{outcome}}")],
    ),
    Panel(
        title="Batches",
        about="Open ones by state (a queued one counts as validating), and ended ones.",
        asks=[
            ("sum by (state) (glowplug_batches)", "{{state}}"),
            (rate("glowplug_batches_ended_total", "state"), "{{state}} per second"),
        ],
    ),
]
BOARD = Board(
    uid="glowplug-service-levels",
    title="Glowplug: service levels",
    about="Service levels of clients. Begin here.",
    variables=["model"],
    rows=[
        ("Now", NOW),
        ("First token", FIRST),
        ("Tokens", TOKENS),
        ("Promises kept", KEPT),
        ("Requests", REQUESTS),
        ("Tenants", TENANTS),
    ],
)
