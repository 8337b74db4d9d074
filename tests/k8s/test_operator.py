"""The operator's manifests: valid, with only the rights that its calls need. Costs a second, and no renderer."""

from typing import Any

import pytest
import yaml

from glowplug.runtime.custom_resources import GROUP, definitions
from glowplug.services.operator.main import NAME
from glowplug.services.operator.settings import OperatorSettings
from tests.k8s.rendering import K8S, named

FOLDER = K8S / "components/operator"
VERSIONS = ("1.30.0", "1.36.0")
CALLS = {  # of services/operator: api_server.py, main.py
    *((GROUP, plural, verb) for plural in ("models", "tenants") for verb in ("get", "list", "watch", "patch")),
    *((GROUP, f"{plural}/status", "patch") for plural in ("models", "tenants")),
    ("events.k8s.io", "events", "create"),
    *(("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "update")),
}


def manifests() -> list[dict[str, Any]]:
    files = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    return [one for file in files for one in yaml.safe_load_all((FOLDER / file).read_text())]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_valid(version: str) -> None:
    import kubernetes_validate

    found = manifests()
    assert {"Deployment", "Role", "NetworkPolicy"} <= {one["kind"] for one in found}
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_its_role_allows_its_calls_and_nothing_else() -> None:
    rules = named(manifests(), "Role", "operator")["rules"]
    allowed = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert allowed == CALLS
    assert [rule["resourceNames"] for rule in rules if "resourceNames" in rule] == [[NAME]]
    assert {one.removesuffix(f".{GROUP}") for one in (d["metadata"]["name"] for d in definitions().values())} == {
        plural for group, plural, verb in CALLS if (group, verb) == (GROUP, "list")
    }


def test_what_removes_the_operator_leaves_the_definitions() -> None:
    assert not [one for one in manifests() if one["kind"] == "CustomResourceDefinition"]


def test_its_variables_are_settings_and_its_asked_services_are_open_to_it() -> None:
    (container,) = named(manifests(), "Deployment", "operator")["spec"]["template"]["spec"]["containers"]
    given = {one["name"].removeprefix("GLOWPLUG_").lower() for one in container["env"]}
    assert given <= {setting.name for setting in OperatorSettings.variables()}
    asked = {url.removeprefix("http://").partition(":")[0] for name, url in settings_urls().items()}
    for policy, direction in (("operator", "egress"), ("asked-by-operator", None)):
        spec = named(manifests(), "NetworkPolicy", policy)["spec"]
        selector = spec[direction][0]["to"][0]["podSelector"] if direction else spec["podSelector"]
        assert set(selector["matchExpressions"][0]["values"]) == asked


def settings_urls() -> dict[str, str]:
    fields = {setting.name: setting for setting in OperatorSettings.variables()}
    return {name: fields[name].default for name in ("autoscaler_url", "placer_url", "router_url")}
