"""How every pod runs: locked up, bounded, asked whether it lives, and given the time to end that its service takes."""

import re
from typing import Any

import pytest

from tests.k8s.rendering import (
    OVERLAYS,
    WORKLOADS,
    Manifest,
    all_containers,
    containers,
    environment,
    named,
    of_kind,
    pod_spec,
    render,
    title,
)

overlays = pytest.mark.parametrize("overlay", OVERLAYS)
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "downwardAPI", "csi"}
WRITABLE = {"emptyDir"}


@overlays
def test_every_pod_passes_the_restricted_profile(overlay: str) -> None:
    manifests = render(overlay)
    labels = named(manifests, "Namespace", "glowplug")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in of_kind(manifests, *WORKLOADS):
        spec = pod_spec(workload)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), title(workload)
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 10001, 10001)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec["volumes"]:
            assert set(volume) - {"name"} <= RESTRICTED_VOLUMES, f"{title(workload)}: {volume}"
        for container in containers(workload):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in own


@overlays
def test_nothing_may_talk_to_the_kubernetes_api(overlay: str) -> None:
    manifests = render(overlay)
    assert of_kind(manifests, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False, title(account)
    for workload in of_kind(manifests, *WORKLOADS):
        assert pod_spec(workload)["automountServiceAccountToken"] is False, title(workload)
        assert pod_spec(workload)["enableServiceLinks"] is False, title(workload)


@overlays
def test_every_container_is_bounded(overlay: str) -> None:
    for where, container in all_containers(render(overlay)):
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]), where
        assert {"cpu", "memory"} <= set(resources["limits"]), where
    for workload in of_kind(render(overlay), *WORKLOADS):
        for volume in pod_spec(workload)["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], f"{title(workload)}: {volume}"


@overlays
def test_every_container_is_probed(overlay: str) -> None:
    for where, container in all_containers(render(overlay)):
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), where
        if container["image"].startswith("glowplug/"):
            paths = [container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "liveness", "readiness")]
            assert paths == ["/live", "/live", "/ready"], where


@overlays
def test_what_is_written_lies_on_a_volume(overlay: str) -> None:
    """The root is read-only: every directory a service writes must be a mount."""
    manifests = render(overlay)
    for where, container in all_containers(manifests):
        env = environment(manifests, container)
        mounts = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert "/tmp" in mounts, where
        for name in ("GLOWPLUG_STATE_DIR", "GLOWPLUG_SHM_DIR"):
            assert name not in env or env[name] in mounts, f"{where}: {name}"
        if container["image"].startswith("glowplug/"):
            assert "GLOWPLUG_STATE_DIR" in env, where


def before_the_end(container: dict[str, Any], env: dict[str, Any]) -> float:
    """Seconds from the order to end until the service has done all it means to do."""
    command = container["lifecycle"]["preStop"]["exec"]["command"] if "lifecycle" in container else []
    seconds = float(command[1]) if command[:1] == ["sleep"] else 0.0
    waits = {"GLOWPLUG_DRAIN_DELAY_S": 0, "GLOWPLUG_DRAIN_S": 10, "GLOWPLUG_STOP_GRACE_S": 3}
    return seconds + sum(float(env.get(name, default)) for name, default in waits.items())


@overlays
def test_the_grace_is_longer_than_the_drain(overlay: str) -> None:
    manifests = render(overlay)
    for workload in of_kind(manifests, *WORKLOADS):
        for container in containers(workload):
            if container["image"].startswith("glowplug/"):
                wanted = before_the_end(container, environment(manifests, container))
                assert pod_spec(workload)["terminationGracePeriodSeconds"] >= wanted + 5, title(workload)


@overlays
def test_the_bus_has_time_to_send_its_clients_away(overlay: str) -> None:
    manifests = render(overlay)
    nats = named(manifests, "StatefulSet", "nats")
    (config,) = [c for c in of_kind(manifests, "ConfigMap") if "nats.conf" in c["data"]]
    told = config["data"]["nats.conf"]
    seconds = [int(s) for s in re.findall(r"lame_duck_\w+: (\d+)s", told)]
    assert len(seconds) == 2
    assert pod_spec(nats)["terminationGracePeriodSeconds"] > sum(seconds)


@overlays
def test_the_bus_keeps_three_copies_and_syncs_each_write(overlay: str) -> None:
    manifests = render(overlay)
    nats = named(manifests, "StatefulSet", "nats")
    (container,) = containers(nats)
    assert nats["spec"]["replicas"] == 3
    assert nats["spec"]["volumeClaimTemplates"]
    (config,) = [c for c in of_kind(manifests, "ConfigMap") if "nats.conf" in c["data"]]
    routes = [f"$NATS_ROUTE_{k}" for k in range(3)]
    assert f"routes: [{', '.join(routes)}]" in config["data"]["nats.conf"]
    for k, route in enumerate(routes):
        assert environment(manifests, container)[route[1:]].endswith(f"@nats-{k}.nats-peers:6222")
    assert "sync_interval: always" in config["data"]["nats.conf"]
    for where, one in all_containers(manifests):
        if one["image"].startswith("glowplug/"):
            assert environment(manifests, one)["GLOWPLUG_NATS_REPLICAS"] == "3", where


@overlays
def test_those_who_decide_have_a_standby(overlay: str) -> None:
    manifests = render(overlay)
    for name in ("predictor", "placer", "autoscaler"):
        deployment: Manifest = named(manifests, "Deployment", name)
        (container,) = containers(deployment)
        assert deployment["spec"]["replicas"] == 2
        assert float(environment(manifests, container)["GLOWPLUG_LEADER_LEASE_S"]) > 0
        assert environment(manifests, container)["GLOWPLUG_SERVICE_ID"]["fieldRef"]["fieldPath"] == "metadata.name"
