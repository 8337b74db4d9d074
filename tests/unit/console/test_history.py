"""The console's history: slots, gaps, clocks, disk, Prometheus."""

import asyncio
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import httpx
import pytest

from glowplug.domain.errors import BadRequest
from glowplug.domain.hardware import Gpu, Grant, GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceFailed, InstanceReady, NodeBeat
from glowplug.services.console import history_api
from glowplug.services.console.fleet_view import ShownFleet
from glowplug.services.console.history import FLEET, MAX_MODELS, History, HistoryPage, Sample
from glowplug.services.console.history_keeper import HistoryDisk, HistoryKeeper, sample_of
from glowplug.telemetry import semconv
from tests import console_story as story
from tests.fleet_builder import a_node

T = 1_700_000_400.0  # starts a slot of every width
ONE = replace(story.request_finished(1, T), model_key="chat", ttft_s=0.5, prompt_tokens=30, response_tokens=100)
IDLE = Sample({}, {}, 0, 0, 100)


def history_of(*facts: object, at: float = T, history: History | None = None) -> History:
    history = history or History()
    for fact in facts:
        history.take(story.fact(fact, at), at)
    return history


def values(page: HistoryPage, metric: str, name: str) -> list[float | None]:
    return next(series.values for series in page.metrics[metric] if series.name == name)


def last(history: History, metric: str, name: str, *, span: str = "1h", model: str = "", at: float = T + 5) -> object:
    return values(history.page(span, model, [metric], at), metric, name)[-1]


def test_requests_become_rates_quantiles_and_shares_of_fleet_and_model() -> None:
    slow, cold = replace(ONE, ttft_s=4.0), replace(ONE, model_key="code", cold=True, ttft_s=9.0, emulated=True)
    history = history_of(*[ONE] * 98, slow, cold)
    assert last(history, "tokens", "prompt") == 30 * 100 / 5, "the slot has lasted for 5 s"
    assert last(history, "tokens", "response", model="code") == 100 / 5
    assert last(history, "ttft", "p50") == pytest.approx(0.5, rel=0.04)
    assert last(history, "ttft", "p99") == pytest.approx(4.0, rel=0.04)
    assert last(history, "hits", "warm") == 0.99
    assert last(history, "hits", "warm", model="code") == 0.0
    assert history.page("1h", "", ["tokens"], T).emulated and not history.page("1h", "chat", ["tokens"], T).emulated


def test_requests_that_no_instance_took_are_neither_warm_nor_cold() -> None:
    history = history_of(replace(ONE, instance_id="", status=503, ttft_s=0.0))
    assert last(history, "hits", "warm") is None
    assert last(history, "ttft", "p50") is None


def test_a_whole_answer_has_no_first_token() -> None:
    assert last(history_of(replace(ONE, stream=False)), "ttft", "p50") is None


def test_starts_count_once_by_kind() -> None:
    ready = story.instance("i-1", "chat", "node-1", InstanceState.READY, T)
    woken = replace(ready, instance_id="i-2", start_kind="wake")
    failed = replace(ready, instance_id="i-3", state=InstanceState.FAILED, ready_at=0.0)
    died = replace(ready, instance_id="i-4", state=InstanceState.FAILED)
    history = history_of(InstanceReady(instance=ready), InstanceReady(instance=ready))
    history_of(InstanceReady(instance=woken), InstanceFailed(instance=failed), history=history)
    history_of(InstanceFailed(instance=died), InstanceReady(instance=replace(ready, replica=True)), history=history)
    page = history.page("1h", "", ["starts"], T)
    assert {series.name: series.values[-1] for series in page.metrics["starts"]} == {"cold": 1, "wake": 1, "failed": 1}


def test_samples_are_means_and_peaks() -> None:
    history = History()
    for waiting in (0, 6, 0):
        history.sample(Sample({"chat": waiting}, {"code": 2}, 60, 10, 100), T)
    assert (last(history, "queue", "waiting"), last(history, "queue", "peak")) == (2.0, 6)
    assert last(history, "queue", "running", model="code") == 2.0
    assert [last(history, "gpu", name) for name in ("used", "reserved", "capacity")] == [60, 10, 100]


