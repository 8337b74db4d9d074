"""`glowplug doctor`."""

import asyncio
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from glowplug.cli.client import FleetClient, connect
from glowplug.cli.contexts import DEFAULT_STATE_DIR, address
from glowplug.cli.doctor import cluster, fleet, machine, rows, servers, services
from glowplug.cli.doctor.findings import Finding, Findings, document, lines, redacted
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import FAILED, WRONG_USAGE, CliError, NoFleet, say, say_json

ANSWER_S = 4.0

KubernetesOption = Annotated[bool, typer.Option("--kubernetes", help="Look at a cluster, through kubectl.")]
NamespaceOption = Annotated[str, typer.Option("--namespace", "-n", help="With --kubernetes: where Glowplug runs.")]
ContextOption = Annotated[str, typer.Option("--context", help="With --kubernetes: kubectl's context.")]
UrlOption = Annotated[
    list[str] | None,
    typer.Option("--url", help="Admin address of a remote service; may be repeated. The service says which one it is."),
]
DeepOption = Annotated[bool, typer.Option("--deep", help="Import vLLM too, which takes up to a minute.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show only warnings and failures.")]


def doctor(
    kubernetes: KubernetesOption = False,
    namespace: NamespaceOption = "glowplug",
    context: ContextOption = "",
    url: UrlOption = None,
    deep: DeepOption = False,
    quiet: QuietOption = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the running fleet, or a cluster, and name the repairs. Changes nothing; exit code 1 when
    something failed."""
    if kubernetes and url:
        raise CliError("--kubernetes looks through kubectl: it takes no --url", WRONG_USAGE)
    if kubernetes:
        found = cluster.check(cluster.Kubectl(namespace, context).gather())
    else:
        found = asyncio.run(_machine_and_fleet(state_dir, tuple(url or ()), deep))
    shown = document(found)
    if as_json:
        say_json(shown)
    else:
        say("\n".join(lines(found, only_bad=quiet)))
    if not shown["healthy"]:
        raise typer.Exit(FAILED)


async def _machine_and_fleet(state_dir: Path | None, urls: tuple[str, ...], deep: bool) -> list[Finding]:
    try:
        client = await _named(urls) if urls else connect(state_dir)
    except NoFleet as error:
        client, state_dir = None, error.state_dir
    folder = state_dir or DEFAULT_STATE_DIR
    # Check ports for a fleet yet to start here, not if one runs or another is named.
    found = await asyncio.to_thread(machine.look, folder, fleet_runs=client is not None, deep=deep)
    if client is None:
        says = f"none runs in {folder.absolute()}, and no GLOWPLUG_*_URL names one"
        return [*found, Findings("fleet").skipped("fleet", says, "glowplug up starts one")]
    known = await fleet.gather(client)
    found += services.check(known)
    found += [*servers.check_store(known.store), *servers.check_bus(known.bus), *rows.check(known)]
    return redacted(found, _secrets(client))


def _secrets(client: FleetClient) -> tuple[str, ...]:
    parts = [urlsplit(url) for url in (client.nats_url, client.redis_url)]
    return (client.admin_token, client.api_key, client.console_key, *(p.password or p.username or "" for p in parts))


async def _named(urls: tuple[str, ...]) -> FleetClient:
    """Ask each address for its service. Raises CliError without an answer."""
    found: dict[str, str] = {}
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
        for url in [address("--url", url) for url in urls]:
            found[await _service_at(http, url)] = url
    return FleetClient.elsewhere(found)


async def _service_at(http: httpx.AsyncClient, url: str) -> str:
    try:
        answer: Any = (await http.get(f"{url}/health")).json()
        return str(answer["service"])
    except httpx.HTTPError as error:
        raise CliError(f"{url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CliError(f"{url} is not the admin address of a Glowplug service (its /health names none)") from error
