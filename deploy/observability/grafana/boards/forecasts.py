"""Expected and actual demand."""

from panels import MODEL, Board, Panel, rate

TO_MODEL = "#/model/${__field.labels.model}"
AT_ONCE = f"sum by (model) (glowplug_requests_held{{{MODEL}}} + glowplug_requests_in_flight{{{MODEL}}})"
EXPECTED = [
    Panel(
        title="Expected and actual, requests at once",
        about="Mean and peak forecast of the open window, over actual demand. Empty without a forecasting policy "
        "(GLOWPLUG_POLICY_PREDICTION).",
        asks=[
            (f'max by (model) (glowplug_forecast_concurrency{{stat="mean", {MODEL}}})', "{{model}} expected"),
            (f'max by (model) (glowplug_forecast_concurrency{{stat="peak", {MODEL}}})', "{{model}} expected peak"),
            (AT_ONCE, "{{model}} actual"),
        ],
        width=12,
        height=10,
        link=TO_MODEL,
    ),
    Panel(
        title="Expected and actual, response tokens per second",
        about="The basis of PreServe's scaler.",
        asks=[
            (
                f'max by (model) (glowplug_forecast_tokens_per_second{{kind="response", {MODEL}}})',
                "{{model}} expected",
            ),
            (rate("glowplug_response_tokens_total", "model", MODEL, "5m"), "{{model}} actual"),
        ],
        width=12,
        height=10,
    ),
    Panel(
        title="Error of late",
        about="Mean absolute error of the concurrency forecast over the last 30 windows, by the mean of demand.",
        asks=[(f"max by (model) (glowplug_forecast_error_ratio{{{MODEL}}})", "{{model}}")],
        unit="percentunit",
        width=12,
    ),
    Panel(
        title="Age of the forecast",
        about="A forecast is made when a window closes; one much older than a window is of a predictor that is gone.",
        asks=[(f"time() - max by (model) (glowplug_forecast_made_timestamp_seconds{{{MODEL}}})", "{{model}}")],
        unit="s",
        width=12,
    ),
]
DEMAND = [
    Panel(
        title="Requests per second by model",
        about="The demand a forecast is held against.",
        asks=[(rate("glowplug_requests_total", "model", MODEL, "5m"), "{{model}}")],
        unit="reqps",
        width=12,
        height=10,
        link=TO_MODEL,
    ),
    Panel(
        title="Response tokens per second by model",
        about="Work, not only arrivals.",
        asks=[(rate("glowplug_response_tokens_total", "model", MODEL, "5m"), "{{model}}")],
        width=12,
        height=10,
    ),
    Panel(
        title="At once, by model",
        about="Requests held and in flight, which have to fit on instances.",
        asks=[(AT_ONCE, "{{model}}")],
        width=12,
    ),
    Panel(
        title="Instances by model",
        about="Instances that the autoscaler keeps for that demand.",
        asks=[(f"sum by (model) (glowplug_model_instances{{{MODEL}}})", "{{model}}")],
        width=12,
    ),
    Panel(
        title="This week and last",
        about="Requests per second of all chosen models, now and a week before.",
        asks=[
            (rate("glowplug_requests_total", "", MODEL, "5m"), "now"),
            (f"sum (rate(glowplug_requests_total{{{MODEL}}}[5m] offset 1w))", "a week before"),
        ],
        unit="reqps",
        width=24,
    ),
]
BOARD = Board(
    uid="glowplug-forecasts",
    title="Glowplug: forecasts",
    about="Expected and actual demand.",
    variables=["model"],
    rows=[("Expected", EXPECTED), ("Actual", DEMAND)],
)
