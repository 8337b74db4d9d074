"""What the data port tells a policy that looks ahead: prompt tokens, the first chunk, the tokens of an answer."""

import asyncio
import json

from glowplug.domain.snapshot import Outlook
from tests.contract.data_port_rig import DONE, TOKEN, Rig, a_rig, answering, chat, stream_three, streaming

LOOKS_AHEAD = {"policy": "preserve_load_aware"}
BODY = json.dumps(
    {"model": "m", "stream": True, "max_tokens": 50, "messages": [{"role": "user", "content": "x" * 400}]}
).encode()


def ahead(rig: Rig) -> Outlook:
    return rig.table.controller.loads()["m"].outlook_by_instance["i-1"]


async def test_a_prompt_is_queued_until_the_first_chunk_and_the_answer_expected_until_its_end() -> None:
    begin, finish = asyncio.Event(), asyncio.Event()
    async with a_rig(params=LOOKS_AHEAD) as rig:
        await rig.engine(streaming(begin, TOKEN, finish, DONE))
        asked = asyncio.create_task(rig.ask(chat(body=BODY)))
        await rig.until(lambda: rig.num_in_flight == 1)
        assert (ahead(rig).queued_tokens, ahead(rig).current_tokens) == (100, 50)
        begin.set()
        await rig.until(lambda: ahead(rig).queued_tokens == 0)
        assert ahead(rig).current_tokens > 0
        finish.set()
        assert (await asked).status == 200
        await rig.until(lambda: rig.num_in_flight == 0)
        assert ahead(rig) == Outlook(peak_ratio=0.0, over_share=0.0)


async def test_lengths_are_learned_from_what_the_engine_reports() -> None:
    async with a_rig(params=LOOKS_AHEAD) as rig:
        await rig.engine(answering({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 33}}))
        for _ in range(3):
            await rig.ask(chat())
        assert rig.table.controller.balances.expect("m", 1, 0) == 33


async def test_an_answer_that_breaks_off_teaches_nothing_and_leaves_nothing() -> None:
    async with a_rig(params=LOOKS_AHEAD) as rig:
        await rig.engine(streaming(TOKEN, then="die"))
        before = rig.table.controller.balances.expect("m", 100, 0)
        await rig.ask(chat(body=BODY))
        assert ahead(rig) == Outlook(peak_ratio=0.0, over_share=0.0)
        assert rig.table.controller.balances.expect("m", 100, 0) == before


async def test_a_policy_that_only_counts_is_told_no_tokens() -> None:
    async with a_rig() as rig:
        asked = asyncio.create_task(rig.ask(chat(body=BODY)))
        await rig.until(lambda: bool(rig.table.controller.requests))
        assert [one.prompt_tokens for one in rig.table.controller.requests.values()] == [0]
        await rig.engine()
        await asked


async def test_a_prompt_whose_length_no_engine_told_is_estimated_and_said_to_be() -> None:
    """A recording had it as 0 tokens, and its replay as one."""
    async with a_rig() as rig:
        await rig.engine(stream_three)
        await rig.ask(chat(body=BODY))
        await rig.until(lambda: len(rig.finished) == 1)
    assert rig.finished[0].token_counts() == (100, 3, False)
