"""The Helm chart generates deploy/k8s, explains refused values, and upgrades change no immutable field. A rendering
takes about 0.1 s, a check against a Kubernetes version some seconds, the file about 30."""

import base64
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import configuration
from glowplug.runtime.model_files import ModelFile
from tests.k8s.api_server import api_server
from tests.k8s.rendering import (
    K8S,
    ROOT,
    SCHEMAS,
    WORKLOADS,
    Manifest,
    all_containers,
    environment,
    matches,
    named,
    of_kind,
    pod_labels,
    pod_spec,
    render,
    title,
)

WRITE = runpy.run_path(str(ROOT / "deploy/helm/write.py"))
CHART: Path = WRITE["CHART"]
HERE = Path(__file__).parent
PAGE = ROOT / "docs/howto/kubernetes.md"
VARIED = HERE / "chart_values.yaml"
ALWAYS = ("--values", str(CHART / "values-sim.yaml"))
GIB = 2**30
pytestmark = pytest.mark.skipif(WRITE["helm"]() is None, reason="no helm to render the chart with: make k8s-tools")
# kustomize's additions and variants; all else is identical.
_HASHED = re.compile(r"^(settings|node-settings|nats|valkey)-[a-z0-9]{10}$")
_OTHER_LABELS = {"app.kubernetes.io/managed-by", "helm.sh/chart"}
_OF_GENERATORS = {"app.kubernetes.io/name", "app.kubernetes.io/component"}


@cache
def _chart(*arguments: str) -> str:
    return str(WRITE["template"](*arguments))


def chart(*arguments: str) -> list[Manifest]:
    return [one.manifest for one in WRITE["objects"](_chart(*arguments))]


@pytest.fixture
def varied() -> list[Manifest]:
    return chart("--values", str(VARIED))


def refusal(*arguments: str) -> str:
    with pytest.raises(RuntimeError) as refused:
        _chart(*arguments)
    return str(refused.value)


def compared(manifest: Any) -> Any:
    if isinstance(manifest, list):
        return [compared(part) for part in manifest]
    if isinstance(manifest, str) and (hashed := _HASHED.match(manifest)):
        return hashed[1]
    if not isinstance(manifest, dict):
        return manifest
    drop = _OTHER_LABELS | {key for key in manifest if str(key).startswith("checksum/")}
    kept = {key: compared(value) for key, value in manifest.items() if key not in drop}
    return {key: value for key, value in kept.items() if (key, value) != ("annotations", {})}


def comparable(manifests: list[Manifest]) -> dict[str, Any]:
    found = {}
    for manifest in map(compared, manifests):
        manifest["metadata"].pop("namespace", None)
        if manifest["kind"] == "ConfigMap":  # generated ones lack our labels
            labels = manifest["metadata"].get("labels", {})
            manifest["metadata"]["labels"] = {k: v for k, v in labels.items() if k not in _OF_GENERATORS}
        found[title(manifest)] = manifest
    return found


def test_the_manifests_are_what_the_chart_makes() -> None:
    """`make k8s-write` regenerates them."""
    written: dict[str, str] = WRITE["files"]()
    assert {path for path, text in written.items() if (K8S / path).read_text() != text} == set()
    rendered = {str(f.relative_to(K8S)) for f in K8S.rglob("*.yaml") if f.read_text().startswith(WRITE["HEADER"])}
    assert rendered <= set(written), "of a template that is gone"


@pytest.mark.parametrize("overlay", ["sim", "gpu-monitored"])
def test_helm_makes_the_objects_that_kustomize_makes(overlay: str) -> None:
    assert comparable(chart(*WRITE["overlay_arguments"](overlay))) == comparable(render(overlay))


def immutable(manifest: Manifest) -> dict[str, Any]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        return {"clusterIP": spec.get("clusterIP")}
    own = {"StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")}
    keys = own.get(manifest["kind"], ("selector",) if manifest["kind"] in WORKLOADS else ())
    return {key: spec[key] for key in keys if key in spec}


@pytest.mark.parametrize("overlay", ["sim", "gpu"])
def test_an_upgrade_changes_nothing_that_cannot_be_changed(overlay: str) -> None:
    released = yaml.safe_load((HERE / "released.yaml").read_text())[overlay]
    now = {title(m): immutable(m) for m in chart(*WRITE["overlay_arguments"](overlay))}
    assert {name: now.get(name) for name in released} == released


