"""Files that are no files, that are too large, and file systems that do not answer."""

import os
import threading
from pathlib import Path

import pytest

from glowplug.weights.files import NoAnswer, PatientReader, read_regular
from tests.waiting import until


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "too large", "link to a pipe", "missing"])
def test_anything_else_is_refused_at_once_with_its_reason(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    elif kind == "too large":
        path.write_bytes(b"123456")
    with pytest.raises(OSError) as caught:
        read_regular(path, 5)
    assert caught.value.strerror


async def test_what_does_not_answer_is_given_up_and_holds_one_thread() -> None:
    reader, answer, calls = PatientReader(0.05), threading.Event(), []

    def work() -> str:
        calls.append(1)
        answer.wait()
        return "late"

    with pytest.raises(NoAnswer, match=r"not answered within 0\.05 s"):
        await reader.run("mount", work)
    with pytest.raises(NoAnswer, match="still does not answer"):
        await reader.run("mount", work)
    assert calls == [1] and reader.is_waiting("mount")
    assert await reader.run("another", lambda: "at once") == "at once"
    answer.set()
    await until(lambda: not reader.is_waiting("mount"))
    assert await reader.run("mount", lambda: "again") == "again"


async def test_errors_come_out_where_they_are_waited_for() -> None:
    def work() -> None:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(FileNotFoundError):
        await PatientReader(10.0).run("a", work)
