"""Pipelines of emulated engines over several agents and a placer, with faults in any phase."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from glowplug.controllers.agent.record import State
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model
from tests.pipeline_rig import PipelineRig, on_the_last_nodes, pipelines, quick, staged_model
from tests.waiting import WAIT_S, until

S = InstanceState


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[PipelineRig]:
    async with pipelines(tmp_path, num_nodes=2) as rig:
        yield rig


async def test_a_pipeline_serves_and_becomes_one_engine_under_a_request(rig: PipelineRig) -> None:
    model = staged_model("a", load_bytes_per_s=1e9)
    rig.withheld = {"i/rest"}
    await rig.place(model, "i")
    first = await rig.reaches("i", State.READY)
    assert (first.num_stages, first.max_concurrency, rig.granted("node-1")) == (2, 4, {"i": 80})
    assert rig.granted("node-2") == {"i.1": 80} and rig.holding("i.1").state is State.READY
    refused = await httpx.AsyncClient(timeout=WAIT_S).get(f"{first.url}/v1/models")
    assert refused.status_code == 401, "its key is asked for"
    answering = asyncio.create_task(rig.ask(first, 600))
    await rig.consolidate("i")
    await until(lambda: rig.holding("i").instance.consolidating, "it has memory for all of the model")
    assert rig.granted("node-1") == {"i": 160}
    links = rig.controller.fleet.network.links
    await until(lambda: "node-1" in links and links["node-1"].fetches, "the rest is being fetched")
    await rig.let("i/rest")
    whole = await until(lambda: (i := rig.holding("i").instance).is_whole and i, "it is whole")
    assert not answering.done() and whole.url == first.url and whole.max_concurrency == 2
    await rig.reaches("i.1", State.STOPPED)
    answer = await answering
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 600
    assert "serves alone" in rig.holding("i.1").instance.reason
    await until(lambda: not rig.granted("node-2"), "the other stage's bytes are free")
    await until(lambda: not rig.controller.fleet.network.links, "no fetch is under way")
    (consolidation,) = rig.holding("i").instance.spells
    assert consolidation.name == "consolidate" and consolidation.traceparent and not consolidation.error
    assert {phase.name.value for phase in consolidation.phases} == {"fetch", "load"}


@pytest.mark.long
async def test_each_stage_becomes_an_instance(rig: PipelineRig) -> None:
    """HydraServe section 6.2: the later stages first, then the first one."""
    await rig.place(staged_model("a"), "i")
    await rig.reaches("i", State.READY)
    await rig.consolidate("i.1", "node-2")
    later = await until(lambda: (i := rig.holding("i.1").instance).is_whole and i, "the later stage is whole")
    assert later.serves and (await rig.ask(later)).status_code == 200
    assert (await rig.ask(rig.holding("i").instance)).status_code == 200, "the pipeline serves on"
    await rig.consolidate("i")
    first = await until(lambda: (i := rig.holding("i").instance).is_whole and i, "the first stage is whole")
    assert (await rig.ask(first)).status_code == 200
    assert rig.granted("node-1") == {"i": 160} and rig.granted("node-2") == {"i.1": 160}


@pytest.mark.long
async def test_a_stage_with_too_little_memory_stays_one_and_is_asked_again(tmp_path: Path) -> None:
    async with pipelines(tmp_path, num_nodes=2, gpu_budgets="200MiB") as rig:
        await rig.place(staged_model("a"), "i")
        await rig.place(staged_model("b"), "j")
        first = await rig.reaches("i", State.READY)
        await rig.reaches("j", State.READY)
        await rig.consolidate("i")
        await until(lambda: "stays stage 0 of 2" in rig.holding("i").instance.reason, "it says why")
        assert (await rig.ask(first)).status_code == 200


# faults

PHASES = {  # held in this phase -> state of the first stage
    "launches": State.LOADING,  # its weights arrive before it does
    "fetches": State.STARTING,
    "loads": State.LOADING,
    "waits": State.STAGE_LOADED,
    "serves": State.READY,
    "grows": State.READY,
}


WITHHELD = ("fetches", "fetches.1", "waits.1", "grows/rest")


def held(phase: str) -> Model:
    holds = {"launches": {"launch_s": 80_000.0}, "loads": {"load_bytes_per_s": 1000.0}}
    return staged_model(phase, **holds.get(phase, {}))


async def in_every_phase(rig: PipelineRig, num_tokens: int = 1900) -> list["asyncio.Task[httpx.Response]"]:
    rig.withheld = {*WITHHELD}
    for phase in PHASES:
        await rig.place(held(phase), phase)
    for phase, state in PHASES.items():
        await rig.reaches(phase, state)
    await rig.reaches("loads.1", State.LOADING)
    asking = [asyncio.create_task(rig.ask(rig.holding(phase).instance, num_tokens)) for phase in ("serves", "grows")]
    await rig.consolidate("grows")
    await until(lambda: rig.holding("grows").instance.consolidating, "it grows")
    await until(lambda: rig.asked_for() == {*WITHHELD}, f"all fetches are asked for, not {rig.asked_for()}")
    return asking


async def expect_ends(rig: PipelineRig, phases: dict[str, str], *, gone: str = "") -> None:
    """Both stages of each end for that reason, nothing is left, no request hangs, and the next start answers."""
    nodes = [node_id for node_id in rig.agents if node_id != gone]
    for phase, why in phases.items():
        for name in (phase, f"{phase}.1"):
            await until(partial(rig.outcome, name), f"{name} has ended, not {rig.holding(name)}")
        reasons = " | ".join(rig.outcome(name)[1] for name in (phase, f"{phase}.1"))  # type: ignore[index]
        assert why in reasons, f"{phase}: {reasons}"
    await until(lambda: not any(rig.granted(node_id) for node_id in nodes), "all bytes are free")
    await until(lambda: not rig.living, f"no process is left, not {rig.living}")
    await until(lambda: not rig.controller.fleet.network.links, "no fetch is counted any more")
    for node_id in nodes:
        rig.agents[node_id].service.controller.validate()
    await rig.let(*WITHHELD)
    for phase in phases:
        await rig.place(quick(held(phase)), f"{phase}-2")
    for phase in phases:
        assert (await rig.ask(await rig.reaches(f"{phase}-2", State.READY))).status_code == 200


async def expect_broken(asking: list["asyncio.Task[httpx.Response]"]) -> None:
    for answer in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(answer, httpx.TransportError), "it ends as it does when an engine dies"


@pytest.mark.parametrize("which", ["", ".1"], ids=["the first stage", "the later stage"])
async def test_engines_that_are_killed(rig: PipelineRig, which: str) -> None:
    asking = await in_every_phase(rig)
    for phase in PHASES:
        os.kill(rig.engines[phase + which][0], signal.SIGKILL)
    starting = dict.fromkeys(("launches", "loads"), "the process ended before it was ready")
    ends = dict.fromkeys(PHASES, "the engine process ended by itself") | starting
    await expect_broken(asking)
    await expect_ends(rig, ends)


async def test_a_stage_that_is_lost_once_the_rest_is_loaded_ends_no_request(rig: PipelineRig) -> None:
    """Its KV cache is recomputed, and the instance continues alone."""
    slow = staged_model("a", load_bytes_per_s=200_000.0, stage_timeout_s=60.0)  # 3 s for the rest
    await rig.place(slow, "i")
    first = await rig.reaches("i", State.READY)
    answering = asyncio.create_task(rig.ask(first, 600))
    await rig.consolidate("i")
    await until(lambda: rig.holding("i").instance.consolidating, "the rest comes")
    os.kill(rig.engines["i.1"][0], signal.SIGSTOP)  # withholds its part of the KV cache
    log = rig.agents["node-1"].service.engines.log_path("i")
    await until(lambda: "the rest of the weights is loaded" in log.read_text(), "the rest is loaded")
    os.kill(rig.engines["i.1"][0], signal.SIGKILL)
    answer = await answering
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 600
    await until(lambda: rig.holding("i").instance.is_whole, "it runs all of the model")
    assert (await rig.ask(rig.holding("i").instance)).status_code == 200
    assert rig.granted("node-1") == {"i": 160} and not rig.granted("node-2")


@pytest.mark.long
async def test_later_stages_that_hang(tmp_path: Path) -> None:
    """The first stage waits for a step up to its timeout; a start, up to its deadline."""
    async with pipelines(tmp_path, num_nodes=2, start_deadline_s=20.0) as rig:
        asking = await in_every_phase(rig)
        for phase in PHASES:
            os.kill(rig.engines[f"{phase}.1"][0], signal.SIGSTOP)
        await expect_broken(asking)
        lost = dict.fromkeys(("serves", "grows"), "a later stage of the pipeline is lost")
        await expect_ends(rig, dict.fromkeys(PHASES, "after 20 s") | lost)


async def test_a_node_that_is_gone_with_its_stages(tmp_path: Path) -> None:
    async with pipelines(tmp_path, num_nodes=3) as rig:
        asking = await in_every_phase(rig)
        await rig.lose("node-2")
        for phase in PHASES:
            os.kill(rig.engines[f"{phase}.1"][0], signal.SIGKILL)
        await expect_broken(asking)
        await expect_ends(rig, dict.fromkeys(PHASES, ""), gone="node-2")


@pytest.mark.parametrize("node_id", ["node-1", pytest.param("node-2", marks=pytest.mark.long)])
async def test_an_agent_that_is_killed_in_every_phase(rig: PipelineRig, node_id: str) -> None:
    """A serving pipeline continues, a growing one is asked again, a starting one restarts or ends."""
    asking = await in_every_phase(rig, num_tokens=600)
    await rig.kill_agent(node_id)
    await rig.let(*WITHHELD)
    for answer in await asyncio.gather(*asking):
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 600
    await until(lambda: rig.holding("grows").instance.is_whole, "it has become whole")
    await rig.reaches("grows.1", State.STOPPED)
    for phase in ("fetches", "waits"):
        await rig.reaches(phase, State.READY)
        assert (await rig.ask(rig.holding(phase).instance)).status_code == 200
    for node in rig.agents.values():
        node.service.controller.validate()


async def test_the_rest_of_the_weights_that_does_not_come(rig: PipelineRig) -> None:
    """The pipeline serves on and becomes whole when asked again, unless its weights prove wrong: its own part was not
    checked before."""
    codes = {"full": "no_space", "away": "weights_unavailable", "wrong": "weights_corrupt"}
    rig.failing = {f"{name}/rest": code for name, code in codes.items()}
    agent = rig.agents["node-1"].service.controller
    agent.params = replace(agent.params, consolidate_retry_s=0.1)
    for name in codes:
        await rig.place(staged_model(name), name)
    asking = {name: asyncio.create_task(rig.ask(await rig.reaches(name, State.READY), 600)) for name in codes}
    for name in codes:
        await rig.consolidate(name)
    for name in ("full", "away"):
        said = f"did not arrive: broken: {codes[name]}"
        await until(lambda name=name, said=said: said in rig.holding(name).instance.reason, f"{name} says why")
        await until(lambda name=name: rig.granted("node-1").get(name) == 80, f"{name} has given its memory back")
    (state, why) = await until(partial(rig.outcome, "wrong"), "what is wrong ends")
    assert state is S.FAILED and "weights_corrupt" in why
    await expect_broken([asking.pop("wrong")])
    await until(lambda: rig.state("wrong.1") is State.STOPPED, "and so does its other stage")
    for name, answer in asking.items():
        assert (await answer).json()["usage"]["completion_tokens"] == 600
        await asyncio.sleep(0.1)
        await rig.consolidate(name)
        await until(lambda name=name: rig.holding(name).instance.is_whole, f"{name} has become whole")
        assert (await rig.ask(rig.holding(name).instance)).status_code == 200
    await until(lambda: not rig.controller.fleet.network.links, "no fetch is counted any more")
    await until(lambda: not rig.granted("node-2"), "the later stages' bytes are free")
    assert rig.granted("node-1") == {"full": 160, "away": 160}


async def test_engines_that_are_killed_while_a_pipeline_becomes_whole(rig: PipelineRig) -> None:
    """The first one while the KV cache moves; either one while the later becomes its own instance."""
    names = ("moves", "grows", "carries")
    rig.withheld = {"grows.1/rest", "carries.1/rest"}
    for name in names:
        await rig.place(staged_model(name, stage_timeout_s=60.0, time_scale=10.0), name)
    asking = [asyncio.create_task(rig.ask(await rig.reaches(name, State.READY), 1900)) for name in names]
    await rig.reaches("moves.1", State.READY)
    os.kill(rig.engines["moves.1"][0], signal.SIGSTOP)
    await rig.consolidate("moves")
    for name in ("grows.1", "carries.1"):
        await rig.consolidate(name, "node-2")
    for name in ("moves", "grows.1", "carries.1"):
        await until(lambda name=name: rig.holding(name).instance.consolidating, f"{name} becomes whole")
    await asyncio.sleep(0.2)
    for name in ("moves", "grows.1", "carries"):
        os.kill(rig.engines[name][0], signal.SIGKILL)
    await expect_broken(asking)
    for name in names:
        for stage in (name, f"{name}.1"):
            await until(partial(rig.outcome, stage), f"{stage} has ended, not {rig.holding(stage)}")
    await until(lambda: not (rig.granted("node-1") or rig.granted("node-2")), "all bytes are free")
    await until(lambda: not rig.living, f"no process is left, not {rig.living}")
    rows = [rig.agents["node-1"].row(name + stage) for name in names for stage in ("", ".1")]
    assert not any(row.consolidating for row in rows if row is not None)
    await until(lambda: not rig.controller.fleet.network.links, "no fetch is counted any more")
    await rig.place(staged_model("next"), "next")
    assert (await rig.ask(await rig.reaches("next", State.READY))).status_code == 200


async def test_two_placers_that_decide_otherwise(tmp_path: Path) -> None:
    """The replaced placer does not know it. One pipeline serves in the end, or the start fails and the next one
    serves."""
    async with pipelines(tmp_path, num_nodes=3) as rig:
        later = await rig.start_placer(2, on_the_last_nodes)
        try:
            for name in ("one", "two", "three"):
                await rig.place(staged_model(name), name)
            for name in ("one", "two", "three"):
                await until(
                    lambda name=name: (
                        rig.outcome(name) or any(h.state is State.READY for h in rig.holdings(name) if not h.is_over)
                    ),
                    f"{name} serves, or has failed",
                )
        finally:
            await rig.placer.stop()
            rig.placer = later
        await rig.place(staged_model("next"), "next")
        assert (await rig.ask(await rig.reaches("next", State.READY))).status_code == 200
        for name in ("one", "two", "three"):
            serving = [h.instance for h in rig.holdings(name) if h.state is State.READY]
            assert len(serving) <= 1, "one of them at most"
            for instance in serving:
                assert (await rig.ask(instance)).status_code == 200
        transient = (State.STARTING, State.LOADING, State.STAGE_LOADED, State.JOINING, State.RESTARTING)
        await until(lambda: not rig.in_states(*transient), f"nothing still comes, not {rig.in_states(*transient)}")
        for agent in rig.agents.values():
            agent.service.controller.validate()


async def test_a_placer_that_is_replaced_in_every_phase(rig: PipelineRig) -> None:
    """The successor reads the rows: it joins pending stages, requests the rest for growing ones, and counts fetches."""
    asking = await in_every_phase(rig, num_tokens=600)
    await rig.placer.stop()
    rig.placer = await rig.start_placer(2)
    await until(lambda: {"fetches", "fetches.1"} <= counted(rig), f"it counts what is fetched, not {counted(rig)}")
    await rig.let(*WITHHELD)
    assert (await rig.ask(await rig.reaches("fetches", State.READY))).status_code == 200
    await until(lambda: rig.holding("grows").instance.is_whole, "it has become whole")
    await rig.reaches("grows.1", State.STOPPED)
    for answer in asyncio.as_completed(asking):
        assert (await answer).status_code == 200
    await until(lambda: not counted(rig), f"nothing is fetched, not {counted(rig)}")


def counted(rig: PipelineRig) -> set[str]:
    links = rig.controller.fleet.network.links.values()
    found = {fetch.fetch_id for link in links for fetch in link.fetches}
    return {name for name in found if name.startswith(("fetches", "grows"))}
