"""Check Glowplug in a Kubernetes namespace: `Kubectl` reads objects (of secrets only the names of keys), `check`
judges."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from glowplug.cli.doctor.findings import Finding, Findings

SECRET = "glowplug-tokens"
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
COMPONENTS = ("router", "autoscaler", "placer", "predictor", "console", "node", "nats", "valkey")
GPU = "nvidia.com/gpu"
SERVERS = {"nats": ("GLOWPLUG_NATS_URL", "@nats:"), "valkey": ("GLOWPLUG_REDIS_URL", "@valkey:")}
CUSTOM_METRICS = "custom.metrics.k8s.io"
MANY_RESTARTS = 5
ANSWER_S = 15.0
WORKLOADS = ("deployments", "statefulsets", "daemonsets")
OTHERS = ("pods", "persistentvolumeclaims", "networkpolicies", "horizontalpodautoscalers", "poddisruptionbudgets")
KEYS = '{{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'
_K = Findings("cluster")
Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """`items` by kind, as in `kubectl get KIND -o json`; None without permission."""

    namespace: str
    error: str = ""
    items: Mapping[str, tuple[Object, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[Object, ...] | None = None
    api_services: tuple[Object, ...] | None = None
    secret_keys: tuple[str, ...] | None = None
    secret_problem: str = ""

    def of(self, kind: str) -> tuple[Object, ...]:
        return self.items.get(kind, ())


def check(facts: ClusterFacts) -> list[Finding]:
    if facts.error:
        return [_K.fail("kubectl", facts.error, "kubectl cluster-info; is --context right, and are you logged in?")]
    groups = (_refused, _workloads, _pods, _images, _volumes, _secret, _policies, _gpus, _scaling)
    return [finding for group in groups for finding in group(facts)]


def _refused(facts: ClusterFacts) -> Iterator[Finding]:
    for kind, why in sorted(facts.refused.items()):
        yield _K.skipped(kind, f"cannot be read: {why}", f"kubectl auth can-i list {kind} -n {facts.namespace}")


def _name(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def _component(thing: Object) -> str:
    return str(thing["metadata"].get("labels", {}).get(COMPONENT, ""))


def _workloads(facts: ClusterFacts) -> Iterator[Finding]:
    seen: set[str] = set()
    for kind in WORKLOADS:
        for workload in facts.of(kind):
            seen.add(_component(workload))
            yield _workload(kind, workload, facts.namespace)
    unread = set(WORKLOADS) & set(facts.refused)
    for component in COMPONENTS:
        if component not in seen and not unread:
            if _is_elsewhere(facts, component):
                yield _K.ok(component, "the services use one that is not part of this release")
                continue
            do = f"helm install glowplug deploy/helm/glowplug -n {facts.namespace}; is that the namespace?"
            yield _K.fail(component, "is not deployed", do)


def _is_elsewhere(facts: ClusterFacts, component: str) -> bool:
    """Whether services know this server, and only by another address than ours."""
    variable, ours = SERVERS.get(component, ("", ""))
    given = [
        entry.get("value", "")
        for kind in WORKLOADS
        for workload in facts.of(kind)
        for container in workload["spec"]["template"]["spec"]["containers"]
        for entry in container.get("env", ())
        if entry["name"] == variable
    ]
    return bool(given) and not any(ours in address for address in given)


def _workload(kind: str, workload: Object, namespace: str) -> Finding:
    status, name = workload.get("status", {}), _name(workload)
    if kind == "daemonsets":
        wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
        if not wanted:
            return _K.fail(name, "no node matches its nodeSelector", "label the nodes as its nodeSelector says")
    else:
        wanted, ready = workload["spec"].get("replicas", 1), status.get("readyReplicas", 0)
    if workload["metadata"].get("generation", 0) > status.get("observedGeneration", 0):
        return _K.warn(
            name, "a change is not rolled out yet", f"kubectl rollout status {kind[:-1]}/{name} -n {namespace}"
        )
    if ready < wanted:
        return _K.fail(name, f"{ready} of {wanted} ready", f"kubectl describe {kind[:-1]}/{name} -n {namespace}")
    if not wanted:
        return _K.warn(name, "scaled to 0", f"kubectl scale {kind[:-1]}/{name} --replicas 1 -n {namespace}")
    return _K.ok(name, f"{ready} of {wanted} ready")


def _pods(facts: ClusterFacts) -> Iterator[Finding]:
    """Yield the first reason of each pod that is not ready."""
    for pod in facts.of("pods"):
        if pod["metadata"].get("deletionTimestamp") or pod["status"].get("phase") == "Succeeded":
            continue
        name, ns = _name(pod), facts.namespace
        if reason := _unscheduled(pod):
            yield _K.fail(name, f"has no node: {reason}", f"kubectl describe pod/{name} -n {ns}")
        for status in (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ())):
            waiting = status.get("state", {}).get("waiting", {})
            last = status.get("lastState", {}).get("terminated", {})
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                says = f"{status['name']}: {waiting['reason']}: {waiting.get('message', 'no message')}"
                yield _K.fail(name, says, f"kubectl logs {name} -c {status['name']} --previous -n {ns}")
            elif last.get("reason") == "OOMKilled":
                says = f"{status['name']} was killed for its memory ({status['restartCount']} restarts)"
                yield _K.fail(name, says, "raise its memory limit, or lower its bounds")
            elif status.get("restartCount", 0) >= MANY_RESTARTS:
                says = f"{status['name']} was restarted {status['restartCount']} times"
                yield _K.warn(name, says, f"kubectl logs {name} -c {status['name']} --previous -n {ns}")


def _unscheduled(pod: Object) -> str:
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "unknown")
    return ""


def _images(facts: ClusterFacts) -> Iterator[Finding]:
    by_tag: dict[str, set[str]] = {}
    for pod in facts.of("pods"):
        for container in pod["spec"]["containers"]:
            image, _, tag = str(container["image"]).partition("@")[0].rpartition(":")
            if "glowplug/" in image and "/" not in tag:
                by_tag.setdefault(tag, set()).add(image.rpartition("/")[2])
    if len(by_tag) > 1:
        mixed = "; ".join(f"{tag}: {', '.join(sorted(names))}" for tag, names in sorted(by_tag.items()))
        yield _K.warn("images", f"mixed versions: {mixed}", "finish the rollout or undo it: docs/howto/upgrade.md")
    elif by_tag:
        yield _K.ok("images", f"every pod runs {next(iter(by_tag))}")


def _volumes(facts: ClusterFacts) -> Iterator[Finding]:
    claims = facts.of("persistentvolumeclaims")
    unbound = [claim for claim in claims if claim["status"].get("phase") != "Bound"]
    for claim in unbound:
        says = f"is {claim['status'].get('phase', 'unknown')}, not bound"
        wanted = claim["spec"].get("storageClassName") or "the default"
        yield _K.fail(_name(claim), says, f"is there a storage class ({wanted}) that makes volumes? kubectl get sc")
    if claims and not unbound:
        yield _K.ok("volumes", f"{len(claims)} bound")
    elif not claims and "persistentvolumeclaims" in facts.items:
        yield _K.warn("volumes", "no claim: NATS and Valkey lose everything at a restart", "give them volumes")


def _secret(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the Secret has every key that pods name. Values are never read."""
    if facts.secret_keys is None:
        if "forbidden" in facts.secret_problem.lower():
            yield _K.skipped("secret", f"{SECRET}: this user may not read it", "ask an administrator if it exists")
        else:
            yield _K.fail("secret", f"{SECRET}: {facts.secret_problem}", "create it: docs/howto/kubernetes.md")
        return
    wanted = {
        ref["key"]
        for pod in facts.of("pods")
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        for env in container.get("env", ())
        if (ref := (env.get("valueFrom") or {}).get("secretKeyRef"))
        and ref["name"] == SECRET
        and not ref.get("optional")
    }
    if missing := sorted(wanted - set(facts.secret_keys)):
        yield _K.fail("secret", f"{SECRET} lacks {', '.join(missing)}", "add it: docs/howto/kubernetes.md")
    else:
        yield _K.ok("secret", f"{SECRET} has every key that the pods read")


