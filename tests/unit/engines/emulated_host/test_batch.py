"""Continuous batching: order, step budget, KV blocks, preemption."""

from hypothesis import given
from hypothesis import strategies as st

from glowplug.engines.emulated_host.batch import BLOCK_TOKENS, Batch, Sequence
from glowplug.engines.emulated_host.profiles import PROFILES


def a_batch(num_blocks: int = 100, max_running: int = 4, max_step_tokens: int = 2048) -> Batch:
    profile = PROFILES["llama-2-7b/a10"]
    return Batch(profile=profile, num_blocks=num_blocks, max_running=max_running, max_step_tokens=max_step_tokens)


def a_sequence(name: str, num_prompt: int = 10, num_wanted: int = 5) -> Sequence:
    return Sequence(name, num_prompt, num_wanted, arrived_at=0.0)


def step(batch: Batch) -> list[str]:
    plan = batch.plan()
    assert plan is not None
    return [sequence.sequence_id for sequence in batch.commit(plan)]


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
    decode = batch.plan()
    assert decode is not None
    batch.commit(decode)
    batch.add(a_sequence("b", num_prompt=500))
    mixed = batch.plan()
    assert mixed is not None
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
    plan = batch.plan()
    assert plan is not None
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