@pytest.mark.parametrize("values", ["values.yaml", "values-sim.yaml", "values-gpu.yaml", str(VARIED)])
def test_helm_finds_nothing_to_complain_of(values: str) -> None:
    command = [WRITE["helm"](), "lint", "--strict", str(CHART), "--values", str(CHART / values)]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert not re.search(r"\[(WARNING|ERROR)\]", linted.stdout), linted.stdout


def test_every_value_stands_on_the_page_of_values() -> None:
    """A pool's values are in its comment, the others have their default."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    page = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(page)
    assert set(schema["properties"]) - {"global"} == set(values)
    for name, value in values.items():
        own = schema["properties"][name].get("properties")
        assert own is None or set(own) == set(value), name
    (example,) = re.findall(r"^# - name: .*?(?=^pools: )", page, re.DOTALL | re.MULTILINE)
    (pool,) = yaml.safe_load(re.sub(r"^# ", "", example, flags=re.MULTILINE))
    assert set(pool) == set(schema["definitions"]["pool"]["properties"])
    shown = chart("--set-json", f"pools={json.dumps([pool])}", "--kube-version", "1.36.0")
    assert named(shown, "StatefulSet", "node-h100")["spec"]["replicas"] == 3


@pytest.mark.parametrize("version", ["1.30.0", "1.36.0"])
def test_every_object_is_valid(version: str, varied: list[Manifest]) -> None:
    import jsonschema
    import kubernetes_validate

    shared = "pools[0].gpus.deviceClass=gpu.nvidia.com"
    image = 'weights.stores=[{"name": "qwen", "path": "/qwen", "image": "registry.example/qwen:1"}]'
    newer = ("--values", str(VARIED), "--set", shared, "--set-json", image, "--kube-version", version)
    more = chart(*newer) if version > "1.35" else []
    for manifest in [*chart(*ALWAYS), *varied, *more]:
        if manifest["kind"] == "HTTPRoute":
            continue
        if (schema := SCHEMAS.get(manifest["kind"])) is not None:
            jsonschema.validate(manifest, schema)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    claims = of_kind(more, "ResourceClaimTemplate")
    assert len(claims) == bool(more)
    for claim in claims:
        (asked,) = claim["spec"]["spec"]["devices"]["requests"]
        assert asked["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("nats.storge=5Gi", "'/nats': additional properties 'storge' not allowed"),
        ("pools[0].regoin=1Gi", "'/pools/0': additional properties 'regoin' not allowed"),
        ("nats.existing.url=nats://me:secret@bus:4222", "'/nats/existing/url'"),
        ("valkey.existing.url=redis+sentinel://a:26379", "'/valkey/existing/url'"),
        ("nats.replicas=2", "'/nats/replicas'"),
        ("nats.maxFileStore=5GB", "maxFileStore of 5GB is more than its storage of 4Gi"),
        ("pools[0].gpuKind=tpu", "'/pools/0/gpuKind'"),
        ("pools[0].region=68G", "'/pools/0/region'"),
        ("pools[0].disk.type=ephemeral", "'/pools/0/disk'"),
        ("pools[0].hostCache=500Mi", "hostCache is 500Mi, more than nine tenths of its region of 512Mi"),
        ("pools[0].region=2Gi", "memory limit of 1Gi must hold the region of 2Gi"),
        ("pools[0].gpuKind=cuda", "gpuKind cuda needs gpus.count"),
        ("pools[0].gpus.count=all,pools[0].gpus.resource=amd.com/gpu", '"all" of amd.com/gpu needs gpus.deviceClass'),
        ("pools[0].gpus.count=1,pools[0].gpus.resource=nvidia.com/gpu.shared", "is a slice of a GPU's time"),
        ("pools[0].gpus.count=1,pools[0].gpus.deviceClass=a", "needs Kubernetes 1.34, this is v1.30.0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(values: str, says: str) -> None:
    assert says in refusal(*ALWAYS, "--kube-version", "1.30.0", "--set", values)


def test_pools_must_not_take_each_others_pods() -> None:
    (pool,) = yaml.safe_load((CHART / "values-sim.yaml").read_text())["pools"]
    for name, says in (("node", "of several give each another name"), ("node-b", "two of them have the name node-b")):
        both = json.dumps([{**pool, "name": name}, {**pool, "name": "node-b"}])
        assert says in refusal("--set-json", f"pools={both}")


def test_each_pool_selects_its_own_pods_and_is_reached_as_nodes(varied: list[Manifest]) -> None:
    pools = of_kind(varied, "DaemonSet")
    assert {p["metadata"]["name"] for p in pools} == {"node-h100", "node-slices", "node-amd"}
    for pool in pools:
        selected = [title(p) for p in pools if matches(pool["spec"]["selector"], pod_labels(p))]
        assert selected == [title(pool)]
        assert matches({"matchLabels": named(varied, "Service", "node")["spec"]["selector"]}, pod_labels(pool))


def agent_and_prefetcher(manifests: list[Manifest], pool: str) -> tuple[dict[str, Any], ...]:
    spec = pod_spec(named(manifests, "DaemonSet", pool))
    agent, prefetcher = spec["containers"]
    return agent, prefetcher, {v["name"]: v for v in spec["volumes"]}


def test_each_pool_asks_for_its_own_gpus(varied: list[Manifest]) -> None:
    every, _, _ = agent_and_prefetcher(varied, "node-h100")
    assert environment(varied, every)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert set(every["resources"]["limits"]) == {"cpu", "memory"}
    assert pod_spec(named(varied, "DaemonSet", "node-h100"))["runtimeClassName"] == "nvidia"
    slices, _, _ = agent_and_prefetcher(varied, "node-slices")
    assert slices["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 2
    assert slices["image"] == "registry.example:5000/own/agent:1.2.3"
    amd, _, _ = agent_and_prefetcher(varied, "node-amd")
    assert amd["resources"]["limits"]["amd.com/gpu"] == 8
    assert "NVIDIA_DRIVER_CAPABILITIES" not in environment(varied, amd)


def test_the_kubelet_has_no_reason_to_evict_a_node_for_its_disk(varied: list[Manifest]) -> None:
    """Prefetchers fill nine tenths of the volume; the pod requests it and all else it may write."""
    agent, prefetcher, volumes = agent_and_prefetcher(varied, "node-h100")
    filled = int(environment(varied, prefetcher)["GLOWPLUG_DISK_CACHE_BYTES"])
    assert volumes["weights"]["emptyDir"]["sizeLimit"] == "500Gi"
    assert filled == 450 * GIB
    on_disk = sum(int(v["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB for v in on_disk_volumes(volumes))
    asked = {int(prefetcher["resources"][kind]["ephemeral-storage"]) for kind in ("requests", "limits")}
    assert asked == {on_disk + GIB}
    assert "ephemeral-storage" not in agent["resources"]["limits"]


def on_disk_volumes(volumes: dict[str, Any]) -> list[dict[str, Any]]:
    return [v for v in volumes.values() if "emptyDir" in v and v["emptyDir"].get("medium") != "Memory"]


def test_weights_lie_on_the_disk_that_a_pool_names(varied: list[Manifest]) -> None:
    for pool, source in (
        ("node-slices", {"hostPath": {"path": "/mnt/nvme/glowplug", "type": "Directory"}}),
        ("node-amd", {"persistentVolumeClaim": {"claimName": "weights"}}),
    ):
        _, prefetcher, volumes = agent_and_prefetcher(varied, pool)
        assert volumes["weights"] == {"name": "weights", **source}
        (mount,) = [m for m in prefetcher["volumeMounts"] if m["name"] == "weights"]
        assert mount["mountPath"] == environment(varied, prefetcher)["GLOWPLUG_DISK_CACHE_DIR"]
        assert ("subPathExpr" in mount) is (pool == "node-amd"), "servers that share a claim keep apart"


def test_nodes_read_what_models_name_by_a_path(varied: list[Manifest]) -> None:
    image = json.dumps([{"name": "qwen", "path": "/qwen", "image": "registry.example/qwen:1"}])
    by_image = (*ALWAYS, "--set-json", f"weights.stores={image}", "--kube-version")
    for manifests, sources in (
        (varied, {"/models": "persistentVolumeClaim", "/share": "hostPath"}),
        (chart(*by_image, "1.36.0"), {"/qwen": "image"}),
    ):
        for node in [w for w in of_kind(manifests, *WORKLOADS) if w["metadata"]["name"].startswith("node")]:
            volumes = {v["name"]: v for v in pod_spec(node)["volumes"]}
            mounts = {m["mountPath"]: m for m in pod_spec(node)["containers"][1]["volumeMounts"]}
            for path, source in sources.items():
                assert mounts[path]["readOnly"] and source in volumes[mounts[path]["name"]]
    assert "the store qwen is an image, which Kubernetes mounts from 1.35 on" in refusal(*by_image, "1.34.0")


def test_servers_of_others_take_the_place_of_ours(varied: list[Manifest]) -> None:
    titles = set(map(title, varied))
    ours = {t for t in titles if t.rpartition("/")[2] in ("nats", "nats-peers", "valkey")}
    assert ours == set()
    for where, container in all_containers(varied):
        user = where.rpartition("/")[2]
        env = environment(varied, container)
        both = [f"tls://{user}:$(GLOWPLUG_SERVER_PASSWORD)@{host}.example:4222" for host in "ab"]
        assert env["GLOWPLUG_NATS_URL"].split(",") == both
        assert env["GLOWPLUG_REDIS_URL"] == {"secretKeyRef": {"name": "redis", "key": "url"}}
        assert ("GLOWPLUG_USAGE_DATABASE_URL" in env) is (user == "console")
    bus, store = named(varied, "NetworkPolicy", "control-plane")["spec"]["egress"]
    assert bus == {"ports": [{"protocol": "TCP", "port": 4222}], "to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}]}
    assert store == {"ports": [{"protocol": "TCP", "port": port} for port in (6380, 26379)]}
    sentinels = "redis+sentinel://a.example:26379\\,b.example:26379/glowplug"
    (router,) = pod_spec(named(chart(*ALWAYS, "--set", f"valkey.existing.url={sentinels}"), "Deployment", "router"))[
        "containers"
    ]
    told = {variable["name"]: variable.get("value") for variable in router["env"]}["GLOWPLUG_REDIS_URL"]
    assert told == "redis+sentinel://router:$(GLOWPLUG_SERVER_PASSWORD)@a.example:26379,b.example:26379/glowplug"


def test_what_the_page_shows_makes_a_fleet(tmp_path: Path, varied: list[Manifest]) -> None:
    """The page is docs/howto/kubernetes.md; every variable must be a known setting."""
    (shown,) = re.findall(r"```yaml file=my-fleet.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my-fleet.yaml").write_text(shown)
    manifests = chart("--values", str(tmp_path / "my-fleet.yaml"))
    (text,) = named(manifests, "ConfigMap", "models")["data"].values()
    assert ModelFile.model_validate(yaml.safe_load(text)).name == "qwen2.5-7b"
    assert agent_and_prefetcher(manifests, "node-h100")[0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    settings = configuration.document()
    given = {name for of in (manifests, varied) for _, c in all_containers(of) for name in environment(of, c)}
    services = {f"GLOWPLUG_{name}_URL" for name in ("ROUTER", "AUTOSCALER", "PLACER", "PREDICTOR")}
    assert {n for n in given - services if n.startswith("GLOWPLUG_") and f"`{n}`" not in settings} == set()


def test_doors_lead_to_the_services_and_their_names_are_answered_to(varied: list[Manifest]) -> None:
    doors = {i["spec"]["rules"][0]["host"]: i["metadata"]["name"] for i in of_kind(varied, "Ingress")}
    assert doors == {"api.example": "router", "fleet.example": "console"}
    (route,) = of_kind(varied, "HTTPRoute")
    assert route["spec"]["hostnames"] == ["models.example"]
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "0s"}
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "router", "port": 8000}]
    answered = named(varied, "ConfigMap", "settings")["data"]["GLOWPLUG_ALLOWED_HOSTS"].split(",")
    assert {"api.example", "fleet.example", "models.example"} <= set(answered)


def test_what_is_switched_off_is_not_there(varied: list[Manifest]) -> None:
    names = {b["metadata"]["name"] for b in of_kind(varied, "PodDisruptionBudget")}
    assert names == {"router", "predictor", "autoscaler"}, "none for a placer of one replica"
    assert named(varied, "Deployment", "router")["spec"]["replicas"] == 3
    off = "networkPolicies.enabled=false,podDisruptionBudgets=false,topologySpread=none,tokens.create=false"
    less = chart(*ALWAYS, "--set", off)
    assert of_kind(less, "NetworkPolicy", "PodDisruptionBudget", "Secret") == []
    assert not [w for w in of_kind(less, *WORKLOADS) if "topologySpreadConstraints" in pod_spec(w)]


def test_one_server_of_nats_looks_for_no_other() -> None:
    alone = chart(*ALWAYS, "--set", "nats.replicas=1")
    config = named(alone, "ConfigMap", "nats")["data"]["nats.conf"]
    assert "cluster" not in config and "jetstream" in config
    assert named(alone, "ConfigMap", "settings")["data"]["GLOWPLUG_NATS_REPLICAS"] == "1"
    many = named(chart(*ALWAYS, "--set", "nats.replicas=5"), "ConfigMap", "nats")["data"]["nats.conf"]
    assert "$NATS_ROUTE_4]" in many


def test_helm_draws_every_password_that_a_pod_asks_for() -> None:
    """Alphanumeric passwords, since they are spliced into addresses."""
    manifests = chart(*ALWAYS)
    (secret,) = of_kind(manifests, "Secret")
    drawn = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert all(re.fullmatch(r"[a-zA-Z0-9]{48}", password) for password in drawn.values())
    assert len(set(drawn.values())) == len(drawn)
    asked = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for _, container in all_containers(manifests)
        for variable in container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {}) and not variable["valueFrom"]["secretKeyRef"].get("optional")
    }
    assert asked <= set(drawn)
    page = PAGE.read_text()
    assert {key for key in drawn if key not in page} == set(), "the page says how to make the Secret oneself"


def test_an_upgrade_keeps_the_passwords_that_are_there(tmp_path: Path) -> None:
    """It keeps other entries too, such as a console's OIDC secret."""
    manifests = chart(*ALWAYS)
    had = {key: base64.b64encode(key.encode()).decode() for key in ("GLOWPLUG_API_KEY", "GLOWPLUG_OIDC_CLIENT_SECRET")}
    owner = {f"meta.helm.sh/release-{what}": "glowplug" for what in ("name", "namespace")}
    about = {"name": "glowplug-tokens", "labels": {"app.kubernetes.io/managed-by": "Helm"}, "annotations": owner}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": had}
    there = {"/api/v1/namespaces/glowplug/secrets/glowplug-tokens": secret}
    for objects in (there, {}):
        with api_server(manifests, objects, tmp_path) as config:
            server = ("--kubeconfig", config, "--dry-run=server", "--disable-openapi-validation")
            rendered = WRITE["objects"](WRITE["template"](*ALWAYS, *server))  # never cached
        (now,) = of_kind([one.manifest for one in rendered], "Secret")
        drawn = set(named(manifests, "Secret", "glowplug-tokens")["data"])
        assert set(now["data"]) == (drawn | set(had) if objects else drawn)
        assert (had.items() <= now["data"].items()) is bool(objects)


