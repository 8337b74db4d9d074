"""`glowplug pull`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glowplug.cli import pull
from glowplug.cli.client import FleetClient
from glowplug.cli.main import app_of
from glowplug.cli.terminal import CliError, NoFleet
from glowplug.domain.model import WeightsRef
from glowplug.weights.source import SourceOptions
from glowplug.weights.sources.hub import HubSource
from tests.hub_server import HubServer

GGUF = bytes(range(256)) * 2000
NONE = NoFleet(Path("here"))
SMALL = {"config.json": b"{}", "model.safetensors": b"t" * 70_000}


class Named(FleetClient):
    def get(self, service: str, path: str, **params: Any) -> Any:
        assert (service, path) == ("autoscaler", "/v1/models/qwen%3A7b")
        weights = {"uri": "hf:o/n", "num_bytes": 0, "sha256": ""}
        return {"name": "qwen:7b", "key": "qwen-7b", "engine": "llamacpp", "weights": weights}


def test_the_argument_names_a_model_a_file_or_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text(
        "name: A.b\nengine: emulated\nweights: hf:o/n\nweights_bytes: 1MiB\n---\n"
        "name: none\nengine: emulated\nweights_bytes: 1MiB\n"
    )
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    fleet = Named({})
    assert pull._wanted("qwen:7b", fleet, None) == [pull.PullTarget(WeightsRef(uri="hf:o/n"), "qwen-7b", "llamacpp")]
    assert pull._wanted("m.yaml", None, NONE) == [pull.PullTarget(WeightsRef(uri="hf:o/n"), "a-b", "emulated")]
    assert pull._wanted("hf://o/n@main", fleet, None) == [pull.PullTarget(WeightsRef(uri="hf:o/n"))]
    assert pull._wanted("w.gguf", fleet, None) == [pull.PullTarget(WeightsRef(uri=f"file:{tmp_path}/w.gguf"))]
    with pytest.raises(CliError, match="is neither a file nor an address, and no fleet runs") as refused:
        pull._wanted("qwen:7b", None, NONE)
    assert refused.value.exit_code == 3
    with pytest.raises(CliError, match=r"hf:o: weights: .*an address of the hub is"):
        pull._wanted("hf:o", fleet, None)


def node(name: str, **given: Any) -> dict[str, Any]:
    return {"node_id": name, "engines": ["llamacpp"], "cached": [], "draining": False} | given


def test_one_node_is_chosen_or_those_that_are_named() -> None:
    wanted = pull.PullTarget(WeightsRef(uri="hf:o/n"), "m", "llamacpp")
    has_it = {"cached": [{"digest": wanted.weights.digest}]}

    def chosen(*rows: dict[str, Any], named: tuple[str, ...] = ()) -> list[str]:
        return [row["node_id"] for row in pull._nodes(rows, wanted, named)]

    assert chosen(node("a"), node("b")) == ["a"]
    assert chosen(node("a"), node("b", **has_it)) == ["b"]
    assert chosen(node("a", draining=True), node("b", engines=["vllm"]), node("c")) == ["c"]
    assert chosen(node("a"), node("b", engines=[]), named=("b", "a", "b")) == ["b", "a"]
    for rows, named, said in (
        ([node("a")], ("x",), "there is no node 'x'; there are: a"),
        ([node("a", engines=[])], (), "no node can start llamacpp"),
        ([], (), "no node has joined"),
    ):
        with pytest.raises(CliError, match=said):
            pull._nodes(rows, wanted, named)


def following(*stages: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return the last answer and the progress shown."""
    answers, shown = iter(stages), list[tuple[int, int]]()
    row = pull._follow(lambda: next(answers), lambda *given: shown.append(given), lambda _: None, lost_s=0.3)
    return row, shown


def stage(name: str, done: int = 0, **more: Any) -> dict[str, Any]:
    return {"stage": name, "num_bytes_done": done, "num_bytes": 9 if done else 0} | more


def test_a_fetch_is_followed_to_its_end() -> None:
    row, shown = following(stage("queued"), stage("sizing"), stage("moving", 4), stage("absent"), stage("complete", 9))
    assert row["stage"] == "complete" and shown == [(0, 0), (0, 0), (4, 9), (0, 0), (9, 9)]
    with pytest.raises(CliError, match=r"it is gone \(weights_unavailable\)"):
        following(stage("moving", 4), stage("failed", code="weights_unavailable", message="it is gone"))
    with pytest.raises(CliError, match="no longer fetches these weights"):
        following(stage("moving", 4), *[stage("absent")] * 9)


