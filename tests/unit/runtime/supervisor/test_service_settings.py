"""A setting of any service that is wrong is told before anything starts."""

import pytest

from glowplug.runtime.supervisor.settings import WrongSetting, check_services


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("GLOWPLUG_POLICY_ROUTING", "leest_loaded", "no routing policy named 'leest_loaded' (there are: first_room,"),
        ("GLOWPLUG_POLICY_SCALING", "union:speed=2", "scaling policy 'union'"),
        ("GLOWPLUG_POLICY_CACHING", "none", "no caching policy named 'none' (there are:"),
        ("GLOWPLUG_GPU_BUDGETS", "1GiB,much", "not a size in bytes: 'much'"),
        ("GLOWPLUG_LOG_LEVEL", "LOUD", "no level of that name (there are: CRITICAL,"),
        ("GLOWPLUG_DRAIN_S", "soon", "valid number"),
    ],
)
def test_the_wrong_one_is_named_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(WrongSetting) as caught:
        check_services()
    line = str(caught.value)
    assert line.startswith(f"{variable}: ") and says in line and "\n" not in line


@pytest.mark.parametrize("variable", ["GLOWPLUG_PORT", "GLOWPLUG_NODE_ID", "GLOWPLUG_ENGINE_PORTS"])
def test_what_each_process_is_given_is_not_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "Not A Value")
    check_services()
