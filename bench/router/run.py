"""Measure the CPU of the data port beside nginx: per request, at the most that each takes and at an equal rate, per
chunk, and with 2,000 open streams.

    python bench/router/run.py [--runs 3] [--rounds 3] [--seconds 5] [--against TREE] [--floor]
        [--keys 10000 [--limits]]

A run starts both proxies anew; its ratios are of medians over its rounds, and several runs are reported as a range.
Both proxy the same mock engine for the same load generator, in turns, on the same machine: the proxy alone on core 0;
mock, load generator and bus on core 1. The router is the unchanged service (`python -m services.router`) with routing,
metrics, request ids, request facts and load reports, and with traces at their default rate. Below the most that it
takes, each proxy spends more on a request: its writes wake processes that wait, and it finds one request at a time.
`--against` also measures the router of another checkout of this repository, in the same turns; `--floor` the smallest
proxy on the router's event loop and parser (floor.py). `--keys` also measures a router with that many named keys of ten
tenants, `--limits` with every limit per minute on each tenant and key; requests then carry one of the keys, in the same
turns. CPU is the kernel's count for the process (/proc/PID/schedstat). Needs cc and, for the comparison, nginx (Debian
package `nginx`; installed through apt when run as root).
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from bench.measured.data import data_option, write_data
from bench.measured.load import Ratio, Timed, compare, load_now
from glowplug.domain.access import NO_LIMITS, AccessLimits, ApiKey, Tenant, digest_of, key_id_of
from glowplug.runtime.errors import NotInstalled
from glowplug.runtime.supervisor.embedded import find_nats, find_valkey
from glowplug.services.router.keys import KeyCopy
from tests.fleet_builder import a_model, an_instance

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROXY_CORE, OTHER_CORE = {0}, {1}
NUM_FILES = 20_000
REQUEST_TARGET, CHUNK_TARGET = 5.0, 1.5
PACE = 1000  # requests a second of the paced load
NGINX, OURS, AGAINST = "nginx", "glowplug router", "glowplug router before"
WITH_KEYS = "glowplug router with keys"
FLOOR = "the smallest proxy"
NUM_TENANTS = 10
LIMITS = AccessLimits(requests_per_minute=1 << 40, tokens_per_minute=1 << 40)


@dataclass(frozen=True)
class Case:
    """One load: streams of `num_chunks` events `interval_us` apart over `num_connections` closed loops, or `rate` of
    them a second."""

    name: str
    num_connections: int
    num_chunks: int
    interval_us: int
    spread_ms: int
    seconds: float
    rate: int = 0


@dataclass
class Sample:
    """The measurements of one round of one case."""

    proxy: str
    case: str
    streams: int
    events: int
    errors: int
    most_open: int
    cpu_us: float
    elapsed_s: float
    ttft_us_p50: int
    ttft_us_p99: int
    gap_us_p50: int
    gap_us_p99: int
    run: int = 1
    load: float = 0.0  # load average before the round


@dataclass
class Proxy:
    """A running proxy: its process and port."""

    name: str
    pid: int
    port: int
    run: int = 1
    num_keys: int = 0  # keys that requests carry in turns
    samples: list[Sample] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def cpu_us(pid: int) -> float:
    """CPU microseconds of all threads of a process."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((task / "schedstat").read_text().split()[0]) / 1000
    return total


def get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return int(answer.status)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if get(url) == 200:
                return
        except (OSError, urllib.error.URLError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{url} does not answer: {error}") from error
        time.sleep(0.05)


@contextlib.contextmanager
def running(
    argv: list[str], cores: Collection[int], log: Path, cwd: Path = ROOT, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child process pinned to these cores."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            stdout=out,
            stderr=out,
            env=os.environ | env,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def have_nginx() -> str:
    """The path of nginx, installed through apt if possible; "" if there is none."""
    found = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if not found and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "nginx"], check=False, stdout=subprocess.DEVNULL)
        found = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    return found or ""


