"""A fleet's processes, ports and samples."""

import os
import socket
from pathlib import Path

import pytest

from glowplug.domain.units import parse_bytes
from glowplug.engines import samples
from glowplug.runtime import model_files
from glowplug.runtime.errors import CannotStart, PortInUse
from glowplug.runtime.host_memory import memory_bytes, sleepers_bytes
from glowplug.runtime.supervisor import plan
from glowplug.runtime.supervisor.child import ChildSpec, backoff_s
from glowplug.runtime.supervisor.plan import GPU_BUDGETS
from glowplug.runtime.supervisor.probe import check_ports, free_block, http_status, is_free
from glowplug.runtime.supervisor.samples import place_samples, sample_files
from glowplug.runtime.supervisor.settings import FleetSettings
from glowplug.runtime.supervisor.statedir import Secrets

SECRETS = Secrets("admin", "key", {})


def make(tmp_path: Path, **fields: object) -> plan.Plan:
    settings = FleetSettings.read(state_dir=tmp_path, **fields)
    return plan.Plan(settings, settings.port_base)


def environment(made: plan.Plan) -> dict[str, str]:
    return plan.service_environment(made, SECRETS, models_dir=Path("/m"), access_dir=Path("/a"), shm_dir=Path("/s"))


def services(made: plan.Plan, engine_secret: str = "") -> list[ChildSpec]:
    def servers(user: str) -> dict[str, str]:
        return {"nats_url": f"nats://{user}@n", "redis_url": f"unix://{user}@/r"}

    return plan.services(made, environment(made), servers, engine_secret)


def test_every_port_of_the_contract_and_none_twice(tmp_path: Path) -> None:
    made = make(tmp_path, port_base=8000, nodes=3)
    ports = [port for port, _ in made.ports()]
    assert sorted(ports) == [8000, 8001, 8002, 8003, 8004, 8005, 8010, 8011, 8012, 8013, 8014, 8015]
    assert max(ports) < 8000 + plan.num_ports(3)
    assert made.nodes()[2] == {
        "node_id": "node-3",
        "agent_url": "http://127.0.0.1:8014",
        "prefetcher_url": "http://127.0.0.1:8015",
    }


def test_each_process_has_its_own_port_and_id_and_is_itself_at_the_bus_and_the_store(tmp_path: Path) -> None:
    specs = services(make(tmp_path, nodes=2))
    for spec in specs:
        assert spec.env["GLOWPLUG_NATS_URL"] == f"nats://{spec.service}@n"
        assert spec.env["GLOWPLUG_REDIS_URL"] == f"unix://{spec.service}@/r"
    assert [s.service for s in specs].count("agent") == 2
    assert len({s.env["GLOWPLUG_PORT"] for s in specs}) == len(specs) == 9
    assert len({s.env["GLOWPLUG_SERVICE_ID"] for s in specs}) == len(specs)
    router = next(s for s in specs if s.service == "router")
    assert router.env["GLOWPLUG_DATA_PORT"] == "8000"
    assert router.argv()[1:] == ("-m", "glowplug.services.router")
    agents = {s.env["GLOWPLUG_NODE_ID"]: s.env["GLOWPLUG_PREFETCHER_URL"] for s in specs if s.service == "agent"}
    assert agents == {"node-1": "http://127.0.0.1:8011", "node-2": "http://127.0.0.1:8013"}


def test_the_router_and_agents_alone_get_the_engines_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path)
    given = {s.service: s.env.get("GLOWPLUG_ENGINE_SECRET") for s in services(made, "made")}
    assert {service for service, secret in given.items() if secret == "made"} == {"router", "agent"}
    assert set(given.values()) == {"made", None}
    monkeypatch.setenv("GLOWPLUG_ENGINE_SECRET", "set by hand")  # read by FleetSettings
    given = {s.service: s.env.get("GLOWPLUG_ENGINE_SECRET") for s in services(made, "made")}
    assert set(given.values()) == {"made", None}


def test_stray_settings_of_one_process_are_not_shared_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_SERVICE_ID", "stray")
    monkeypatch.setenv("GLOWPLUG_RESYNC_S", "1")
    made = make(tmp_path)
    predictor = next(s for s in services(made) if s.service == "predictor")
    assert predictor.env["GLOWPLUG_SERVICE_ID"] == "predictor-1"
    assert predictor.env["GLOWPLUG_RESYNC_S"] == "1"
    assert "GLOWPLUG_NODE_ID" not in predictor.env


@pytest.mark.parametrize(
    ("host", "given", "enforced"),
    [
        ("127.0.0.1", "", ""),
        ("::1", "", ""),
        ("localhost", "", ""),
        ("0.0.0.0", "", "key"),
        ("10.0.0.5", "", "key"),
        ("127.0.0.1", "mine", "mine"),
        ("0.0.0.0", "mine", "mine"),
    ],
)
def test_the_api_key_is_asked_beyond_loopback_or_when_set(tmp_path: Path, host: str, given: str, enforced: str) -> None:
    made = make(tmp_path, host=host, api_key=given)
    assert environment(made)["GLOWPLUG_API_KEY"] == enforced
    assert environment(made)["GLOWPLUG_ADMIN_TOKEN"] == "admin"
    assert environment(made)["GLOWPLUG_CONSOLE_KEY"] == "", "the console asks for the API key, then"