def test_what_nobody_measured_is_a_gap_and_what_did_not_happen_is_zero() -> None:
    history = history_of(ONE)
    history.sample(IDLE, T + 10)
    history_of(ONE, at=T + 40, history=history)
    page = history.page("1h", "", ["tokens", "ttft"], T + 45)
    assert values(page, "tokens", "response")[-6:] == [None, 10.0, 0.0, None, None, 20.0]
    assert [value is None for value in values(page, "ttft", "p50")[-5:]] == [False, True, True, True, False]
    assert page.times[-1] == T + 40 and len(page.times) == 360
    model = history.page("1h", "never-seen", ["tokens"], T + 45)
    assert values(model, "tokens", "response")[-5:] == [0.0, 0.0, None, None, 0.0]


def test_a_slot_is_shown_in_every_span_before_it_is_over() -> None:
    history = history_of(ONE)
    history_of(ONE, at=T + 130, history=history)
    assert last(history, "tokens", "response", span="24h", at=T + 130) == 10.0, "100 tokens in 10 s of 120"
    assert last(history, "tokens", "response", span="7d", at=T + 130) == pytest.approx(200 / 130, abs=0.001)


def test_a_clock_set_back_a_little_fills_the_open_slot_and_a_lot_drops_the_future() -> None:
    history = history_of(ONE, at=T + 100)
    history_of(ONE, at=T + 50, history=history)
    assert last(history, "tokens", "response", at=T + 105) == 2 * 100 / 5
    history_of(ONE, at=T - 90_000, history=history)
    assert last(history, "tokens", "response", at=T - 90_000 + 5) == 100 / 5
    assert all(newest <= T - 90_000 for _, newest in history.bounds.values())
    assert last(history, "tokens", "response", at=T + 105) is None


def test_the_busiest_models_of_a_slot_are_kept() -> None:
    history = history_of(*(replace(ONE, model_key=f"m-{number}") for number in range(MAX_MODELS + 20)), ONE, ONE)
    history.sample(IDLE, T + 10)
    kept = next(iter(history.rings["1h"].closed.values()))
    assert len(kept) == MAX_MODELS + 1 and {FLEET, "chat"} <= kept.keys()
    fleet = values(history.page("1h", "", ["tokens"], T + 10), "tokens", "prompt")
    assert fleet[-2] == 30 * (MAX_MODELS + 22) / 10


@pytest.mark.parametrize("asked", [("2h", "", []), ("1h", "", ["odd"]), ("1h", "chat", ["gpu"])])
def test_what_there_is_not_is_refused(asked: tuple[str, str, list[str]]) -> None:
    with pytest.raises(BadRequest):
        History().page(*asked, T)


# ---- the fleet's picture


def test_a_sample_leaves_out_the_dead_and_what_sleeps() -> None:
    grants = (
        Grant(holder="a", owner=GrantOwner.KV, num_bytes=30),
        Grant(holder="b", owner=GrantOwner.RESERVATION, num_bytes=5),
    )
    sleepers = (Grant(holder="c", owner=GrantOwner.SLEEPER, num_bytes=50),)
    view = ShownFleet()
    for name, seen_at in (("node-1", T), ("node-2", T - 600)):
        gpu = Gpu(gpu_id=f"{name}/0", total_bytes=100, grants=grants, sleepers=sleepers)
        view.take(story.fact(NodeBeat(node=replace(a_node(name), gpus=(gpu,))), seen_at), seen_at)
    sample = sample_of(view, T)
    assert (sample.used_bytes, sample.reserved_bytes, sample.total_bytes) == (30, 5, 100)


# ---- disk


def kept(path: Path, history: History) -> History:
    """The history after a restart at T + 300."""
    disk = HistoryDisk(path)
    slots, rows = history.changes()
    disk.write(slots, rows, history.bounds)
    disk.close()
    found, again = History(), HistoryDisk(path)
    found.restore(again.read(), T + 300)
    again.close()
    return found


