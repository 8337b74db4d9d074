"""Every pod is locked down, bounded and probed; everything it names exists."""

import re
from typing import Any

import yaml

from docs import configuration
from glowplug import __version__
from glowplug.runtime.privileges import READER, USERS
from glowplug.runtime.privileges import variable as password_of
from glowplug.telemetry import document as metrics
from tests.k8s.rendering import (
    ROOT,
    WORKLOADS,
    Manifest,
    all_containers,
    containers,
    environment,
    matches,
    named,
    of_kind,
    pod_labels,
    pod_spec,
    render,
    title,
)

# Not our settings: passwords spliced into addresses, and variables of servers and runtimes.
OTHERS_READ = {
    "NATS_PEER_PASSWORD",
    *(f"NATS_ROUTE_{k}" for k in range(3)),
    *map(password_of, USERS),
    "POD_NAME",
    "MALLOC_ARENA_MAX",
    "NVIDIA_DRIVER_CAPABILITIES",
    "FAIL_ON_INIT_ERROR",
}
SECRET_WORDS = re.compile(r"TOKEN|PASSWORD|API_KEY|CONSOLE_KEY|SECRET|_AUTH$")
TOKENS, WEIGHTS = "glowplug-tokens", "glowplug-weights"
UNIT = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "downwardAPI", "csi"}


def size(text: Any) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(\D*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNIT[unit]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, *WORKLOADS)


def selected(manifests: list[Manifest], selector: dict[str, Any]) -> list[Manifest]:
    return [w for w in workloads(manifests) if matches(selector, pod_labels(w))]


def port_names(workload: Manifest) -> dict[str, int]:
    ports = [p for c in containers(workload) for p in c.get("ports", ())]
    assert len({p["containerPort"] for p in ports}) == len(ports), f"{title(workload)}: two containers on one port"
    return {p["name"]: p["containerPort"] for p in ports}


def test_every_variable_is_a_setting(target: str) -> None:
    page = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", configuration.document()))
    page |= {f"GLOWPLUG_{s}_URL" for s in ("ROUTER", "AUTOSCALER", "PLACER", "PREDICTOR")}
    manifests = render(target)
    given = {(where, name) for where, c in all_containers(manifests) for name in environment(manifests, c)}
    assert given
    assert {(where, name) for where, name in given if name not in page | OTHERS_READ} == set()


