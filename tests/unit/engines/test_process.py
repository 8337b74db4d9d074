"""Starting, finding and stopping engine processes."""

import asyncio
import os
import signal
import struct
import sys
from pathlib import Path

import pytest

from glowplug.domain.gguf import InvalidGguf
from glowplug.engines import probe, process, rendezvous
from glowplug.engines.gguf import read_facts

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); time.sleep(60)",
]


def start(argv: list[str], folder: Path) -> tuple[int, float]:
    pid = process.spawn(argv, cwd=folder, log_path=folder / "log", env=os.environ)
    started = process.started_at(pid)
    assert started is not None
    while "up" not in process.log_tail(folder / "log"):
        assert process.is_alive(pid, started)
    return pid, started


@pytest.mark.parametrize("waits_for_group", [False, True])
async def test_a_process_leads_its_own_session_and_ends_on_sigterm(tmp_path: Path, waits_for_group: bool) -> None:
    pid, started = start(SLEEPER, tmp_path)
    assert os.getsid(pid) == pid
    await process.stop_group(pid, started, grace_s=10.0, waits_for_group=waits_for_group)
    assert not process.is_alive(pid, started)


async def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    pid, started = start(STUBBORN, tmp_path)
    assert len(process.group_members(pid, started)) == 2
    await process.stop_group(pid, started, grace_s=0.2)
    assert process.group_members(pid, started) == []


async def test_children_left_by_a_dead_leader_are_ended_too(tmp_path: Path) -> None:
    pid, started = start(STUBBORN, tmp_path)
    os.kill(pid, signal.SIGKILL)
    while process.is_alive(pid, started):
        pass
    assert len(process.group_members(pid, started)) == 1
    await process.stop_group(pid, started, grace_s=0.0)
    assert process.group_members(pid, started) == []


async def test_another_process_with_that_pid_is_left_alone(tmp_path: Path) -> None:
    pid, started = start(SLEEPER, tmp_path)
    assert not process.is_alive(pid, started - 5.0)
    await process.stop_group(pid, started - 5.0, grace_s=0.1)
    assert process.is_alive(pid, started)
    process.kill_group(pid, started)


def test_engines_do_not_get_our_settings_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["GLOWPLUG_ADMIN_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"]
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HF_HOME", "/home/hf")
    env = process.engine_environment({"X": "1", "AWS_REGION": "given"})
    assert not env.keys() & set(secrets)
    assert (env["X"], env["AWS_REGION"], env["HF_HOME"]) == ("1", "given", "/home/hf")


def test_log_tail_gives_the_last_lines_that_say_something(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert process.log_tail(path) == ""
    path.write_text("".join(f"line {i}\n\n" for i in range(100)))
    assert process.log_tail(path, num_lines=2) == "line 98\nline 99"


def test_a_message_is_read_as_written_and_absent_before(tmp_path: Path) -> None:
    assert rendezvous.read(tmp_path, rendezvous.GO) is None
    rendezvous.write(tmp_path, rendezvous.GO, {"path": "/x"})
    assert rendezvous.wait(tmp_path, rendezvous.GO, timeout_s=0.0) == {"path": "/x"}
    assert [path.name for path in tmp_path.iterdir()] == [rendezvous.GO]


def test_waiting_ends_with_the_time_or_the_directory(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"go\.json"):
        rendezvous.wait(tmp_path, rendezvous.GO, timeout_s=0.0, poll_s=0.001)
    with pytest.raises(FileNotFoundError, match="gone"):
        rendezvous.wait(tmp_path / "none", rendezvous.GO, timeout_s=5.0)


def test_samples_are_summed_over_labels() -> None:
    text = b'# HELP a b\na{x="1 2"} 2.0\na{x="3"} 1\nab 5\nb 0.5\n'
    assert probe.sample_sum(text, ("a", "b")) == 3.5
    assert probe.sample_sum(text, ("c",)) == 0.0


@pytest.mark.parametrize(
    ("answer", "timeout_s", "error"),
    [
        (b"", 2.0, ConnectionError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", 2.0, ConnectionError),
        (b"nonsense\r\n\r\n", 2.0, ConnectionError),
        (None, 0.1, TimeoutError),
    ],
)
async def test_a_broken_answer_and_none_have_their_errors(
    answer: bytes | None, timeout_s: float, error: type[Exception]
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        writer.write(answer or b"")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        with pytest.raises(error):
            await probe.ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/", timeout_s)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def a_gguf(path: Path, version: int = 3) -> Path:
    values = [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("bc"),
        _text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8),
        *(
            _text(f"llama.{key}") + struct.pack("<II", 4, number)
            for key, number in {
                "block_count": 30,
                "context_length": 8192,
                "embedding_length": 576,
                "attention.head_count": 9,
                "attention.head_count_kv": 3,
            }.items()
        ),
        _text("tokenizer.chat_template") + struct.pack("<I", 8) + _text("{{ x }}"),
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(values)) + b"".join(values))
    return path


def test_facts_of_a_gguf_file(tmp_path: Path) -> None:
    facts = read_facts(a_gguf(tmp_path / "m.gguf"))
    assert facts.context_tokens == 8192
    assert facts.kv_bytes_per_token == 30 * 3 * (64 + 64) * 2
    assert facts.chat_template == "{{ x }}"


def test_a_gguf_file_cut_within_its_tensors_says_how_much_is_missing(tmp_path: Path) -> None:
    q4_1_and_float32 = (
        _text("a") + struct.pack("<IQQIQ", 2, 64, 2, 3, 0) + _text("b") + struct.pack("<IQIQ", 1, 8, 0, 96)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + q4_1_and_float32
    whole = head + bytes(-len(head) % 32) + bytes(96 + 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    assert read_facts(path).architecture == ""
    path.write_bytes(whole[:-1])
    with pytest.raises(InvalidGguf, match=f"cut short: {len(whole) - 1} bytes of {len(whole)}"):
        read_facts(path)
    with pytest.raises(InvalidGguf, match="directory"):
        read_facts(tmp_path)


def test_every_cut_of_a_gguf_file_is_refused_or_read_and_never_crashes(tmp_path: Path) -> None:
    whole = a_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidGguf, match=r"cut\.gguf"):
            read_facts(cut)


def test_another_version_is_refused_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(InvalidGguf, match="version 9"):
        read_facts(a_gguf(tmp_path / "m.gguf", version=9))
