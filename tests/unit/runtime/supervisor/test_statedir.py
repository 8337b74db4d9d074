"""One fleet per directory: lock, secrets, fleet.json."""

import json
import os
import stat
from pathlib import Path

import psutil
import pytest

from glowplug.runtime.errors import AlreadyRunning, CannotStart
from glowplug.runtime.privileges import USERS
from glowplug.runtime.supervisor.statedir import StateDir, disk_errors, read_fleet, write_private


def test_a_second_holder_is_told_who_has_it(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "s"), StateDir(tmp_path / "s")
    first.lock()
    with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}.*glowplug down"):
        second.lock()
    first.unlock()
    second.lock()


def test_too_little_room_names_the_place_and_the_setting(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"MiB free.*GLOWPLUG_STATE_DIR") as refused:
        StateDir(tmp_path).lock(min_free_bytes=1 << 60)
    assert str(tmp_path) in str(refused.value)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotStart, match="cannot use state directory"):
        StateDir(tmp_path / "file").lock()


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    first = state.secrets()
    assert first == state.secrets()
    assert len({first.admin_token, first.api_key, *first.passwords.values()}) == 2 + len(USERS)
    assert first.passwords.keys() == set(USERS) and min(map(len, first.passwords.values())) > 30
    assert min(len(first.admin_token), len(first.api_key)) > 30
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600


def test_given_secrets_win_and_are_not_written(tmp_path: Path) -> None:
    assert StateDir(tmp_path).secrets(admin_token="mine").admin_token == "mine"
    assert "mine" not in (tmp_path / "secrets.json").read_text()
    assert StateDir(tmp_path).secrets().admin_token.startswith("gpa-")


def test_broken_secrets_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{half")
    assert StateDir(tmp_path).secrets().admin_token


def test_fleet_json_of_a_dead_or_another_process_is_no_fleet(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert read_fleet(tmp_path) is None
    me = psutil.Process()
    state.write_fleet({"pid": me.pid, "pid_started_at": me.create_time()})
    assert read_fleet(tmp_path) is not None
    state.write_fleet({"pid": me.pid, "pid_started_at": me.create_time() - 100})  # a reused pid
    assert read_fleet(tmp_path) is None
    (tmp_path / "fleet.json").write_text("[]")
    assert read_fleet(tmp_path) is None


def test_private_files_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_private(path, {"a": 1})
    with pytest.raises(TypeError):
        write_private(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"disk is full.*--state-dir"), disk_errors(tmp_path):
        raise OSError(28, "No space left on device")


def test_a_directory_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    made = tmp_path / "s"
    made.mkdir(mode=0o755)
    state = StateDir(made)
    state.lock()
    state.secrets()
    state.unlock()
    made.chmod(0o755)
    (made / "secrets.json").chmod(0o644)
    again = StateDir(made)
    again.lock()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE((made / "secrets.json").stat().st_mode) == 0o600
    again.unlock()


def test_a_directory_of_other_things_that_others_can_read_is_refused_and_left_alone(tmp_path: Path) -> None:
    made = tmp_path / "home"
    made.mkdir(mode=0o755)
    (made / "letter.txt").write_text("")
    with pytest.raises(CannotStart, match="chmod 700"):
        StateDir(made).lock()
    assert stat.S_IMODE(made.stat().st_mode) == 0o755
    made.chmod(0o700)
    StateDir(made).lock()
