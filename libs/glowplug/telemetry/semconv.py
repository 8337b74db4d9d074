"""Every metric, attribute and span name, in one place. Seconds and bytes; counters end in `_total`."""

PREFIX = "glowplug"

# Metrics: requests (router)
REQUESTS_TOTAL = "glowplug_requests_total"  # model, code
REQUEST_TTFT_SECONDS = "glowplug_request_ttft_seconds"  # model, temperature
REQUEST_QUEUE_SECONDS = "glowplug_request_queue_seconds"  # model
REQUEST_TPOT_SECONDS = "glowplug_request_tpot_seconds"  # model; seconds per token after the first, one value per answer
REQUEST_E2E_SECONDS = "glowplug_request_e2e_seconds"  # model
PROMPT_TOKENS_TOTAL = "glowplug_prompt_tokens_total"  # model; where the engine reports them
RESPONSE_TOKENS_TOTAL = "glowplug_response_tokens_total"  # model; else one per SSE event
SLO_REQUESTS_TOTAL = "glowplug_slo_requests_total"  # model, level; ttft or tpot, of models that set it
SLO_MISSED_TOTAL = "glowplug_slo_missed_total"  # model, level; of these, too slow, failed or refused
ROUTER_OVERHEAD_SECONDS = "glowplug_router_overhead_seconds"
REQUESTS_IN_FLIGHT = "glowplug_requests_in_flight"  # model
ROUTER_PREFIX_BLOCKS = "glowplug_router_prefix_blocks"  # model
REQUESTS_HELD = "glowplug_requests_held"  # model
RESPONSE_CHUNKS_TOTAL = "glowplug_response_chunks_total"  # model
UPSTREAM_RETRIES_TOTAL = "glowplug_upstream_retries_total"
STREAM_CONTINUATIONS_TOTAL = "glowplug_stream_continuations_total"  # reason, outcome; streams whose engine ends
REQUESTS_REFUSED_TOTAL = "glowplug_requests_refused_total"  # code; before a model was known
CONNECTIONS = "glowplug_connections"
TELEMETRY_DROPPED_TOTAL = "glowplug_telemetry_dropped_total"
TENANT_REQUESTS_TOTAL = "glowplug_tenant_requests_total"  # tenant; the first 50 by name, the rest as "other"
TENANT_TOKENS_TOTAL = "glowplug_tenant_tokens_total"  # tenant, kind; prompt or response, likewise
USAGE_LOST_TOTAL = "glowplug_usage_lost_total"
USAGE_SPOOL_BYTES = "glowplug_usage_spool_bytes"
BATCHES = "glowplug_batches"  # state; at the router that runs them
BATCHES_ENDED_TOTAL = "glowplug_batches_ended_total"  # state
BATCH_LINES_TOTAL = "glowplug_batch_lines_total"  # outcome; completed, failed, or retried, sent again

