"""The text in a stream of SSE events, as engines and routers send it."""

import json


def text_of(line: str) -> str:
    """The text in one line of a stream of a completion or a chat; "" without any. Raises RuntimeError for an error
    event."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line[6:])
    if "error" in event:
        raise RuntimeError(event["error"]["message"])
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in event.get("choices", ()))