NGINX_CONF = """
daemon off; worker_processes 1; worker_rlimit_nofile {files}; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections {files}; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; keepalive_requests 1000000000;
    upstream engine {{ server 127.0.0.1:{engine}; keepalive 4096; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096; client_body_buffer_size 64k;
        location / {{
            proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_set_header X-Request-Id $request_id; proxy_buffering off; proxy_read_timeout 300s;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(binary: str, engine: int, folder: Path) -> Iterator[Proxy]:
    """Run nginx with one worker."""
    port, conf = free_port(), folder / "nginx.conf"
    conf.write_text(NGINX_CONF.format(files=NUM_FILES, folder=folder, engine=engine, port=port))
    with running([binary, "-c", str(conf), "-p", str(folder)], PROXY_CORE, folder / "nginx.log") as process:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        worker, *_ = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Proxy(NGINX, int(worker), port)


@contextlib.contextmanager
def smallest(engine: int, folder: Path) -> Iterator[Proxy]:
    """Run floor.py."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.router.floor", str(port), str(engine)]
    path = f"{ROOT / 'libs'}:{ROOT}"
    with running(argv, PROXY_CORE, folder / "floor.log", PYTHONPATH=path) as process:
        wait_for(f"http://127.0.0.1:{port}/", process)
        yield Proxy(FLOOR, process.pid, port)


def tables(engine: int) -> bytes:
    """A router's copy of its tables, with the mock engine as the only ready instance."""
    model = a_model(engine="mock", max_concurrency=100_000)
    instance = an_instance("i-mock", engine="mock", url=f"http://127.0.0.1:{engine}", max_concurrency=100_000)
    return msgspec.json.encode({"written_at": time.time(), "models": [model], "instances": [instance]})


@contextlib.contextmanager
def router(
    engine: int,
    folder: Path,
    root: Path = ROOT,
    name: str = OURS,
    num_keys: int = 0,
    limits: AccessLimits = NO_LIMITS,
) -> Iterator[Proxy]:
    """Run a router of the tree `root`, with a bus and a store of its own on the other core; the store holds the same
    tables as the router's copy. With `num_keys` named keys, which have these `limits`, as their tenants have."""
    folder.mkdir(mode=0o755)
    port, nats_port, held = free_port(), free_port(), tables(engine)
    env = {
        "GLOWPLUG_SERVICE_ID": "router-1",
        "GLOWPLUG_DATA_PORT": str(port),
        "GLOWPLUG_STATE_DIR": str(folder),
        "GLOWPLUG_NATS_URL": f"nats://127.0.0.1:{nats_port}",
        "GLOWPLUG_REDIS_URL": f"unix://{folder}/valkey.sock",
        "GLOWPLUG_LOG_LEVEL": "ERROR",
        "GLOWPLUG_MAX_CONNECTIONS": "100000",
        "PYTHONPATH": f"{root / 'libs'}:{root}",
    }
    with contextlib.ExitStack() as stack:
        try:
            nats = [str(find_nats()), "-js", "-sd", str(folder / "js"), "-a", "127.0.0.1", "-p", str(nats_port)]
            stack.enter_context(running(nats, OTHER_CORE, folder / "nats.log"))
            valkey = [str(find_valkey()), "--port", "0", "--unixsocket", str(folder / "valkey.sock"), "--save", ""]
            stack.enter_context(running([*valkey, "--dir", str(folder)], OTHER_CORE, folder / "valkey.log"))
            until_answers(env["GLOWPLUG_REDIS_URL"])
            fill_store(env["GLOWPLUG_REDIS_URL"], held, keys_of(num_keys, limits))
        except NotInstalled as error:
            print(f"without bus and store: {error}", file=sys.stderr)
        own = folder / "router-1"
        own.mkdir()
        (own / "tables.json").write_bytes(held)
        if num_keys:
            (own / "keys.json").write_bytes(msgspec.json.encode(keys_of(num_keys, limits)))
        argv = [sys.executable, "-m", "services.router"]
        process = stack.enter_context(running(argv, PROXY_CORE, folder / "router.log", root, **env))
        wait_for(f"http://127.0.0.1:{port}/ready", process)
        yield Proxy(name, process.pid, port, num_keys=num_keys)