# Metrics: control plane (every service)
STIMULI_TOTAL = "glowplug_stimuli_total"  # service, type
HANDLE_SECONDS = "glowplug_handle_seconds"  # service
EFFECTS_TOTAL = "glowplug_effects_total"  # service, effect
BUS_PUBLISH_FAILURES_TOTAL = "glowplug_bus_publish_failures_total"  # service
STORE_FAILURES_TOTAL = "glowplug_store_failures_total"  # service
STALE_COMMANDS_TOTAL = "glowplug_stale_commands_total"  # service
BUS_CONNECTED = "glowplug_bus_connected"
BUS_STORES = "glowplug_bus_stores"
STORE_CONNECTED = "glowplug_store_connected"
STORE_WRITABLE = "glowplug_store_writable"
DECISIONS_TOTAL = "glowplug_decisions_total"  # kind, policy
EVENTS_PUBLISHED_TOTAL = "glowplug_events_published_total"  # service, type
BUS_RECONNECTS_TOTAL = "glowplug_bus_reconnects_total"  # service
BUS_REDELIVERIES_TOTAL = "glowplug_bus_redeliveries_total"  # service
BUS_MALFORMED_TOTAL = "glowplug_bus_malformed_total"  # service
BUS_OVERFLOWED_TOTAL = "glowplug_bus_overflowed_total"  # service; usage events discarded before they were read
BUS_GIVEN_UP_TOTAL = "glowplug_bus_given_up_total"  # service; durable events that failed at every delivery
BUS_PENDING = "glowplug_bus_pending"  # service; durable events not yet delivered to it, at the last delivery
INBOX_STIMULI = "glowplug_inbox_stimuli"  # service; waiting for the controller
LOOP_LAG_SECONDS = "glowplug_loop_lag_seconds"  # service; how late each tick is
TABLE_SYNC_TIMESTAMP_SECONDS = "glowplug_table_sync_timestamp_seconds"  # service; when its tables were last read whole
ROWS_UNREADABLE = "glowplug_rows_unreadable"  # service, table; rows that could not be read at the last reading
SPANS_EXPORTED_TOTAL = "glowplug_spans_exported_total"  # service
SPANS_DROPPED_TOTAL = "glowplug_spans_dropped_total"  # service; spans made that the receiver never took
LEADER = "glowplug_leader"  # service; 1: this process leads, 0: it is a standby or is not elected
LEADER_CHANGES_TOTAL = "glowplug_leader_changes_total"  # service; new leaders this process has seen
BUILD_INFO = "glowplug_build_info"  # service, service_id, version; always 1

# Metrics: fleet (placer, autoscaler)
NODES = "glowplug_nodes"  # state
NODE_UP = "glowplug_node_up"  # node; 0 once the node is silent, absent an hour later or once the node has left
PLACEMENTS_PENDING = "glowplug_placements_pending"  # stage; room: no place yet, start: its agent has the command
MODELS = "glowplug_models"  # temperature
MODEL_INSTANCES = "glowplug_model_instances"  # model, state

# Metrics: forecasts (predictor)
FORECAST_CONCURRENCY = "glowplug_forecast_concurrency"  # model, stat; mean or peak, of the current window
FORECAST_TOKENS_PER_SECOND = "glowplug_forecast_tokens_per_second"  # model, kind; prompt or response
FORECAST_ERROR_RATIO = "glowplug_forecast_error_ratio"  # model; of concurrency: recent mean error over the mean load
FORECAST_MADE_TIMESTAMP_SECONDS = "glowplug_forecast_made_timestamp_seconds"  # model; when the forecast was made

# Metrics: nodes (agent)
GPU_BYTES = "glowplug_gpu_bytes"  # node, gpu, owner
GPU_TOTAL_BYTES = "glowplug_gpu_total_bytes"  # node, gpu
INSTANCES = "glowplug_instances"  # node, state
COLD_START_SECONDS = "glowplug_cold_start_seconds"  # model, phase; phase total is command to ready
DRAIN_SECONDS = "glowplug_drain_seconds"  # model, part; drained: until no request runs, asleep: then until it sleeps
CONSOLIDATE_SECONDS = "glowplug_consolidate_seconds"  # model, result; whole or failed, of stages of pipelines
COLD_START_PREDICTED_SECONDS = "glowplug_cold_start_predicted_seconds"  # phase; of starts that had a prediction
COLD_START_ERROR_SECONDS = "glowplug_cold_start_error_seconds"  # phase; how far the prediction was off, either way
STARTS_TOTAL = "glowplug_starts_total"  # model, weights; asleep with an engine, in host memory, else fetched
START_FAILURES_TOTAL = "glowplug_start_failures_total"  # model, code
ENGINE_DEATHS_TOTAL = "glowplug_engine_deaths_total"  # model, code; instances that failed after they were ready

