"""The emulated engine below its routes."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug_lab.emulated.api import StopCutter
from glowplug_lab.emulated.engine import Engine, EngineConfig, OnToken, Stream
from glowplug_lab.emulated.faults import Faults, as_json, changed
from glowplug_lab.emulated.profiles import DEFAULT_PROFILE, PROFILES
from glowplug_lab.emulated.text import LABEL, answer_tokens, count_tokens, embedding, token_ids
from glowplug_lab.simulator.hardware.batching import BatchEngine, EngineLimits, Sequence, What
from tests.waiting import WAIT_S

MEMORY: dict[str, int] = {"context_tokens": 4096, "kv_bytes": 0, "weights_bytes": 13 << 30}


async def sent(engine: Engine, requests: list[tuple[int, int]]) -> list[tuple[Stream, float, float]]:
    """Returns each with the times of its first and last token, in emulated seconds of the wall clock."""
    loop, times = asyncio.get_running_loop(), [list[float]() for _ in requests]
    done: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]

    def on_token(number: int) -> OnToken:
        def took(is_last: bool) -> None:
            times[number].append((loop.time() - began) * engine.config.time_scale)
            if is_last:
                done[number].set_result(None)

        return took

    began = loop.time()
    streams = [engine.submit(*sizes, on_token(number)) for number, sizes in enumerate(requests)]
    steps = asyncio.ensure_future(engine.run())
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*done)
    steps.cancel()
    assert [len(told) for told in times] == [num_wanted for _, num_wanted in requests]
    return [(stream, told[0], told[-1]) for stream, told in zip(streams, times, strict=True)]


async def test_each_token_goes_out_when_the_simulator_says() -> None:
    profile = PROFILES["llama-2-7b/a10"]
    config = EngineConfig(profile=profile, max_running=2, load_bytes_per_s=1e9, time_scale=20.0, **MEMORY)
    requests = [(1500, 40), (900, 60), (30, 5)]
    live = await sent(Engine(config, Faults()), requests)
    limits = EngineLimits(kv_tokens=2 * 4096, max_sequences=2, chunk_tokens=2048)
    simulated = BatchEngine(profile.costs, limits)
    for number, sizes in enumerate(requests):
        simulated.submit(Sequence(number, *sizes), 0.0)
    wanted = {one.key: one for what, one, _ in simulated.advance(1e9) if what is What.FINISHED}
    for number, (stream, first_at, last_at) in enumerate(live):
        got, twin = stream.sequence, wanted[number]
        assert got.first_token_at == pytest.approx(twin.first_token_at)
        assert got.finished_at == pytest.approx(twin.finished_at)
        assert first_at >= twin.first_token_at - 1e-3 and last_at >= twin.finished_at - 1e-3


@pytest.mark.parametrize(("ttft_s", "itl_s"), [(1.0, 0.5), (0.0, 0.0)])
async def test_steps_take_the_time_that_is_set(ttft_s: float, itl_s: float) -> None:
    config = EngineConfig(
        profile=PROFILES[DEFAULT_PROFILE], max_running=2, load_bytes_per_s=1e9, time_scale=100.0, **MEMORY
    )
    engine = Engine(config, Faults(ttft_s=ttft_s))
    engine.set_faults(Faults(ttft_s=ttft_s, itl_s=itl_s))
    [(stream, _, _)] = await sent(engine, [(1500, 5)])
    assert stream.sequence.first_token_at == pytest.approx(ttft_s, abs=1e-3)
    assert stream.sequence.finished_at == pytest.approx(ttft_s + 4 * itl_s, abs=1e-3)


def cut(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    cutter, shown = StopCutter(stops), ""
    for piece in pieces:
        shown += cutter.feed(piece)
        if cutter.found:
            break
    return shown + cutter.rest(), cutter.found


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "found"),
    [
        (["one", " two", " three"], (), "one two three", False),
        (["one", " two", " three"], ("two",), "one ", True),
        (["a<", "e", "nd>b"], ("<end>",), "a", True),
        (["a<", "e", "lse"], ("<end>",), "a<else", False),
        (["xx yy"], ("yy", "xx"), "", True),
    ],
)
def test_text_ends_before_the_first_stop_string(
    pieces: list[str], stops: tuple[str, ...], shown: str, found: bool
) -> None:
    assert cut(pieces, stops) == (shown, found)


@given(st.lists(st.text("ab<", max_size=4), max_size=12), st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3))
def test_cutting_piecewise_is_cutting_whole(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, found = cut(pieces, tuple(stops))
    assert found == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert found or shown == text


def test_answers_are_labelled_and_depend_on_prompt_and_seed_alone() -> None:
    def first(prompt: str, seed: int) -> str:
        return "".join(itertools.islice(answer_tokens(prompt, seed), 30))

    assert first("x", 1) == first("x", 1)
    assert first("x", 1) != first("x", 2)
    assert first("x", 1) != first("y", 1)
    assert first("x", 1).startswith(LABEL)


def test_vectors_are_unit_length_and_tokens_count_what_they_are() -> None:
    assert sum(value * value for value in embedding("a", 64)) == pytest.approx(1.0)
    assert len(token_ids("hello world")) == count_tokens("hello world") == 3


def test_changes_keep_what_they_do_not_name() -> None:
    faults = changed(Faults(hang=True), {"ttft_s": 1, "failure_types": ["rate_limit"]})
    assert faults == Faults(hang=True, ttft_s=1.0, failure_types=("rate_limit",))
    assert as_json(faults)["emulated"] is True


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nope": 1}, "nope"),
        ({"hang": 1}, "hang"),
        ({"ttft_s": "fast"}, "ttft_s"),
        ({"ttft_s": True}, "ttft_s"),
        ({"failure_types": ["odd"]}, "failure_types"),
        ({"failure_rate": 2.0}, "failure_rate"),
        ({"mode": "song"}, "mode"),
        ({"crash_at_token": 1.5}, "crash_at_token"),
        ([], "object"),
    ],
)
def test_what_is_wrong_is_named(changes: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        changed(Faults(), changes)


def test_the_default_profile_exists() -> None:
    assert DEFAULT_PROFILE in PROFILES
