"""/docs of a service: its operations as one page of plain HTML, which loads nothing and runs nothing. Programs read
/openapi.json."""

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any, Final

_STYLE: Final = (
    ":root{color-scheme:dark light}"
    "body{font:14px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:1000px;margin:0 auto;padding:24px}"
    "h2{margin:28px 0 4px;font-size:15px}"
    "dl{margin:0}dt{margin-top:10px;font-family:ui-monospace,monospace;overflow-wrap:anywhere}"
    "dd{margin:0;opacity:.8}b{display:inline-block;min-width:64px}"
)
_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS: Final = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
}


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    by_tag: dict[str, list[str]] = {}
    for tag, row in _rows(document["paths"]):
        by_tag.setdefault(tag, []).append(row)
    parts = [f"<h2>{escape(tag)}</h2><dl>{''.join(rows)}</dl>" for tag, rows in by_tag.items()]
    title = escape(f"{info['title']} {info['version']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{escape(info.get('description', ''))}</p>"
        '<p>Parameters, bodies and answers are in <a href="/openapi.json">/openapi.json</a>.</p>'
        f"{''.join(parts)}</body></html>"
    )


def _rows(paths: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            shown = escape(path + ("?" + "&".join(f"{name}=" for name in query) if query else ""))
            what = escape(operation.get("description") or operation.get("summary", ""))
            yield operation.get("tags", ["other"])[0], f"<dt><b>{method.upper()}</b> {shown}</dt><dd>{what}</dd>"
