"""Import layers, import circles, and the list of services."""

import subprocess
import sys
import tomllib
from typing import Any

import grimp
import pytest

from tests.house.tree import ROOT, SERVICES, files

PACKAGES = {"glowplug", "glowplug_lab"}


LINTER: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def contract(name: str) -> dict[str, Any]:
    (found,) = (c for c in LINTER["contracts"] if c["name"].startswith(name))
    return dict(found)


def layered(name: str) -> set[str]:
    return {part.strip() for layer in contract(name)["layers"] for part in layer.split("|")}


def test_nothing_imports_up_or_sideways() -> None:
    """import-linter sets up logging, so it runs in its own process."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_imports_for_types_alone_count_as_imports() -> None:
    assert not LINTER.get("exclude_type_checking_imports")
    ignored = [one for contract in LINTER["contracts"] for one in contract.get("ignore_imports", ())]
    assert ignored == ["glowplug -> glowplug.api"], "the public names alone are loaded when they are asked for"


def test_siblings_import_each_other_in_no_circle() -> None:
    """Sub-packages count as units; type-only imports and those inside functions count."""
    graph = grimp.build_graph(*sorted(PACKAGES), cache_dir=None)
    parents = {name.rpartition(".")[0] for name in graph.modules} - {""}
    circles = {parent: sorted(graph.nominate_cycle_breakers(parent)) for parent in parents}
    assert not any(circles.values()), {parent: imports for parent, imports in circles.items() if imports}


def test_every_package_is_in_a_layer() -> None:
    def packages(root: str) -> set[str]:
        return {f"{root}.{f.split('/')[2]}" for f in files() if f.startswith(f"libs/{root}/") and f.count("/") > 2}

    assert layered("import layers") == {"glowplug.services", *packages("glowplug")}
    modules = {"glowplug_lab.api", "glowplug_lab.systems"}
    assert layered("layers of the laboratory") == modules | packages("glowplug_lab")


def test_the_product_may_not_import_the_laboratory() -> None:
    apart = contract("the product never imports the laboratory")
    assert (apart["source_modules"], apart["forbidden_modules"]) == (["glowplug"], ["glowplug_lab"])
    assert not apart.get("ignore_imports") and not apart.get("allow_indirect_imports")


def test_every_service_is_kept_apart_from_the_others() -> None:
    found = {f.split("/")[1] for f in files() if f.startswith("services/") and f.count("/") > 1}
    assert set(contract("services never import")["modules"]) == {f"glowplug.services.{name}" for name in found}
    assert found == set(SERVICES)


def test_pure_packages_may_not_touch_clock_network_or_log() -> None:
    forbidden = contract("pure packages")
    pure = {f"glowplug.{name}" for name in ("domain", "policies", "fleet", "controllers")}
    assert set(forbidden["source_modules"]) == pure
    world = {"asyncio", "time", "random", "os", "socket", "logging", "nats", "redis", "fastapi"}
    assert set(forbidden["forbidden_modules"]) >= world


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_package_has_the_files_each_has(service: str) -> None:
    expected = {"__init__.py", "__main__.py", "main.py", "settings.py"}
    assert expected <= {f.removeprefix(f"services/{service}/") for f in files()}
