"""Every metric, attribute and span name, in one place. Seconds and bytes; counters end in `_total`."""

PREFIX = "glowplug"

# Metrics: requests (router)
REQUESTS_TOTAL = "glowplug_requests_total"  # model, code
REQUEST_TTFT_SECONDS = "glowplug_request_ttft_seconds"  # model, temperature
REQUEST_QUEUE_SECONDS = "glowplug_request_queue_seconds"  # model
REQUEST_E2E_SECONDS = "glowplug_request_e2e_seconds"  # model
ROUTER_OVERHEAD_SECONDS = "glowplug_router_overhead_seconds"
REQUESTS_IN_FLIGHT = "glowplug_requests_in_flight"  # model
REQUESTS_HELD = "glowplug_requests_held"  # model
RESPONSE_CHUNKS_TOTAL = "glowplug_response_chunks_total"  # model
UPSTREAM_RETRIES_TOTAL = "glowplug_upstream_retries_total"
REQUESTS_REFUSED_TOTAL = "glowplug_requests_refused_total"  # code; before a model was known
CONNECTIONS = "glowplug_connections"
TELEMETRY_DROPPED_TOTAL = "glowplug_telemetry_dropped_total"

# Metrics: control plane (every service)
STIMULI_TOTAL = "glowplug_stimuli_total"  # service, type
HANDLE_SECONDS = "glowplug_handle_seconds"  # service
EFFECTS_TOTAL = "glowplug_effects_total"  # service, effect
BUS_PUBLISH_FAILURES_TOTAL = "glowplug_bus_publish_failures_total"  # service
STORE_FAILURES_TOTAL = "glowplug_store_failures_total"  # service
STALE_COMMANDS_TOTAL = "glowplug_stale_commands_total"  # service
BUS_CONNECTED = "glowplug_bus_connected"
STORE_CONNECTED = "glowplug_store_connected"
DECISIONS_TOTAL = "glowplug_decisions_total"  # kind, policy

# Metrics: nodes (agent)
GPU_BYTES = "glowplug_gpu_bytes"  # gpu, owner
GPU_TOTAL_BYTES = "glowplug_gpu_total_bytes"  # gpu
INSTANCES = "glowplug_instances"  # state
COLD_START_SECONDS = "glowplug_cold_start_seconds"  # model, phase

# Metrics: weights (prefetcher)
FETCHED_BYTES_TOTAL = "glowplug_fetched_bytes_total"  # source
FETCH_SECONDS = "glowplug_fetch_seconds"  # source
FETCH_FAILURES_TOTAL = "glowplug_fetch_failures_total"  # code
FETCH_RETRIES_TOTAL = "glowplug_fetch_retries_total"  # source
FETCHES_IN_FLIGHT = "glowplug_fetches_in_flight"
LINK_BYTES_IN_FLIGHT = "glowplug_link_bytes_in_flight"
CACHE_CAPACITY_BYTES = "glowplug_cache_capacity_bytes"
CACHE_BYTES = "glowplug_cache_bytes"
CACHE_HITS_TOTAL = "glowplug_cache_hits_total"
CACHE_MISSES_TOTAL = "glowplug_cache_misses_total"
CACHE_EVICTIONS_TOTAL = "glowplug_cache_evictions_total"

# Metrics: traces and pages (console)
SPANS_RECEIVED_TOTAL = "glowplug_spans_received_total"
SPANS_REFUSED_TOTAL = "glowplug_spans_refused_total"
EXPORTS_REFUSED_TOTAL = "glowplug_exports_refused_total"  # code
TRACES_KEPT = "glowplug_traces_kept"
TRACES_BYTES = "glowplug_traces_bytes"
TRACES_EVICTED_TOTAL = "glowplug_traces_evicted_total"
STREAM_CLIENTS = "glowplug_stream_clients"
STREAM_DROPPED_TOTAL = "glowplug_stream_dropped_total"

# Span and resource attributes
ATTR_MODEL = "glowplug.model"
ATTR_REQUEST_ID = "glowplug.request_id"
ATTR_INSTANCE_ID = "glowplug.instance_id"
ATTR_NODE_ID = "glowplug.node_id"
ATTR_GPU_ID = "glowplug.gpu_id"
ATTR_DECISION_ID = "glowplug.decision_id"
ATTR_REASON = "glowplug.reason"
ATTR_EVENT_TYPE = "glowplug.event_type"
ATTR_PHASE = "glowplug.phase"  # a PhaseName, on the span of one stage of a cold start
ATTR_PREDICTED_SECONDS = "glowplug.predicted_seconds"
ATTR_BYTES = "glowplug.bytes"
ATTR_SOURCE = "glowplug.source"
ATTR_DIGEST = "glowplug.weights_digest"
ATTR_RESUMED_BYTES = "glowplug.resumed_bytes"
ATTR_RETRIES = "glowplug.retries"
ATTR_ENGINE = "glowplug.engine"
ATTR_EMULATED = "glowplug.emulated"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# Headers
HEADER_EMULATED = "x-glowplug-emulated"
OTHER = "other"  # label value past the cap
MAX_LABEL_VALUES = 1000
