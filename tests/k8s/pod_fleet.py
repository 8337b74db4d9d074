"""The fleet of an overlay: its containers as processes, each pod in a network namespace under the overlay's policies.
Commands, variables, files and probes are the manifests'; our checkout replaces the images."""

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from glowplug.runtime.privileges import USERS, variable
from tests.k8s.arrows import End, fleet_ends, outside_ends
from tests.k8s.namespaces import Network, counted, ruleset
from tests.k8s.rendering import ROOT, Manifest, containers, environment, matches, named, of_kind, pod_labels, pod_spec
from tests.servers import nats_binary, valkey_binary

SECRETS = {
    "GLOWPLUG_ADMIN_TOKEN": "admin-of-the-test",
    "GLOWPLUG_API_KEY": "key-of-the-test",
    "GLOWPLUG_ENGINE_SECRET": "engines-of-the-test",
    "GLOWPLUG_CONSOLE_KEY": "console-key-of-the-test",
    "NATS_PEER_PASSWORD": "0peers0of0the0test",
    **{variable(user): f"1e4{user}2of3the4test" for user in USERS},  # like a number, which a configuration may misread
}
START_S, STOP_S = 90.0, 20.0


class NotReady(RuntimeError):
    """The message carries the end of its logs."""


@dataclass
class Pod:
    name: str
    kind: str
    address: str
    workload: Manifest
    folder: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def path(self, container: Mapping[str, Any], text: str) -> str:
        places = {m["mountPath"]: str(self.folder / m["name"]) for m in container["volumeMounts"]}
        any_of = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True))
        return re.sub(rf"(?<![\w/.-])({any_of})(?=[/\"'\s]|$)", lambda found: places[found[1]], text)


def _set_sysctls(spec: Mapping[str, Any]) -> None:
    for one in spec["securityContext"].get("sysctls", ()):
        Path("/proc/sys", *one["name"].split(".")).write_text(one["value"])


