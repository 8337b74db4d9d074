"""CPU of the data port beside nginx: per request, per chunk, and with 2,000 open streams.

    python bench/router/run.py [--runs 3] [--rounds 3] [--seconds 5] [--only-router] [--against TREE]

A run starts both anew; its ratios are of medians over its rounds, and what is reported of several runs is their range.
Both stand in front of the same mock engine and under the same load generator, in turns, on the same machine: the proxy
alone on core 0; mock, load generator and bus on core 1. The router is the service as it is
(`python -m services.router`) with routing, metrics, request ids, request facts and load reports on, and with traces at
their default rate. `--against` measures the router of another checkout of this repository too, in the same turns.
CPU is what the kernel counts for the process (/proc/PID/schedstat). Results: results/router.{md,csv,svg}.
Wants cc and, for the comparison, nginx (Debian package `nginx`; installed through apt when run as root).
"""

import argparse
import contextlib
import csv
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.measured.load import Ratio, Timed, compare, load_now
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.runtime.supervisor.embedded import find_nats, find_valkey
from glowplug.runtime.supervisor.errors import NotInstalled

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROXY_CORE, OTHER_CORE = 0, 1
NUM_FILES = 20_000
REQUEST_TARGET, CHUNK_TARGET = 6.0, 2.0
NGINX, OURS, AGAINST = "nginx", "glowplug router", "glowplug router before"


@dataclass(frozen=True)
class Case:
    """One load: streams of `num_chunks` events `interval_us` apart over `num_connections` closed loops."""

    name: str
    num_connections: int
    num_chunks: int
    interval_us: int
    spread_ms: int
    seconds: float


@dataclass
class Sample:
    """What one run of one case gave."""

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
    load: float = 0.0  # of the machine, before


@dataclass
class Proxy:
    name: str
    pid: int
    port: int
    run: int = 1
    samples: list[Sample] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def cpu_us(pid: int) -> float:
    """Time on the CPU of all threads of a process."""
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
    argv: list[str], core: int, log: Path, cwd: Path | None = None, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A child pinned to one core."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            stdout=out,
            stderr=out,
            env=os.environ | env,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
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
    """The binary, installed through apt when that can be done; "" when there is none."""
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
    port = free_port()
    conf = folder / "nginx.conf"
    conf.write_text(NGINX_CONF.format(files=NUM_FILES, folder=folder, engine=engine, port=port))
    with running([binary, "-c", str(conf), "-p", str(folder)], PROXY_CORE, folder / "nginx.log") as process:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Proxy(NGINX, int(children[0]), port)


def write_tables(folder: Path, engine: int) -> None:
    """The router's copy of its tables: one ready instance, the mock."""
    model = Model(
        name="m",
        key="m",
        engine="mock",
        weights=WeightsRef(uri="file:///none"),
        weights_bytes=1,
        kv_bytes=1,
        max_concurrency=100_000,
        revision=1,
    )
    worker = Worker(worker_id="w", node_id="node-1", gpu_id="node-1/0", num_bytes=2)
    instance = Instance(
        instance_id="i-mock",
        model_key="m",
        engine="mock",
        state=InstanceState.READY,
        workers=(worker,),
        url=f"http://127.0.0.1:{engine}",
        max_concurrency=100_000,
        revision=1,
    )
    target = folder / "router-bench"
    target.mkdir()
    copy = {"written_at": time.time(), "models": [model], "instances": [instance]}
    (target / "tables.json").write_bytes(msgspec.json.encode(copy))


@contextlib.contextmanager
def router(engine: int, folder: Path, root: Path = ROOT, name: str = OURS) -> Iterator[Proxy]:
    """The service of the tree `root`, with a bus and a store of its own that hold what `write_tables` writes."""
    folder.mkdir(mode=0o755)
    port, nats_port = free_port(), free_port()
    write_tables(folder, engine)
    env = {
        "GLOWPLUG_SERVICE_ID": "router-bench",
        "GLOWPLUG_DATA_PORT": str(port),
        "GLOWPLUG_STATE_DIR": str(folder),
        "GLOWPLUG_NATS_URL": f"nats://127.0.0.1:{nats_port}",
        "GLOWPLUG_REDIS_URL": f"unix://{folder}/valkey.sock",
        "GLOWPLUG_LOG_LEVEL": "ERROR",
        "GLOWPLUG_MAX_CONNECTIONS": "100000",
    }
    with contextlib.ExitStack() as stack:
        try:
            nats = [str(find_nats()), "-js", "-sd", str(folder / "js"), "-a", "127.0.0.1", "-p", str(nats_port)]
            stack.enter_context(running(nats, OTHER_CORE, folder / "nats.log"))
            valkey = [str(find_valkey()), "--port", "0", "--unixsocket", str(folder / "valkey.sock"), "--save", ""]
            stack.enter_context(running([*valkey, "--dir", str(folder)], OTHER_CORE, folder / "valkey.log"))
            time.sleep(0.5)
            fill_store(env["GLOWPLUG_REDIS_URL"], folder)
        except NotInstalled as error:
            print(f"without bus and store: {error}", file=sys.stderr)
        argv = [sys.executable, "-m", "services.router"]
        path = f"{root / 'libs'}:{root}"
        process = stack.enter_context(running(argv, PROXY_CORE, folder / "router.log", root, PYTHONPATH=path, **env))
        wait_for(f"http://127.0.0.1:{port}/ready", process)
        yield Proxy(name, process.pid, port)


