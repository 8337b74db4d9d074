"""Keep a fleet under mixed load and kill its processes: nothing that it keeps may grow with time, no stream be cut.

    python -m bench.soak [--seconds 3600] [--per-second 1.0] [--samples FILE] [--json FILE]
    python -m bench.soak --read FILE

Eight llama.cpp models where three fit, so that they swap all the time; every API, streams and whole answers, keys of
four tenants; one client in ten leaves midway. Each twentieth of the run something is killed: in the first half every
process of the fleet once, then only engines and the first node's processes, so that the others live through the second
half. Growth is judged there, by the median slope between all pairs of samples; a run of less than a quarter of an hour
fails by lost requests alone, since a fleet still fills its tables. `--samples` has every sample as it is
made, from which `--read` prints the same tables.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, TextIO

import httpx
import psutil
import redis

from bench.measured.data import data_option, markdown, write_data
from bench.measured.fleet import write_weights
from glowplug.bus.streams import stream_configs
from glowplug.domain.instance import InstanceState
from glowplug.runtime.privileges import LOGS, READER, RIGHTS
from glowplug.runtime.supervisor.fleet import default_shm_dir
from glowplug.runtime.supervisor.sweep import processes_of
from glowplug.state.keys import PREFIX
from tests.fleet_runner import Fleet
from tests.waiting import wait_until

NUM_MODELS: Final = 8
EMBEDDER: Final = NUM_MODELS - 1
NUM_SAMPLES, NUM_KILLS = 60, 20
MOST_AT_ONCE: Final = 12
FAVOURITE_S: Final = 40.0
MIB: Final = 1 << 20
MODEL: Final = """
name: m{number}
engine: llamacpp
weights: {{uri: "file://{path}", sha256: {sha256}}}
kv_bytes: 140MiB
context_tokens: 2048
max_concurrency: 4
max_queue: 100
keep_alive_s: 10s
max_wait_s: 180s
engine_args: {{embeddings: {embeds}}}
"""
SETTINGS: Final = {"GLOWPLUG_GPU_BUDGETS": "350MiB", "GLOWPLUG_HOST_CACHE_BYTES": str(500 * MIB)}


# -- load ----------------------------------------------------------------------------------------------------------

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
LAST: Final = {  # of a stream that is whole
    CHAT: ("data: [DONE]",),
    COMPLETIONS: ("data: [DONE]",),
    RESPONSES: ("event: response.completed", "event: response.incomplete"),
    MESSAGES: ("event: message_stop",),
}
DONE, LEFT, WRONG, REFUSED = "done", "client left", "refused as wrong", "refused for lack of room"
CUT, FAILED, GONE = "cut", "failed", "connection lost"
LOST: Final = (CUT, FAILED, GONE)


@dataclass(frozen=True, slots=True)
class Asked:
    path: str
    body: dict[str, Any]
    leaves_after_s: float | None = None


def asked(chance: random.Random, now_s: float) -> Asked:
    """One request of the mix. Most go to a favourite model, and the favourite changes."""
    path = chance.choices((CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS), (5, 2, 2, 2, 1))[0]
    text = " ".join(chance.choices(("river", "stone", "cloud", "apple"), k=chance.choices((10, 200), (9, 1))[0]))
    number = int(now_s / FAVOURITE_S + chance.paretovariate(1.5) - 1) % EMBEDDER
    if path == EMBEDDINGS:
        number = EMBEDDER
    body: dict[str, Any] = {"model": f"m{number}"}
    if path in (CHAT, MESSAGES):
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt" if path == COMPLETIONS else "input"] = text
    if path != EMBEDDINGS:
        body["stream"] = chance.random() < 0.7
        num_tokens = -1 if chance.random() < 0.03 else chance.randrange(8, 32)
        body["max_output_tokens" if path == RESPONSES else "max_tokens"] = num_tokens
    return Asked(path, body, chance.uniform(0.1, 2.0) if chance.random() < 0.1 else None)


@dataclass(slots=True)
class Ledger:
    """How requests ended. `router_away`: times (from, to) in which a killed router loses its connections."""

    ends: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    router_away: list[tuple[float, float]] = field(default_factory=list)
    num_skipped: int = 0  # since MOST_AT_ONCE were open

    def note(self, one: Asked, began: float, end: str, detail: str) -> None:
        now = time.monotonic()
        if end in LOST and any(began <= to and now >= since for since, to in self.router_away):
            end = "lost with a killed router"
        elif end in LOST:
            self.lost.append(f"{time.strftime('%H:%M:%S')} {end} after {now - began:.1f} s: {one} {detail[-300:]}")
        self.ends[end] += 1


async def send(http: httpx.AsyncClient, one: Asked, key: str) -> tuple[str, str]:
    """Send one request. Returns its end, and the answer's text where it failed."""
    try:
        async with (
            asyncio.timeout(one.leaves_after_s),
            http.stream("POST", one.path, json=one.body, headers={"Authorization": f"Bearer {key}"}) as answer,
        ):
            text = (await answer.aread()).decode()
    except TimeoutError:
        return LEFT, ""
    except httpx.HTTPError as error:
        return GONE, repr(error)
    if answer.status_code == 400:
        return (WRONG, "") if -1 in one.body.values() else (FAILED, text)
    if answer.status_code != 200:
        return REFUSED if answer.status_code in (429, 503) else FAILED, text
    if not one.body.get("stream"):
        return DONE, ""
    if any(line.startswith(LAST[one.path]) for line in text.splitlines()):
        return DONE, ""
    return FAILED if '"error"' in text else CUT, text