def _policies(facts: ClusterFacts) -> Iterator[Finding]:
    if "networkpolicies" not in facts.items:
        return
    policies = facts.of("networkpolicies")
    closed = [policy for policy in policies if _closes_all(policy["spec"])]
    if not policies or not closed:
        says = "there is none" if not policies else "no policy denies the rest"
        yield _K.warn("network policies", says, "the chart brings them: networkPolicies.enabled")
    elif len(policies) == len(closed):
        yield _K.fail("network policies", "all traffic is denied and none allowed", "apply the others too")
    else:
        yield _K.ok("network policies", f"closed but for the {len(policies) - len(closed)} that open arrows")


def _closes_all(spec: Object) -> bool:
    opens = any(spec.get(name) for name in ("podSelector", "ingress", "egress"))
    return not opens and {"Ingress", "Egress"} <= set(spec.get("policyTypes", ()))


def _gpus(facts: ClusterFacts) -> Iterator[Finding]:
    asked = [
        int(limit)
        for daemon in facts.of("daemonsets")
        for container in daemon["spec"]["template"]["spec"]["containers"]
        if (limit := container.get("resources", {}).get("limits", {}).get(GPU))
    ]
    if not asked:
        yield _K.skipped("gpus", "agents request none: their GPUs are budgets of host memory")
        return
    if facts.nodes is None:
        yield _K.skipped("gpus", "this user may not list the cluster's nodes")
        return
    offering = {_name(n): int(n["status"].get("allocatable", {}).get(GPU, 0)) for n in facts.nodes}
    able = [name for name, num in offering.items() if num >= max(asked)]
    if not able:
        says = f"no node offers {max(asked)} {GPU}"
        yield _K.fail("gpus", says, "install the NVIDIA driver and device plugin: deploy/k8s/nvidia-device-plugin")
    else:
        yield _K.ok("gpus", f"{len(able)} node(s) offer the {max(asked)} GPU(s) that an agent asks for")


