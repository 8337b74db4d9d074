"""Parts of dashboards. A board is rows of panels; build.py lays them out and writes the JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
SCHEMA = 41  # Grafana 12
Json = dict[str, Any]
MODEL = 'model=~"$model"'
NODE = 'node=~"$node"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`asks` are (PromQL, legend). `about` is the text behind the i: the meaning, and when to worry."""

    title: str
    about: str
    asks: Sequence[tuple[str, str]] = ()
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    base: str = "green"
    bounds: Sequence[tuple[str, float]] = ()  # colour from this value on
    link: str = ""  # into the console, with ${__field.labels...}
    text: str = ""
    custom: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Board:
    """One dashboard. `variables` beside the data source and the console's address: model, node."""

    uid: str
    title: str
    about: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[str] = ()


def quantiles(metric: str, matchers: str = "", by: str = "", window: str = "$__rate_interval") -> list[tuple[str, str]]:
    """p50, p95 and p99 of a histogram."""
    return [(quantile(q, metric, matchers, by, window), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)]


def quantile(q: float, metric: str, matchers: str = "", by: str = "", window: str = "$__rate_interval") -> str:
    chosen = f"{{{matchers}}}" if matchers else ""
    return f"histogram_quantile({q}, sum by ({by + ', ' if by else ''}le) (rate({metric}_bucket{chosen}[{window}])))"


def rate(metric: str, by: str = "", matchers: str = "", window: str = "$__rate_interval") -> str:
    chosen = f"{{{matchers}}}" if matchers else ""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{chosen}[{window}]))"


def per_minute(metric: str, by: str = "", matchers: str = "") -> str:
    """For rare events: over 5 minutes, so that single ones are visible."""
    return f"60 * {rate(metric, by, matchers, '5m')}"


def mean(metric: str, by: str, matchers: str = "", window: str = "$__rate_interval") -> str:
    """Mean of a histogram's observations."""
    return f"{rate(f'{metric}_sum', by, matchers, window)} / {rate(f'{metric}_count', by, matchers, window)}"


def stat(title: str, about: str, expr: str, unit: str = "short", **more: Any) -> Panel:
    """One current number."""
    return Panel(
        title=title, about=about, asks=[(expr, "")], kind="stat", unit=unit, **{"width": 4, "height": 4} | more
    )


def drawn(panel: Panel, panel_id: int, x: int, y: int) -> Json:
    """One panel in Grafana's format."""
    made: Json = {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
    }
    if panel.kind == "text":
        return made | {"options": {"mode": "markdown", "content": panel.text}, "transparent": True}
    instant = panel.kind in ("stat", "bargauge", "table")
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": expr,
            "legendFormat": legend or "__auto",
            "range": not instant,
            "instant": instant,
            **({"format": "table"} if panel.kind == "table" else {}),
            **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for i, (expr, legend) in enumerate(panel.asks)
    ]
    return made | {
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _defaults(panel: Panel) -> Json:
    steps = [{"color": panel.base, "value": None}, *({"color": c, "value": at} for c, at in panel.bounds)]
    made: Json = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "min": 0}
    if panel.unit == "percentunit":
        made["max"] = 1
    if panel.kind == "timeseries":
        drawing = {"fillOpacity": 60 if panel.stacked else 8, "lineWidth": 1, "showPoints": "never", "spanNulls": 60000}
        if panel.stacked:
            drawing["stacking"] = {"mode": "normal", "group": "A"}
        if panel.bounds:
            drawing["thresholdsStyle"] = {"mode": "dashed"}
        made["custom"] = drawing
    if panel.link:
        made["links"] = [{"title": "Open in the console", "url": "${console}/" + panel.link, "targetBlank": True}]
    return made


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        made: Json = {"graphMode": "area", "colorMode": "value" if panel.bounds else "none"}
        made["reduceOptions"] = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    elif panel.kind == "timeseries":
        made = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "bargauge":
        made = {"orientation": "horizontal", "displayMode": "gradient", "showUnfilled": True}
        made["reduceOptions"] = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    elif panel.kind == "heatmap":
        made = {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Blues"}}
    elif panel.kind == "state-timeline":
        made = {"mergeValues": True, "showValue": "never", "legend": {"displayMode": "list", "placement": "bottom"}}
    else:
        made = {}
    return made | panel.custom
