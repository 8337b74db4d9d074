"""Replacing a function in every module that imported it by name."""

import sys
from types import ModuleType

import pytest

from glowplug_vllm.parked import patches


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    home, user, other = (ModuleType(f"gp_fake_{name}") for name in ("home", "user", "other"))
    home.__dict__["pick"] = lambda: "old"
    user.__dict__["pick"] = home.__dict__["pick"]
    other.__dict__["pick"] = lambda: "of its own"
    for module in (home, user, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return home, user, other


def test_holders_of_the_old_one_get_the_new_one_and_namesakes_keep_theirs(
    modules: tuple[ModuleType, ModuleType, ModuleType],
) -> None:
    home, user, other = modules
    assert patches.replace_everywhere("gp_fake_home", "pick", lambda: "new") == 2
    assert [m.__dict__["pick"]() for m in (home, user, other)] == ["new", "new", "of its own"]


def test_a_vllm_without_the_names_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in patches.NEEDED:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(patches.Unpatchable, match=r"EngineCoreProc\.run_engine_core"):
        patches.apply(is_cpu=True)
