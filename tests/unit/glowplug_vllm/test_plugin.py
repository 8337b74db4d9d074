"""The watch on the engine core; replacing functions imported by name."""

import asyncio
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from glowplug_vllm import plugin, rendezvous
from glowplug_vllm.parked import patches


async def test_a_core_that_answers_is_not_silent() -> None:
    asked = 0

    async def answer() -> bool:
        nonlocal asked
        asked += 1
        return False

    watch = plugin.CoreWatch(answer)
    assert [await watch.silent_s(), await watch.silent_s()] == [0.0, 0.0]
    assert asked == 2


async def test_silence_grows_from_the_first_unanswered_question_and_ends_with_its_answer() -> None:
    gate = asyncio.Event()
    watch = plugin.CoreWatch(gate.wait)
    first = await watch.silent_s()
    second = await watch.silent_s()
    assert 0 < first < second
    gate.set()
    assert await watch.silent_s() == 0.0


async def test_a_dead_core_raises_what_it_raised_and_is_asked_again() -> None:
    async def dead() -> bool:
        raise RuntimeError("EngineDeadError")

    watch = plugin.CoreWatch(dead)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="EngineDeadError"):
            await watch.silent_s()


async def test_ready_is_announced_once_the_port_accepts(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    held = {"num_slots": 4, "kv_tokens": 11_648}
    await plugin.announce(plugin.ServerStart(tmp_path, 1.0, 2.0, 3.0), "0.0.0.0", port, held)
    server.close()
    ready = rendezvous.wait(tmp_path, rendezvous.READY, 0.0)
    assert ready["port"] == port and held.items() <= ready.items()
    assert [phase[:2] for phase in ready["phases"][:2]] == [["launch", 1.0], ["load", 3.0]]
    assert ready["phases"][0][2] == 2.0


def test_slots_and_the_kv_cache_are_those_of_vllms_configuration() -> None:
    cache, scheduler = Namespace(num_gpu_blocks=728, block_size=16), Namespace(max_num_seqs=4)
    client = Namespace(vllm_config=Namespace(cache_config=cache, scheduler_config=scheduler))
    assert plugin.holds(client) == {"num_slots": 4, "kv_tokens": 11_648}
    assert plugin.holds(None) == plugin.holds(Namespace()) == {"num_slots": 0, "kv_tokens": 0}


def test_holders_of_the_old_one_get_the_new_one_and_namesakes_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    home, user, other = (ModuleType(f"gp_fake_{name}") for name in ("home", "user", "other"))
    home.__dict__["pick"] = user.__dict__["pick"] = lambda: "old"
    other.__dict__["pick"] = lambda: "of its own"
    for module in (home, user, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert patches.replace_everywhere("gp_fake_home", "pick", lambda: "new") == 2
    assert [m.__dict__["pick"]() for m in (home, user, other)] == ["new", "new", "of its own"]


def test_a_vllm_without_the_names_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in patches.NEEDED:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(patches.Unpatchable, match=r"EngineCoreProc\.run_engine_core"):
        patches.apply(is_cpu=True)
