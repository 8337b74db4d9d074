"""vLLM's metric names in Prometheus text, written by hand: a client library would double this process's memory."""

from bisect import bisect_left
from dataclasses import dataclass, field

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


@dataclass(slots=True)
class Histogram:
    """Cumulative buckets are made when read; observing is one bisection."""

    name: str
    buckets: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def observe(self, value: float) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.buckets) + 1)
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def lines(self, labels: str) -> list[str]:
        counts = self.counts or [0] * (len(self.buckets) + 1)
        lines, seen = [f"# TYPE {self.name} histogram"], 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), counts, strict=True):
            seen += count
            lines.append(f'{self.name}_bucket{{{labels},le="{bound}"}} {seen}')
        return [*lines, f"{self.name}_sum{{{labels}}} {self.total}", f"{self.name}_count{{{labels}}} {seen}"]


@dataclass(slots=True)
class Metrics:
    """Counters and histograms of one engine; gauges are read from the batch when asked."""

    ttft: Histogram = field(default_factory=lambda: Histogram("vllm:time_to_first_token_seconds", TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram("vllm:inter_token_latency_seconds", ITL_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram("vllm:e2e_request_latency_seconds", E2E_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram("vllm:request_queue_time_seconds", E2E_BUCKETS))
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason

    def text(self, labels: str, gauges: dict[str, float], counters: dict[str, float], infos: dict[str, str]) -> str:
        """The whole exposition. `infos` maps a name to its extra labels."""
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name}{{{labels}}} {value}"]
        for name, value in counters.items():
            lines += [f"# TYPE {name} counter", f"{name}{{{labels}}} {value}"]
        for name, extra in infos.items():
            lines += [f"# TYPE {name} gauge", f"{name}{{{labels},{extra}}} 1.0"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in sorted(self.num_finished.items()):
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}')
        for histogram in (self.ttft, self.itl, self.e2e, self.queue):
            lines += histogram.lines(labels)
        return "\n".join(lines) + "\n"
