"""Contexts: how a command finds its fleet."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import glowplug
from glowplug.cli import contexts, up
from glowplug.cli.client import connect
from glowplug.cli.main import app_of
from glowplug.cli.terminal import CliError, NoFleet

FAR = "http://far:8005"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No fleet in folders or environment."""
    for name in ("STATE_DIR", "AUTOSCALER_URL", "PLACER_URL", "ADMIN_TOKEN", "API_KEY"):
        monkeypatch.delenv(f"GLOWPLUG_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path


def runs(folder: Path) -> Path:
    """A state folder of a fleet in this process; the parent folder's name is its admin token."""
    own = psutil.Process()
    document = {"pid": own.pid, "pid_started_at": own.create_time(), "urls": {"data": "http://here:1"}}
    document |= {"admin_token": folder.parent.name, "api_key": "", "nats_url": ""}
    folder.mkdir(parents=True)
    (folder / "fleet.json").write_text(json.dumps(document))
    return folder


def typed(*argv: str, code: int = 0) -> str:
    done = CliRunner().invoke(app_of("context"), ["context", *argv])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


def test_a_fleet_is_found_from_any_folder_once_it_is_recorded(here: Path) -> None:
    assert contexts.record(runs(here / "alpha" / ".glowplug")) == "alpha"
    assert connect().admin_token == "alpha"
    assert glowplug.Client()._fleet.admin_token == "alpha"
    assert contexts.path().stat().st_mode & 0o777 == 0o600 and contexts.path().parent.stat().st_mode & 0o077 == 0


def test_what_is_nearer_goes_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts.record(runs(here / "current" / "s"))
    monkeypatch.setenv("GLOWPLUG_AUTOSCALER_URL", FAR)
    assert connect().urls == {"autoscaler": FAR}, "the environment goes before the current context"
    runs(here / "mine" / ".glowplug")
    assert connect().admin_token == "mine", "the working folder goes before both"
    monkeypatch.setenv("GLOWPLUG_STATE_DIR", str(runs(here / "environment" / "s")))
    assert connect().admin_token == "environment"
    assert connect(runs(here / "option" / "s")).admin_token == "option"


def test_a_folder_that_is_named_or_here_is_never_passed_over_for_the_context(here: Path) -> None:
    contexts.record(runs(here / "current" / "s"))
    with pytest.raises(NoFleet, match=r"no fleet runs in .*/elsewhere: start one"):
        connect(here / "elsewhere")
    (here / "mine" / ".glowplug").mkdir()
    with pytest.raises(NoFleet, match=r"no fleet runs in .*/mine/\.glowplug: start one"):
        connect()


def test_a_context_without_its_fleet_is_named_in_the_error(here: Path) -> None:
    contexts.record(here / "gone" / ".glowplug")
    with pytest.raises(NoFleet, match=r"/gone/\.glowplug \(context gone; `glowplug context` lists others\)"):
        connect()


def test_two_folders_of_one_name_are_two_contexts_and_one_folder_is_one(here: Path) -> None:
    first, second = here / "a" / "same" / ".glowplug", here / "b" / "same" / ".glowplug"
    assert [contexts.record(folder) for folder in (first, second, first, second)] == ["same", "same-2"] * 2
    assert contexts.record(Path("/ /.glowplug")) == "fleet"
    assert contexts.read().current == "fleet"


def test_contexts_are_listed_chosen_and_removed(here: Path) -> None:
    assert typed() == "no context is known: `glowplug up` and `glowplug context add` create one\n"
    contexts.record(runs(here / "alpha" / "s"))
    contexts.record(here / "beta" / "s")
    states = {row["context"]: (row["current"], row["state"]) for row in json.loads(typed("--json"))}
    assert states == {"alpha": (False, "runs"), "beta": (True, "stopped")}
    assert "now use alpha" in typed("use", "alpha")
    assert [line.split()[0] for line in typed().splitlines()[1:]] == ["*", "beta"]
    with pytest.raises(CliError, match="there is no context 'gamma'; there are: alpha, beta"):
        typed("use", "gamma")
    typed("rm", "alpha")
    assert contexts.read().current == "" and list(contexts.read().named) == ["beta"]
    assert (here / "alpha" / "s" / "fleet.json").exists()


def test_a_fleet_elsewhere_has_its_tokens_from_a_private_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_ADMIN_TOKEN", "of another fleet")
    monkeypatch.setenv("GLOWPLUG_API_KEY", "of the environment")
    tokens = here / "tokens"
    tokens.write_text(
        "# as `glowplug env` prints them\nexport GLOWPLUG_ADMIN_TOKEN='a b'\nGLOWPLUG_NATS_URL=nats://far\n"
    )
    tokens.chmod(0o644)
    with pytest.raises(CliError, match=r"others can read .*tokens, which holds tokens: chmod 600"):
        typed("add", "prod", "--autoscaler", FAR, "--env-file", str(tokens))
    assert not contexts.read().named
    tokens.chmod(0o600)
    typed("add", "prod", "--autoscaler", f"{FAR}/", "--env-file", str(tokens))
    fleet = connect()
    assert (fleet.urls, fleet.admin_token, fleet.nats_url) == ({"autoscaler": FAR}, "a b", "nats://far")
    assert fleet.api_key == "of the environment", "which fills in what the file does not say"
    assert "a b" not in contexts.path().read_text()
    with pytest.raises(CliError, match="context prod is a fleet that runs elsewhere"):
        up.folder_of(None)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("x",), "no address is given"),
        (("x", "--placer", "far:8004"), "--placer 'far:8004' is not an http address"),
        (("a b", "--placer", FAR), "'a b' is not a context name"),
        (("there", "--placer", FAR), "there is a context there already"),
    ],
)
def test_what_cannot_be_added_is_refused(here: Path, argv: tuple[str, ...], said: str) -> None:
    contexts.record(here / "there" / "s")
    with pytest.raises(CliError, match=said):
        typed("add", *argv)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"current": "a"}',
        '{"current": "", "contexts": {"a": {"x": 1}}}',
        '{"current": "a", "contexts": {"a": {"state_dir": 7}}}',
    ],
)
def test_a_damaged_file_is_one_line_and_only_where_it_is_needed(here: Path, text: str) -> None:
    contexts.path().parent.mkdir(parents=True)
    contexts.path().write_text(text)
    with pytest.raises(CliError, match=r"context\.json is damaged or of another version"):
        connect()
    (line,) = up._recorded(here / "s")
    assert line.startswith("  other folders do not find this fleet: ")
    assert connect(runs(here / "named" / "s")).admin_token == "named"


def test_a_fleet_goes_on_where_no_context_can_be_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "config").symlink_to(here / "nowhere")
    (line,) = up._recorded(here / "s")
    assert line.endswith("context.json: File exists; XDG_CONFIG_HOME chooses another place")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    (line,) = up._recorded(here / "s")
    assert line.endswith("there is no folder for contexts: set HOME or XDG_CONFIG_HOME")


def test_a_client_takes_tokens_by_the_rule_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_ADMIN_TOKEN", "environment")
    fleets: list[Any] = [glowplug.Client(urls={"placer": FAR}, admin_token=given)._fleet for given in ("", "given")]
    assert [fleet.admin_token for fleet in fleets] == ["environment", "given"]
