"""Lines of children: prefixes, a terminal that does not keep up, a disk that is full for a while."""

import io
import shutil
from pathlib import Path

from glowplug.runtime.supervisor.output import Output


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
    shutil.rmtree(tmp_path / "logs")  # opening a file below it fails from now on
    output.notice("one")
    output.notice("two")
    (tmp_path / "logs").mkdir()
    output.notice("three")
    output.close()
    said = stream.getvalue()
    assert said.count("logs are not written") == 1
    assert "one" in said and "two" in said and "three" in said
    assert (tmp_path / "logs" / "supervisor.log").read_text() == "three\n"