def test_ports_of_services_and_probes_are_the_containers(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        found = selected(manifests, {"matchLabels": service["spec"]["selector"]})
        assert len(found) == 1, f"{title(service)} selects {[title(w) for w in found]}"
        ports = port_names(found[0])
        for port in service["spec"]["ports"]:
            assert ports.get(port["targetPort"]) == port["port"], f"{title(service)}: {port}"
    for workload in workloads(manifests):
        for container in containers(workload):
            own = {p["name"] for p in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                kind = container[probe].get("httpGet") or container[probe].get("tcpSocket")
                assert kind is None or kind["port"] in own, f"{title(workload)}: {probe}"


def test_the_admin_port_told_is_the_admin_port_declared(manifests: list[Manifest]) -> None:
    for where, container in all_containers(manifests):
        env = environment(manifests, container)
        declared = {p["name"]: p["containerPort"] for p in container["ports"]}
        if "GLOWPLUG_PORT" in env:
            assert int(env["GLOWPLUG_PORT"]) in declared.values(), where
            assert int(env.get("GLOWPLUG_DATA_PORT", declared.get("data", 0))) == declared.get("data", 0), where
            assert env["GLOWPLUG_HOST"] == "0.0.0.0", where


def test_addresses_name_services_and_their_ports(manifests: list[Manifest]) -> None:
    services = {s["metadata"]["name"]: {p["port"] for p in s["spec"]["ports"]} for s in of_kind(manifests, "Service")}
    addresses = 0
    for where, container in all_containers(manifests):
        texts = [*map(str, environment(manifests, container).values()), *container.get("args", ())]
        for host, port in re.findall(r"://(?:[^@/\s]*@)?([a-z][a-z0-9.-]*):(\d+)", " ".join(texts)):
            addresses += 1
            assert int(port) in services[host.rpartition(".")[2]], f"{where}: {host}:{port}"
    assert addresses


def test_selectors_meet_their_own_pods_and_no_others(manifests: list[Manifest]) -> None:
    for workload in workloads(manifests):
        assert [title(w) for w in selected(manifests, workload["spec"]["selector"])] == [title(workload)]
        for rule in pod_spec(workload).get("topologySpreadConstraints", ()):
            assert selected(manifests, rule["labelSelector"]) == [workload]
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert selected(manifests, policy["spec"]["podSelector"]), title(policy)


def test_budgets_and_scalers_have_something_to_hold(manifests: list[Manifest]) -> None:
    """A budget on one replica would block every drain."""
    scaled = {s["spec"]["scaleTargetRef"]["name"]: s["spec"] for s in of_kind(manifests, "HorizontalPodAutoscaler")}
    assert set(scaled) == {"router"}
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert {b["metadata"]["name"] for b in budgets} >= {"router", "nats", "placer", "autoscaler", "predictor"}
    for budget in budgets:
        (workload,) = selected(manifests, budget["spec"]["selector"])
        assert workload["kind"] in ("Deployment", "StatefulSet")
        name = workload["metadata"]["name"]
        assert scaled[name]["minReplicas"] > 1 if name in scaled else workload["spec"]["replicas"] > 1, name
    for name in scaled:
        assert "replicas" not in named(manifests, "Deployment", name)["spec"], "the scaler owns the number"


def test_the_router_is_scaled_on_metrics_it_has(manifests: list[Manifest]) -> None:
    section = metrics.document().partition("## Requests (router)")[2].partition("\n## ")[0]
    scaled_on = named(manifests, "HorizontalPodAutoscaler", "router")["spec"]["metrics"]
    assert {m["type"] for m in scaled_on} == {"Pods"}
    for metric in scaled_on:
        name = metric["pods"]["metric"]["name"]
        assert f"`{name}`" in section and metrics.kind(name) == "gauge"


def test_images_are_pinned(target: str) -> None:
    images = {container["image"] for _, container in all_containers(render(target))}
    for image in images:
        name, _, tag = image.rpartition(":")
        assert name, f"{image} has no tag"
        assert tag != "latest"
        assert re.search(r"\d+\.\d+\.\d+", tag), image
        if name.startswith("glowplug/"):
            assert tag == __version__, image


def test_the_servers_are_those_of_compose() -> None:
    """Only one version of NATS and Valkey is tested."""
    compose = (ROOT / "deploy/docker-compose.yml").read_text()
    servers = {i for _, c in all_containers(render("sim")) if not (i := c["image"]).startswith("glowplug/")}
    assert len(servers) == 2
    assert {image for image in servers if f"image: {image}\n" not in compose} == set()


def test_secrets_are_only_referred_to(manifests: list[Manifest]) -> None:
    assert of_kind(manifests, "Secret") == []
    referred = set()
    for where, container in all_containers(manifests):
        for variable in container.get("env", ()):
            if SECRET_WORDS.search(variable["name"]):
                referred.add(variable["valueFrom"]["secretKeyRef"]["name"])
            if "value" in variable:
                assert not re.search(r"://[^$/]*:[^$/]*@", variable["value"]), f"{where}: {variable['name']}"
        referred |= {s["secretRef"]["name"] for s in container.get("envFrom", ()) if "secretRef" in s}
    assert referred == {TOKENS, WEIGHTS}
    for config in of_kind(manifests, "ConfigMap"):
        assert not [key for key in config["data"] if SECRET_WORDS.search(key)], title(config)


def test_each_pod_gets_only_the_secrets_it_needs(manifests: list[Manifest]) -> None:
    holders: dict[str, set[str]] = {}
    for where, container in all_containers(manifests):
        for variable in container.get("env", ()):
            if (source := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                holders.setdefault(source["key"], set()).add(where.rpartition("/")[2])
    assert holders["GLOWPLUG_API_KEY"] == {"router"}
    assert holders["GLOWPLUG_CONSOLE_KEY"] == {"console"}
    assert holders["GLOWPLUG_ENGINE_SECRET"] == {"router", "agent"}
    assert holders["GLOWPLUG_OIDC_CLIENT_SECRET"] == {"console"}
    assert holders["GLOWPLUG_ADMIN_TOKEN"] == {"prefetcher", *USERS} - {
        READER
    }  # each service, and the console for its roles
    assert holders["NATS_PEER_PASSWORD"] == {"nats"}
    for user in USERS:
        own = set() if user == READER else {user}
        assert holders[password_of(user)] == own | {"nats", "valkey"}, user


def test_each_service_is_itself_at_the_bus_and_the_store(manifests: list[Manifest]) -> None:
    for where, container in all_containers(manifests):
        service = where.rpartition("/")[2]
        if service in USERS:
            env = environment(manifests, container)
            for name in ("GLOWPLUG_NATS_URL", "GLOWPLUG_REDIS_URL"):
                assert f"//{service}:$(GLOWPLUG_SERVER_PASSWORD)@" in env[name], where
            assert env["GLOWPLUG_SERVER_PASSWORD"]["secretKeyRef"]["key"] == password_of(service), where


def test_no_secret_stands_on_a_command_line(target: str) -> None:
    manifests = render(target)
    for where, container in all_containers(manifests):
        line = " ".join([*container.get("command", ()), *container.get("args", ())])
        secret = {
            n for n, v in environment(manifests, container).items() if isinstance(v, dict) and "secretKeyRef" in v
        }
        spliced = {n for n, v in environment(manifests, container).items() if isinstance(v, str) and "PASSWORD)" in v}
        assert not [name for name in secret | spliced if name in line], where


def test_clients_reach_the_data_port_of_a_router_and_no_other(manifests: list[Manifest]) -> None:
    ports = {name: named(manifests, "Service", name)["spec"]["ports"] for name in ("router", "router-admin")}
    assert {name: [port["port"] for port in of] for name, of in ports.items()} == {
        "router": [8000],
        "router-admin": [8080],
    }


def test_what_pods_mount_and_read_exists(manifests: list[Manifest]) -> None:
    configs = {c["metadata"]["name"] for c in of_kind(manifests, "ConfigMap")}
    accounts = {a["metadata"]["name"] for a in of_kind(manifests, "ServiceAccount")}
    for workload in workloads(manifests):
        spec = pod_spec(workload)
        assert spec["serviceAccountName"] in accounts
        volumes = {v["name"] for v in spec["volumes"]}
        volumes |= {c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", ())}
        for volume in spec["volumes"]:
            assert volume.get("configMap", {}).get("name", "") in configs | {""}, title(workload)
        for container in containers(workload):
            sources = [s["configMapRef"]["name"] for s in container.get("envFrom", ()) if "configMapRef" in s]
            assert set(sources) <= configs, title(workload)
            assert {m["name"] for m in container["volumeMounts"]} <= volumes, title(workload)
        mounted = {m["name"] for c in containers(workload) for m in c["volumeMounts"]}
        assert mounted == volumes, f"{title(workload)}: a volume nobody mounts"


def test_the_models_are_files_the_autoscaler_takes(overlay: str, manifests: list[Manifest]) -> None:
    from glowplug.runtime.model_files import ModelFile

    models = named(manifests, "ConfigMap", "models")["data"]
    assert models
    engines = {ModelFile.model_validate(yaml.safe_load(text)).engine for text in models.values()}
    assert engines == {"sim": {"emulated"}, "gpu": {"vllm"}}[overlay]
    if overlay == "sim":
        assert set(models) == {f.name for f in (ROOT / "deploy/models/emulated").iterdir()}


def test_labels_are_the_standard_ones(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "glowplug", title(manifest)
        assert labels["app.kubernetes.io/managed-by"] == "kustomize", title(manifest)
        if manifest["kind"] != "ConfigMap":
            assert labels["app.kubernetes.io/name"] == "glowplug", title(manifest)
        if manifest["kind"] in WORKLOADS:
            assert pod_labels(manifest)["app.kubernetes.io/component"] == labels["app.kubernetes.io/component"]


def test_both_containers_of_a_node_agree(overlay: str, manifests: list[Manifest]) -> None:
    (node,) = [w for w in workloads(manifests) if w["metadata"]["name"] == "node"]
    agent, prefetcher = containers(node)
    ours, theirs = environment(manifests, agent), environment(manifests, prefetcher)
    for name in ("GLOWPLUG_NODE_ID", "GLOWPLUG_SHM_DIR", "GLOWPLUG_HOST_CACHE_BYTES"):
        assert ours[name] == theirs[name], name
    region = next(v for v in pod_spec(node)["volumes"] if v["name"] == "region")["emptyDir"]
    assert region["medium"] == "Memory"
    for container in (agent, prefetcher):
        mount = next(m for m in container["volumeMounts"] if m["name"] == "region")
        assert mount["mountPath"] == ours["GLOWPLUG_SHM_DIR"]
    cache_bytes = int(ours["GLOWPLUG_HOST_CACHE_BYTES"])
    assert cache_bytes <= 0.9 * size(region["sizeLimit"]), "the prefetcher uses nine tenths of the volume at most"
    limit = size(prefetcher["resources"]["limits"]["memory"])
    assert limit >= size(region["sizeLimit"]) + 256 * 2**20, "the region counts against the prefetcher's memory"
    assert ours["GLOWPLUG_NODE_ID"]["fieldRef"]["fieldPath"] == (
        "metadata.name" if overlay == "sim" else "spec.nodeName"
    )


def test_every_pod_passes_the_restricted_profile(manifests: list[Manifest]) -> None:
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


def test_nothing_may_talk_to_the_kubernetes_api(manifests: list[Manifest]) -> None:
    assert of_kind(manifests, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []
    for account in of_kind(manifests, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False, title(account)
    for workload in of_kind(manifests, *WORKLOADS):
        assert pod_spec(workload)["automountServiceAccountToken"] is False, title(workload)
        assert pod_spec(workload)["enableServiceLinks"] is False, title(workload)


def test_every_container_is_bounded(manifests: list[Manifest]) -> None:
    for where, container in all_containers(manifests):
        resources = container["resources"]
        assert {"cpu", "memory"} <= set(resources["requests"]), where
        assert {"cpu", "memory"} <= set(resources["limits"]), where
    for workload in of_kind(manifests, *WORKLOADS):
        for volume in pod_spec(workload)["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], f"{title(workload)}: {volume}"


def test_every_container_is_probed(manifests: list[Manifest]) -> None:
    for where, container in all_containers(manifests):
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), where
        if container["image"].startswith("glowplug/"):
            paths = [container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "liveness", "readiness")]
            assert paths == ["/live", "/live", "/ready"], where


def test_what_is_written_lies_on_a_volume(manifests: list[Manifest]) -> None:
    """The root is read-only: written directories must be mounts."""
    for where, container in all_containers(manifests):
        env = environment(manifests, container)
        mounts = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert "/tmp" in mounts, where
        for name in ("GLOWPLUG_STATE_DIR", "GLOWPLUG_SHM_DIR"):
            assert name not in env or env[name] in mounts, f"{where}: {name}"
        if container["image"].startswith("glowplug/"):
            assert "GLOWPLUG_STATE_DIR" in env, where


def before_the_end(container: dict[str, Any], env: dict[str, Any]) -> float:
    command = container["lifecycle"]["preStop"]["exec"]["command"] if "lifecycle" in container else []
    seconds = float(command[1]) if command[:1] == ["sleep"] else 0.0
    waits = {"GLOWPLUG_DRAIN_DELAY_S": 0, "GLOWPLUG_DRAIN_S": 10, "GLOWPLUG_STOP_GRACE_S": 3}
    return seconds + sum(float(env.get(name, default)) for name, default in waits.items())


def test_the_grace_is_longer_than_the_drain(manifests: list[Manifest]) -> None:
    for workload in of_kind(manifests, *WORKLOADS):
        for container in containers(workload):
            if container["image"].startswith("glowplug/"):
                wanted = before_the_end(container, environment(manifests, container))
                assert pod_spec(workload)["terminationGracePeriodSeconds"] >= wanted + 5, title(workload)


def test_the_bus_has_time_to_send_its_clients_away(manifests: list[Manifest]) -> None:
    nats = named(manifests, "StatefulSet", "nats")
    (config,) = [c for c in of_kind(manifests, "ConfigMap") if "nats.conf" in c["data"]]
    given = config["data"]["nats.conf"]
    seconds = [int(s) for s in re.findall(r"lame_duck_\w+: (\d+)s", given)]
    assert len(seconds) == 2
    assert pod_spec(nats)["terminationGracePeriodSeconds"] > sum(seconds)


def test_the_bus_keeps_three_copies_and_syncs_each_write(manifests: list[Manifest]) -> None:
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


def test_those_who_decide_have_a_standby(manifests: list[Manifest]) -> None:
    for name in ("predictor", "placer", "autoscaler"):
        deployment: Manifest = named(manifests, "Deployment", name)
        (container,) = containers(deployment)
        assert deployment["spec"]["replicas"] == 2
        assert float(environment(manifests, container)["GLOWPLUG_LEADER_LEASE_S"]) > 0
        assert environment(manifests, container)["GLOWPLUG_SERVICE_ID"]["fieldRef"]["fieldPath"] == "metadata.name"
