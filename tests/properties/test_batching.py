"""The engine that skips ahead, against a plain one that visits every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug_lab.simulator.costs import FITTED, StepCosts
from glowplug_lab.simulator.hardware.batching import BatchEngine, EngineLimits, Sequence, State, What

COSTS = FITTED["llama-2-7b", "a10"]
FLAT = StepCosts(prefill_base_s=0.05, prefill_s_per_token=1e-4, decode_base_s=0.03)


def plain(costs, limits, arrivals):
    """Returns key -> (first token, finish)."""
    coming = sorted(arrivals)
    waiting, running, first, finish = [], [], {}, {}
    now = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, key, prompt, output = coming.pop(0)
            waiting.append({"key": key, "size": prompt, "left": output})
        used, batch = sum(s["size"] for s in running), []
        while waiting and len(running) + len(batch) < limits.max_sequences:
            size, taken = waiting[0]["size"], sum(s["size"] for s in batch)
            if batch and taken + size > limits.max_prefill_tokens:
                break
            if used + taken + size + len(running) + len(batch) + 1 > limits.kv_tokens:
                break
            batch.append(waiting.pop(0))
        if batch:
            now += costs.prefill_s(sum(s["size"] for s in batch), sum(s["size"] ** 2 for s in batch))
            for s in batch:
                s["left"] -= 1
                first.setdefault(s["key"], now)
            running += batch
        else:
            while limits.kv_tokens - sum(s["size"] for s in running) < len(running):
                victim = running.pop()
                victim["size"] += 1  # its newest token is recomputed too
                waiting.insert(0, victim)
            context = sum(s["size"] for s in running)
            now += (
                costs.decode_base_s + costs.decode_s_per_sequence * len(running) + costs.decode_s_per_context * context
            )
            for s in running:
                s["size"] += 1
                s["left"] -= 1
        for s in [s for s in running if s["left"] == 0]:
            running.remove(s)
            finish[s["key"]] = now
    return {key: (first[key], finish[key]) for key in finish}


def sequences_of(arrivals):
    return [(at_s, Sequence(key, prompt, output)) for at_s, key, prompt, output in sorted(arrivals)]


def drive(engine, arrivals):
    coming = sequences_of(arrivals)
    for at_s, sequence in coming:
        while engine.next_at_s <= at_s:
            engine.advance(engine.next_at_s)
        engine.submit(sequence, at_s)
    while engine.next_at_s < math.inf:
        engine.advance(engine.next_at_s)
    return {s.key: (s.first_token_at, s.finished_at) for _, s in coming}


ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=25
).map(  # never two at one instant: the caller orders those
    lambda rows: [(at_s + 1e-5 * n, n, prompt, output) for n, (at_s, prompt, output) in enumerate(sorted(rows))]
)
LIMITS = st.builds(
    EngineLimits,
    kv_tokens=st.integers(700, 4000),
    max_sequences=st.integers(1, 12),
    max_prefill_tokens=st.sampled_from([256, 2048]),
)
CHUNKED = st.builds(
    EngineLimits,
    kv_tokens=st.integers(700, 4000),
    max_sequences=st.integers(1, 12),
    chunk_tokens=st.sampled_from([16, 256]),
    long_prefill_tokens=st.sampled_from([0, 16, 64]),
)


@given(ARRIVALS, LIMITS, st.sampled_from([COSTS, FLAT]))
def test_skipping_is_stepping(arrivals, limits, costs):
    wanted = plain(costs, limits, arrivals)
    for stepping in (False, True):
        got = drive(BatchEngine(costs, limits, stepping=stepping), arrivals)
        assert got.keys() == wanted.keys()
        for key, times in wanted.items():
            assert got[key] == pytest.approx(times, rel=1e-9), f"sequence {key}, stepping={stepping}"


def plain_in_pieces(costs, limits, arrivals):
    """The same with pieces of prompts beside decoding."""
    coming = sorted(arrivals)
    waiting, reading, running, first, finish = [], [], [], {}, {}
    now = 0.0
    while coming or waiting or reading or running:
        if not waiting and not reading and not running:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, key, prompt, output = coming.pop(0)
            waiting.append({"key": key, "size": prompt, "left": output, "read": 0})
        while limits.kv_tokens - sum(s["size"] for s in reading + running) < len(running):
            victim = running.pop()
            waiting.insert(0, victim | {"size": victim["size"] + 1, "read": 0})
        budget = max(1, limits.chunk_tokens - len(running))
        beside_others = len(waiting) + len(reading) + len(running) > 1
        most = (beside_others and limits.long_prefill_tokens) or limits.chunk_tokens
        while waiting and len(reading) + len(running) < limits.max_sequences:
            held, size = sum(s["size"] for s in reading + running), waiting[0]["size"]
            has_room = held + size + len(reading) + len(running) + 1 <= limits.kv_tokens
            if not has_room or sum(min(s["size"] - s["read"], most) for s in reading) >= budget:
                break
            reading.append(waiting.pop(0))
        num_tokens = num_tokens2 = 0
        for s in reading:
            begun, s["read"] = s["read"], s["read"] + min(s["size"] - s["read"], most, budget - num_tokens)
            num_tokens, num_tokens2 = num_tokens + s["read"] - begun, num_tokens2 + s["read"] ** 2 - begun**2
        if running:
            now += costs.decode_s(len(running), sum(s["size"] for s in running))
        if reading:
            now += costs.prefill_s(num_tokens, num_tokens2)
        if running and reading:
            now -= min(costs.prefill_base_s, costs.decode_base_s)
        for s in running:
            s["size"] += 1
            s["left"] -= 1
        for s in [s for s in reading if s["read"] == s["size"]]:
            reading.remove(s)
            running.append(s)
            s["left"] -= 1
            first.setdefault(s["key"], now)
        for s in [s for s in running if s["left"] == 0]:
            running.remove(s)
            finish[s["key"]] = now
    return {key: (first[key], finish[key]) for key in finish}


@given(ARRIVALS, CHUNKED, st.booleans())
def test_skipping_is_stepping_in_pieces(arrivals, limits, stepping):
    got = drive(BatchEngine(COSTS, limits, stepping=stepping), arrivals)
    wanted = plain_in_pieces(COSTS, limits, arrivals)
    assert got.keys() == wanted.keys()
    for key, times in wanted.items():
        assert got[key] == pytest.approx(times, rel=1e-9), f"sequence {key}"


@given(ARRIVALS, LIMITS | CHUNKED, st.floats(0.0, 30.0))
def test_the_cache_is_never_over_full_and_empty_at_the_end(arrivals, limits, at_s):
    engine = BatchEngine(COSTS, limits)
    for when, sequence in sequences_of(arrivals):
        engine.submit(sequence, when)
        assert 0 <= engine.kv_tokens_used(when) <= limits.kv_tokens
    engine.advance(max(at_s, arrivals[-1][0]))
    assert 0 <= engine.kv_tokens_used(max(at_s, arrivals[-1][0])) <= limits.kv_tokens
    engine.advance(1e9)
    assert engine.num_sequences == 0 and engine.kv_tokens_used(1e9) == 0 and engine.next_at_s == math.inf


@given(ARRIVALS, LIMITS | CHUNKED, st.data())
def test_who_has_left_holds_nothing_and_is_not_heard_of(arrivals, limits, data):
    engine, leaving = BatchEngine(COSTS, limits), set()
    sequences = {}
    for when, sequence in sequences_of(arrivals):
        sequences[sequence.key] = sequence
        engine.submit(sequence, when)
        if data.draw(st.booleans()):
            victim = sequences[data.draw(st.sampled_from(sorted(sequences)))]
            if victim.state in (State.WAITING, State.RUNNING) and victim.key not in leaving:
                engine.advance(when)
                engine.abort(victim, when)
                leaving.add(victim.key)
    heard = {s.key for what, s, _ in engine.advance(1e9) if what is What.FINISHED}
    assert not heard & leaving
    assert all(s.state is (State.ABORTED if k in leaving else State.FINISHED) for k, s in sequences.items())
    assert engine.kv_tokens_used(1e9) == 0


def test_a_slowdown_stretches_what_comes_after_the_next_boundary():
    limits = EngineLimits(kv_tokens=4000)
    engine = BatchEngine(FLAT, limits)
    one = Sequence(1, 100, 11)
    engine.submit(one, 0.0)
    prefill = FLAT.prefill_s(100, 10_000)
    engine.advance(prefill)
    engine.slow_down(2.0, prefill + 4.5 * 0.03)  # inside the fifth of ten steps
    engine.advance(1e9)
    assert one.finished_at == pytest.approx(prefill + 5 * 0.03 + 5 * 0.06)


@given(ARRIVALS, LIMITS | CHUNKED, st.floats(0.0, 1.0), st.data())
def test_a_cache_that_shrinks_loses_nobody(arrivals, limits, share, data):
    """WarmServe section 4.1: at any limit, used blocks fit and every sequence ends."""
    engine = BatchEngine(COSTS, limits)
    coming = sequences_of(arrivals)
    last_s = max(at_s for at_s, *_ in arrivals)
    for at_s, sequence in coming:
        engine.submit(sequence, at_s)
    for at_s in sorted(data.draw(st.lists(st.floats(last_s, last_s + 30.0), max_size=4))):
        kept = engine.limit_kv(int(share * limits.kv_tokens), at_s)
        assert engine.kv_tokens_used(at_s) <= kept == engine.limits.kv_tokens <= limits.kv_tokens
    at_s = last_s + 30.0
    while engine.next_at_s < math.inf:
        assert engine.kv_tokens_used(at_s) <= engine.limits.kv_tokens
        at_s = engine.next_at_s
        engine.advance(at_s)
    assert all(s.state is State.FINISHED and s.num_emitted == s.output_tokens for _, s in coming)


@given(ARRIVALS, LIMITS, st.floats(0.0, 30.0))
def test_an_engine_that_is_reshaped_loses_no_token(arrivals, limits, at_s):
    """HydraServe section 6.2: a pipeline's batch continues in the whole engine."""
    engine = BatchEngine(COSTS.pipelined(4, 0.001), limits)
    coming, is_whole = sequences_of(arrivals), False
    for when, sequence in coming:
        if when >= at_s and not is_whole:
            is_whole = True
            engine.reshape(COSTS, EngineLimits(kv_tokens=limits.kv_tokens, max_sequences=1), at_s)
        engine.submit(sequence, when)
    engine.advance(1e9)
    assert all(s.state is State.FINISHED and s.num_emitted == s.output_tokens for _, s in coming)
    assert engine.costs == (COSTS if is_whole else COSTS.pipelined(4, 0.001))
    assert engine.num_sequences == 0 and engine.kv_tokens_used(1e9) == 0