def fill_store(url: str, folder: Path) -> None:
    """The same rows in the store, so that a resync finds what the copy has."""
    import redis

    rows = json.loads((folder / "router-bench" / "tables.json").read_bytes())
    store = redis.Redis.from_url(url)
    store.hset("glowplug:v1:models", "m", json.dumps(rows["models"][0]))
    store.hset("glowplug:v1:instances", "i-mock", json.dumps(rows["instances"][0]))
    store.close()


def measure(proxy: Proxy, case: Case, engine: int) -> Sample:
    get(f"http://127.0.0.1:{engine}/configure?chunks={case.num_chunks}&interval_us={case.interval_us}")
    load = [HERE / "build/load", proxy.port, case.num_connections, case.seconds, case.num_chunks, case.spread_ms]
    busy, before = load_now(), cpu_us(proxy.pid)
    done = subprocess.run(
        [str(part) for part in load],
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {OTHER_CORE}),
    )
    used_us = cpu_us(proxy.pid) - before
    sample = Sample(
        proxy=proxy.name, case=case.name, cpu_us=used_us, run=proxy.run, load=busy, **json.loads(done.stdout)
    )
    proxy.samples.append(sample)
    time.sleep(0.3)
    return sample


@dataclass
class Figures:
    """Medians over rounds, microseconds of CPU."""

    request_us: float
    chunk_us: float
    open_errors: int
    most_open: int
    open_cores: float
    ttft_us_p50: float
    ttft_us_p99: float


def figures(proxy: Proxy) -> Figures:
    def of(case: str) -> list[Sample]:
        return [s for s in proxy.samples if s.case == case]

    request_us = statistics.median(s.cpu_us / s.streams for s in of("requests"))
    chunks = [(s.cpu_us - s.streams * request_us) / max(s.events - 2 * s.streams, 1) for s in of("chunks")]
    opened = of("open")
    return Figures(
        request_us=request_us,
        chunk_us=statistics.median(chunks),
        open_errors=sum(s.errors for s in opened),
        most_open=max((s.most_open for s in opened), default=0),
        open_cores=statistics.median(s.cpu_us / 1e6 / s.elapsed_s for s in opened) if opened else 0.0,
        ttft_us_p50=statistics.median(s.ttft_us_p50 - 20_000 for s in of("chunks")),
        ttft_us_p99=statistics.median(s.ttft_us_p99 - 20_000 for s in of("chunks")),
    )


def ratios(ours: Proxy, theirs: Proxy) -> tuple[Ratio, Ratio]:
    """CPU per request and per chunk, this proxy over that one, of one run: round by round, in turns."""

    def per_request(proxy: Proxy) -> list[Timed]:
        return [Timed(s.cpu_us / s.streams, s.load) for s in proxy.samples if s.case == "requests"]

    def per_chunk(proxy: Proxy) -> list[Timed]:
        request_us = statistics.median(one.figure for one in per_request(proxy))
        found = [s for s in proxy.samples if s.case == "chunks"]
        return [Timed((s.cpu_us - s.streams * request_us) / max(s.events - 2 * s.streams, 1), s.load) for s in found]

    return compare(per_request(ours), per_request(theirs)), compare(per_chunk(ours), per_chunk(theirs))


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
        Case("chunks", 40, 64, 20_000, 1280, seconds),
        Case("open", 2000, 40, 250_000, 4000, max(seconds * 3, 15)),
    ]


