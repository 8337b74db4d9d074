"""The control socket of an engine process, both ends. Lane: fast, 0.3 s."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from glowplug.engines import control
from glowplug.engines.probe import ask_control


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if question["do"] == "fail":
        raise ValueError("cannot")
    return {"done": question["do"]}


@pytest.mark.parametrize("folder", ["short", "long-" + "x" * 90], ids=["short path", "path too long for an address"])
async def test_each_question_has_its_answer(tmp_path: Path, folder: str) -> None:
    run_dir = tmp_path / folder
    run_dir.mkdir()
    control.serve(run_dir, answer)
    answers = await asyncio.gather(*(ask_control(run_dir, {"do": number}, 5.0) for number in range(20)))
    assert [one["done"] for one in answers] == list(range(20))


async def test_what_fails_inside_is_an_error_outside_and_the_next_question_is_answered(tmp_path: Path) -> None:
    control.serve(tmp_path, answer)
    with pytest.raises(RuntimeError, match="ValueError: cannot"):
        await ask_control(tmp_path, {"do": "fail"}, 5.0)
    assert await ask_control(tmp_path, {"do": "go on"}, 5.0) == {"done": "go on"}


async def test_a_process_that_does_not_listen_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await ask_control(tmp_path, {"do": "state"}, 5.0)


async def test_an_answer_that_takes_too_long_is_an_error_and_one_who_leaves_is_no_harm(tmp_path: Path) -> None:
    def slow(question: dict[str, Any]) -> dict[str, Any]:
        time.sleep(question["s"])
        return {}

    control.serve(tmp_path, slow)
    with pytest.raises(TimeoutError):
        await ask_control(tmp_path, {"s": 0.3}, 0.05)
    assert await ask_control(tmp_path, {"s": 0.0}, 5.0) == {}