# Metrics: weights (prefetcher)
FETCHED_BYTES_TOTAL = "glowplug_fetched_bytes_total"  # node, source
FETCH_SECONDS = "glowplug_fetch_seconds"  # source
FETCH_FAILURES_TOTAL = "glowplug_fetch_failures_total"  # node, code
FETCH_RETRIES_TOTAL = "glowplug_fetch_retries_total"  # node, source
FETCHES_IN_FLIGHT = "glowplug_fetches_in_flight"  # node
LINK_BYTES_IN_FLIGHT = "glowplug_link_bytes_in_flight"  # node
LINK_BYTES_PER_S = "glowplug_link_bytes_per_second"  # node; declared, else measured; 0: unknown
PEER_SERVED_BYTES_TOTAL = "glowplug_peer_served_bytes_total"  # node; read here by other nodes
WRONG_PIECES_TOTAL = "glowplug_wrong_pieces_total"  # node, source; fetched again from elsewhere
CACHE_CAPACITY_BYTES = "glowplug_cache_capacity_bytes"  # node
CACHE_BYTES = "glowplug_cache_bytes"  # node
CACHE_HITS_TOTAL = "glowplug_cache_hits_total"  # node
CACHE_MISSES_TOTAL = "glowplug_cache_misses_total"  # node
CACHE_EVICTIONS_TOTAL = "glowplug_cache_evictions_total"  # node
DISK_CAPACITY_BYTES = "glowplug_disk_capacity_bytes"  # node
DISK_BYTES = "glowplug_disk_bytes"  # node
DISK_WRITTEN_BYTES_TOTAL = "glowplug_disk_written_bytes_total"  # node
DISK_EVICTIONS_TOTAL = "glowplug_disk_evictions_total"  # node
DISK_FAILURES_TOTAL = "glowplug_disk_failures_total"  # node, code

# Metrics: traces and pages (console)
TRACES_KEPT = "glowplug_traces_kept"
STREAM_CLIENTS = "glowplug_stream_clients"
USAGE_RECORDS_TOTAL = "glowplug_usage_records_total"
USAGE_REPEATED_TOTAL = "glowplug_usage_repeated_total"
LEDGER_FAILURES_TOTAL = "glowplug_ledger_failures_total"
STREAM_DROPPED_TOTAL = "glowplug_stream_dropped_total"

# Span and resource attributes
ATTR_MODEL = "glowplug.model"
ATTR_REQUEST_ID = "glowplug.request_id"
ATTR_INSTANCE_ID = "glowplug.instance_id"
ATTR_NODE_ID = "glowplug.node_id"
ATTR_GPU_ID = "glowplug.gpu_id"
ATTR_DECISION_ID = "glowplug.decision_id"
ATTR_REASON = "glowplug.reason"
ATTR_PHASE = "glowplug.phase"  # a PhaseName, on the span of one stage of a cold start
ATTR_PIPELINE = "glowplug.pipeline"  # id of the pipeline of a stage
ATTR_PREDICTED_SECONDS = "glowplug.predicted_seconds"
ATTR_BYTES = "glowplug.bytes"
ATTR_SOURCE = "glowplug.source"
ATTR_DIGEST = "glowplug.weights_digest"
ATTR_RESUMED_BYTES = "glowplug.resumed_bytes"
ATTR_RETRIES = "glowplug.retries"
ATTR_ENGINE = "glowplug.engine"
ATTR_EMULATED = "glowplug.emulated"
ATTR_CONTINUE_REASON = "glowplug.continue_reason"  # of a stream that another engine continues
ATTR_CONTINUE_OUTCOME = "glowplug.continue_outcome"  # ... why it stayed with its first engine, where it did
ATTR_DROPPED_TOOLS = "glowplug.dropped_tools"
ATTR_TOKENS_BEFORE = "glowplug.tokens_before"  # tokens that the client has before that
ATTR_FROM_INSTANCE = "glowplug.from_instance_id"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# Headers
HEADER_EMULATED = "x-glowplug-emulated"
HEADER_REFUSED = "x-glowplug-refused"  # set by an engine that sleeps: routers send the request elsewhere
OTHER = "other"  # label value past the cap
MAX_TENANTS = 50  # with series of their own
MAX_LABEL_VALUES = 1000
