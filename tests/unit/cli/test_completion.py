"""Shell completion with names of the running fleet."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glowplug.cli import completion, contexts, main
from glowplug.cli.client import FleetClient
from glowplug.cli.terminal import CliError

ROWS: dict[str, list[dict[str, Any]]] = {
    "/v1/models": [{"name": "chat"}, {"name": "code"}],
    "/v1/nodes": [{"node_id": "node-1", "gpus": [{"gpu_id": "node-1/0"}]}],
    "/v1/instances": [{"instance_id": "c-1"}],
    "/v1/tenants": [{"name": "lab"}, {"name": "shop"}],
    "/v1/keys": [{"prefix": "gp-abcdefgh", "state": "active"}, {"prefix": "gp-zzzzzzzz", "state": "revoked"}],
}
Offered = Callable[..., list[str]]


class Fleet(FleetClient):
    def rows(self, service: str, path: str, **params: Any) -> list[dict[str, Any]]:
        return ROWS[path]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offered:
    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("_GLOWPLUG_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("glowplug", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setattr(sys, "argv", ["glowplug"])
        with pytest.raises(SystemExit):
            main.main()
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.split()

    monkeypatch.setattr(completion, "connect", lambda _: Fleet({}, document={"processes": [{"name": "placer-1"}]}))
    return ask


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("load ", ["chat", "code"]),
        ("run co", ["code"]),
        ("pull c", ["chat", "code"]),
        ("cordon ", ["node-1"]),
        ("why ", ["c-1", "chat", "code", "node-1/0"]),
        ("logs ", ["c-1", "chat", "code", "placer-1"]),
        ("ps ", []),
        ("ps --all --model ch", ["chat"]),
        ("load chat --node ", ["node-1"]),
        ("load --to ready ", ["chat", "code"]),
        ("load --dry", ["--dry-run"]),
        ("tenants remove ", ["lab", "shop"]),
        ("keys create --tenant s", ["shop"]),
        ("keys revoke ", ["gp-abcdefgh"]),
        ("keys r", ["revoke", "rotate"]),
        ("mod", ["models"]),
        ("models --js", ["--json"]),
    ],
)
def test_a_word_is_completed_by_what_it_names(offered: Offered, line: str, names: list[str]) -> None:
    assert offered(*line.split(" ")) == names


def test_contexts_are_offered_by_name(offered: Offered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    contexts.record(tmp_path / "alpha" / "s")
    assert offered("context", "use", "a") == ["alpha"] and offered("context", "r") == ["rm"]


def test_no_fleet_is_no_offer_and_no_word(offered: Offered, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Path | None) -> FleetClient:
        raise CliError("no fleet")

    monkeypatch.setattr(completion, "connect", none)
    assert offered("load", "") == []


def test_a_fleet_that_hangs_is_waited_for_no_longer_than_a_person_likes(
    offered: Offered, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    class Hanging(FleetClient):
        def rows(self, service: str, path: str, **params: Any) -> list[dict[str, Any]]:
            asked.append(self.timeout_s)
            raise CliError("timed out")

    monkeypatch.setattr(completion, "connect", lambda _: Hanging({}))
    assert offered("why", "") == []
    assert sum(asked) <= 0.3 and max(len(names) for names in completion.WORDS.values()) * completion.CALL_S <= 0.31


def test_every_verb_that_is_completed_is_a_verb() -> None:
    assert completion.WORDS.keys() <= {path.rsplit(".", 1)[1] for path in main._VERBS}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str, tmp_path: Path) -> None:
    env = os.environ | {"_GLOWPLUG_COMPLETE": f"source_{shell}"}
    code = "import sys; sys.argv[0] = 'glowplug'; from glowplug.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"_GLOWPLUG_COMPLETE=complete_{shell}" in done.stdout, done.stderr
    if path := shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        subprocess.run([path, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_install_writes_into_the_home_of_its_shell(tmp_path: Path) -> None:
    """The command detects its shell, hence a real one."""
    env = os.environ | {"HOME": str(tmp_path)}
    code = "import sys; sys.argv[0] = 'glowplug'; from glowplug.cli.main import main; main()"
    line = f'{sys.executable} -c "{code}" --install-completion; true'
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=60)
    assert "bash completion installed" in done.stdout, done.stderr
    assert "complete_bash" in (tmp_path / ".bash_completions" / "glowplug.sh").read_text()


def test_the_state_folder_of_the_line_is_the_one_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: Offered
) -> None:
    asked: list[Path | None] = []

    def connect(folder: Path | None) -> FleetClient:
        asked.append(folder)
        return Fleet({})

    monkeypatch.setattr(completion, "connect", connect)
    assert offered("load", "--state-dir", str(tmp_path), "ch") == ["chat"]
    assert asked == [tmp_path]
