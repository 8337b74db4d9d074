"""Children's output: log files and a slow terminal."""

import io
import os
import shutil
from pathlib import Path

from glowplug.runtime.supervisor.output import LONGEST_LINE, LogFile, Output


def file(tmp_path: Path, max_bytes: int = 10_000) -> tuple[LogFile, int]:
    made = LogFile(tmp_path / "nats.log", max_bytes)
    return made, made.open()


def test_whole_lines_are_read_as_they_come_and_the_rest_at_the_end(tmp_path: Path) -> None:
    log, fd = file(tmp_path)
    os.write(fd, b"one\ntwo\nthr")
    assert log.poll() == ["one", "two"]
    assert log.poll() == []
    os.write(fd, b"ee\nhalf")
    assert log.poll() == ["three"]
    assert log.rest() == ["half"] and log.rest() == []
    os.close(fd)


def test_lines_of_an_earlier_run_stay_in_the_file_and_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "nats.log").write_text("old\n")
    log, fd = file(tmp_path)
    os.write(fd, b"new\n")
    assert log.poll() == ["new"]
    assert (tmp_path / "nats.log").read_text() == "old\nnew\n"
    os.close(fd)


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    log, fd = file(tmp_path, 1_000_000)
    os.write(fd, b"x" * (LONGEST_LINE + 1))
    assert [len(line) for line in log.poll()] == [LONGEST_LINE + 1]
    os.close(fd)


def test_the_file_is_emptied_under_its_writer_and_the_newest_is_kept(tmp_path: Path) -> None:
    log, fd = file(tmp_path, 4096)
    seen = []
    for i in range(1000):
        os.write(fd, f"line {i:04d} {'x' * 20}\n".encode())
        seen += log.poll()
    assert len(seen) == 1000
    kept = (tmp_path / "nats.log.1").read_text() + (tmp_path / "nats.log").read_text()
    assert "line 0999" in kept
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 4096 + 100
    os.close(fd)


def test_what_was_written_while_nobody_read_is_cut_to_its_newest_bytes(tmp_path: Path) -> None:
    log, fd = file(tmp_path, 4096)
    for i in range(1000):
        os.write(fd, f"line {i:04d} {'x' * 20}\n".encode())
    assert log.poll()[-1].startswith("line 0999")
    os.write(fd, b"after\n")
    assert log.poll() == ["after"]
    assert (tmp_path / "nats.log.1").stat().st_size <= 4096
    assert (tmp_path / "nats.log").read_text() == "after\n"
    os.close(fd)


def test_lines_go_to_the_terminal_with_a_prefix(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path, max_bytes=10_000, stream=stream, width=6)
    output.line("nats", "up")
    output.line("agent", "joined")
    output.close()
    assert stream.getvalue() == "nats   | up\nagent  | joined\n"


def test_hidden_logs_are_not_shown(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path, max_bytes=10_000, stream=stream, show_logs=False)
    output.line("nats", "up")
    output.say("ready")
    output.close()
    assert stream.getvalue() == "ready\n"


def test_the_supervisors_own_file_stays_bounded(tmp_path: Path) -> None:
    output = Output(tmp_path, max_bytes=4096, stream=io.StringIO())
    for i in range(1000):
        output.notice(f"line {i:04d} {'x' * 20}")
    output.close()
    kept = (tmp_path / "supervisor.log").read_text() + (tmp_path / "supervisor.log.1").read_text()
    assert "line 0999" in kept
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 4096 + 100


def test_a_reader_that_has_gone_does_not_stop_the_fleet(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path, max_bytes=10_000, stream=stream)
    stream.close()
    for i in range(100):
        output.notice(f"{i}")
    output.close()
    assert (tmp_path / "supervisor.log").read_text().splitlines()[-1] == "99"


def test_a_full_disk_is_told_once_and_files_are_written_again_when_it_is_not(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path / "logs", max_bytes=10_000, stream=stream)
    shutil.rmtree(tmp_path / "logs")  # opening a file below it fails
    output.notice("one")
    output.notice("two")
    (tmp_path / "logs").mkdir()
    output.notice("three")
    output.close()
    said = stream.getvalue()
    assert said.count("logs are not written") == 1
    assert "one" in said and "two" in said and "three" in said
    assert (tmp_path / "logs" / "supervisor.log").read_text() == "three\n"