class Prefetching(FleetClient):
    """One node; its prefetcher answers with `stages` in turn."""

    stages: Iterator[dict[str, Any]]

    def nodes(self) -> list[dict[str, Any]]:
        return [node("a", prefetcher_url="http://a")]

    def get(self, service: str, path: str, **params: Any) -> Any:
        if service == "autoscaler":
            return Named({}).get(service, path)
        return next(self.stages)

    def call(self, method: str, service: str, path: str, **kwargs: Any) -> Any:
        assert (method, service, path) == ("POST", "prefetcher of a", "/v1/fetches")
        assert kwargs["json"]["model_key"] == "qwen-7b"
        return next(self.stages)


def pulling(monkeypatch: pytest.MonkeyPatch, options: list[str], *stages: dict[str, Any]) -> Any:
    known = {"digest": "d", "source": "hf", "code": "", "message": ""}
    monkeypatch.setattr(Prefetching, "stages", iter([known | one for one in stages]), raising=False)
    monkeypatch.setattr(pull, "connect", lambda _: Prefetching({}))
    monkeypatch.setattr(pull, "POLL_S", 0.0)
    return CliRunner().invoke(app_of("pull"), ["pull", "qwen:7b", *options])


@pytest.mark.parametrize("options", [["--wait"], []])
def test_a_pull_waits_until_the_weights_are_there(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    moving = [stage("moving", done) for done in (1, 1, 5, 9)]
    done = pulling(monkeypatch, options, stage("queued"), stage("queued"), *moving, stage("complete", 9))
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [f"hf:o/n to a: {percent} % of 9 B" for percent in (10, 50, 100)]
    assert "hf:o/n" in done.stdout.splitlines()[1] and "\x1b" not in done.output


def test_a_pull_that_fails_says_why_and_does_not_end_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = stage("failed", code="weights_unavailable", message="it is gone")
    for options, stages in ((["--wait"], [stage("queued"), failed]), (["--no-wait"], [failed])):
        done = pulling(monkeypatch, options, *stages)
        assert done.exit_code != 0 and str(done.exception) == "it is gone (weights_unavailable)"


def test_a_pull_that_does_not_wait_says_how_far_the_fetch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    done = pulling(monkeypatch, ["--no-wait"], stage("queued"))
    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["WEIGHTS", "WHERE", "STAGE"],
        ["hf:o/n", "a", "queued"],
    ]
    monkeypatch.setattr(pull, "connect", none_runs)
    refused = CliRunner().invoke(app_of("pull"), ["pull", "hf:o/n", "--no-wait"])
    assert isinstance(refused.exception, NoFleet)


def none_runs(_: Path) -> FleetClient:
    raise NONE


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer({"org/one": {"one.gguf": GGUF}, "org/set": SMALL}) as server:
        yield server


def test_without_a_fleet_the_cache_of_the_hub_is_filled(hub: HubServer, tmp_path: Path) -> None:
    options = SourceOptions(hf_endpoint=hub.url, hf_cache_dir=tmp_path, hf_offline=False, hf_token="")
    row = pull._into_hub_cache(HubSource("hf:org/set", options), True)
    folder = Path(row["where"])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == SMALL
    assert (row["num_bytes"], row["source"]) == (70_002, "hf")
    num_requests = len(hub.fetched())
    assert pull._into_hub_cache(HubSource("hf:org/set", options), True)["source"] == "cache"
    assert len(hub.fetched()) == num_requests


def test_without_a_fleet_other_weights_are_only_measured(hub: HubServer, tmp_path: Path) -> None:
    def said(uri: str) -> tuple[int, str]:
        with pytest.raises(CliError) as refused:
            pull._without_fleet(pull.PullTarget(WeightsRef(uri=uri)), True, NONE)
        return refused.value.exit_code, str(refused.value)

    code, text = said(f"{hub.url}/org/one/resolve/main/one.gguf")
    assert code == 3 and "one.gguf (500 KiB) can only be kept by a node of a fleet, and no fleet runs" in text
    assert said("file:/w")[0] == 3 and "is on this machine already" in said("file:/w")[1]
    assert said(f"{hub.url}/nothing")[0] == 1
    assert said("http://127.0.0.1:9/w")[0] == 1
