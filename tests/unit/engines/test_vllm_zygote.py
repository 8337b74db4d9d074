"""The driver's side of the zygote, against a stand-in without vLLM."""

import asyncio
import os
import sys
import textwrap
from pathlib import Path

import pytest

import glowplug
from glowplug.domain.errors import EngineFailed
from glowplug.engines.vllm_zygote import Zygote
from tests.waiting import until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

# Stands where vLLM's interpreter would: the zygote's own loop, with servers that only end with status 0.
STAND_IN = textwrap.dedent(f"""\
    #!{sys.executable}
    import os, pathlib, sys
    sys.path.insert(0, {str(Path(glowplug.__file__).parents[1])!r})
    from glowplug_vllm.parked import zygote
    path = pathlib.Path(sys.argv[sys.argv.index("--socket") + 1])
    try:
        held = zygote.lock(path)
    except zygote.AlreadyParked:
        sys.exit(75)
    zygote.Zygote(path, lambda question: os._exit(0), linger_s=20.0, inherited=(held,)).run()
""")


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return path


async def exit_of(run_dir: Path) -> str:
    await until((run_dir / "exit.json").exists)
    return (run_dir / "exit.json").read_text()


async def test_the_first_to_ask_parks_and_the_others_share_it(interpreter: Path, tmp_path: Path) -> None:
    three = [Zygote(interpreter, tmp_path / "z", {}, 30.0) for _ in range(3)]
    await asyncio.gather(*(zygote.ensure() for zygote in three))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    pids = [await zygote.start(run_dir, run_dir / "log", {}) for zygote in three]
    assert len(set(pids)) == 3
    assert '"code": 0' in await exit_of(run_dir)
    for zygote in three:
        await zygote.close()
    assert not three[0].socket_path.exists()


async def test_a_refusal_is_told(interpreter: Path, tmp_path: Path) -> None:
    zygote = Zygote(interpreter, tmp_path / "z", {}, 30.0)
    with pytest.raises(EngineFailed, match="refuses: "):
        await zygote.start(tmp_path, tmp_path / "log", {"A": 5})  # type: ignore[dict-item]
    await zygote.close()


async def test_a_parking_that_fails_says_why(tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho ImportError: no module named vllm >&2\nexit 3\n")
    failing.chmod(0o755)
    with pytest.raises(EngineFailed, match=r"status 3\)\n.*no module named vllm"):
        await Zygote(failing, tmp_path / "z", dict(os.environ), 30.0).ensure()


async def test_a_parking_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 5\n")
    slow.chmod(0o755)
    with pytest.raises(EngineFailed, match=r"did not park within 0\.2 s"):
        await Zygote(slow, tmp_path / "z", {}, 0.2).ensure()


async def test_giving_back_what_was_never_held_is_harmless(interpreter: Path, tmp_path: Path) -> None:
    zygote = Zygote(interpreter, tmp_path / "z", {}, 30.0)
    await zygote.close()
    assert not (tmp_path / "z").exists()
