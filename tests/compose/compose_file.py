"""The compose file and .env.example, as tests read them."""

import re
from functools import cache
from typing import Any

import yaml

from tests.compose.fleet import FILES, root_file

COMPOSE = FILES[0]
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)(:?[-?][^}]*)?\}")


@cache
def compose(path: str = COMPOSE) -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(root_file(path))
    return told


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def example() -> dict[str, str]:
    """Settings of .env.example."""
    lines = [line for line in root_file(".env.example").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def filled(text: str) -> str:
    """`text` as compose reads it with .env.example."""
    return VARIABLE.sub(lambda match: example().get(match[1]) or "given", text)
