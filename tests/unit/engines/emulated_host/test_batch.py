"""The emulated engine below its routes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug_lab.emulated.api import StopCutter
from glowplug_lab.emulated.batch import BLOCK_TOKENS, Batch, Sequence, Step
from glowplug_lab.emulated.faults import Faults, as_json, changed
from glowplug_lab.emulated.profiles import DEFAULT_PROFILE, PROFILES
from glowplug_lab.emulated.text import LABEL, answer_tokens, count_tokens, embedding, token_ids


def a_batch(num_blocks: int = 100, max_running: int = 4, max_step_tokens: int = 2048) -> Batch:
    profile = PROFILES["llama-2-7b/a10"]
    return Batch(profile=profile, num_blocks=num_blocks, max_running=max_running, max_step_tokens=max_step_tokens)


def a_sequence(name: str, num_prompt: int = 10, num_wanted: int = 5) -> Sequence:
    return Sequence(name, num_prompt, num_wanted)


def planned(batch: Batch) -> Step:
    plan = batch.plan()
    assert plan is not None
    return plan


def step(batch: Batch) -> list[str]:
    return [sequence.sequence_id for sequence in batch.commit(planned(batch))]


def test_a_new_sequence_is_prefilled_and_gets_its_first_token_in_one_step() -> None:
    batch = a_batch()
    batch.add(a_sequence("a"))
    assert step(batch) == ["a"]
    assert step(batch) == ["a"]
    assert batch.running[0].num_generated == 2


def test_seats_are_given_first_come_first_served() -> None:
    batch = a_batch(max_running=2)
    for name in "abc":
        batch.add(a_sequence(name))
    assert step(batch) == ["a", "b"]
    assert [sequence.sequence_id for sequence in batch.waiting] == ["c"]
    batch.remove(batch.running[0])
    assert step(batch) == ["b", "c"]


def test_a_prompt_longer_than_the_step_budget_is_prefilled_in_pieces_while_others_decode() -> None:
    batch = a_batch(max_step_tokens=64)
    batch.add(a_sequence("short"))
    step(batch)
    batch.add(a_sequence("long", num_prompt=150))
    assert step(batch) == ["short"]
    assert step(batch) == ["short"]
    assert step(batch) == ["short", "long"]


def test_a_mixed_step_costs_more_than_a_decode_step() -> None:
    batch = a_batch()
    batch.add(a_sequence("a"))
    step(batch)
    decode = planned(batch)
    batch.commit(decode)
    batch.add(a_sequence("b", num_prompt=500))
    mixed = planned(batch)
    assert mixed.num_prefill_tokens == 500
    assert mixed.seconds > decode.seconds


def test_without_free_blocks_the_youngest_is_preempted_and_computed_again() -> None:
    batch = a_batch(num_blocks=2)
    batch.add(a_sequence("old", num_prompt=BLOCK_TOKENS - 1, num_wanted=20))
    batch.add(a_sequence("young", num_prompt=BLOCK_TOKENS - 1, num_wanted=20))
    assert step(batch) == ["old", "young"]
    step(batch)
    step(batch)
    assert batch.num_preemptions == 1
    assert [sequence.sequence_id for sequence in batch.running] == ["old"]
    assert [sequence.sequence_id for sequence in batch.waiting] == ["young"]
    assert batch.waiting[0].num_generated > 0, "what was said stays said"
    batch.remove(batch.running[0])
    assert step(batch) == ["young"]


def test_a_removed_sequence_gets_no_token_from_a_step_under_way() -> None:
    batch = a_batch()
    batch.add(a_sequence("a"))
    plan = planned(batch)
    batch.remove(batch.running[0])
    assert batch.commit(plan) == []
    assert batch.num_used_blocks == 0


def test_nothing_is_planned_when_nothing_runs_or_admission_is_closed() -> None:
    batch = a_batch()
    assert batch.plan() is None
    batch.admitting = False
    batch.add(a_sequence("a"))
    assert batch.plan() is None


sizes = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12)


@given(sizes, st.integers(18, 40), st.integers(1, 6), st.integers(16, 256))
def test_everyone_ends_blocks_never_overflow_and_all_come_back(
    requests: list[tuple[int, int]], num_blocks: int, max_running: int, max_step_tokens: int
) -> None:
    batch = a_batch(num_blocks, max_running, max_step_tokens)
    for i, (num_prompt, num_wanted) in enumerate(requests):
        batch.add(a_sequence(str(i), num_prompt, num_wanted))
    num_steps = 0
    while (plan := batch.plan()) is not None:
        num_steps += 1
        assert num_steps < 20_000
        assert plan.seconds > 0
        assert sum(plan.pieces.values()) <= max_step_tokens
        assert len(batch.running) <= max_running
        assert batch.num_used_blocks == sum(sequence.num_blocks for sequence in batch.running) <= num_blocks
        for sequence in batch.commit(plan):
            if sequence.num_generated >= sequence.num_wanted:
                batch.remove(sequence)
    assert not batch.running
    assert not batch.waiting
    assert batch.num_used_blocks == 0


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


def test_hydraserve_table_2_llama_7b_on_a10_with_8_requests_of_1024_tokens() -> None:
    profile = PROFILES["llama-2-7b/a10"]
    tpot_s = profile.step_s(tok=0, sq=0, num_decoding=8, ctx=8 * 1024)
    ttft_s = profile.step_s(tok=8 * 1024, sq=8 * 1024**2, num_decoding=0, ctx=0)
    assert tpot_s == pytest.approx(0.042, rel=0.05)
    assert ttft_s == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_more_work_never_costs_less(name: str) -> None:
    profile = PROFILES[name]
    small = profile.step_s(tok=100, sq=10_000, num_decoding=1, ctx=100)
    assert profile.step_s(tok=200, sq=40_000, num_decoding=1, ctx=100) > small
    assert profile.step_s(tok=100, sq=10_000, num_decoding=9, ctx=900) > small


def test_the_default_profile_exists() -> None:
    assert DEFAULT_PROFILE in PROFILES
