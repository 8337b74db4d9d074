"""A warm request passes the files that ARCHITECTURE.md names, in that order; and no two files of the router need each
other."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType

from tests.contract.data_port_rig import a_rig, chat

ROOT = Path(__file__).parents[3]
ROUTER = ROOT / "services/router"
PACKAGE = "services.router"


def named() -> list[str]:
    """The files of the walk, as ARCHITECTURE.md numbers them."""
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## A warm request")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`", section, re.MULTILINE)


async def test_a_warm_request_passes_the_files_of_its_walk_in_order() -> None:
    entered: dict[str, None] = {}

    def enter(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            entered[str(path.relative_to(ROUTER if path.parent == ROUTER else ROOT))] = None

    async with a_rig(params={"policy": "union"}) as rig:
        await rig.engine()
        client = await rig.client()
        await client.send(chat(stream=True))
        await client.answer()
        await client.send(chat(stream=True))
        sys.setprofile(enter)
        answer = await client.answer()
        sys.setprofile(None)
    assert answer.status == 200
    walk = named()
    assert len(walk) <= 12
    assert [path for path in entered if "/" not in path] == [path for path in walk if "/" not in path]
    assert {path for path in walk if "/" in path} <= set(entered)


def imported(path: Path) -> set[str]:
    """The router's files that one of them imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found.add(str(node.module).split(".")[2])
    return found


def test_no_import_goes_in_a_circle() -> None:
    graph = {path.stem: imported(path) for path in ROUTER.glob("*.py")}
    assert set(TopologicalSorter(graph).static_order()) == set(graph)  # or CycleError, which names the circle