def until_answers(url: str) -> None:
    """Wait until a store that has just been started answers."""
    import redis

    deadline = time.monotonic() + 10
    while True:
        try:
            redis.Redis.from_url(url).ping()
            return
        except redis.RedisError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def keys_of(num_keys: int, limits: AccessLimits) -> KeyCopy:
    """Keys that the load generator presents, of ten tenants."""
    presented = [f"gp-k{number:07d}-{'s' * 43}" for number in range(num_keys)]
    keys = [
        ApiKey(key_id=key_id_of(key), tenant=f"t{n % NUM_TENANTS}", name="k", sha256=digest_of(key), limits=limits)
        for n, key in enumerate(presented)
    ]
    return KeyCopy(bool(keys), keys, [Tenant(name=f"t{n}", limits=limits) for n in range(NUM_TENANTS)] if keys else [])


def fill_store(url: str, held: bytes, access: KeyCopy) -> None:
    """Write the tables' rows into the store, so that a resync finds the same as the copy."""
    import redis

    rows = json.loads(held)
    store = redis.Redis.from_url(url)
    store.hset("glowplug:v1:models", "m", json.dumps(rows["models"][0]))
    store.hset("glowplug:v1:instances", "i-mock", json.dumps(rows["instances"][0]))
    if access.keys:
        store.hset("glowplug:v1:keys", mapping={row.key_id: msgspec.json.encode(row) for row in access.keys})
        store.hset("glowplug:v1:tenants", mapping={row.name: msgspec.json.encode(row) for row in access.tenants})
    store.close()


def measure(proxy: Proxy, case: Case, engine: int) -> Sample:
    """Run one case: counts of the load generator, and CPU microseconds of the proxy."""
    get(f"http://127.0.0.1:{engine}/configure?chunks={case.num_chunks}&interval_us={case.interval_us}")
    argv = [HERE / "build/load", proxy.port, case.num_connections, case.seconds, case.num_chunks, case.spread_ms]
    argv.append(case.rate)
    argv += [proxy.num_keys] if proxy.num_keys else []
    busy, before = load_now(), cpu_us(proxy.pid)
    done = subprocess.run(
        [str(part) for part in argv],
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, OTHER_CORE),
    )
    used_us, counted = cpu_us(proxy.pid) - before, json.loads(done.stdout)
    sample = Sample(proxy=proxy.name, case=case.name, cpu_us=used_us, run=proxy.run, load=busy, **counted)
    proxy.samples.append(sample)
    time.sleep(0.3)
    return sample


@dataclass
class Figures:
    """Medians over rounds; `request_us` and `chunk_us` are CPU microseconds."""

    request_us: float
    paced_us: float
    chunk_us: float
    open_errors: int
    most_open: int
    open_cores: float
    ttft_us_p50: float
    ttft_us_p99: float


def per_request(proxy: Proxy, case: str = "requests") -> list[Timed]:
    return [Timed(s.cpu_us / s.streams, s.load) for s in proxy.samples if s.case == case]


def per_chunk(proxy: Proxy) -> list[Timed]:
    """CPU microseconds per chunk of each round, without the cost of the requests to which the chunks belong."""
    request_us = statistics.median(one.figure for one in per_request(proxy))
    found = [s for s in proxy.samples if s.case == "chunks"]
    return [Timed((s.cpu_us - s.streams * request_us) / max(s.events - 2 * s.streams, 1), s.load) for s in found]


def figures(proxy: Proxy) -> Figures:
    opened, chunks = ([s for s in proxy.samples if s.case == case] for case in ("open", "chunks"))
    return Figures(
        request_us=statistics.median(one.figure for one in per_request(proxy)),
        paced_us=statistics.median(one.figure for one in per_request(proxy, "paced")),
        chunk_us=statistics.median(one.figure for one in per_chunk(proxy)),
        open_errors=sum(s.errors for s in opened),
        most_open=max((s.most_open for s in opened), default=0),
        open_cores=statistics.median(s.cpu_us / 1e6 / s.elapsed_s for s in opened) if opened else 0.0,
        ttft_us_p50=statistics.median(s.ttft_us_p50 - 20_000 for s in chunks),
        ttft_us_p99=statistics.median(s.ttft_us_p99 - 20_000 for s in chunks),
    )