class PodFleet:
    """`replicas` by kind of pod; `speedup` holds extra variables (the emulated clock). Close it."""

    def __init__(
        self, manifests: list[Manifest], folder: Path, replicas: Mapping[str, int], speedup: Mapping[str, str]
    ) -> None:
        self.manifests, self.folder, self.speedup = manifests, folder, dict(speedup)
        self.network = Network()
        self.ends: dict[str, End] = fleet_ends(manifests) | outside_ends()
        self.pods: dict[str, Pod] = {}
        self.hosts = folder / "hosts"
        self.bin = folder / "bin"  # programs under the images' names
        self.bin.mkdir()
        (self.bin / "valkey-server").symlink_to(valkey_binary())
        for kind in fleet_ends(manifests):
            workload = next(m for m in manifests if m["metadata"]["name"] == kind and "template" in m.get("spec", {}))
            for ordinal in range(replicas.get(kind, 1)):
                name = f"{kind}-{ordinal}"
                pod = Pod(name, kind, self.network.add(name), workload, folder / name)
                self.network.inside(name, partial(_set_sysctls, pod_spec(workload)))
                self.pods[name] = pod
        for name, end in outside_ends().items():
            self.network.add(name, end.address)
        self.enforce()
        self.write_hosts()

    def enforce(self) -> None:
        addresses: dict[str, list[str]] = {}
        for name, address in self.network.addresses.items():
            addresses.setdefault(self.pods[name].kind if name in self.pods else name, []).append(address)
        for pod in self.pods.values():
            self.network.enforce(pod.name, ruleset(self.manifests, self.ends[pod.kind], self.ends, addresses))

    def write_hosts(self) -> None:
        """Services resolve to their pods; pods of headless ones have names."""
        lines = ["127.0.0.1 localhost"]
        for service in of_kind(self.manifests, "Service"):
            for pod in self.pods.values():
                if matches({"matchLabels": service["spec"]["selector"]}, pod_labels(pod.workload)):
                    name = service["metadata"]["name"]
                    lines.append(f"{pod.address} {name}")
                    if service["spec"].get("clusterIP") == "None":
                        lines.append(f"{pod.address} {pod.name}.{name}")
        self.hosts.write_text("\n".join(lines) + "\n")

    def variables(self, pod: Pod, container: Mapping[str, Any]) -> dict[str, str]:
        env: dict[str, str] = {}
        downward = {"metadata.name": pod.name, "status.podIP": pod.address, "spec.nodeName": f"{pod.name}.internal"}
        for name, value in environment(self.manifests, container).items():
            if isinstance(value, str):
                text = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], value)
            elif "fieldRef" in value:
                text = downward[value["fieldRef"]["fieldPath"]]
            elif value["secretKeyRef"].get("optional") and value["secretKeyRef"]["key"] not in SECRETS:
                continue
            else:
                text = SECRETS[value["secretKeyRef"]["key"]]
            env[name] = pod.path(container, text)
        return env

    def start(self, *names: str) -> None:
        for name in names:
            pod = self.pods[name]
            self._make_volumes(pod)
            for container in containers(pod.workload):
                env = self.variables(pod, container)
                argv = self._argv(pod, container, env)
                with (pod.folder / f"{container['name']}.log").open("ab") as log:
                    pod.processes[container["name"]] = subprocess.Popen(
                        self.network.command(name, self.hosts, argv),
                        env={"PATH": f"{self.bin}:{os.environ['PATH']}", **env, **self.speedup},
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )

    def _make_volumes(self, pod: Pod) -> None:
        for container in containers(pod.workload):
            for mount in container["volumeMounts"]:
                (pod.folder / mount["name"]).mkdir(parents=True, exist_ok=True)
        for volume in pod_spec(pod.workload)["volumes"]:
            if (source := volume.get("configMap")) is not None:
                (container,) = containers(pod.workload)
                for file, text in named(self.manifests, "ConfigMap", source["name"])["data"].items():
                    (pod.folder / volume["name"] / file).write_text(pod.path(container, text))

    def _argv(self, pod: Pod, container: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
        image = container["image"].partition(":")[0]
        program = [nats_binary()] if image == "nats" else container.get("command")
        if program is None:
            program = [sys.executable, "-m", f"glowplug.services.{image.removeprefix('glowplug/').partition('-')[0]}"]
        arguments = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text) for text in container.get("args", ())]
        return [*program, *(pod.path(container, text) for text in arguments)]

    def until_ready(self, *names: str, within_s: float = START_S) -> None:
        deadline = time.monotonic() + within_s
        waiting = [(self.pods[name], c) for name in names for c in containers(self.pods[name].workload)]
        while waiting:
            waiting = [(pod, c) for pod, c in waiting if not self._is_ready(pod, c)]
            dead = [pod for pod, c in waiting if pod.processes[c["name"]].poll() is not None]
            if waiting and (dead or time.monotonic() > deadline):
                pod = dead[0] if dead else waiting[0][0]
                raise NotReady(f"{pod.name} is not ready:\n{self.log(pod.name)[-4000:]}")
            time.sleep(0.1)

    def _is_ready(self, pod: Pod, container: Mapping[str, Any]) -> bool:
        probe = container["readinessProbe"]
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        try:
            if "httpGet" in probe:
                target = (ports[probe["httpGet"]["port"]], probe["httpGet"]["path"])
                return self.ask(pod.name, pod.address, target[0], target[1])[0] == 200
            with self.network.socket(pod.name) as sock:
                sock.settimeout(2)
                sock.connect((pod.address, ports["client"]))
                sock.sendall(b"PING\r\n")
                time.sleep(0.05)
                return b"PONG" in sock.recv(100)
        except OSError:
            return False

    def ask(
        self,
        source: str,
        host: str,
        port: int,
        path: str,
        *,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Raises OSError if blocked."""

        def body_() -> tuple[int, http.client.HTTPMessage, bytes]:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            try:
                connection.request(method, path, body=body, headers=dict(headers or {}))
                answer = connection.getresponse()
                return answer.status, answer.headers, answer.read()
            finally:
                connection.close()

        return self.network.inside(source, body_)

    def probes(self) -> dict[str, int]:
        said = {}
        for pod in self.pods.values():
            for container in containers(pod.workload):
                ports = {p["name"]: p["containerPort"] for p in container["ports"]}
                for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                    if (get := container[kind].get("httpGet")) is not None:
                        status, _, _ = self.ask(pod.name, pod.address, ports[get["port"]], get["path"])
                        said[f"{pod.name} {container['name']} {kind}"] = status
        return said

    def counters(self) -> dict[tuple[str, str, str], int]:
        """(kind of pod, input or output, peer or `refused`) -> packets."""
        found: dict[tuple[str, str, str], int] = {}
        for pod in self.pods.values():
            for (hook, who), packets in counted(self.network.counters(pod.name)).items():
                key = (pod.kind, hook, who)
                found[key] = found.get(key, 0) + packets
        return found

    def log(self, name: str) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.pods[name].folder.glob("*.log")))

    def kill(self, name: str) -> None:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.network.namespace(name)], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        for process in self.pods[name].processes.values():
            process.wait()
        self.pods[name].processes.clear()

    def close(self) -> None:
        """End processes, gently first, then the namespaces."""
        try:
            self._end(lambda pod: pod.kind not in ("nats", "valkey"))
            self._end(lambda pod: True)
        finally:
            for name in self.pods:
                self.kill(name)
            self.network.close()

    def _end(self, wanted: Callable[[Pod], bool]) -> None:
        ending = [p for pod in self.pods.values() if wanted(pod) for p in pod.processes.values() if p.poll() is None]
        for process in ending:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in ending:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
