"""Who reaches the compose fleet and who its services are to each other, read without any container engine."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from glowplug.runtime.privileges import READER, USERS
from glowplug.runtime.privileges import variable as password_of
from tests.compose.compose_file import VARIABLE, example, filled, services
from tests.compose.engine import ROOT
from tests.compose.fleet import root_file


def test_opening_one_port_opens_no_other() -> None:
    opened: dict[str, set[str]] = {}
    for name, told in services().items():
        for port in told.get("ports", ()):
            opened.setdefault(str(VARIABLE.findall(port)[0][0]), set()).add(name)
    assert opened == {
        "API_BIND_ADDRESS": {"router"},
        "CONSOLE_BIND_ADDRESS": {"console"},
        "OBSERVABILITY_BIND_ADDRESS": {"prometheus", "alertmanager", "grafana", "jaeger"},
    }


def test_each_service_is_itself_at_the_bus_and_the_store() -> None:
    """And holds no password but its own; the servers hold all."""
    for name, told in services().items():
        env, text = told.get("environment") or {}, json.dumps(told.get("environment") or {})
        held = {user for user in USERS if password_of(user) in text}
        if name in ("nats", "valkey"):
            assert held == set(USERS)
        elif "GLOWPLUG_NATS_URL" in env:
            service = {"cli": READER}.get(name, filled(told["image"]).partition(":")[0].removeprefix("glowplug/"))
            service = service.partition("-")[0]
            assert held == {service}, name
            for variable_name in ("GLOWPLUG_NATS_URL", "GLOWPLUG_REDIS_URL"):
                assert f"//{service}:" in env[variable_name], name
        else:
            assert not held, name


def test_no_secret_stands_on_a_command_line() -> None:
    secrets = [name for name, value in example().items() if value == ""]
    for name, told in services().items():
        line = json.dumps([told.get(key) for key in ("command", "entrypoint", "healthcheck")])
        assert not [secret for secret in secrets if secret in line], name


def test_images_are_named_in_one_place() -> None:
    for name, told in services().items():
        if "glowplug" in told["image"]:
            assert re.match(r"\$\{IMAGE_PREFIX:-glowplug\}/[a-z-]+:\$\{IMAGE_TAG:-", told["image"]), name


@pytest.mark.parametrize("url", ["", "none", "https://alerts.example/hook?token=s3cret"])
def test_alerts_go_where_the_setting_says(url: str, tmp_path: Path) -> None:
    program = tmp_path / "alertmanager"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ALERT_WEBHOOK_URL": url}
    argv = ["sh", str(ROOT / "deploy/docker/alertmanager.sh"), str(tmp_path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    told = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())
    receivers = {receiver["name"]: receiver for receiver in told["receivers"]}
    is_sent = url.startswith("https")
    assert receivers[told["route"]["receiver"]].get("webhook_configs", []) == (
        [{"url_file": f"{tmp_path}/webhook-url", "send_resolved": True}] if is_sent else []
    )
    assert not is_sent or (tmp_path / "webhook-url").read_text() == url
    assert "s3cret" not in done.stdout and (tmp_path / "webhook-url").stat().st_mode & 0o077 == 0
    (manager,) = yaml.safe_load(root_file("deploy/observability/prometheus.yml"))["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_jaeger_refuses_spans_before_its_container_is_full() -> None:
    told = yaml.safe_load(root_file("deploy/docker/jaeger.yaml"))
    (pipeline,) = told["service"]["pipelines"].values()
    assert pipeline["processors"][0] == "memory_limiter"
    assert set(pipeline["processors"]) == set(told["processors"])
    limit = told["processors"]["memory_limiter"]
    assert limit["spike_limit_mib"] < limit["limit_mib"] < int(services()["jaeger"]["mem_limit"].removesuffix("m"))


@pytest.mark.parametrize("running", [["router", "console"], ["console", "grafana"], [*services()]])
def test_compose_up_prints_what_runs(running: list[str], tmp_path: Path) -> None:
    """The script of `make compose-up` beside stand-ins for docker and its compose."""
    checkout = tmp_path / "checkout/deploy/docker"
    checkout.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/docker/compose.sh", checkout)
    (tmp_path / "checkout/.env").write_text(root_file(".env.example"))
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncase " $* " in *" ps "*) printf "%s\\n" ' + " ".join(running) + " ;; esac\n")
    docker.chmod(0o700)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", str(checkout / "compose.sh"), "up"], env=env, capture_output=True, text=True, check=True
    )
    printed = {
        line.split("  ")[0].strip() for line in done.stdout.splitlines() if re.search(r" http://127.0.0.1:\d+", line)
    }
    lines = {
        "router": "OpenAI API",
        "console": "console",
        "grafana": "Grafana",
        "jaeger": "Jaeger",
        "prometheus": "Prometheus",
        "alertmanager": "Alertmanager",
    }
    assert printed - {". ./.env; curl -N http://127.0.0.1:8000/v1/chat/completions \\"} == {
        lines[name] for name in running if name in lines
    }
    assert ("curl" in done.stdout) == ("router" in running)