def test_the_console_may_have_a_key_of_its_own(tmp_path: Path) -> None:
    made = make(tmp_path, console_key="own")
    assert (environment(made)["GLOWPLUG_CONSOLE_KEY"], environment(made)["GLOWPLUG_API_KEY"]) == ("own", "")


def test_a_wildcard_host_is_reached_over_loopback(tmp_path: Path) -> None:
    assert make(tmp_path, host="0.0.0.0").url(0) == "http://127.0.0.1:8000"
    assert make(tmp_path, host="::").url(0) == "http://[::1]:8000"


def test_only_the_edge_listens_beyond_loopback(tmp_path: Path) -> None:
    made = make(tmp_path, host="0.0.0.0", nodes=1)
    hosts = {s.service: s.env["GLOWPLUG_HOST"] for s in services(made)}
    assert {name for name, host in hosts.items() if host == "0.0.0.0"} == {"router", "console"}
    assert set(hosts.values()) == {"0.0.0.0", "127.0.0.1"}


def test_nodes_share_the_machine_memory_that_sleepers_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOWPLUG_SWAP_HOST_BYTES", raising=False)
    one, three = (int(environment(make(tmp_path, nodes=n))["GLOWPLUG_SWAP_HOST_BYTES"]) for n in (1, 3))
    assert one == sleepers_bytes(memory_bytes()) and three == one // 3
    assert "GLOWPLUG_SWAP_HOST_BYTES" not in environment(make(tmp_path, engine="emulated"))
    monkeypatch.setenv("GLOWPLUG_SWAP_HOST_BYTES", "0")
    assert environment(make(tmp_path))["GLOWPLUG_SWAP_HOST_BYTES"] == "0"


def test_spans_go_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in environment(make(tmp_path))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://elsewhere:4318")
    assert environment(make(tmp_path))["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://elsewhere:4318"


def test_a_taken_port_names_port_owner_holder_and_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} .*needed by the placer.*--port-base") as refused:
            check_ports("127.0.0.1", [(port, "the placer")])
        assert f"pid {os.getpid()}" in str(refused.value)
        assert "\n" not in str(refused.value)
    check_ports("127.0.0.1", [(port, "the placer")])


def test_a_free_block_has_no_taken_port_in_it() -> None:
    base = free_block("127.0.0.1", 8, start_at=11)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 3))
        taken.listen()
        other = free_block("127.0.0.1", 8, start_at=11)
        assert other != base
        assert all(is_free("127.0.0.1", other + k) for k in range(8))


async def test_nobody_there_is_status_zero() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert await http_status(f"http://127.0.0.1:{sock.getsockname()[1]}/ready", timeout_s=1) == 0
    assert await http_status("http://127.0.0.1:-1/ready", timeout_s=1) == 0, "a server that has not said its port yet"


def test_backoff_grows_to_its_cap_and_starts_almost_at_once() -> None:
    waits = [backoff_s(n, longest_s=10) for n in range(1, 50)]
    assert waits[0] <= 0.1
    assert waits == sorted(waits)
    assert waits[-1] == 10


@pytest.mark.llamacpp
def test_llamacpp_samples_compete_for_the_memory_of_three_nodes() -> None:
    samples.prepare()
    models = [model for file in sample_files("llamacpp") for model in model_files.load(file)]
    assert len({model.weights.uri for model in models}) == 2, "a swap changes the weights, too"
    budget = parse_bytes(GPU_BUDGETS["llamacpp"])
    assert len(models) >= 5
    assert all(model.memory_bytes <= budget for model in models)
    assert sum(model.memory_bytes for model in models) > budget * FleetSettings().nodes
    assert len({model.memory_bytes for model in models}) >= 4
    assert len({model.system_prompt for model in models}) == len(models)


def test_emulated_samples_fit_one_gpu_each_and_not_all_at_once() -> None:
    models = [model for file in sample_files("emulated") for model in model_files.load(file)]
    budgets = [parse_bytes(text) for text in GPU_BUDGETS["emulated"].split(",")]
    assert all(model.engine == "emulated" for model in models)
    assert all(model.memory_bytes <= min(budgets) for model in models)
    assert len({model.key for model in models}) == len(models) >= 6


def test_samples_are_copied_once_and_what_a_person_did_stays(tmp_path: Path) -> None:
    target = tmp_path / "models" / "emulated"
    place_samples(target, "emulated")
    first = sorted(target.iterdir())
    first[0].unlink()
    first[1].write_text("mine")
    place_samples(target, "emulated")
    assert sorted(target.iterdir()) == first[1:]
    assert first[1].read_text() == "mine"


def test_an_unknown_engine_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"'cuda9'.*emulated.*llamacpp"):
        place_samples(tmp_path / "models", "cuda9")
