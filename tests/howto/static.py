"""Checks of commands that cannot run here: they parse, and their names exist."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Set
from pathlib import Path

import typer
import yaml

from glowplug.cli.main import app_of
from tests.howto.blocks import ROOT, Block

_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1.*?^\t*\2$", re.MULTILINE | re.DOTALL)
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_SEPARATORS = {"|", "||", "&", "&&", ";", ";;", "(", ")", "|&", "\n"}
_WRAPPERS = {"sudo", "env", "exec", "time", "nohup", "if", "then", "while", "do", "!", "else", "until", "command"}
FILE_FLAGS = {"-f", "--file", "--filename", "-k", "--kustomize"}
COMPOSE_VERBS = {"stop", "start", "restart", "kill", "pause", "unpause", "exec", "logs", "run", "rm", "build", "pull"}
FOLDERS = tuple(f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))


def commands(text: str) -> Iterator[list[str]]:
    text = _HEREDOC.sub("", text.replace("\\\n", " "))
    for line in text.splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split = True
        tokens = iter([*lexer, "\n"])
        for token in tokens:
            if token in _SEPARATORS:
                if words:
                    yield words
                words = []
            elif token and set(token) <= set("<>&"):
                next(tokens, None)  # the redirection's file
            elif words or not (_ASSIGNMENT.match(token) or token in _WRAPPERS):
                words.append(token)


def problems(block: Block, also: Set[str] = frozenset()) -> list[str]:
    """`also`: files present when they run."""
    parsed = subprocess.run(["sh", "-n"], input=block.text, capture_output=True, text=True, check=False)
    if parsed.returncode:
        return [f"{block.where}: does not parse: {parsed.stderr.strip()}"]
    found = []
    for words in commands(block.text):
        name, arguments = Path(words[0]).name, words[1:]
        wrong = [*_CHECKS[name](arguments)] if name in _CHECKS else []
        wrong = [why for why in wrong if why.removeprefix("there is no ") not in also]
        found += [f"{block.where}: `{' '.join(words)}`: {why}" for why in (*wrong, *_files(words, also))]
    return found


def _files(words: list[str], also: Set[str]) -> Iterator[str]:
    for word in words:
        path = word.partition("=")[2] if word.startswith("--") else word
        path = path.partition(":")[0].removeprefix("./")
        is_there = path in also or (ROOT / path).exists()
        if path.startswith(FOLDERS) and not re.search(r"[*?$<{]", path) and not is_there:
            yield f"there is no {path}"


def _glowplug(arguments: list[str]) -> Iterator[str]:
    verbs = getattr(typer.main.get_command(app_of()), "commands")  # noqa: B009 - typer brings a click of its own
    if not arguments or arguments == ["--help"]:
        return
    verb = verbs.get(arguments[0])
    if verb is None:
        yield f"glowplug has no verb {arguments[0]!r}"
        return
    verb = getattr(verb, "commands", {}).get(next(iter(arguments[1:]), ""), verb)  # within a group: keys create
    flags = {flag for parameter in verb.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for word in arguments[1:]:
        if word == "--":
            break
        if word.startswith("-") and word != "-" and word.partition("=")[0] not in flags | {"--help"}:
            yield f"`glowplug {arguments[0]}` has no {word}"


def _make(arguments: list[str]) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in arguments:
        if not word.startswith("-") and "=" not in word and word not in targets:
            yield f"there is no `make {word}`"


def _given(arguments: list[str]) -> Iterator[str]:
    """Files and folders given as `-f x` or `--file=x`."""
    for at, word in enumerate(arguments):
        flag, _, value = word.partition("=")
        if flag in FILE_FLAGS:
            yield value or "".join(arguments[at + 1 : at + 2])


def _named_files(arguments: list[str]) -> Iterator[str]:
    for file in _given(arguments):
        if file != "-" and "://" not in file and not re.search(r"[$<]", file) and not (ROOT / file).exists():
            yield f"there is no {file}"


def _compose(arguments: list[str]) -> Iterator[str]:
    yield from _named_files(arguments)
    files = list(_given(arguments)) or ["deploy/docker-compose.yml"]
    services: set[str] = set()
    for file in (ROOT / file for file in files if (ROOT / file).exists()):
        services |= set((yaml.safe_load(file.read_text()) or {}).get("services") or {})
    at = next((at for at, word in enumerate(arguments) if word in COMPOSE_VERBS), len(arguments))
    named = next((word for word in arguments[at + 1 :] if not word.startswith("-")), "")
    if named and services and not re.search(r"[$<]", named) and named not in services and not named.isdecimal():
        yield f"no service {named!r} in {', '.join(files)}"


def _docker(arguments: list[str]) -> Iterator[str]:
    yield from _compose(arguments[1:]) if arguments[:1] == ["compose"] else _named_files(arguments)


_CHECKS = {
    "glowplug": _glowplug,
    "make": _make,
    "docker": _docker,
    "docker-compose": _compose,
    "kubectl": _named_files,
}