async def load(url: str, keys: Sequence[str], seconds: float, per_second: float, ledger: Ledger) -> None:
    chance, until = random.Random(0), time.monotonic() + seconds
    running: set[asyncio.Task[None]] = set()

    async def one(http: httpx.AsyncClient, request: Asked, key: str) -> None:
        began = time.monotonic()
        ledger.note(request, began, *await send(http, request, key))

    async with httpx.AsyncClient(base_url=url, timeout=240) as http:
        while time.monotonic() < until:
            request, key = asked(chance, time.monotonic()), chance.choice(keys)
            if len(running) < MOST_AT_ONCE:
                running.add(asyncio.create_task(one(http, request, key)))
            else:
                ledger.num_skipped += 1
            await asyncio.sleep(chance.expovariate(per_second))
            for task in [task for task in running if task.done()]:
                running.remove(task)
                task.result()
        await asyncio.gather(*running)


def make_keys(fleet: Fleet) -> list[str]:
    """Two keys of each of four tenants, half of them with limits that are never reached."""
    keys = []
    with httpx.Client(base_url=fleet.url("autoscaler"), headers=fleet.admin, timeout=30) as http:
        for number in range(4):
            limits = {"requests_per_minute": 1 << 30} if number % 2 else {}
            http.put(f"/v1/tenants/team-{number}", json={"limits": limits}).raise_for_status()
            for name in ("a", "b"):
                made = http.post("/v1/keys", json={"tenant": f"team-{number}", "name": name}).raise_for_status()
                keys.append(made.json()["key"])
    return keys


# -- kills ---------------------------------------------------------------------------------------------------------

ENGINE: Final = "an engine"
ONCE: Final = (
    "console-1", "router-1", "nats", "valkey", "placer-1", "autoscaler-1", "predictor-1", "agent-1", "prefetcher-1",
)  # fmt: skip
AGAIN: Final = (ENGINE, "agent-1", "prefetcher-1")


