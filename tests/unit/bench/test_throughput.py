"""How bench/throughput reads its samples."""

from bench.throughput.run import Sample, table


def _sample(contender: str, tokens_per_s: float, num_requests: int = 4) -> Sample:
    return Sample(contender, "stream", num_requests, tokens_per_s, 2 * tokens_per_s, 3.0, 0.5)


def test_a_ratio_is_of_medians_to_those_of_the_raw_server_at_as_many_requests() -> None:
    samples = [_sample("raw", rate) for rate in (80.0, 100.0, 300.0)] + [_sample("raw", 10.0, 1)]
    samples += [_sample("fleet", rate) for rate in (1.0, 95.0, 96.0)]
    row = next(line for line in table(samples).splitlines() if line.startswith("| fleet"))
    assert row == "| fleet, stream | 4 | 95.0 | 0.95 | 190.0 | 0.95 | 3 | 0.5-0.5 |"
