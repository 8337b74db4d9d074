"""Protocol of the zygote's socket: one JSON object per line, one answer per question. Standard library only.

    {"op": "hello"}                                -> {"ok": true, "pid", "version", "parked_s", "num_servers"}
    {"op": "start", "run_dir", "log", "env"}       -> {"ok": true, "pid"}       env: null unsets a variable
    {"op": "keep", "tokenizer": DIR}               -> {"ok": true, "kept": bool}
    {"op": "lease"}                                -> {"ok": true}              the zygote stays while this is open
    {"op": "release"}                              -> {"ok": true}              ends a lease on purpose
    {"op": "stop"}                                 -> {"ok": true}              its servers live on

A refused question answers {"ok": false, "error"}. The socket is 0600: its users can run code as its owner."""

import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 256 * 1024
OPS = ("hello", "start", "keep", "lease", "release", "stop")


class BadQuestion(ValueError):
    """A line that is not a question of this protocol."""


@dataclass(frozen=True, slots=True)
class Question:
    """Fields that an op does not have are empty."""

    op: str
    run_dir: str = ""
    log: str = ""
    env: dict[str, str | None] = field(default_factory=dict)
    tokenizer: str = ""


def decode(line: bytes) -> Question:
    """Raises BadQuestion with the reason."""
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise BadQuestion(f"not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("op") not in OPS:
        raise BadQuestion(f"op must be one of {', '.join(OPS)}")
    if unknown := set(raw) - {"op", "run_dir", "log", "env", "tokenizer"}:
        raise BadQuestion(f"unknown field {sorted(unknown)[0]!r}")
    question = Question(**raw)
    texts = (question.run_dir, question.log, question.tokenizer)
    if not all(isinstance(text, str) for text in texts) or not isinstance(question.env, dict):
        raise BadQuestion("run_dir, log and tokenizer are strings, env is an object")
    if not all(value is None or isinstance(value, str) for value in question.env.values()):
        raise BadQuestion("env: every value is a string or null")
    if question.op == "start" and not (Path(question.run_dir).is_absolute() and Path(question.log).is_absolute()):
        raise BadQuestion("start needs absolute paths in run_dir and log")
    return question


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def ask(path: Path, message: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask over a connection of its own. Raises OSError without a zygote, TimeoutError, ValueError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(encode(message))
        with connection.makefile("rb") as answers:
            answer: dict[str, Any] = json.loads(answers.readline(MAX_LINE_BYTES))
    return answer