def kill(fleet: Fleet, name: str, ledger: Ledger) -> None:
    """Kill one process, and wait until the fleet is whole again."""
    since = time.monotonic()
    if name == ENGINE:
        for process in others(fleet)[:1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return
    pid = int(fleet.process(name)["pid"])
    if name == "router-1":
        ledger.router_away.append((since, float("inf")))
    os.kill(pid, signal.SIGKILL)
    wait_until(f"{name} is back", lambda: fleet.process(name)["pid"] not in (pid, None, 0) and fleet.ready(), 120.0)
    if name == "router-1":
        ledger.router_away[-1] = since, time.monotonic()


async def kills(fleet: Fleet, every_s: float, ledger: Ledger, note: TextIO) -> None:
    for name in itertools.chain(ONCE, itertools.cycle(AGAIN)):
        await asyncio.sleep(every_s)
        began = time.monotonic()
        await asyncio.to_thread(kill, fleet, name, ledger)
        print(json.dumps({"killed": name, "whole_again_s": time.monotonic() - began}), file=note, flush=True)


# -- samples -------------------------------------------------------------------------------------------------------

USS, RSS, FILES, THREADS = "memory of its own", "resident memory", "files", "threads"
ROWS, STORE, BUS, MESSAGES_KEPT, READERS = "rows", "memory", "bytes", "messages", "readers"
INSTANCES: Final = "instances"
DISK_FILES, DISK_BYTES, NUM_PROCESSES = "files on disk", "bytes on disk", "processes"
Value = tuple[str, str, int, float]  # kind, name, pid or 0, value


def others(fleet: Fleet) -> list[psutil.Process]:
    """The engines: the fleet's processes that its supervisor has not started."""
    document = fleet.document
    known = {row["pid"] for row in document["processes"]} | {document["pid"]}
    return [process for process in processes_of(fleet.state_dir) if process.pid not in known]


def own_bytes(pid: int) -> int:
    """Bytes that only this process maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def of_processes(fleet: Fleet) -> Iterator[Value]:
    document = fleet.document
    pids = {row["name"]: row["pid"] for row in document["processes"]} | {"supervisor": document["pid"]}
    for name, pid in pids.items():
        with suppress(psutil.NoSuchProcess, OSError):  # it has just been killed
            process = psutil.Process(pid)
            yield USS, name, pid, own_bytes(pid)
            yield RSS, name, pid, process.memory_info().rss
            yield FILES, name, pid, process.num_fds()
            yield THREADS, name, pid, process.num_threads()
    engines = others(fleet)
    yield NUM_PROCESSES, "engines", 0, len(engines)
    for kind, figure in ((USS, own_bytes), (FILES, lambda pid: psutil.Process(pid).num_fds())):
        total = 0
        for process in engines:
            with suppress(psutil.NoSuchProcess, OSError):
                total += figure(process.pid)
        yield kind, "engines", 0, total


def of_servers(fleet: Fleet) -> Iterator[Value]:
    with redis.Redis.from_url(fleet.document["redis_url"]) as store:
        yield STORE, "store", 0, store.info("memory")["used_memory"]
        for name in RIGHTS[READER].reads:
            key = f"{PREFIX}:{name}"
            rows = store.lrange(key, 0, -1) if name in LOGS else list(store.hgetall(key).values())
            yield ROWS, name, 0, len(rows)
            if name == "instances":
                states = Counter(str(json.loads(row)["state"]) for row in rows)
                yield from ((INSTANCES, state.value, 0, states[state.value]) for state in InstanceState)
    (ports,) = (fleet.state_dir / "nats").glob("nats-server_*.ports")
    monitor = json.loads(ports.read_text())["monitoring"][0]
    seen = httpx.get(f"{monitor}/jsz", params={"accounts": "true", "streams": "true"}, timeout=30).json()
    for account in seen["account_details"]:
        for stream in account["stream_detail"]:
            yield BUS, stream["name"], 0, stream["state"]["bytes"]
            yield MESSAGES_KEPT, stream["name"], 0, stream["state"]["messages"]
            yield READERS, stream["name"], 0, stream["state"]["consumer_count"]


def sample(fleet: Fleet) -> list[Value]:
    found = list(of_processes(fleet))
    with suppress(httpx.HTTPError, redis.RedisError, OSError, ValueError, KeyError):  # killed
        found += of_servers(fleet)
    return [*found, *on_disk(fleet)]


def on_disk(fleet: Fleet) -> Iterator[Value]:
    state = fleet.state_dir
    for name, folder in (("logs", state / "logs"), ("state", state), ("host memory", default_shm_dir(state))):
        sizes = []
        for path in folder.rglob("*"):
            with suppress(OSError):  # it has just been removed
                sizes += [path.stat().st_size] if path.is_file() else []
        yield DISK_FILES, name, 0, len(sizes)
        yield DISK_BYTES, name, 0, sum(sizes)


async def samples(fleet: Fleet, every_s: float, ledger: Ledger, note: TextIO, ended: asyncio.Event) -> None:
    """Sample each `every_s`, and once more when the load has ended."""
    began, is_last = time.monotonic(), False
    while not is_last:
        at, is_last = time.monotonic() - began, ended.is_set()
        values = await asyncio.to_thread(sample, fleet)
        print(json.dumps({"at_s": at, "values": values, **told(ledger)}), file=note, flush=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await ended.wait()


def told(ledger: Ledger) -> dict[str, Any]:
    return {"ends": dict(ledger.ends), "lost": ledger.lost, "skipped": ledger.num_skipped, "load": os.getloadavg()[0]}


# -- judgement -----------------------------------------------------------------------------------------------------

Series = Sequence[tuple[float, float]]  # (seconds, value)
JUDGED_S: Final = 900.0
# The most that a series may grow within the second half: more than its noise, less than a leak of an hour.
SLACK: Final = {
    USS: 2.0 * MIB,
    FILES: 8,
    THREADS: 4,
    ROWS: 40,
    STORE: 4.0 * MIB,
    READERS: 1,
    NUM_PROCESSES: 4,
    DISK_FILES: 40,
}
SLACK_OF: Final = {  # whose memory depends on the moment, and what keeps a stated number that an hour may not fill
    (USS, "console-1"): 16.0 * MIB,
    (ROWS, "decisions"): 2000,
    (USS, "nats"): 24.0 * MIB,
    (USS, "valkey"): 4.0 * MIB,
    (USS, "engines"): 400.0 * MIB,
    (FILES, "engines"): 60,
    (BUS, "GLOWPLUG_COMMANDS"): 1.0 * MIB,
}
LOG_BYTES_A_S: Final = 2000.0
LIMITS: Final = {str(config.name): int(config.max_bytes or 0) for config in stream_configs(1)}


def slope(series: Series) -> float:
    """The median slope between two samples (Theil and Sen), a second: deaf to spikes and single steps."""
    pairs = itertools.combinations(series, 2)
    return median([(b - a) / (t - s) for (s, a), (t, b) in pairs if t > s] or [0.0])


@dataclass(slots=True)
class Soak:
    """The samples of a run, by kind, name and process."""

    seen: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    ends: Mapping[str, int] = field(default_factory=dict)
    lost: Sequence[str] = ()
    num_skipped: int = 0
    loads: list[float] = field(default_factory=list)
    killed: list[tuple[str, float]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Soak":
        soak = cls()
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "killed" in row:
                soak.killed.append((row["killed"], row["whole_again_s"]))
                continue
            for kind, name, pid, value in row["values"]:
                soak.seen[kind, name][pid].append((row["at_s"], value))
            soak.ends, soak.lost, soak.num_skipped = row["ends"], row["lost"], row["skipped"]
            soak.loads.append(row["load"])
        return soak

    @property
    def seconds(self) -> float:
        return max(at for rows in self.seen.values() for series in rows.values() for at, _ in series)

    def second_half(self, kind: str, name: str) -> Series:
        """Of the process that lived through it; empty without one."""
        of_processes = self.seen.get((kind, name), {}).values()
        series = max(of_processes, key=lambda series: series[-1][0], default=[])
        half = [(at, value) for at, value in series if at >= self.seconds / 2]
        return half if half and half[0][0] <= 0.6 * self.seconds <= 0.75 * half[-1][0] else ()

    def growth(self, kind: str, name: str) -> float:
        """Within the second half; nan without a process that lived through it."""
        series = self.second_half(kind, name)
        return slope(series) * (series[-1][0] - series[0][0]) if series else float("nan")

    def faults(self) -> list[str]:
        found = [f"a request was lost: {one}" for one in self.lost]
        for kind, name in self.seen:
            slack = SLACK_OF.get((kind, name), SLACK.get(kind, float("inf")))
            if self.growth(kind, name) > slack:
                found.append(f"{kind} of {name} grew by {self.growth(kind, name):,.0f}, more than {slack:,.0f}")
        for name, most in LIMITS.items():
            found += [f"stream {name} has {at} bytes" for at in self.last(BUS, name) if at > most]
        rate = slope(self.second_half(DISK_BYTES, "logs"))
        return [*found, f"{rate:.0f} log bytes a second"] if rate > LOG_BYTES_A_S else found

    def last(self, kind: str, name: str) -> list[float]:
        return [value for _, value in self.second_half(kind, name)[-1:]]

    # -- tables --------------------------------------------------------------------------------------------------------

    def tables(self) -> str:
        ends = Counter(self.ends).most_common()
        requests = markdown(("requests", "number"), ends)
        kills = ", ".join(f"{name} ({seconds:.1f} s)" for name, seconds in self.killed)
        return f"{self.of_processes()}\n\n{self.of_the_rest()}\n\n{requests}\n\n{len(self.killed)} kills: {kills}"

    def of_processes(self) -> str:
        head = ("process", "own memory at half time, MiB", "at the end", "growth an hour", "files", "threads")
        names = [name for kind, name in self.seen if kind == USS]
        return markdown(head, (self._row(name) for name in names))

    def _row(self, name: str) -> Iterable[object]:
        memory = self.second_half(USS, name)
        if not memory:
            yield from (name, *5 * ("killed",))
            return
        begin, end = median(value for _, value in memory[:5]), median(value for _, value in memory[-5:])
        yield from (name, f"{begin / MIB:.1f}", f"{end / MIB:.1f}", f"{slope(memory) * 3600 / MIB:+.1f}")
        for kind in (FILES, THREADS):
            values = [value for _, value in self.second_half(kind, name)]
            yield f"{min(values):.0f}-{max(values):.0f}" if values else ""

    def of_the_rest(self) -> str:
        kinds = (ROWS, INSTANCES, STORE, BUS, MESSAGES_KEPT, READERS, DISK_FILES, DISK_BYTES, NUM_PROCESSES)
        rows = []
        for kind, name in self.seen:
            series = self.second_half(kind, name)
            if kind in kinds and series and any(value for _, value in series):
                values = [value for _, value in series]
                an_hour = f"{slope(series) * 3600:+,.0f}"
                rows.append((f"{kind} of {name}", f"{values[0]:,.0f}", f"{values[-1]:,.0f}", an_hour))
        return markdown(("kept", "at half time", "at the end", "growth an hour"), rows)


# -- the run -------------------------------------------------------------------------------------------------------


async def soak(fleet: Fleet, seconds: float, per_second: float, note: TextIO) -> None:
    ledger, keys, ended = Ledger(), make_keys(fleet), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(samples(fleet, seconds / NUM_SAMPLES, ledger, note, ended))
        killing = tasks.create_task(kills(fleet, max(seconds / NUM_KILLS, 10.0), ledger, note))
        await load(fleet.url("data"), keys, seconds, per_second, ledger)
        killing.cancel()
        ended.set()


def run(folder: Path, seconds: float, per_second: float, path: Path) -> Soak:
    """Soak a fleet of its own in `folder`, with every sample in the file `path`."""
    models = {}
    for number in range(NUM_MODELS):
        weights = folder / f"m{number}.gguf"
        digest, embeds = write_weights(weights, number), str(number == EMBEDDER).lower()
        models[f"m{number}"] = MODEL.format(number=number, path=weights, sha256=digest, embeds=embeds)
    with Fleet.start(folder, models, engine="llamacpp", nodes=3, **SETTINGS) as fleet, path.open("w") as note:
        asyncio.run(soak(fleet, seconds, per_second, note))
    return Soak.read(path)


def main() -> None:
    """Run the soak, or read one, print its tables and fail with its faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--per-second", type=float, default=1.0, help="requests")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="every sample, a line of JSON each")
    parser.add_argument("--read", type=Path, metavar="FILE", help="samples of an earlier run")
    data_option(parser)
    args = parser.parse_args()
    if args.read:
        seen = Soak.read(args.read)
    else:
        with tempfile.TemporaryDirectory(prefix="glowplug-soak-") as folder:
            path = args.samples or Path(folder) / "samples.jsonl"
            seen = run(Path(folder), args.seconds, args.per_second, path)
    loads = f"load {min(seen.loads):.1f} to {max(seen.loads):.1f}"
    print(f"{seen.seconds:.0f} s, {os.cpu_count()} cores, {loads}, {seen.num_skipped} requests not sent\n")
    print(seen.tables(), flush=True)
    write_data(args.json, {"ends": seen.ends, "faults": seen.faults(), "seconds": seen.seconds})
    if faults := seen.faults():
        print("\n".join(faults), file=sys.stderr)
    sys.exit(bool(faults if seen.seconds >= JUDGED_S else seen.lost))


if __name__ == "__main__":
    main()
