"""docs/policies.md and the registry name the same policies, the default of each kind first."""

import importlib
import re

import pytest

from glowplug.policies.options import base_name
from glowplug.policies.registry import KINDS, choose, installed
from glowplug.runtime.settings import Settings
from tests.house.tree import text

SECTION = re.compile(r"^## (\w+): .*?$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^- `(\w+)`: (.+?)\. \*(.+)\*$", re.MULTILINE)
SERVICES = ("router", "predictor", "autoscaler", "placer", "prefetcher")


def sections() -> dict[str, str]:
    return dict(SECTION.findall(text("docs/policies.md")))


def test_every_kind_has_its_section_and_no_other_has() -> None:
    assert sorted(sections()) == sorted(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_policy_of_a_kind_is_on_the_page_once(kind: str) -> None:
    names = [name for name, _, _ in ROW.findall(sections()[kind])]
    assert sorted(names) == installed(kind)


def test_every_option_on_the_page_is_one_of_its_policy() -> None:
    rows = re.findall(r"^- (\w+): (`.+?)(?:: |$)", text("docs/policies.md"), re.MULTILINE)
    named = [(kind, name) for kind, cell in rows for name in re.findall(r"`([^`]+)`", cell) if kind in KINDS]
    assert len(named) > 10
    for kind, name in named:
        assert choose(kind, name), name


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_setting_of_a_kind_exists_and_its_default_stands_first(kind: str) -> None:
    variable = f"GLOWPLUG_POLICY_{kind.upper()}"
    assert variable in sections()[kind]
    defaults = {
        one.default
        for service in SERVICES
        for cls in vars(importlib.import_module(f"glowplug.services.{service}.settings")).values()
        if isinstance(cls, type) and issubclass(cls, Settings)
        for one in cls.variables()
        if one.env == variable
    }
    assert {base_name(name) for name in defaults} == {ROW.findall(sections()[kind])[0][0]}


def test_what_a_scenario_leaves_out_is_on_the_page_as_a_baseline() -> None:
    setup = importlib.import_module("glowplug_lab.simulator.setup")
    for kind, body in sections().items():
        after = {name: paper for name, _, paper in ROW.findall(body)}
        assert after[getattr(setup.PolicyNames(), kind)].startswith("baseline"), kind
