"""Holders of memory: GPUs by owner, host memory, links, nodes."""

from panels import NODE, Board, Panel, per_minute, rate, stat

HITS, MISSES = (rate(f"glowplug_cache_{kind}_total", "node", NODE, "5m") for kind in ("hits", "misses"))
USED = f"sum by (node, gpu, owner) (glowplug_gpu_bytes{{{NODE}}})"
NOW = [
    stat("GPU memory", "Of the chosen nodes.", f"sum(glowplug_gpu_total_bytes{{{NODE}}})", "bytes"),
    stat(
        "Free",
        "Share that is free.",
        f"1 - sum(glowplug_gpu_bytes{{{NODE}}}) / sum(glowplug_gpu_total_bytes{{{NODE}}})",
        "percentunit",
    ),
    stat("Nodes alive", "That take instances.", 'max(glowplug_nodes{state="alive"})'),
    stat(
        "Nodes silent",
        "That left without a word within the last hour.",
        "count(max by (node) (glowplug_node_up) == 0) or vector(0)",
        bounds=[("red", 1)],
    ),
    stat("Instances ready", "On the chosen nodes.", f'sum(glowplug_instances{{state="ready", {NODE}}})'),
    stat(
        "Host memory in use",
        "Share of the bytes that weights may take.",
        f"sum(glowplug_cache_bytes{{{NODE}}}) / sum(glowplug_cache_capacity_bytes{{{NODE}}})",
        "percentunit",
    ),
]
MEMORY = [
    Panel(
        title="By owner",
        about="weights and kv belong to running engines; prewarm to copies made before any request; reservation to "
        "copies on their way; sleeper to the remains of sleeping engines.",
        asks=[(f"sum by (owner) (glowplug_gpu_bytes{{{NODE}}})", "{{owner}}")],
        unit="bytes",
        width=12,
        stacked=True,
    ),
    Panel(
        title="Free, by GPU",
        about="A model fits only where one GPU alone has the room.",
        asks=[
            (
                f"sum by (node, gpu) (glowplug_gpu_total_bytes{{{NODE}}}) "
                f"- sum by (node, gpu) (glowplug_gpu_bytes{{{NODE}}})",
                "{{gpu}}",
            )
        ],
        unit="bytes",
        width=12,
    ),
    Panel(
        title="Each GPU by owner, now",
        about="Zero owners are left out.",
        asks=[(f"{USED} > 0", "{{gpu}} {{owner}}")],
        kind="bargauge",
        unit="bytes",
        width=12,
        height=10,
    ),
    Panel(
        title="Evictions",
        about="Instances sent away to make room, per minute, by the policy that chose.",
        asks=[(per_minute("glowplug_decisions_total", "policy", 'kind="evict"'), "{{policy}}")],
        width=12,
        height=10,
        link="#/decisions",
    ),
]
NODES = [
    Panel(
        title="Nodes",
        about="1 alive, 0 silent; a gap: it said goodbye.",
        asks=[(f"max by (node) (glowplug_node_up{{{NODE}}})", "{{node}}")],
        kind="state-timeline",
        base="red",
        bounds=[("green", 1)],
        width=12,
    ),
    Panel(
        title="Instances by state",
        about="As their agents see them.",
        asks=[(f"sum by (state) (glowplug_instances{{{NODE}}})", "{{state}}")],
        width=12,
        stacked=True,
    ),
]
HOST = [
    Panel(
        title="Weights in host memory",
        about="Of each node; at its capacity the next fetch evicts.",
        asks=[
            (f"sum by (node) (glowplug_cache_bytes{{{NODE}}})", "{{node}}"),
            (f"sum by (node) (glowplug_cache_capacity_bytes{{{NODE}}})", "{{node}} capacity"),
        ],
        unit="bytes",
    ),
    Panel(
        title="Found in host memory",
        about="Share of asked weights that were there.",
        asks=[
            (
                f"{HITS} / ({HITS} + {MISSES})",
                "{{node}}",
            )
        ],
        unit="percentunit",
    ),
    Panel(
        title="Evicted from host memory",
        about="Weights per minute. More than one, with more misses than hits, is thrashing.",
        asks=[(per_minute("glowplug_cache_evictions_total", "node", NODE), "{{node}}")],
        bounds=[("red", 1)],
    ),
    Panel(
        title="Copies on disk",
        about="Of each node's disk tier; at its capacity a copy worth more evicts others.",
        asks=[
            (f"sum by (node) (glowplug_disk_bytes{{{NODE}}})", "{{node}}"),
            (f"sum by (node) (glowplug_disk_capacity_bytes{{{NODE}}})", "{{node}} capacity"),
        ],
        unit="bytes",
    ),
    Panel(
        title="Written to disk",
        about="By the disk tier.",
        asks=[(rate("glowplug_disk_written_bytes_total", "node", NODE), "{{node}}")],
        unit="Bps",
    ),
    Panel(
        title="Copies evicted, and failures of the disk",
        about="Per minute.",
        asks=[
            (per_minute("glowplug_disk_evictions_total", "node", NODE), "{{node}} evicted"),
            (per_minute("glowplug_disk_failures_total", "node, code", NODE), "{{node}} {{code}}"),
        ],
    ),
    Panel(
        title="Bytes in flight on links",
        about="Asked for and not landed.",
        asks=[(f"sum by (node) (glowplug_link_bytes_in_flight{{{NODE}}})", "{{node}}")],
        unit="bytes",
    ),
    Panel(
        title="Rate of links",
        about="Declared, else as measured over transfers that filled it; 0 before anything came.",
        asks=[(f"sum by (node) (glowplug_link_bytes_per_second{{{NODE}}})", "{{node}}")],
        unit="Bps",
    ),
    Panel(
        title="Weights between nodes",
        about="Read by other nodes; pieces that differed from their checksum, per minute.",
        asks=[
            (rate("glowplug_peer_served_bytes_total", "node", NODE), "{{node}}"),
            (per_minute("glowplug_wrong_pieces_total", "node, source", NODE), "{{node}} wrong, {{source}}"),
        ],
        unit="Bps",
    ),
    Panel(
        title="Fetches at once",
        about="Queued or running.",
        asks=[(f"sum by (node) (glowplug_fetches_in_flight{{{NODE}}})", "{{node}}")],
    ),
    Panel(
        title="Failed and repeated fetches",
        about="Per minute, by code; repeats are single reads.",
        asks=[
            (per_minute("glowplug_fetch_failures_total", "node, code", NODE), "{{node}} {{code}}"),
            (per_minute("glowplug_fetch_retries_total", "node", NODE), "{{node}} repeats"),
        ],
    ),
]
BOARD = Board(
    uid="glowplug-gpus",
    title="Glowplug: GPUs by owner",
    about="Who holds the bytes, on GPUs and in host memory.",
    variables=["node"],
    rows=[("Now", NOW), ("GPU memory", MEMORY), ("Nodes", NODES), ("Host memory and links", HOST)],
)