class _Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_right = (self.path, self.headers["Authorization"]) == ("http://router:8000/v1/models", "Bearer secret")
        self.send_response(200 if is_right else 401)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "b"}, {"id": "a"}]}')

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.mark.parametrize(("key", "code"), [("secret", 0), ("other", 1)])
def test_the_test_of_a_release_asks_a_router_for_its_models(key: str, code: int) -> None:
    found = subprocess.run(
        [WRITE["helm"](), "template", "x", str(CHART), *ALWAYS, "--show-only", "templates/tests/models.yaml"],
        capture_output=True,
        text=True,
        check=True,
    )
    policy, pod = yaml.safe_load_all(found.stdout)
    assert all(m["metadata"]["annotations"]["helm.sh/hook"] == "test" for m in (policy, pod))
    assert matches(policy["spec"]["podSelector"], pod["metadata"]["labels"]), "the namespace denies it everything"
    (container,) = pod["spec"]["containers"]
    with http.server.HTTPServer(("127.0.0.1", 0), _Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy = f"http://127.0.0.1:{server.server_address[1]}"
        env = {"PATH": os.environ["PATH"], "GLOWPLUG_API_KEY": key, "http_proxy": proxy}
        ran = subprocess.run(
            [sys.executable, "-c", *container["args"]], env=env, capture_output=True, text=True, check=False
        )
        server.shutdown()
    assert ran.returncode == code, ran.stderr
    assert (ran.stdout == "the router serves: a b\n") is (code == 0)


def test_the_notes_say_how_to_reach_it() -> None:
    command = [WRITE["helm"](), "install", "x", str(CHART), "--namespace", "own", "--dry-run=client"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("NOTES:")[2]
    assert "It has no nodes yet" in plain
    assert "kubectl -n own port-forward service/router 8000:8000" in plain
    varied = subprocess.run([*command, "--values", str(VARIED)], capture_output=True, text=True, check=True).stdout
    assert "https://api.example/v1" in varied and "https://models.example/v1" in varied
    assert "*.own.svc.cluster.local" in varied
