"""Docs are current: drawn pages name everything, links resolve, variables exist."""

import ast
import re
import tomllib
import typing
from functools import cache
from typing import Any

import pytest
import yaml

from docs import capabilities, configuration, instance_states, site_pages
from glowplug.controllers.agent.record import State
from glowplug.engines import drivers
from glowplug.events import commands, facts
from glowplug.events import document as events_document
from glowplug.runtime.supervisor.samples import sample_files
from glowplug.telemetry import document as metrics_document
from tests.house.tree import ROOT, files, files_in, nodes, python, text
from tests.howto.blocks import read
from tests.howto.example import made_by

PAGES = [f for f in files() if f.endswith(".md") and "/" not in f] + files_in("docs", suffix=".md")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"\bGLOWPLUG_[A-Z0-9_]*[A-Z0-9]\b")
NO_VARIABLES = {"GLOWPLUG_FACTS", "GLOWPLUG_COMMANDS", "GLOWPLUG_USAGE", "GLOWPLUG_POLICY", "GLOWPLUG_FAIR_TURN_S"}


@cache
def drawn() -> dict[str, str]:
    return {
        "capabilities.md": capabilities.document(),
        "configuration.md": configuration.document(),
        "instance-states.md": instance_states.document(),
        "events.md": events_document.document(),
        "metrics.md": metrics_document.document(),
    }


def test_every_row_of_the_state_page_has_a_page_and_a_test() -> None:
    rows = re.findall(r"^\| (\[.*?) \| (.*?) \|", text("docs/state.md"), re.MULTILINE)
    assert len(rows) > 20
    named = [re.findall(r"`((?:tests|bench)/[^`]+)`", shown) for _, shown in rows]
    assert [rows[i][0] for i, paths in enumerate(named) if not any(p.startswith("tests/") for p in paths)] == []
    assert [path for paths in named for path in paths if not (ROOT / path).is_file()] == []


def test_the_readme_asks_the_model_that_make_up_asks() -> None:
    """`glowplug up` prints a request to the router's first model, by name."""
    names = sorted(yaml.safe_load(file.read_text())["name"] for file in sample_files("llamacpp"))
    asked = re.findall(r"""-d '{"model": "([^"]+)", "stream": true""", text("README.md"))
    assert asked == names[:1]


def test_the_architecture_pairs_each_service_with_the_policies_that_its_settings_choose() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| [^|]* \| ([^|]*) \| [^|]* \|$", text("ARCHITECTURE.md"), re.MULTILINE))
    for service in ("router", "predictor", "autoscaler", "placer", "prefetcher", "agent"):
        chosen = set(re.findall(r"^    policy_(\w+):", text(f"services/{service}/settings.py"), re.MULTILINE))
        assert set(re.findall(r"`(\w+)`", rows[service])) == chosen, service


def _module(path: str) -> str:
    return path.removeprefix("libs/").removesuffix(".py").replace("/", ".")


def test_make_docs_writes_each_drawn_page_and_no_page_is_committed() -> None:
    recipe = text("Makefile").partition("\ndocs: ")[2].partition("\n\n")[0]
    written = re.findall(r"python (\S+\.py|-m \S+) >build/docs/(\S+)", recipe)
    asked = {
        path if path.startswith("docs/") else f"-m {path[5:-3].replace('/', '.')}": path for path in site_pages.DRAWN
    }
    assert {asked[command]: page for command, page in written} == site_pages.DRAWN
    assert set(drawn()) == set(site_pages.DRAWN.values())
    assert [page for page in drawn() if (ROOT / "docs" / page).exists()] == []


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("capabilities.md", [*drivers.installed()]),
        ("configuration.md", [one.env for cls in configuration.classes().values() for one in cls.variables()]),
        ("instance-states.md", [state.value for state in State]),
        ("metrics.md", [one.value for one in metrics_document.names() if one.section.startswith("Metrics:")]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_drawn_page_names_everything(page: str, names: list[str]) -> None:
    assert names and [name for name in names if f"`{name}`" not in drawn()[page]] == []


def test_the_page_of_events_names_every_type() -> None:
    types = {cls.TYPE for cls in (*typing.get_args(facts.Fact), *typing.get_args(commands.Command))}
    assert set(re.findall(r"^- \*\*(\S+)\*\* `", drawn()["events.md"], re.MULTILINE)) == types


def test_no_settings_class_is_left_out() -> None:
    written = {cls.__name__ for cls in configuration.classes().values()}
    defined = {
        node.name
        for f in python("libs/glowplug", "services")
        for node in nodes(f)
        if isinstance(node, ast.ClassDef) and any("Settings" in ast.unparse(base) for base in node.bases)
    }
    assert defined == written


def test_the_citation_and_the_chart_are_of_this_version() -> None:
    cited, project = yaml.safe_load(text("CITATION.cff")), tomllib.loads(text("pyproject.toml"))["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    chart = yaml.safe_load(text("deploy/helm/glowplug/Chart.yaml"))
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])


def test_every_link_leads_somewhere() -> None:
    said = {page: text(page) for page in PAGES} | {f"docs/{page}": shown for page, shown in drawn().items()}
    links = [(p, target) for p in said for target in LINK.findall(re.sub(r"(?s)```.*?```", "", said[p]))]
    for page, target in links:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), f"{page} -> {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{page} -> {target}"


