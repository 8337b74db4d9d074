"""Demand as it was. What was expected of it has its place here and no data yet."""

from panels import MODEL, Board, Panel, note, rate

TO_MODEL = "#/model/${__field.labels.model}"
EMPTY = """\
### Expected demand
The predictor of this version counts demand and publishes **no forecasts**: there is no curve to draw.
Forecasts by model, their age and their error will stand here, over the demand below.
"""
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
        about="Requests held and in flight: what has to fit on instances.",
        asks=[
            (
                f"sum by (model) (glowplug_requests_held{{{MODEL}}} + glowplug_requests_in_flight{{{MODEL}}})",
                "{{model}}",
            )
        ],
        width=12,
    ),
    Panel(
        title="Instances by model",
        about="What the autoscaler keeps for that demand.",
        asks=[(f"sum by (model) (glowplug_model_instances{{{MODEL}}})", "{{model}}")],
        width=12,
    ),
    Panel(
        title="This week and last",
        about="Requests per second of all chosen models, and of a week before: what repeats can be expected.",
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
    rows=[("Expected", [note(EMPTY)]), ("Actual", DEMAND)],
)