def ratios(ours: Proxy, theirs: Proxy) -> tuple[Ratio, Ratio, Ratio]:
    """Ratios of CPU per request, per request of the paced load, and per chunk of two proxies in one run, round by
    round."""
    requests, paced = (compare(per_request(ours, case), per_request(theirs, case)) for case in ("requests", "paced"))
    return requests, paced, compare(per_chunk(ours), per_chunk(theirs))


def named(proxies: list[Proxy], name: str) -> Proxy:
    return next(proxy for proxy in proxies if proxy.name == name)


def _span(found: list[Ratio], form: str) -> str:
    """The ratios of all runs as a range, or why a run has none."""
    if refused := [one for one in found if one.why_not]:
        return refused[0].show()
    low, high = (f"{pick(one.middle for one in found):{form}}" for pick in (min, max))
    return f"{low}x to {high}x" if len(found) > 1 else f"{low}x"


def cases(seconds: float) -> list[Case]:
    return [
        Case("requests", 32, 1, 0, 0, seconds),
        Case("paced", 32, 1, 0, 0, seconds, PACE),
        Case("chunks", 40, 64, 20_000, 1280, seconds),
        Case("open", 2000, 40, 250_000, 4000, max(seconds * 3, 15)),
    ]


def medians(proxies: list[Proxy]) -> dict[str, Figures]:
    """The figures of each proxy by name, over all runs."""
    return {
        name: figures(Proxy(name, 0, 0, samples=[s for p in proxies if p.name == name for s in p.samples]))
        for name in dict.fromkeys(p.name for p in proxies)
    }


def as_data(runs: list[list[Proxy]]) -> dict[str, object]:
    """Medians of each proxy over all runs, and the ratios over nginx of each run that has them."""
    proxies = [proxy for one in runs for proxy in one]
    found = [
        ratios(named(one, OURS), named(one, NGINX)) for one in runs if {OURS, NGINX} <= {proxy.name for proxy in one}
    ]
    loads = [s.load for p in proxies for s in p.samples]
    return {
        "proxies": {name: asdict(of) for name, of in medians(proxies).items()},
        **{
            f"{name}_ratios": [None if one[number].why_not else one[number].middle for one in found]
            for number, name in enumerate(("request", "paced", "chunk"))
        },
        "load": [min(loads), max(loads)],
    }


