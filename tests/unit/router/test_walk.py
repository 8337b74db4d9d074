"""A warm request passes ARCHITECTURE.md's files in order."""

from tests.contract.data_port_rig import a_rig, chat
from tests.walks import entered, named


async def test_a_warm_request_passes_the_files_of_its_walk_in_order() -> None:
    async with a_rig(params={"policy": "union"}) as rig:
        await rig.engine()
        client = await rig.client()
        await client.send(chat(stream=True))
        await client.answer()
        await client.send(chat(stream=True))
        with entered("services/router", "") as files:
            answer = await client.answer()
    assert answer.status == 200
    walk = named("A warm request")
    assert len(walk) <= 14
    files = [path for path in files if path != "exchange_states.py"]  # the rig looks for faults
    assert [path for path in files if "/" not in path] == [path for path in walk if "/" not in path]
    assert {path for path in walk if "/" in path} <= set(files)
