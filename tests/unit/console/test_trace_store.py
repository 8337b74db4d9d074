"""The ring of traces and its file."""

import errno
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from glowplug.services.console import trace_store
from glowplug.services.console.spans import Resource, Span, SpanEvent
from glowplug.services.console.trace_store import TraceDisk, TraceStore
from glowplug.telemetry import semconv
from tests import console_story as story

RESOURCE = Resource("svc", (("service.instance.id", "svc-1"),))
ROUTER = Resource("glowplug-router", (("host.name", "a"),))
SECRET = "canary-of-a-prompt"
encode = msgspec.msgpack.encode


NAMES = {"request_id": semconv.ATTR_REQUEST_ID, "model": semconv.ATTR_MODEL}


def span(
    trace: int, number: int = 1, *, parent: int = 0, start: int = 1, events: tuple[SpanEvent, ...] = (), **about: Any
) -> Span:
    """`about`: attributes, with request_id and model under their trace names."""
    attributes = tuple((NAMES.get(name, name), value) for name, value in about.items())
    parent_id = f"{parent:016x}" if parent else ""
    return Span(
        f"{trace:032x}", f"{number:016x}", parent_id, f"s{number}", 1, start, start + 10, attributes=attributes,
        events=events,
    )  # fmt: skip


def add(store: TraceStore, *spans: Span) -> None:
    store.add((one, RESOURCE) for one in spans)


def test_late_spans_join_their_trace_and_the_summary_grows() -> None:
    store = TraceStore()
    add(store, span(1, 2, parent=1, start=5))
    first = store.summary("1")
    assert first is not None and first.name == "s2" and not first.has_root and first.revision == 1
    add(store, span(1, 1, start=3, request_id="r-1"))
    summary = store.summary("1")
    assert summary is not None and summary.has_root
    assert (summary.name, summary.num_spans, summary.start_ns, summary.end_ns) == ("s1", 2, 3, 15)
    assert store.trace_of_request("r-1") == f"{1:032x}"
    assert [one.span_id[-1] for one, _ in store.get("1") or ()] == ["1", "2"]


def test_a_span_sent_twice_is_kept_once() -> None:
    store = TraceStore()
    add(store, span(1, 1))
    before = store.num_bytes
    add(store, span(1, 1))
    assert (store.num_spans, store.num_bytes) == (1, before)
    summary = store.summary("1")
    assert summary is not None and (summary.num_spans, summary.revision) == (1, 1)


def test_the_oldest_trace_leaves_with_all_that_points_at_it() -> None:
    store = TraceStore(max_traces=2)
    for trace in (1, 2, 3):
        add(store, span(trace, 1, request_id=f"r-{trace}"))
    assert store.get("1") is None and store.trace_of_request("r-1") is None
    assert [line.request_ids for line in store.newest()] == [("r-3",), ("r-2",)]
    assert (len(store), store.num_spans, store.num_evicted) == (2, 2, 1)


def test_bytes_are_bounded_and_counted_down_again() -> None:
    store = TraceStore(max_bytes=100_000)
    for trace in range(500):
        add(store, span(trace + 1, 1, pad="x" * 900), span(trace + 1, 2, pad="x" * 900))
        assert store.num_bytes <= 100_000
    assert store.num_evicted > 400
    assert len(store) * 2 == store.num_spans


def test_one_endless_trace_cannot_push_out_the_others() -> None:
    store = TraceStore(max_bytes=200_000, max_spans_per_trace=50)
    add(store, span(1, 1))
    add(store, *(span(2, i + 1, parent=1 if i else 0) for i in range(200)))
    summary = store.summary("2")
    assert summary is not None and (summary.num_spans, summary.num_dropped) == (50, 150)
    add(store, *(span(3, i + 1, pad="x" * 1000) for i in range(50)))
    assert store.num_bytes <= 200_000
    assert store.get("1") is not None


def test_what_it_counts_is_what_it_costs() -> None:
    batches = [story.received(story.cold_trace(i, 1000.0, "m", f"r-{i}")) for i in range(200)]
    tracemalloc.start()
    store = TraceStore()
    for batch in batches:
        store.add(batch.spans)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= store.num_bytes
    assert store.num_spans == 200 * 15


def test_the_model_is_that_of_the_request() -> None:
    """A trace may also stop other models to free memory."""
    store = TraceStore()
    add(store, span(1, 5, parent=1, model="victim"), span(1, 1, request_id="r", model="wanted"))
    add(store, span(1, 6, parent=1, model="victim-2"))
    summary = store.summary("1")
    assert summary is not None and summary.model == "wanted"


def test_summary_of_a_whole_story() -> None:
    store = TraceStore()
    for trace in (story.cold_trace(0, 1.0, "m", "r"), story.failed_trace(1, 1.0, "m", "q")):
        store.add(story.received(trace).spans)
    failed, cold = store.newest()
    assert cold.is_cold and not cold.num_errors and not cold.is_emulated and cold.model == "m"
    assert cold.services[0] == "glowplug-agent" and len(cold.services) == 6
    assert failed.num_errors == 2 and failed.is_emulated and not failed.is_cold


