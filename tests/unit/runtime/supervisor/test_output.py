"""Lines of children: files, prefixes, a terminal that does not keep up, a disk that is full."""

import io
from pathlib import Path

from glowplug.runtime.supervisor.output import Output


def test_lines_go_to_a_file_each_and_to_the_terminal_with_a_prefix(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path, max_bytes=10_000, stream=stream, width=6)
    output.line("nats", "up")
    output.line("agent", "joined")
    output.close()
    assert stream.getvalue() == "nats   | up\nagent  | joined\n"
    assert (tmp_path / "nats.log").read_text() == "up\n"


def test_hidden_logs_still_go_to_the_files(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path, max_bytes=10_000, stream=stream, show_logs=False)
    output.line("nats", "up")
    output.say("ready")
    output.close()
    assert stream.getvalue() == "ready\n"
    assert (tmp_path / "nats.log").read_text() == "up\n"


def test_files_stay_bounded(tmp_path: Path) -> None:
    output = Output(tmp_path, max_bytes=4096, stream=io.StringIO(), show_logs=False)
    for i in range(1000):
        output.line("nats", f"line {i:04d} {'x' * 20}")
    output.close()
    kept = (tmp_path / "nats.log").read_text() + (tmp_path / "nats.log.1").read_text()
    assert "line 0999" in kept
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 4096 + 100


def test_a_reader_that_has_gone_does_not_stop_the_fleet(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path, max_bytes=10_000, stream=stream)
    stream.close()
    for i in range(100):
        output.line("nats", f"{i}")
    output.close()
    assert (tmp_path / "nats.log").read_text().splitlines()[-1] == "99"


def test_a_full_disk_is_told_once_and_the_terminal_goes_on(tmp_path: Path) -> None:
    stream = io.StringIO()
    output = Output(tmp_path / "logs", max_bytes=10_000, stream=stream)
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("")  # opening a file below it fails from now on
    output.line("nats", "one")
    output.line("nats", "two")
    output.close()
    said = stream.getvalue()
    assert said.count("no longer written") == 1
    assert "one" in said and "two" in said