def report(runs: list[list[Proxy]], out: Path, args: argparse.Namespace) -> str:
    proxies = [proxy for one in runs for proxy in one]
    rows = {
        name: figures(Proxy(name, 0, 0, samples=[s for p in proxies if p.name == name for s in p.samples]))
        for name in dict.fromkeys(p.name for p in proxies)
    }
    loads = [s.load for p in proxies for s in p.samples]
    lines = [
        "# The data port beside nginx",
        "",
        f"`python bench/router/run.py --runs {args.runs} --rounds {args.rounds} --seconds {args.seconds:g}`; "
        f"medians of {args.runs} x {args.rounds} rounds, in turns on one machine of {os.cpu_count()} cores at load "
        f"{min(loads):.1f} to {max(loads):.1f}, the proxy pinned to core 0. Engine and load are mocks.",
        "",
        "| proxy | CPU us/request | CPU us/chunk | added TTFT p50 / p99 us | open streams | errors | cores then |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, f in rows.items():
        lines.append(
            f"| {name} | {f.request_us:.0f} | {f.chunk_us:.1f} | {f.ttft_us_p50:.0f} / {f.ttft_us_p99:.0f} "
            f"| {f.most_open} | {f.open_errors} | {f.open_cores:.2f} |"
        )
    ours = rows[OURS]
    lines.append("")
    if NGINX in rows:
        found = [ratios(named(one, OURS), named(one, NGINX)) for one in runs]
        request, chunk = (_span([pair[which] for pair in found], form) for which, form in ((0, ".1f"), (1, ".2f")))
        lines.append(
            f"Over nginx, of {len(runs)} runs: per request {request} (target at most {REQUEST_TARGET:g}), "
            f"per chunk {chunk} (target at most {CHUNK_TARGET:g}); "
            f"{ours.open_errors} errors with {ours.most_open} open streams."
        )
        lines += [f"- run {n}: request {a.show()}; chunk {b.show()}" for n, (a, b) in enumerate(found, start=1)]
    else:
        lines.append("nginx is not on this machine: no ratios.")
    if AGAINST in rows:
        lines += ["", "Over the router before:"]
        changes = [ratios(named(one, OURS), named(one, AGAINST)) for one in runs]
        lines += [f"- run {n}: request {a.show()}; chunk {b.show()}" for n, (a, b) in enumerate(changes, start=1)]
    out.mkdir(exist_ok=True)
    (out / "router.md").write_text("\n".join(lines) + "\n")
    with (out / "router.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Sample.__dataclass_fields__)
        writer.writerows([getattr(s, f) for f in Sample.__dataclass_fields__] for p in proxies for s in p.samples)
    (out / "router.svg").write_text(svg(rows))
    return "\n".join(lines)


def svg(rows: dict[str, Figures]) -> str:
    """Two groups of bars: CPU per request and per chunk."""
    bars, y = [], 40
    for title, attribute in (("CPU us per request", "request_us"), ("CPU us per chunk", "chunk_us")):
        most = max(getattr(f, attribute) for f in rows.values())
        bars.append(f'<text x="10" y="{y}" font-weight="bold">{title}</text>')
        for name, f in rows.items():
            y += 26
            value = getattr(f, attribute)
            fill = "#c2410c" if name == OURS else "#888"
            bars.append(f'<text x="10" y="{y}">{name}</text>')
            bars.append(f'<rect x="150" y="{y - 13}" width="{value / most * 340:.0f}" height="16" fill="{fill}"/>')
            bars.append(f'<text x="{158 + value / most * 340:.0f}" y="{y}">{value:.1f}</text>')
        y += 44
    style = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="580" height="{y - 20}" {style}>{"".join(bars)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="with both proxies started anew")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only-router", action="store_true", help="no nginx, no ratios to it: for profiling")
    parser.add_argument("--against", type=Path, help="another checkout, whose router is measured in the same turns")
    parser.add_argument("--no-open", action="store_true", help="leave the 2,000 streams out")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two cores are needed: one for the proxy, one for everything else")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))
    subprocess.run(["make", "-s", "-C", str(HERE), "all"], check=True)
    binary = "" if args.only_router else have_nginx()
    if not binary and not args.only_router:
        print("nginx is absent and cannot be installed here: no comparison", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as name, contextlib.ExitStack() as stack:
        folder, engine = Path(name), free_port()
        folder.chmod(0o755)
        mock = stack.enter_context(running([str(HERE / "build/mock_engine"), str(engine)], OTHER_CORE, folder / "mock"))
        wait_for(f"http://127.0.0.1:{engine}/", mock)
        runs = [one_run(number, binary, engine, folder, args) for number in range(1, args.runs + 1)]
        print()
        print(report(runs, args.out, args))


def one_run(run: int, binary: str, engine: int, into: Path, args: argparse.Namespace) -> list[Proxy]:
    """Both proxies anew, each case in turns."""
    folder = into / f"run-{run}"
    folder.mkdir(mode=0o755)
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(nginx(binary, engine, folder))] if binary else []
        if args.against is not None:
            proxies.append(stack.enter_context(router(engine, folder / "before", args.against.resolve(), AGAINST)))
        proxies.append(stack.enter_context(router(engine, folder / "ours")))
        for proxy in proxies:
            proxy.run = run
        for case in [c for c in cases(args.seconds) if not (args.no_open and c.name == "open")]:
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