def report(runs: list[list[Proxy]], args: argparse.Namespace) -> str:
    proxies = [proxy for one in runs for proxy in one]
    rows = medians(proxies)
    loads = [s.load for p in proxies for s in p.samples]
    lines = [
        "# The data port beside nginx",
        "",
        f"`python bench/router/run.py --runs {args.runs} --rounds {args.rounds} --seconds {args.seconds:g}`; "
        f"medians of {args.runs} x {args.rounds} rounds, in turns on one machine of {os.cpu_count()} cores at load "
        f"{min(loads):.1f} to {max(loads):.1f}, the proxy pinned to core 0. Engine and load are mocks.",
        "",
        f"| proxy | CPU us/request | at {PACE} a second | CPU us/chunk | added TTFT p50 / p99 us | open streams "
        "| errors | cores then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, f in rows.items():
        lines.append(
            f"| {name} | {f.request_us:.0f} | {f.paced_us:.0f} | {f.chunk_us:.1f} "
            f"| {f.ttft_us_p50:.0f} / {f.ttft_us_p99:.0f} | {f.most_open} | {f.open_errors} | {f.open_cores:.2f} |"
        )
    ours = rows[OURS]
    lines.append("")
    if NGINX in rows:
        found = [ratios(named(one, OURS), named(one, NGINX)) for one in runs]
        request, paced, chunk = (
            _span([one[which] for one in found], form) for which, form in enumerate((".1f", ".1f", ".2f"))
        )
        lines.append(
            f"Over nginx, of {len(runs)} runs: per request {request} (target at most {REQUEST_TARGET:g}), "
            f"at {PACE} a second {paced}, per chunk {chunk} (target at most {CHUNK_TARGET:g}); "
            f"{ours.open_errors} errors with {ours.most_open} open streams."
        )
        lines += [
            f"- run {n}: request {one.show()}; paced {paced.show()}; chunk {chunk.show()}"
            for n, (one, paced, chunk) in enumerate(found, start=1)
        ]
    else:
        lines.append("nginx is not on this machine: no ratios.")
    lines += ["", *changes(runs)] if len(rows) > 2 or AGAINST in rows else []
    return "\n".join(lines)


def changes(runs: list[list[Proxy]]) -> list[str]:
    """CPU per request of our routers over each other, by run."""
    lines = []
    for name, base in ((OURS, AGAINST), (WITH_KEYS, OURS), (WITH_KEYS, AGAINST)):
        for number, one in enumerate(runs, start=1):
            if {name, base} <= {proxy.name for proxy in one}:
                found = compare(per_request(named(one, name)), per_request(named(one, base)))
                lines.append(f"- run {number}: {name} over {base}: request {found.show()}")
    for number, one in enumerate(runs, start=1):
        if {FLOOR, NGINX} <= {proxy.name for proxy in one}:
            request, paced, chunk = (ratio.show() for ratio in ratios(named(one, FLOOR), named(one, NGINX)))
            lines.append(f"- run {number}: {FLOOR} over {NGINX}: request {request}; paced {paced}; chunk {chunk}")
    return lines


@contextlib.contextmanager
def mock_engine() -> Iterator[tuple[Path, int]]:
    """Run a mock engine, and yield (folder for files, port of the engine). Raises the limit of open files for 2,000
    streams."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))
    subprocess.run(["make", "-s", "-C", str(HERE), "all"], check=True)
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as name:
        folder, engine = Path(name), free_port()
        folder.chmod(0o755)
        with running([str(HERE / "build/mock_engine"), str(engine)], OTHER_CORE, folder / "mock") as mock:
            wait_for(f"http://127.0.0.1:{engine}/", mock)
            yield folder, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="with both proxies started anew")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--against", type=Path, help="another checkout, whose router is measured in the same turns")
    parser.add_argument("--floor", action="store_true", help="also measure the smallest proxy")
    parser.add_argument("--keys", type=int, default=0, help="also measure a router with so many named keys")
    parser.add_argument("--limits", action="store_true", help="with limits on each key and tenant")
    parser.add_argument("--requests-only", action="store_true", help="print the change of CPU per request alone")
    data_option(parser)
    args = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two cores are needed: one for the proxy, one for everything else")
    binary = have_nginx()
    if not binary:
        print("nginx is absent and cannot be installed here: no comparison", file=sys.stderr)
    with mock_engine() as (folder, engine):
        runs = [one_run(number, binary, engine, folder, args) for number in range(1, args.runs + 1)]
        print()
        if args.requests_only:
            print("\n".join(changes(runs)))
            return
        print(report(runs, args))
        write_data(args.json, as_data(runs))


def one_run(run: int, binary: str, engine: int, into: Path, args: argparse.Namespace) -> list[Proxy]:
    """Start all proxies anew and measure each case in turns."""
    folder = into / f"run-{run}"
    folder.mkdir(mode=0o755)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(nginx(binary, engine, folder))] if binary else []
        if args.against is not None:
            proxies.append(stack.enter_context(router(engine, folder / "before", args.against.resolve(), AGAINST)))
        if args.floor:
            proxies.append(stack.enter_context(smallest(engine, folder)))
        proxies.append(stack.enter_context(router(engine, folder / "ours")))
        if args.keys:
            given = LIMITS if args.limits else NO_LIMITS
            made = router(engine, folder / "keys", name=WITH_KEYS, num_keys=args.keys, limits=given)
            proxies.append(stack.enter_context(made))
        for proxy in proxies:
            proxy.run = run
        for case in cases(args.seconds)[: 1 if args.requests_only else None]:
            for number in range(args.rounds if case.name != "open" else 1):
                for proxy in proxies:
                    s = measure(proxy, case, engine)
                    print(
                        f"run {run}, {case.name} {number + 1}: {proxy.name}: {s.streams} streams, {s.events} events, "
                        f"{s.errors} errors, {s.cpu_us / 1e6:.2f} s of CPU in {s.elapsed_s:.1f} s, load {s.load:.1f}",
                        flush=True,
                    )
    return proxies


if __name__ == "__main__":
    main()