def test_a_restart_goes_on_where_the_last_process_ended(tmp_path: Path) -> None:
    history = history_of(ONE)
    history_of(ONE, at=T + 130, history=history)
    found = kept(tmp_path / "history.db", history)
    for span in history.rings:
        before, after = (one.page(span, "", ["tokens", "ttft"], T + 300) for one in (history, found))
        assert before == after
    for one in (history, found):
        history_of(ONE, at=T + 1300, history=one)
    assert last(found, "tokens", "response", span="7d", at=T + 1300) == last(
        history, "tokens", "response", span="7d", at=T + 1300
    )
    assert values(found.page("7d", "", ["tokens"], T + 1300), "tokens", "response")[-2] == round(200 / 1200, 3)


def test_the_disk_holds_no_more_than_the_rings(tmp_path: Path) -> None:
    disk, history = HistoryDisk(tmp_path / "history.db"), History({"short": (10, 3), "long": (20, 3)})
    for number in range(50):
        history.sample(IDLE, T + 10 * number)
        slots, rows = history.changes()
        disk.write(slots, rows, history.bounds)
    assert len(list(disk.read())) == 3 + 1 + 3 + 1


def test_a_disk_that_fails_is_tried_again(tmp_path: Path) -> None:
    view = ShownFleet()
    view.source("bus", True, T)
    keeper = HistoryKeeper(view, lambda: T + 20)
    path = tmp_path / "history.db"
    keeper.open_disk(path)
    history_of(ONE, history=keeper.history)
    keeper.sample()
    broken = sqlite3.connect(path)
    broken.execute("ALTER TABLE history RENAME TO elsewhere")
    broken.commit()
    asyncio.run(keeper.save())
    broken.execute("ALTER TABLE elsewhere RENAME TO history")
    broken.commit()
    broken.close()
    asyncio.run(keeper.close())
    again = History()
    again.restore(HistoryDisk(path).read(), T + 20)
    assert values(again.page("1h", "", ["tokens"], T + 20), "tokens", "response")[-3] == 10.0


def test_a_file_that_is_no_database_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "console" / "history.db"
    path.parent.mkdir()
    path.write_bytes(b"no database" * 1000)
    keeper = HistoryKeeper(ShownFleet(), lambda: T)
    keeper.open_disk(path)
    asyncio.run(keeper.close())
    assert path.with_name("history.db.broken").read_bytes().startswith(b"no database")


# ---- Prometheus


def asked_of(answer: httpx.Response, *metrics: str, model: str = "") -> tuple[HistoryPage, list[str]]:
    texts = []

    def handle(request: httpx.Request) -> httpx.Response:
        texts.append(parse_qs(request.url.query.decode())["query"][0])
        return answer

    async def read() -> HistoryPage:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await history_api.read_page(client, "http://prometheus:9090/", "1h", model, metrics, T + 5)

    return asyncio.run(read()), texts


def test_prometheus_is_asked_for_a_range_and_its_holes_are_gaps() -> None:
    line = {"metric": {"weights": "host"}, "values": [[T - 10, "2"], [T, "NaN"]]}
    page, texts = asked_of(
        httpx.Response(200, content=json.dumps({"data": {"result": [line]}})), "starts", model="chat"
    )
    assert texts == [f'sum by (weights) (increase({semconv.STARTS_TOTAL}{{model="chat"}}[60s]))']
    assert values(page, "starts", "host")[-3:] == [None, 2.0, None]
    assert page.source == "prometheus" and not page.problem


@pytest.mark.parametrize("answer", [httpx.Response(500), httpx.Response(200, content=b"<html>")])
def test_a_prometheus_that_gives_no_values_is_named_as_the_problem(answer: httpx.Response) -> None:
    page, texts = asked_of(answer)
    assert page.problem.startswith("Prometheus answered with something")
    assert len(texts) == 12 and page.metrics["ttft"] == []
