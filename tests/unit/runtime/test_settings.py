"""A wrong setting gives one line with its name."""

import subprocess
import sys
from dataclasses import replace

import pytest

from glowplug.cli.up import settings_of
from glowplug.controllers.placer.params import PlacerParams
from glowplug.policies.systems import DEFAULT
from glowplug.runtime.errors import WrongSetting
from glowplug.runtime.settings import ServiceSettings
from glowplug.runtime.supervisor.settings import FleetSettings, check_services
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.autoscaler.settings import AutoscalerSettings
from glowplug.services.console.settings import ConsoleSettings
from glowplug.services.placer.settings import PlacerSettings
from glowplug.services.predictor.settings import PredictorSettings
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.services.router.settings import RouterSettings
from glowplug_lab.systems import SYSTEMS

DECIDING = (RouterSettings, PredictorSettings, PlacerSettings, AutoscalerSettings, PrefetcherSettings, AgentSettings)
EVERY = (FleetSettings, ConsoleSettings, *DECIDING)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLOWPLUG_PORT", "abc"),
        ("GLOWPLUG_PORT", "70000"),
        ("GLOWPLUG_RESYNC_S", "-1"),
        ("GLOWPLUG_SERVICE_ID", "router.eu"),  # the bus names its reader after it
    ],
)
def test_a_service_setting_is_named_as_its_owner_writes_it(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(WrongSetting) as raised:
        ServiceSettings.read()
    line = str(raised.value)
    assert line.startswith(f"{name}: ") and repr(value) in line and "\n" not in line


@pytest.mark.parametrize("settings", EVERY)
def test_no_service_takes_a_number_that_nobody_can_mean(monkeypatch, settings):
    numbers = [one for one in settings.variables() if type(one.default) in (int, float)]
    assert len(numbers) > 2
    for one in numbers:
        for value in ("-1", "inf", "nan") if type(one.default) is float else ("-1",):
            with monkeypatch.context() as patch:
                patch.setenv(one.env, value)
                with pytest.raises(WrongSetting) as raised:
                    settings.read()
            line = str(raised.value)
            assert line.startswith(f"{one.env}: ") and "\n" not in line, value


def test_a_setting_of_the_params_reaches_them_and_an_unknown_variable_nothing(monkeypatch):
    for name, value in {"FAIR_WAIT_S": "7", "FAIR_TURN_S": "9"}.items():
        monkeypatch.setenv(f"GLOWPLUG_{name}", value)
    params = PlacerSettings.read().params
    assert params.fair_wait_s == 7.0
    assert params.fair_turn_s == PlacerParams().fair_turn_s, "no setting"


@pytest.mark.parametrize("settings", EVERY)
def test_a_variable_means_one_setting(settings):
    names = [one.env for one in settings.variables()]
    assert len(names) == len(set(names))


def test_the_fleet_refuses_a_wrong_setting_with_the_usage_exit_code(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOWPLUG_READY_TIMEOUT_S", "soon")
    with pytest.raises(WrongSetting, match="GLOWPLUG_READY_TIMEOUT_S") as raised:
        settings_of(tmp_path)
    assert raised.value.exit_code == 2


def test_devices_of_one_machine_belong_to_one_node(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOWPLUG_GPU_KIND", "cuda")
    with pytest.raises(WrongSetting, match="--nodes 1"):
        settings_of(tmp_path, nodes=3)
    assert settings_of(tmp_path, nodes=1).gpu_kind == "cuda"


def test_a_service_process_ends_with_that_line_and_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "glowplug.services.placer"],
        env={"PATH": "/usr/bin", "GLOWPLUG_PORT": "abc"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("glowplug: GLOWPLUG_PORT: ") and "Traceback" not in done.stderr


def test_one_word_chooses_every_policy_and_what_goes_with_them(monkeypatch):
    monkeypatch.setenv("GLOWPLUG_POLICIES", "union")
    monkeypatch.setenv("GLOWPLUG_POLICY_EVICTION", "lru")
    placer, autoscaler = PlacerSettings.read(), AutoscalerSettings.read()
    assert (placer.policy_placement, placer.policy_prewarming, placer.params.turns) == ("union", "union", "balanced")
    assert placer.policy_eviction == "lru", "what is set by itself goes before"
    assert (autoscaler.policy_scaling, autoscaler.params.stop_becomes) == ("union", "prewarmed")
    assert RouterSettings.read().policy_routing == "union"
    assert PrefetcherSettings.read().policy_caching == "union"
    monkeypatch.setenv("GLOWPLUG_POLICIES", "warmserve")
    assert AgentSettings.read().params.reservation == "paper"
    monkeypatch.setenv("GLOWPLUG_KV_RESERVATION", "literal_code")
    assert AgentSettings.read().params.reservation == "literal_code"
    monkeypatch.setenv("GLOWPLUG_POLICIES", "unoin")
    with pytest.raises(WrongSetting) as caught:
        PlacerSettings.read()
    said = "GLOWPLUG_POLICIES: no system named 'unoin' (there are: hybrid, hydraserve, "
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_policy_and_param_of_a_system_is_one_of_some_service(name):
    services = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent")
    found = {service: settings.of({"policies": name}) for service, settings in zip(services, DECIDING, strict=True)}
    policies = {field: getattr(one, field) for one in found.values() for field in vars(one) if "policy_" in field}
    assert policies == {f"policy_{kind}": policy for kind, policy in SYSTEMS[name].policies.items()}
    for service, params in SYSTEMS[name].params.items():
        assert {field: getattr(found[service].params, field) for field in params} == params


def test_a_fleet_told_nothing_runs_the_default_system():
    for settings in DECIDING:
        assert settings() == settings.of({}) == replace(settings.of({"policies": DEFAULT}), policies="")


@pytest.mark.parametrize("settings", [AgentSettings, PrefetcherSettings])
def test_a_name_with_dots_is_one_word(
    settings: type[AgentSettings] | type[PrefetcherSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOWPLUG_NODE_ID", "ip-10-0-0-1.internal")
    assert settings.read().node_id == "ip-10-0-0-1-internal"
    monkeypatch.setenv("GLOWPLUG_NODE_ID", "Node*")
    with pytest.raises(WrongSetting):
        settings.read()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("GLOWPLUG_POLICY_ROUTING", "leest_loaded", "no routing policy named 'leest_loaded' (there are: first_room,"),
        ("GLOWPLUG_POLICY_SCALING", "union:speed=2", "scaling policy 'union'"),
        ("GLOWPLUG_POLICY_CACHING", "none", "no caching policy named 'none' (there are:"),
        ("GLOWPLUG_GPU_BUDGETS", "1GiB,much", "not a size in bytes: 'much'"),
        ("GLOWPLUG_LOG_LEVEL", "LOUD", "no level of that name (there are: CRITICAL,"),
        ("GLOWPLUG_DRAIN_S", "soon", "not a number"),
    ],
)
def test_the_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(WrongSetting) as caught:
        check_services()
    line = str(caught.value)
    assert line.startswith(f"{variable}: ") and says in line and "\n" not in line


@pytest.mark.parametrize("variable", ["GLOWPLUG_PORT", "GLOWPLUG_NODE_ID", "GLOWPLUG_ENGINE_PORTS"])
def test_what_a_process_is_given_does_not_come_from_outside(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "Not A Value")
    check_services()
