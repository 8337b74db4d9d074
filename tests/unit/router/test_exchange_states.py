"""The states of an exchange: their parts, and `faults` for a part out of its state."""

from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.services.router.exchange_states import PARTS, Answer, AnswerKind, ExchangeState, Framing, faults
from tests.contract.data_port_rig import TOKEN, a_rig, chat, streaming


def test_each_state_names_parts_that_there_are() -> None:
    for state in ExchangeState:
        needs, may, means = state.value
        assert means and {*needs.split(), *may.split()} <= set(PARTS) and not {*needs.split()} & {*may.split()}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"state": ExchangeState.ENDED}, "ENDED without ending"),
        ({"state": ExchangeState.ASKED}, "ASKED and has answer"),
        ({"state": ExchangeState.BROKEN}, "BROKEN without resumption"),
        ({"attempt": None}, "without attempt"),
        ({"framing": Framing.PLAIN}, "cannot pass as it is"),
        ({"framing": None}, "has no head"),
    ],
)
async def test_a_part_out_of_its_state_is_a_fault(change: dict[str, Any], found: str) -> None:
    async with a_rig() as rig:
        await rig.engine(streaming(TOKEN, then="hang"))
        client = await rig.sent(chat(stream=True))
        await client.head()
        assert await client.chunk() == TOKEN and rig.exchange.state is ExchangeState.FLOWING
        before = {part: getattr(rig.exchange, part) for part in change}
        for part, value in change.items():
            setattr(rig.exchange, part, value)
        said = [*faults(rig.exchange)]
        for part, value in before.items():
            setattr(rig.exchange, part, value)
        assert any(found in fault for fault in said), said


def an_exchange(state: ExchangeState, answer: Answer | None = None, **over: Any) -> Any:
    """It has the parts that its state needs, and `over`."""
    needs, _, _ = state.value
    parts: dict[str, Any] = dict.fromkeys(PARTS) | dict.fromkeys(needs.split(), Framing.CHUNKED) | {"answer": answer}
    return SimpleNamespace(state=state, **{"num_continued": 0, **parts, **over})


def an_answer(kind: AnswerKind = AnswerKind.STREAM, **over: Any) -> Answer:
    return Answer(**{"kind": kind, "status": 200, "first_byte": 1.0, **over})


BODY, STREAM, ERROR = AnswerKind
S = ExchangeState


@pytest.mark.parametrize(
    ("exchange", "found"),
    [
        (an_exchange(S.WAITING), []),
        (an_exchange(S.WAITING, timer=1, framing=Framing.CHUNKED), []),
        (an_exchange(S.WAITING, engine=1, ending=1), ["it is WAITING and has engine", "it is WAITING and has ending"]),
        (an_exchange(S.ANSWERING), ["it is ANSWERING without answer"]),
        (an_exchange(S.ANSWERING, an_answer(BODY), framing=Framing.PLAIN), []),
        (an_exchange(S.ANSWERING, an_answer(ERROR, collected=[])), []),
        (
            an_exchange(S.ANSWERING, an_answer(ERROR), framing=Framing.PLAIN),
            ["its answer is a ERROR, and collected: False"],
        ),
        (
            an_exchange(S.ANSWERING, an_answer(BODY, collected=[], kept=b"a"), framing=Framing.PLAIN),
            ["its answer is a BODY and has ['kept']", "its answer is a BODY, and collected: True"],
        ),
        (
            an_exchange(S.ANSWERING, an_answer(STREAM, collected=[b"a"]), framing=Framing.PLAIN),
            ["its answer is a STREAM and has ['collected']", "its answer is a STREAM, and collected: True"],
        ),
        (an_exchange(S.ANSWERING, an_answer(BODY)), ["its answer is a BODY, and the client has no head"]),
        (an_exchange(S.FLOWING, an_answer()), []),
        (an_exchange(S.FLOWING, an_answer(BODY)), ["it is FLOWING and its answer is a BODY"]),
        (an_exchange(S.MOVING, an_answer(BODY)), ["it is MOVING and its answer is a BODY"]),
        (an_exchange(S.FLOWING, an_answer(kept=b"a")), ["it is FLOWING, and a chunk cannot pass as it is"]),
        (an_exchange(S.FLOWING, an_answer(), num_continued=1), ["it is FLOWING, and a chunk cannot pass as it is"]),
        (
            an_exchange(S.FLOWING, an_answer(), framing=Framing.PLAIN),
            ["it is FLOWING, and a chunk cannot pass as it is"],
        ),
        (an_exchange(S.ANSWERING, an_answer(kept=b"a"), framing=Framing.PLAIN, num_continued=1), []),
        (an_exchange(S.BROKEN, an_answer(), num_continued=1), []),
        (an_exchange(S.BROKEN, an_answer(BODY), num_continued=1), ["it is BROKEN and its answer is a BODY"]),
        (an_exchange(S.BROKEN, an_answer()), ["it is BROKEN and has kept the lost engine's events"]),
        (
            an_exchange(S.CONTINUING, an_answer(log=[]), num_continued=1),
            ["it is CONTINUING and has kept the lost engine's events"],
        ),
        (
            an_exchange(S.CONTINUING, an_answer(kept=b"a"), num_continued=1),
            ["it is CONTINUING and has kept the lost engine's events"],
        ),
    ],
)
def test_each_fault_is_told_and_no_other(exchange: Any, found: list[str]) -> None:
    assert [*faults(exchange)] == found