class Rig:
    """`restart` opens the file as a new process would."""

    def __init__(self, path: Path, *, keep_content: bool = False, **bounds: int) -> None:
        self.path, self.failed = path, list[int]()
        self.store = TraceStore(**bounds)
        max_bytes = bounds.get("max_bytes", 1 << 22)
        self.disk = TraceDisk(path, max_bytes=max_bytes, keep_content=keep_content, on_failure=self.failed.append)
        self.store.restore(self.disk)

    def restart(self, **changes: object) -> "Rig":
        self.disk.close()
        return Rig(self.path, **changes)  # type: ignore[arg-type]

    @property
    def ids(self) -> list[int]:
        return [int(line.trace_id, 16) for line in self.store.newest()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "console-1" / "traces.log"


def test_traces_survive_a_restart_whole_and_in_order(path: Path) -> None:
    first = Rig(path)
    events = (SpanEvent(10**18, "first token", (("k", "v"),)),)
    add(first.store, span(1, request_id="req-7", model="m", n=3, x=1.5, b=True, events=events), span(2))
    first.store.add([(span(1, 2), ROUTER), (span(1, 2), ROUTER)])
    second = first.restart()
    assert second.ids == first.ids == [2, 1]
    assert second.store.get(f"{1:032x}") == first.store.get(f"{1:032x}")
    assert second.store.trace_of_request("req-7") == f"{1:032x}"
    assert second.disk.num_bytes > 0 and path.stat().st_mode & 0o777 == 0o600
    second.disk.close()


def test_what_has_left_the_ring_leaves_the_disk_with_the_next_start(path: Path) -> None:
    first = Rig(path, max_traces=2)
    for number in range(1, 6):
        add(first.store, span(number))
    second = first.restart(max_traces=2)
    assert second.ids == [5, 4]
    third = second.restart(max_traces=1)
    assert third.ids == [5] and third.store.num_evicted == 0
    assert third.restart(max_traces=10).ids == [5], "a smaller bound holds on disk too"


def test_a_broken_file_is_put_aside_and_a_new_one_begun(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"this is no file of traces at all" * 1000)
    rig = Rig(path)
    add(rig.store, span(1))
    after = rig.restart()
    assert after.ids == [1]
    assert path.with_name("traces.log.broken").read_bytes().startswith(b"this is no")
    after.disk.close()


def test_a_record_that_a_kill_has_cut_short_is_left_out(path: Path) -> None:
    first = Rig(path)
    add(first.store, span(1), span(2))
    first.disk.close()
    path.write_bytes(path.read_bytes()[:-3])
    second = Rig(path)
    assert second.ids == [1] and not path.with_name("traces.log.broken").exists()
    add(second.store, span(3))
    assert second.restart().ids == [3, 1]


def test_a_place_that_cannot_be_written_costs_the_restart_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    rig = Rig(tmp_path / "file" / "traces.log")
    add(rig.store, span(1))
    rig.disk.close()
    assert rig.ids == [1] and rig.disk.problem
    assert sum(rig.failed) == 1


def test_the_file_loses_the_oldest_and_stays_in_its_bound(path: Path) -> None:
    rig = Rig(path, max_bytes=1 << 16, max_traces=10_000)
    for number in range(1, 2000):
        add(rig.store, span(number, text="x" * 1000))
        if number % 20 == 0:
            rig.disk.write()
            assert rig.disk.num_bytes <= 2 * (1 << 16) + 40 * 1200
    before = rig.ids
    assert rig.restart(max_bytes=1 << 16, max_traces=10_000).ids == before


def test_a_disk_that_is_full_is_tried_again_and_what_it_took_half_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, size: int, content: bytes) -> int:
        with path.open("ab") as file:
            file.write(content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    rig = Rig(path)
    add(rig.store, span(1))
    rig.disk.write()
    with monkeypatch.context() as without_space:
        without_space.setattr(trace_store, "_append", full)
        add(rig.store, span(2))
        rig.disk.write()
        assert "No space" in rig.disk.problem and sum(rig.failed) == 1
    add(rig.store, span(3))
    rig.disk.write()
    assert not rig.disk.problem
    assert rig.restart().ids == [3, 1]


def test_a_file_that_somebody_has_deleted_is_begun_again(path: Path) -> None:
    rig = Rig(path)
    add(rig.store, span(1))
    rig.disk.write()
    path.unlink()
    add(rig.store, span(2))
    rig.disk.write()
    assert rig.restart().ids == [2]


@pytest.mark.parametrize("keep_content", [True, False])
def test_prompts_leave_the_file_with_the_leave_to_keep_them(path: Path, keep_content: bool) -> None:
    said = {"gen_ai.prompt": SECRET, semconv.ATTR_MODEL: "m"}
    first = Rig(path, keep_content=True)
    events = (SpanEvent(10**18, "gen_ai.content", tuple(said.items())),)
    first.store.add([(span(1, events=events, **said), Resource("r", tuple(said.items())))])
    second = first.restart(keep_content=keep_content)
    (found,) = second.store.get(f"{1:032x}") or ()
    assert (found[0].attribute("gen_ai.prompt") == SECRET) is keep_content
    assert found[0].attribute(semconv.ATTR_MODEL) == "m"
    second.disk.close()
    on_disk = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert (SECRET.encode() in on_disk) is keep_content


def test_more_than_the_disk_can_take_is_dropped_and_counted(path: Path) -> None:
    failed: list[int] = []
    disk = TraceDisk(path, max_bytes=1 << 20, keep_content=False, on_failure=failed.append, max_pending=3)
    one = span(1)
    for _ in range(5):
        disk.keep(encode(one), encode(ROUTER))
    assert failed == [1, 1]