@given(ARRIVALS, LIMITS | CHUNKED, st.booleans(), st.lists(st.floats(0.0, 30.0), max_size=3))
def test_a_cache_that_is_lost_loses_no_token(arrivals, limits, stepping, losses):
    engine, coming = BatchEngine(COSTS, limits, stepping=stepping), sequences_of(arrivals)
    for at_s, sequence in sorted([*coming, *((at_s, None) for at_s in losses)], key=lambda one: one[0]):
        if sequence is not None:
            engine.submit(sequence, at_s)
            continue
        told = {s: engine.num_emitted(s, at_s) for _, s in coming if s.submitted_at >= 0}
        engine.recompute(at_s)
        assert told == {s: engine.num_emitted(s, at_s) for s in told}
        assert not engine.running and sum(engine.kv_tokens_read().values()) == 0
    engine.advance(1e9)
    assert all(s.state is State.FINISHED and s.num_emitted == s.output_tokens for _, s in coming)
    assert engine.num_sequences == 0 and engine.kv_tokens_used(1e9) == 0


def test_what_can_never_fit_is_refused():
    engine = BatchEngine(COSTS, EngineLimits(kv_tokens=100))
    with pytest.raises(ValueError, match="101 tokens, the KV cache holds 100"):
        engine.submit(Sequence(1, 60, 41), 0.0)
    with pytest.raises(ValueError, match="at least 1 each"):
        Sequence(2, 0, 5)