def _scaling(facts: ClusterFacts) -> Iterator[Finding]:
    for scaler in facts.of("horizontalpodautoscalers"):
        conditions = {c["type"]: c for c in scaler.get("status", {}).get("conditions", ())}
        active = conditions.get("ScalingActive", {})
        if active.get("status") == "False":
            says = f"does not scale: {active.get('message', active.get('reason', 'unknown'))}"
            yield _K.warn(f"hpa {_name(scaler)}", says, "serve its metrics: deploy/k8s/components/monitoring")
        elif active:
            replicas = scaler["status"].get("currentReplicas", 0)
            yield _K.ok(f"hpa {_name(scaler)}", f"{replicas} of at most {scaler['spec']['maxReplicas']} replicas")
    if facts.api_services is not None and facts.of("horizontalpodautoscalers"):
        custom = [s for s in facts.api_services if s["spec"].get("group") == CUSTOM_METRICS]
        up = [s for s in custom if any(_is_available(c) for c in s.get("status", {}).get("conditions", ()))]
        if up:
            yield _K.ok("metrics API", f"{CUSTOM_METRICS} is served")
        else:
            says = f"{CUSTOM_METRICS} is {'not available' if custom else 'not served'}: the routers' number stays"
            yield _K.warn("metrics API", says, "install prometheus-adapter: deploy/k8s/components/monitoring")
    for budget in facts.of("poddisruptionbudgets"):
        status = budget.get("status", {})
        if status.get("expectedPods", 0) and status.get("currentHealthy", 0) < status.get("desiredHealthy", 0):
            says = f"{status['currentHealthy']} healthy of {status['desiredHealthy']}: no node can be drained now"
            yield _K.warn(f"pdb {_name(budget)}", says, "repair its pods first")


def _is_available(condition: Object) -> bool:
    return condition.get("type") == "Available" and condition.get("status") == "True"


@dataclass(frozen=True)
class Kubectl:
    namespace: str
    context: str = ""
    program: str = "kubectl"

    def gather(self) -> ClusterFacts:
        if shutil.which(self.program) is None:
            return ClusterFacts(namespace=self.namespace, error=f"there is no {self.program} on the path")
        here = ("--namespace", self.namespace)
        with ThreadPoolExecutor(max_workers=4) as pool:
            jobs = {kind: pool.submit(self.items, "get", kind, *here) for kind in (*WORKLOADS, *OTHERS)}
            nodes, services = (pool.submit(self.items, "get", kind) for kind in ("nodes", "apiservices"))
            keys, secret_problem = self.ask("get", "secret", SECRET, *here, "--output", f"go-template={KEYS}")
            found = {kind: job.result() for kind, job in jobs.items()}
            return ClusterFacts(
                namespace=self.namespace,
                error=found["pods"][1] if all(problem for _, problem in found.values()) else "",
                items={kind: rows for kind, (rows, problem) in found.items() if not problem},
                refused={kind: problem for kind, (_, problem) in found.items() if problem},
                nodes=None if nodes.result()[1] else nodes.result()[0],
                api_services=None if services.result()[1] else services.result()[0],
                secret_keys=None if secret_problem else tuple(keys.split()),
                secret_problem=secret_problem,
            )

    def items(self, *words: str) -> tuple[tuple[Object, ...], str]:
        """Return (objects of a list, "") or ((), why not)."""
        text, problem = self.ask(*words, "--output", "json")
        if problem:
            return (), problem
        try:
            return tuple(json.loads(text)["items"]), ""
        except (ValueError, LookupError, TypeError):
            return (), "kubectl answered with something that is not a list"

    def ask(self, *words: str) -> tuple[str, str]:
        """Return (output, "") or ("", last line of stderr)."""
        argv = [self.program, *(["--context", self.context] if self.context else []), *words]
        argv.append(f"--request-timeout={ANSWER_S:g}s")
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=2 * ANSWER_S, check=False, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return "", f"kubectl did not answer within {2 * ANSWER_S:g} s"
        except OSError as error:
            return "", f"kubectl cannot run: {error.strerror}"
        complaints = [line for line in done.stderr.splitlines() if line.strip()]
        return ("", complaints[-1] if complaints else "it failed") if done.returncode else (done.stdout, "")
