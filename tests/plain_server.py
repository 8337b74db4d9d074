"""A foreign server, started by its command line: `python -m tests.plain_server --port P --model FILE`.

It holds its weights in memory, drops them at POST /doze and reads them again at POST /rise.
"""

import argparse
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Response


def make(model: Path, name: str) -> FastAPI:
    app, weights = FastAPI(), {"bytes": model.read_bytes()}

    @app.get("/alive")
    async def alive() -> dict[str, Any]:
        return {"ok": True}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response("plain_running 0\nplain_waiting 0\n", media_type="text/plain")

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> dict[str, Any]:
        if not weights["bytes"]:
            raise HTTPException(503, "it dozes")
        text = f"{name} has {len(weights['bytes'])} bytes"
        return {"object": "text_completion", "choices": [{"text": text}], "usage": {"completion_tokens": 1}}

    @app.post("/doze")
    async def doze() -> None:
        weights["bytes"] = b""

    @app.post("/rise")
    async def rise() -> None:
        weights["bytes"] = model.read_bytes()

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", default="plain")
    given = parser.parse_args()
    uvicorn.run(make(given.model, given.name), host="127.0.0.1", port=given.port, log_level="warning")
