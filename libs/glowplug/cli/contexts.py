"""Contexts, by which commands find their fleet from any folder.

`context.json` is in $XDG_CONFIG_HOME/glowplug, else ~/.config/glowplug, private to its owner. A context is a local
fleet, by its state folder, or one elsewhere, by addresses; the latter's tokens are in a file (lines of `glowplug
env`) or in the environment."""

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glowplug.cli.terminal import WRONG_USAGE, CliError
from glowplug.runtime.errors import CannotStart
from glowplug.runtime.supervisor.statedir import OTHERS, write_private

DEFAULT_STATE_DIR = Path(".glowplug")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def address(option: str, url: str) -> str:
    """Return the value of `option` without a final slash. Raises CliError unless it is http or https with a host."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"{option} {url!r} is not an http address", WRONG_USAGE)
    return url.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A fleet by `state_dir`, or by `urls` and the `env_file` with its tokens. `name`: "" for a folder without a
    context."""

    name: str = ""
    state_dir: str = ""
    urls: Mapping[str, str] = field(default_factory=dict)
    env_file: str = ""

    def values(self) -> dict[str, str]:
        """Return tokens by name: `admin_token` of GLOWPLUG_ADMIN_TOKEN, and so on. Raises CliError for a file that
        others can read."""
        if not self.env_file:
            return {}
        told = read_env(Path(self.env_file), f"{self.env_file} of context {self.name}")
        return {name.removeprefix("GLOWPLUG_").lower(): value for name, value in told.items()}


def read_env(path: Path, name: str) -> dict[str, str]:
    """Read lines of `glowplug env`; `name`: of the file in errors. Raises CliError, also if others can read it."""
    try:
        if path.stat().st_mode & OTHERS:
            raise CliError(f"others can read {path}, which holds tokens: chmod 600 {path}")
        lines = [line.strip().removeprefix("export ") for line in path.read_text("utf-8").splitlines()]
        pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
        return {name.strip(): "".join(shlex.split(value)) for name, _, value in pairs}
    except OSError as error:
        raise CliError(f"cannot read {name}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(f"{name} has a line that is not NAME=VALUE: {error}") from error


@dataclass(frozen=True, slots=True)
class Contexts:
    current: str = ""
    named: Mapping[str, Context] = field(default_factory=dict)

    def get(self, name: str) -> Context:
        """Raises CliError for an unknown name."""
        if name not in self.named:
            raise CliError(f"there is no context {name!r}; there are: {', '.join(sorted(self.named)) or 'none'}")
        return self.named[name]

    def with_context(self, added: Context) -> "Contexts":
        return Contexts(added.name, {**self.named, added.name: added})

    def without(self, name: str) -> "Contexts":
        self.get(name)
        left = {key: one for key, one in self.named.items() if key != name}
        return Contexts("" if self.current == name else self.current, left)


def path() -> Path:
    """Raises CliError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "glowplug", "context.json")
    except RuntimeError as error:
        raise CliError("there is no folder for contexts: set HOME or XDG_CONFIG_HOME") from error


def read() -> Contexts:
    """Raises CliError for a file of another version."""
    try:
        stored: dict[str, Any] = json.loads(path().read_text("utf-8"))
        named = {name: Context(name=name, **fields) for name, fields in stored["contexts"].items()}
        texts = [text for one in named.values() for text in (one.state_dir, one.env_file, *one.urls.values())]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
        return Contexts(str(stored["current"]), named)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise CliError(f"cannot read {path()}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CliError(f"{path()} is damaged or of another version: remove it, then add its contexts again") from error


def write(contexts: Contexts) -> None:
    """Raises CliError if the folder is not writable."""
    stored = {
        name: {key: value for key, value in asdict(one).items() if value and key != "name"}
        for name, one in sorted(contexts.named.items())
    }
    try:
        path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path(), {"current": contexts.current, "contexts": stored})
    except (OSError, CannotStart) as error:
        why = getattr(error.__cause__ or error, "strerror", "")
        raise CliError(f"cannot write {path()}: {why}; XDG_CONFIG_HOME chooses another place") from error


def checked_name(name: str) -> str:
    """Raises CliError for a name that a shell would need quoted."""
    if not _NAME.fullmatch(name):
        raise CliError(f"{name!r} is not a context name: letters, digits, '.', '_' and '-', at most 63")
    return name


def record(state_dir: Path) -> str:
    """Make the fleet of `state_dir` current; return its context's name: that of the parent folder, numbered if
    taken."""
    contexts = read()
    known = [name for name, one in contexts.named.items() if one.state_dir == str(state_dir)]
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", state_dir.parent.name).strip("-._")[:50] or "fleet"
    free = (
        name
        for n in range(1, len(contexts.named) + 2)
        if (name := plain if n == 1 else f"{plain}-{n}") not in contexts.named
    )
    name = known[0] if known else next(free)
    write(contexts.with_context(Context(name=name, state_dir=str(state_dir))))
    return name


def chosen(state_dir: Path | None, *, by_context: bool = True) -> Context:
    """Find the fleet: `state_dir` or GLOWPLUG_STATE_DIR, else `.glowplug` here if present, else the current context
    (with `by_context`), else `.glowplug`."""
    given = state_dir or os.environ.get("GLOWPLUG_STATE_DIR") or ""
    if not given and by_context and not DEFAULT_STATE_DIR.is_dir():
        contexts = read()
        if contexts.current:
            return contexts.get(contexts.current)
    return Context(state_dir=str(Path(given or DEFAULT_STATE_DIR).absolute()))
