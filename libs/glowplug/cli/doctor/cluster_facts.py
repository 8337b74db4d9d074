"""Asking a cluster through kubectl: reads only, and of secrets only the names of their keys."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from glowplug.cli.doctor.cluster import SECRET, ClusterFacts

ANSWER_S = 15.0
WORKLOADS = ("deployments", "statefulsets", "daemonsets", "pods", "persistentvolumeclaims", "networkpolicies")
SCALERS = ("horizontalpodautoscalers", "poddisruptionbudgets")
KEYS = '{{range $key, $value := .data}}{{$key}}{{"\\n"}}{{end}}'


@dataclass(frozen=True)
class Kubectl:
    """kubectl in one namespace. `context` empty: its current one."""

    namespace: str
    context: str = ""
    program: str = "kubectl"

    def gather(self) -> ClusterFacts:
        """Every question at once; what the user may not see is left out and said so."""
        if shutil.which(self.program) is None:
            return ClusterFacts(namespace=self.namespace, error=f"there is no {self.program} on the path")
        with ThreadPoolExecutor(max_workers=4) as pool:
            items = {
                kind: pool.submit(self.items, "get", kind, "--namespace", self.namespace)
                for kind in (*WORKLOADS, *SCALERS)
            }
            nodes = pool.submit(self.items, "get", "nodes")
            services = pool.submit(self.items, "get", "apiservices")
            secret = pool.submit(
                self.ask, "get", "secret", SECRET, "--namespace", self.namespace, "--output", f"go-template={KEYS}"
            )
            found = {kind: job.result() for kind, job in items.items()}
            keys, why = secret.result()
            return ClusterFacts(
                namespace=self.namespace,
                error=found["pods"][1] if all(problem for _, problem in found.values()) else "",
                items={kind: rows for kind, (rows, problem) in found.items() if not problem},
                refused={kind: problem for kind, (_, problem) in found.items() if problem},
                nodes=nodes.result()[0] if not nodes.result()[1] else None,
                api_services=services.result()[0] if not services.result()[1] else None,
                secret_keys=None if why else tuple(keys.split()),
                secret_problem=why,
            )

    def items(self, *words: str) -> tuple[tuple[Mapping[str, Any], ...], str]:
        """(objects of a list, "") or ((), why not)."""
        text, problem = self.ask(*words, "--output", "json")
        if problem:
            return (), problem
        try:
            return tuple(json.loads(text)["items"]), ""
        except (ValueError, LookupError, TypeError):
            return (), "kubectl answered with something that is no list"

    def ask(self, *words: str) -> tuple[str, str]:
        """(what kubectl printed, "") or ("", its last line of complaint)."""
        argv: Sequence[str] = [self.program, *(["--context", self.context] if self.context else []), *words]
        try:
            done = subprocess.run(
                [*argv, f"--request-timeout={ANSWER_S:g}s"],
                capture_output=True,
                text=True,
                timeout=2 * ANSWER_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return "", f"kubectl did not answer within {2 * ANSWER_S:g} s"
        except OSError as error:
            return "", f"kubectl cannot run: {error.strerror}"
        complaints = [line for line in done.stderr.splitlines() if line.strip()]
        return ("", complaints[-1] if complaints else "it failed") if done.returncode else (done.stdout, "")
