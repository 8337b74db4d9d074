"""The states of an exchange: their parts, and `faults` for a part out of its state."""

from typing import Any

import pytest

from glowplug.services.router.exchange_states import PARTS, ExchangeState, Framing, faults
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