def test_every_page_is_reached_from_another() -> None:
    linked = set()
    for page in PAGES:
        for target in LINK.findall(text(page)):
            path = (ROOT / page).parent / target.partition("#")[0]
            linked |= {path.resolve()} if "://" not in target and path.exists() else set()
    listed = ("README.md", "docs/adr/0")  # by their folder and by the menu of the site
    pages = [page for page in [*PAGES, *site_pages.DRAWN] if not page.startswith(listed)]
    assert [page for page in pages if (ROOT / page).resolve() not in linked] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    on_site = [site_pages.BESIDE.get(page, page.removeprefix("docs/")) for page in PAGES]
    assert sorted(pages(yaml.safe_load(text("mkdocs.yml"))["nav"])) == sorted([*on_site, *drawn()])


def test_a_page_of_the_site_has_no_link_that_leaves_it_and_no_mark_of_the_runner() -> None:
    for_site = site_pages.for_site
    said = "Read\n- [a](../bench/budget.py), [b](../ARCHITECTURE.md#packages), [c](adr)\n\n```sh needs=gpu\n[d](e)\n```"
    assert for_site(said, "gpu.md") == (
        "Read\n\n- a, [b](architecture.md#packages), [c](adr/README.md)\n\n```sh\n[d](e)\n```"
    )
    assert for_site("[![F](docs/screenshots/fleet.png)](docs/console.md)", "first-minute.md") == (
        "[![F](screenshots/fleet.png)](console.md)"
    )
    assert for_site("[e](../../libs/glowplug/events/document.py)", "extend/event.md") == "[e](../events.md)"


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_variables_in_code_and_docs_are_the_ones_on_the_page() -> None:
    urls = {f"GLOWPLUG_{s}_URL" for s in ("ROUTER", "AUTOSCALER", "PLACER", "PREDICTOR", "CONSOLE", "DATA")}
    folders = ("libs", "services", "tests", "bench", "deploy", "docs", "scenarios")
    used = {
        (f, name)
        for f in [*files_in(*folders), *PAGES, "Makefile", ".ci/run"]
        if not f.startswith("tests/house/") and f.rpartition(".")[2] not in ("png", "svg", "ico", "woff2", "npz")
        for name in VARIABLE.findall(text(f))
    }
    known = set(VARIABLE.findall(drawn()["configuration.md"])) | urls
    assert {(f, name) for f, name in used if name not in known | NO_VARIABLES} == set()


def test_every_verb_of_the_makefile_is_explained() -> None:
    made = text("Makefile")
    targets = re.findall(r"^([a-z][a-z0-9-]*):", made, re.MULTILINE)
    assert {"help", "install", "up", "down", "demo", "test", "check", "lint", "types", "proto", "sim", "bench"} <= set(
        targets
    )
    assert [t for t in targets if not re.search(rf"^{t}:.*## \S", made, re.MULTILINE)] == []


def test_verbs_the_docs_name_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text("Makefile"), re.MULTILINE))
    named = {(p, verb) for p in PAGES for verb in re.findall(r"`make ([a-z0-9-]+)", text(p))}
    assert {(p, verb) for p, verb in named if verb not in targets} == set()


def test_paths_the_docs_name_exist() -> None:
    folders = r"(?:libs|services|tests|proto|docs|deploy|bench|scenarios)"
    named = {(p, path) for p in PAGES for path in re.findall(rf"`({folders}/[\w./-]+)`", text(p))}
    missing = {(p, path) for p, path in named if not (ROOT / path).exists()}
    assert {(p, path) for p, path in missing if path not in made_by(read(p))} == set()


def metric_uses() -> dict[str, set[str]]:
    """Constant of semconv.py -> its instruments."""
    kinds = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "summary": "summary"}
    found: dict[str, set[str]] = {}
    for f in python("libs/glowplug", "services"):
        for node in nodes(f):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("semconv"):
                found.setdefault(node.attr, set())
            if isinstance(node, ast.Call) and node.args and "semconv." in ast.unparse(node.args[0]):
                kind = kinds.get(ast.unparse(node.func).rpartition(".")[2].lower())
                name = ast.unparse(node.args[0]).rpartition(".")[2]
                found.setdefault(name, set()).update({kind} if kind else set())
    return found


def metrics() -> list[Any]:
    return [name for name in metrics_document.names() if name.section.startswith("Metrics:")]


def test_every_metric_on_the_page_is_measured_and_of_its_kind() -> None:
    uses = metric_uses()
    assert [m.constant for m in metrics() if m.constant not in uses] == []
    wrong = [(m.value, uses[m.constant]) for m in metrics() if uses[m.constant] - {metrics_document.kind(m.value)}]
    assert wrong == []


def test_metric_names_carry_their_unit() -> None:
    values = [m.value for m in metrics()]
    assert len(values) == len(set(values))
    assert [v for v in values if not v.startswith("glowplug_")] == []
    assert [v for v in values if re.search(r"_(ms|kb|mb|gb|count|time|latency)$", v)] == []
